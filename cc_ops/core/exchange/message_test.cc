#include "cc_ops/core/exchange/message.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace slipstream {
namespace {

// Data for two ranks: a table with rows of 3 values and a table with rows of 1 value.
struct Sent {
  std::vector<int64_t> sizes = {2, 1, 0, 3};
  std::vector<int64_t> keys = {5, -7, 9, 1, 2, 3};
  std::vector<float> values = {1.5f, -2.f, 3.f, 4.f, 5.f, 6.f, 7.f, 8.f, 9.f, 10.f};

  SendBufferView view() const {
    return {2,
            sizes.data(),
            keys.data(),
            static_cast<int64_t>(keys.size()),
            values.data(),
            static_cast<int64_t>(values.size())};
  }
};
const std::vector<int64_t> kRowFloats = {3, 1};

std::vector<uint8_t> Written(const Sent& sent, RowDtype dtype, SteadyLengths* lengths) {
  MessageWriter writer(kRowFloats, dtype);
  EXPECT_TRUE(writer.Take(sent.view(), lengths).ok());
  int64_t all = 0;
  for (const int64_t length : writer.lengths()) all += length;
  std::vector<uint8_t> bytes(static_cast<size_t>(all), 0xee);
  writer.Write(bytes.data());
  return bytes;
}

Sent Read(const std::vector<uint8_t>& bytes) {
  MessageReader reader(kRowFloats);
  EXPECT_TRUE(reader.Take(bytes.data(), static_cast<int64_t>(bytes.size()), 2).ok());
  Sent got;
  got.sizes.assign(4, -1);
  got.keys.assign(static_cast<size_t>(reader.num_keys()), -1);
  got.values.assign(static_cast<size_t>(reader.num_values()), -1.f);
  reader.Read(got.sizes.data(), got.keys.data(), got.values.data());
  return got;
}

TEST(MessageTest, WrittenMessageRoundTrips) {
  const Sent sent;
  for (const RowDtype dtype : {RowDtype::kFloat32, RowDtype::kBfloat16, RowDtype::kFloat16}) {
    SteadyLengths lengths;
    const Sent got = Read(Written(sent, dtype, &lengths));
    EXPECT_EQ(got.sizes, sent.sizes);
    EXPECT_EQ(got.keys, sent.keys);
    EXPECT_EQ(got.values, sent.values) << "all of them are numbers of every dtype";
  }
  SteadyLengths lengths;
  const Sent got = Read(Written(sent, RowDtype::kInt8, &lengths));
  EXPECT_EQ(got.keys, sent.keys);
  // Rows of three values, then of one; the step is a 127th of a row's largest magnitude.
  const std::vector<float> largest = {3, 3, 3, 6, 6, 6, 7, 8, 9, 10};
  for (size_t i = 0; i < largest.size(); ++i) {
    EXPECT_NEAR(got.values[i], sent.values[i], largest[i] / 127) << i;
  }
}

TEST(MessageTest, RoundsValuesToNearestBfloat16) {
  Sent sent;
  sent.values[0] = 1.f + 1.f / 256;  // Midpoints of two values round to even.
  sent.values[1] = 1.f + 3.f / 256;
  sent.values[2] = std::numeric_limits<float>::quiet_NaN();
  sent.values[3] = std::numeric_limits<float>::infinity();
  SteadyLengths lengths;
  const Sent got = Read(Written(sent, RowDtype::kBfloat16, &lengths));
  EXPECT_EQ(got.values[0], 1.f);
  EXPECT_EQ(got.values[1], 1.f + 4.f / 256);
  EXPECT_TRUE(std::isnan(got.values[2]));
  EXPECT_EQ(got.values[3], std::numeric_limits<float>::infinity());
}

TEST(MessageTest, PaddingIsZeroed) {
  SteadyLengths lengths;
  const std::vector<uint8_t> bytes = Written(Sent(), RowDtype::kFloat32, &lengths);
  int64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  // Header, 3 keys, 7 values.
  for (int64_t i = 4 * 8 + 3 * 8 + 7 * 4; i < length; ++i) EXPECT_EQ(bytes[i], 0) << i;
}

TEST(MessageTest, LengthsChangeOnlyIfTooShortOrLongTooLong) {
  SteadyLengths lengths;
  const int64_t first = lengths.Of(1, 100000);
  EXPECT_GE(first, 100000);
  EXPECT_LE(first, 104000);
  EXPECT_EQ(lengths.Of(1, first), first);
  EXPECT_EQ(lengths.Of(1, first * 3 / 4), first);
  const int64_t longer = lengths.Of(1, first + 1);
  EXPECT_GT(longer, first);
  EXPECT_EQ(lengths.Of(1, 10), longer);
  for (int i = 0; i < 1000; ++i) lengths.Of(1, i % 50 == 0 ? longer : 10);
  EXPECT_EQ(lengths.Of(1, 10), longer) << "one in fifty needs it";
  for (int i = 0; i < 65; ++i) lengths.Of(1, i == 7 ? 3000 : 2000);
  EXPECT_GE(lengths.Of(1, 2000), 3000) << "the longest of them";
  EXPECT_LT(lengths.Of(1, 2000), 3300);
  EXPECT_LT(lengths.Of(0, 10), 2000) << "of another rank";
  for (int i = 0; i < 100; ++i) EXPECT_EQ(lengths.Of(2, i * 10), lengths.Of(2, 0));
}

TEST(MessageTest, RejectsPartsThatDoNotFit) {
  SteadyLengths lengths;
  const auto status_of = [&](const Sent& sent) {
    return MessageWriter(kRowFloats, RowDtype::kFloat32).Take(sent.view(), &lengths);
  };
  Sent sent;
  sent.sizes[3] = 4;
  EXPECT_NE(status_of(sent).message().find("sizes[1, 1] is 4"), std::string::npos);
  sent.sizes[3] = 2;
  EXPECT_NE(status_of(sent).message().find("sizes adds up to 5 keys"), std::string::npos);
  sent.sizes[3] = -1;
  EXPECT_NE(status_of(sent).message().find("is -1 rows"), std::string::npos);
  sent = Sent();
  sent.values.pop_back();
  EXPECT_FALSE(status_of(sent).ok());
}

TEST(MessageTest, RejectsDamagedMessages) {
  SteadyLengths lengths;
  const std::vector<uint8_t> whole = Written(Sent(), RowDtype::kFloat32, &lengths);
  const auto message_of = [](const std::vector<uint8_t>& bytes, int ranks) {
    return MessageReader(kRowFloats)
        .Take(bytes.data(), static_cast<int64_t>(bytes.size()), ranks)
        .message();
  };
  const auto with = [&](size_t word, int64_t value) {
    std::vector<uint8_t> bytes = whole;
    std::memcpy(bytes.data() + 8 * word, &value, sizeof(value));
    return message_of(bytes, 2);
  };
  EXPECT_EQ(message_of(whole, 2), "");
  EXPECT_NE(message_of(whole, 1).find("bytes remain after the messages of 1 ranks"),
            std::string::npos);
  EXPECT_NE(message_of(whole, 3).find("rank 2 has no complete header"), std::string::npos);
  EXPECT_NE(message_of({whole.begin(), whole.end() - 8}, 2).find("rank 1 has the length"),
            std::string::npos);
  for (const int64_t length : {int64_t{-8}, int64_t{0}, int64_t{33}, int64_t{1} << 62}) {
    EXPECT_NE(with(0, length).find("rank 0 has the length"), std::string::npos) << length;
  }
  EXPECT_NE(with(1, 7).find("the dtype number 7"), std::string::npos);
  for (const int64_t size : {int64_t{-1}, int64_t{1} << 40, int64_t{1} << 62}) {
    EXPECT_NE(with(2, size).find("rows of table 0"), std::string::npos) << size;
    EXPECT_NE(with(3, size).find("rows of table 1"), std::string::npos) << size;
  }
}

}  // namespace
}  // namespace slipstream
