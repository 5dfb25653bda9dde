#include "cc_ops/core/saturation/input_reservoir.h"

#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "gtest/gtest.h"

namespace slipstream {
namespace {

void Offer(InputReservoir* reservoir, const std::vector<Lookup>& lookups, float loss) {
  reservoir->OfferListed(
      loss, [&] { return std::pair<const Lookup*, int64_t>(lookups.data(), lookups.size()); });
}

void OfferNumbers(InputReservoir* reservoir, int64_t count) {
  for (int64_t i = 0; i < count; ++i) Offer(reservoir, {{i, 0}}, 0.5f);
}

TEST(InputReservoir, KeepsAllExamplesUntilFull) {
  InputReservoir reservoir(4, 0);
  EXPECT_EQ(reservoir.size(), 0);
  Offer(&reservoir, {}, 0.5f);  // An example without lookups also counts.
  Offer(&reservoir, {{5, 1}, {6, 0}}, 0.25f);
  ASSERT_EQ(reservoir.size(), 2);
  EXPECT_TRUE(reservoir.input(0).empty());
  EXPECT_EQ(reservoir.input(1)[0].key, 5);
  EXPECT_EQ(reservoir.input(1)[0].table, 1);
}

TEST(InputReservoir, SampleIsUniform) {
  constexpr int kInputs = 100, kCapacity = 10, kWindows = 2000;
  std::vector<int> chosen(kInputs, 0);
  InputReservoir reservoir(kCapacity, 3);
  for (int window = 0; window < kWindows; ++window) {
    OfferNumbers(&reservoir, kInputs);
    ASSERT_EQ(reservoir.size(), kCapacity);
    for (int i = 0; i < kCapacity; ++i) ++chosen[reservoir.input(i)[0].key];
    reservoir.Clear();
  }
  // Chi-square test with at most 99 degrees of freedom, because draws are without replacement: mean
  // 89, 99.99% quantile about 150.
  const double expected = static_cast<double>(kWindows) * kCapacity / kInputs;
  double chi_square = 0.0;
  for (const int count : chosen) {
    chi_square += (count - expected) * (count - expected) / expected;
  }
  EXPECT_LT(chi_square, 150.0);
}

TEST(InputReservoir, SameSeedGivesSameSample) {
  InputReservoir first(8, 5), second(8, 5), other(8, 6);
  OfferNumbers(&first, 1000);
  OfferNumbers(&second, 1000);
  OfferNumbers(&other, 1000);
  int differing = 0;
  for (int i = 0; i < 8; ++i) {
    EXPECT_EQ(first.input(i)[0].key, second.input(i)[0].key);
    differing += first.input(i)[0].key != other.input(i)[0].key ? 1 : 0;
  }
  EXPECT_GT(differing, 0);
}

TEST(InputReservoir, ClearStartsEmptySample) {
  InputReservoir reservoir(4, 0);
  OfferNumbers(&reservoir, 100);
  reservoir.Clear();
  EXPECT_EQ(reservoir.size(), 0);
  OfferNumbers(&reservoir, 2);
  EXPECT_EQ(reservoir.size(), 2);
  EXPECT_EQ(reservoir.input(1)[0].key, 1);
}

TEST(InputReservoir, ContinuesIdenticallyAfterRestore) {
  for (const int64_t before : {0, 3, 5, 40}) {
    InputReservoir one(5, 9), other(5, 9);
    OfferNumbers(&one, before);
    OfferNumbers(&other, 17);  // Replaced by Import.
    const InputReservoir::State state = one.Export();
    ASSERT_TRUE(other.Fits(state));
    other.Import(state);
    OfferNumbers(&one, 30);
    OfferNumbers(&other, 30);
    ASSERT_EQ(one.size(), other.size());
    for (int64_t i = 0; i < one.size(); ++i) {
      EXPECT_EQ(one.input(i)[0].key, other.input(i)[0].key);
      EXPECT_EQ(one.loss(i), other.loss(i));
    }
  }
}

TEST(InputReservoir, RejectsMismatchedState) {
  InputReservoir reservoir(5, 0);
  OfferNumbers(&reservoir, 8);
  const InputReservoir::State whole = reservoir.Export();
  EXPECT_FALSE(InputReservoir(4, 0).Fits(whole));
  InputReservoir::State state = whole;
  state.losses.pop_back();
  EXPECT_FALSE(reservoir.Fits(state));
  state = whole;
  state.ends[1] = 0;
  EXPECT_FALSE(reservoir.Fits(state));
  state = whole;
  state.ends.back() = 99;
  EXPECT_FALSE(reservoir.Fits(state));
  state = whole;
  state.offered_in_window = -1;
  EXPECT_FALSE(reservoir.Fits(state));
  state.offered_in_window = 3;
  EXPECT_FALSE(reservoir.Fits(state));
  // Further offers would overflow.
  state.offered_in_window = std::numeric_limits<int64_t>::max();
  EXPECT_FALSE(reservoir.Fits(state));
  state.offered_in_window = InputReservoir::kMaxOffered;
  ASSERT_TRUE(reservoir.Fits(state));
  reservoir.Import(state);
  OfferNumbers(&reservoir, 3);
  EXPECT_EQ(reservoir.size(), 5);
}

}  // namespace
}  // namespace slipstream
