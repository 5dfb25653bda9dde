#include "cc_ops/core/exchange/pulled_rows.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "cc_ops/core/testing/test_rules.h"

namespace slipstream {
namespace {

std::unique_ptr<EmbeddingTable> MakeTable(const std::string& kind, int64_t dim) {
  TableOptions options;
  options.name = "t";
  options.dim = dim;
  options.initializer.kind = RowInitializer::Kind::kUniform;
  options.initializer.a = -1.f;
  options.initializer.b = 1.f;
  options.initializer.seed = 3;
  options.rule = RuleNamed(kind);
  return std::make_unique<EmbeddingTable>(options);
}

const StoredRow* Stored(const float* row) { return reinterpret_cast<const StoredRow*>(row); }
StoredRow* Stored(float* row) { return reinterpret_cast<StoredRow*>(row); }

// Returns rows [values, slots] of the keys 0, 1, ... Every third row has its initial values, and
// every other one of these is absent; the other rows were updated.
std::vector<std::vector<float>> MakeRows(const EmbeddingTable& table, int64_t rows,
                                         std::mt19937* random) {
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> made;
  for (int64_t key = 0; key < rows; ++key) {
    std::vector<float> row(static_cast<size_t>(table.dim() + table.slots_per_row()));
    table.options().initializer.Fill(key, table.dim(), row.data());
    table.options().rule.InitSlots(table.dim(), row.data() + table.dim());
    std::vector<float> gradient(static_cast<size_t>(table.dim()));
    for (float& g : gradient) g = normal(*random);
    if (key % 3 != 0) table.options().rule.Apply(0.1f, table.dim(), gradient.data(), row.data());
    made.push_back(row);
  }
  return made;
}

TEST(PulledRows, RoundTrip) {
  std::mt19937 random(1);
  for (const std::string& kind : AllRuleNames()) {
    for (const int64_t dim : {1, 3, 16}) {
      for (int variant = 0; variant < 2 * kRowDtypes; ++variant) {
        RowFormat format;
        format.with_summary = variant % 2 != 0;
        format.dtype = static_cast<RowDtype>(variant / 2);
        auto table = MakeTable(kind, dim);
        const UpdateRule rule = table->options().rule;
        for (const int64_t count : {0, 1, 8, 21}) {
          const auto rows = MakeRows(*table, count, &random);
          std::vector<uint8_t> bytes = {7, 7};
          RowPacker packer(*table, format, count, &bytes);
          for (int64_t key = 0; key < count; ++key) {
            packer.Add(key, key % 6 == 0 ? nullptr : Stored(rows[static_cast<size_t>(key)].data()));
          }
          const bool has_summary = format.with_summary && kind != "sgd";
          const int64_t given = count - (count + 2) / 3;
          const int64_t row_bytes = EncodedBytes(format.dtype, dim) + (has_summary ? 2 : 0);
          const int64_t size = (count + 7) / 8 + given * row_bytes;
          ASSERT_EQ(static_cast<int64_t>(bytes.size()), 2 + size);

          std::vector<int64_t> keys(static_cast<size_t>(count));
          const SendBufferView view = {1, &count, keys.data(), count, nullptr, 0};
          const auto is_right = [&](int64_t num_bytes) {
            return CheckPulledRows({table.get()}, view, {{format, bytes.data() + 2, num_bytes}})
                .ok();
          };
          EXPECT_TRUE(is_right(size));
          EXPECT_FALSE(is_right(size - 1));
          RowUnpacker unpacker(*table, format, count, bytes.data() + 2);
          for (int64_t key = 0; key < count; ++key) {
            const auto& own = rows[static_cast<size_t>(key)];
            std::vector<float> replica(own.size(), 42.f);
            unpacker.Next(key, Stored(replica.data()));
            const bool is_exact = key % 3 == 0 || format.dtype == RowDtype::kFloat32;
            float largest = 0;
            for (int64_t j = 0; j < dim; ++j) largest = std::max(largest, std::fabs(own[j]));
            for (int64_t j = 0; j < dim; ++j) {
              EXPECT_NEAR(replica[j], own[j], is_exact ? 0.f : largest / 253.f) << key;
            }
            if (kind == "sgd") continue;
            std::vector<float> expected = own;
            const float summary = rule.SlotSummary(dim, own.data());
            rule.FillSlots(dim, has_summary ? summary : 0.f, expected.data());
            for (size_t j = static_cast<size_t>(dim); j < own.size(); ++j) {
              EXPECT_LE(replica[j], expected[j]);
              EXPECT_GE(replica[j], expected[j] * (1.f - 1.f / 128.f));
            }
          }
          EXPECT_EQ(unpacker.End(), bytes.data() + bytes.size());
        }
      }
    }
  }
}

// Rows of a table that was imported without slots do not have their initial values.
TEST(PulledRows, RowWithInitialSlotsAndChangedValuesIsSent) {
  auto table = MakeTable("adagrad", 2);
  std::mt19937 random(1);
  auto row = MakeRows(*table, 1, &random)[0];
  row[1] += 1.f;
  std::vector<uint8_t> bytes;
  RowPacker(*table, RowFormat(), 1, &bytes).Add(0, Stored(row.data()));
  ASSERT_EQ(bytes.size(), 9u);
  std::vector<float> replica(4);
  RowUnpacker(*table, RowFormat(), 1, bytes.data()).Next(0, Stored(replica.data()));
  EXPECT_EQ(replica, (std::vector<float>{row[0], row[1], 0.f, 0.f}));
}

TEST(PulledRows, RoundingKeepsNonFiniteValues) {
  auto table = MakeTable("sgd", 4);
  const float infinity = std::numeric_limits<float>::infinity();
  const float row[] = {std::nanf(""), infinity, -infinity, std::numeric_limits<float>::max()};
  std::vector<uint8_t> bytes;
  RowFormat format;
  format.dtype = RowDtype::kBfloat16;
  RowPacker(*table, format, 1, &bytes).Add(0, Stored(row));
  std::vector<float> replica(4);
  RowUnpacker(*table, format, 1, bytes.data()).Next(0, Stored(replica.data()));
  EXPECT_TRUE(std::isnan(replica[0]));
  EXPECT_EQ(replica[1], infinity);
  EXPECT_EQ(replica[2], -infinity);
  EXPECT_EQ(replica[3], infinity);  // Rounds to the nearest value, which is infinity.
}

}  // namespace
}  // namespace slipstream
