// For tests of the exchange: tables with four values per row, and requests of a rank.
#ifndef SLIPSTREAM_CC_OPS_CORE_TESTING_PULL_REQUEST_H_
#define SLIPSTREAM_CC_OPS_CORE_TESTING_PULL_REQUEST_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cc_ops/core/exchange/pull.h"
#include "cc_ops/core/exchange/pulled_lookup.h"
#include "cc_ops/core/testing/test_rules.h"

namespace slipstream {

constexpr int64_t kDim = 4;

// Returns an empty table. kind: name of its update rule.
inline std::unique_ptr<EmbeddingTable> MakeTable(const std::string& kind, int64_t capacity = 0) {
  TableOptions options;
  options.name = "t";
  options.dim = kDim;
  options.capacity = capacity;
  options.eviction = TableOptions::Eviction::kLru;
  options.initializer.kind = RowInitializer::Kind::kUniform;
  options.initializer.a = -1.f;
  options.initializer.b = 1.f;
  options.rule = RuleNamed(kind);
  return std::make_unique<EmbeddingTable>(options);
}

// The request of one rank for rows of one table.
struct Request {
  explicit Request(std::vector<int64_t> wanted) : keys(std::move(wanted)) {
    sizes = {static_cast<int64_t>(keys.size())};
  }
  SendBufferView Keys() const {
    return {1, sizes.data(), keys.data(), static_cast<int64_t>(keys.size()), nullptr, 0};
  }
  // Reads the rows from the owner and stores the message.
  Status Pull(const std::vector<EmbeddingTable*>& tables, bool create_missing,
              bool with_summary = false) {
    PullOptions options;
    options.create_missing = create_missing;
    options.format.with_summary = with_summary;
    return Pull(tables, options);
  }
  Status Pull(const std::vector<EmbeddingTable*>& tables, const PullOptions& options) {
    SteadyLengths lengths;
    PulledRows pulled;
    const Status status = PullRows(tables, Keys(), options, &lengths, &pulled);
    if (status.ok()) {
      EXPECT_EQ(pulled.lengths, std::vector<int32_t>{static_cast<int>(pulled.messages.size())});
      message = pulled.messages;
    }
    return status;
  }
  PulledMessages Messages() const {
    return {Keys(), message.data(), static_cast<int64_t>(message.size())};
  }
  std::vector<int64_t> keys, sizes;
  std::vector<uint8_t> message;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TESTING_PULL_REQUEST_H_
