#include "cc_ops/core/exchange/merged_rows.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <utility>
#include <vector>

namespace slipstream {
namespace {

SendBufferView ViewOf(const SendBuffer& buffer) {
  return {buffer.ranks,         buffer.sizes.data(),
          buffer.keys.data(),   static_cast<int64_t>(buffer.keys.size()),
          buffer.values.data(), static_cast<int64_t>(buffer.values.size())};
}

TEST(MergedRows, SumsEachKeyAtItsOwner) {
  std::mt19937_64 random(5);
  const std::vector<int64_t> floats = {2, 1};
  for (const int ranks : {1, 3}) {
    SendBuffer given;
    given.ranks = 4;
    std::map<std::pair<size_t, int64_t>, std::vector<float>> wanted;
    for (int part = 0; part < given.ranks; ++part) {
      for (size_t t = 0; t < floats.size(); ++t) {
        given.sizes.push_back(static_cast<int64_t>(random() % 20));
        for (int64_t i = 0; i < given.sizes.back(); ++i) {
          const int64_t key = static_cast<int64_t>(random() % 15) - 5;
          given.keys.push_back(key);
          std::vector<float>& sum = wanted[{t, key}];
          sum.resize(static_cast<size_t>(floats[t]));
          for (float& value : sum) {
            given.values.push_back(static_cast<float>(random() % 100) / 8.f);
            value += given.values.back();
          }
        }
      }
    }
    SendBuffer merged;
    ASSERT_TRUE(MergeRows(ViewOf(given), floats, ranks, &merged).ok());
    ASSERT_EQ(merged.sizes.size(), floats.size() * static_cast<size_t>(ranks));
    const int64_t* key = merged.keys.data();
    const float* value = merged.values.data();
    size_t found = 0;
    for (size_t part = 0; part < merged.sizes.size(); ++part) {
      const size_t t = part % floats.size();
      float squares = 0.f;
      for (int64_t i = 0; i < merged.sizes[part]; ++i, ++key, ++found) {
        EXPECT_TRUE(i == 0 || key[-1] < *key);
        EXPECT_EQ(OwnerOf(*key, ranks), static_cast<int>(part / floats.size()));
        for (const float sum : wanted[{t, *key}]) {
          EXPECT_EQ(*value++, sum);
          squares += sum * sum;
        }
      }
      EXPECT_FLOAT_EQ(merged.squares[part], squares);
    }
    EXPECT_EQ(found, wanted.size());
    EXPECT_EQ(found, merged.keys.size());
  }
}

TEST(MergedRows, EmptyBufferMergesToNothing) {
  SendBuffer nothing, merged;
  nothing.sizes = {0, 0};
  merged.keys = {1};
  ASSERT_TRUE(MergeRows(ViewOf(nothing), {2, 1}, 3, &merged).ok());
  EXPECT_EQ(merged.sizes, std::vector<int64_t>(6, 0));
  EXPECT_TRUE(merged.keys.empty() && merged.values.empty());
}

TEST(MergedRows, RejectsInconsistentBuffer) {
  SendBuffer wrong, merged;
  wrong.sizes = {2};
  wrong.keys = {1};
  const Status status = MergeRows(ViewOf(wrong), {1}, 1, &merged);
  EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace slipstream
