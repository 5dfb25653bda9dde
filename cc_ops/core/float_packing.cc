#include "cc_ops/core/float_packing.h"

#include <algorithm>
#include <cstring>
#include <string>

namespace slipstream {
namespace {

constexpr int64_t kBlock = 16;
constexpr int kExponentBits = 8;
constexpr uint32_t kMaxExponent = (1u << kExponentBits) - 1;

template <class Bits>
struct Format {
  static constexpr int kBits = 8 * sizeof(Bits);
  static constexpr int kMantissaBits = kBits - 1 - kExponentBits;

  static uint32_t Exponent(Bits value) { return (value >> kMantissaBits) & kMaxExponent; }
  // Sign and mantissa, as one number of kMantissaBits + 1 bits.
  static uint32_t Rest(Bits value) {
    const uint32_t mantissa = value & ((1u << kMantissaBits) - 1);
    return mantissa | static_cast<uint32_t>(value >> (kBits - 1)) << kMantissaBits;
  }
  static Bits Value(uint32_t exponent, uint32_t rest) {
    const uint32_t mantissa = rest & ((1u << kMantissaBits) - 1);
    return static_cast<Bits>((rest >> kMantissaBits) << (kBits - 1) | exponent << kMantissaBits |
                             mantissa);
  }
};

// Numbers up to 255, of which 0, 1 and 2 take two bits: the number, or three and then as many ones
// as it is greater, and a zero; from kLongest ones on, the number itself follows.
constexpr uint32_t kEscape = 3;
constexpr int kEscapeBits = 2;
constexpr uint32_t kLongest = 8;

int SmallBits(uint32_t number) {
  if (number < kEscape) return kEscapeBits;
  const uint32_t ones = number - kEscape;
  return kEscapeBits + (ones < kLongest ? static_cast<int>(ones) + 1 : kLongest + kExponentBits);
}

// Signed differences of exponents, modulo 256, as numbers that are small where these are.
uint32_t Fold(uint32_t difference) {
  const uint32_t low = difference & kMaxExponent;
  return low < 128 ? 2 * low : 2 * (256 - low) - 1;
}
uint32_t Unfold(uint32_t folded) { return folded % 2 == 0 ? folded / 2 : 256 - (folded + 1) / 2; }

// Lowest bits first.
class BitWriter {
 public:
  explicit BitWriter(std::vector<uint8_t>* bytes) : bytes_(bytes) {}

  // count: 0 to 32.
  void Put(uint32_t bits, int count) {
    held_ |= static_cast<uint64_t>(bits) << num_held_;
    num_held_ += count;
    for (; num_held_ >= 8; num_held_ -= 8, held_ >>= 8) {
      bytes_->push_back(static_cast<uint8_t>(held_));
    }
  }
  void PutSmall(uint32_t number) {
    if (number < kEscape) return Put(number, kEscapeBits);
    Put(kEscape, kEscapeBits);
    const uint32_t ones = number - kEscape;
    if (ones < kLongest) return Put((1u << ones) - 1, static_cast<int>(ones) + 1);
    Put((1u << kLongest) - 1, kLongest);
    Put(number, kExponentBits);
  }
  void EndByte() {
    if (num_held_ > 0) Put(0, 8 - num_held_);
  }

 private:
  std::vector<uint8_t>* bytes_;
  uint64_t held_ = 0;
  int num_held_ = 0;
};

class BitReader {
 public:
  BitReader(const uint8_t* bytes, int64_t num_bytes) : bytes_(bytes), num_bytes_(num_bytes) {}

  // count: 0 to 32. Behind the end there are zeros; see Passed.
  uint32_t Get(int count) {
    const uint64_t bits = Peek() & ((uint64_t{1} << count) - 1);
    at_ += count;
    return static_cast<uint32_t>(bits);
  }
  uint32_t GetSmall() {
    const uint64_t bits = Peek();
    const uint32_t first = bits & ((1u << kEscapeBits) - 1);
    at_ += kEscapeBits;
    if (first < kEscape) return first;
    uint32_t ones = 0;
    while (ones < kLongest && (bits >> (kEscapeBits + ones) & 1u) != 0) ++ones;
    at_ += ones;
    if (ones == kLongest) return Get(kExponentBits);
    ++at_;
    return kEscape + ones;
  }
  // Whether more was read than there is.
  bool Passed() const { return at_ > 8 * num_bytes_; }
  int64_t BytesRead() const { return (at_ + 7) / 8; }

 private:
  // At least 57 bits from here on.
  uint64_t Peek() const {
    const int64_t byte = at_ / 8;
    uint64_t bits = 0;
    const int64_t left = num_bytes_ - byte;
    if (left >= 8) {
      for (int i = 0; i < 8; ++i) bits |= static_cast<uint64_t>(bytes_[byte + i]) << (8 * i);
    } else {
      for (int64_t i = 0; i < left; ++i) bits |= static_cast<uint64_t>(bytes_[byte + i]) << (8 * i);
    }
    return bits >> (at_ % 8);
  }

  const uint8_t* bytes_;
  const int64_t num_bytes_;
  int64_t at_ = 0;  // in bits
};

}  // namespace

template <class Bits>
void PackFloats(const Bits* values, int64_t n, std::vector<uint8_t>* packed) {
  using F = Format<Bits>;
  BitWriter to(packed);
  uint32_t before = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const Bits *first = values + begin, *end = values + std::min(begin + kBlock, n);
    uint32_t greatest = 0;
    for (const Bits* value = first; value < end; ++value) {
      greatest = std::max(greatest, F::Exponent(*value));
    }
    const uint32_t change = Fold(greatest - before);
    int bits = SmallBits(change);
    for (const Bits* value = first; value < end; ++value) {
      bits += SmallBits(greatest - F::Exponent(*value));
    }
    const bool is_shorter = bits < kExponentBits * static_cast<int>(end - first);
    to.Put(is_shorter, 1);
    if (is_shorter) {
      to.PutSmall(change);
      before = greatest;
    }
    for (const Bits* value = first; value < end; ++value) {
      if (is_shorter) {
        to.PutSmall(greatest - F::Exponent(*value));
        to.Put(F::Rest(*value), F::kMantissaBits + 1);
      } else {
        to.Put(*value, F::kBits);
      }
    }
  }
  to.EndByte();
}

template <class Bits>
Status UnpackFloats(const uint8_t* packed, int64_t bytes, int64_t n, Bits* values, int64_t* used) {
  using F = Format<Bits>;
  BitReader from(packed, bytes);
  uint32_t before = 0;
  bool is_damaged = false;
  for (int64_t begin = 0; begin < n && !is_damaged; begin += kBlock) {
    Bits *first = values + begin, *end = values + std::min(begin + kBlock, n);
    const bool is_shorter = from.Get(1) != 0;
    if (is_shorter) before = (before + Unfold(from.GetSmall())) & kMaxExponent;
    for (Bits* value = first; value < end; ++value) {
      if (is_shorter) {
        const uint32_t distance = from.GetSmall();
        is_damaged |= distance > before;
        *value = F::Value((before - distance) & kMaxExponent, from.Get(F::kMantissaBits + 1));
      } else {
        *value = static_cast<Bits>(from.Get(F::kBits));
      }
    }
    is_damaged |= from.Passed();
  }
  if (is_damaged) {
    return InvalidArgument("packed floats end, or are damaged, within byte " +
                           std::to_string(std::min(from.BytesRead(), bytes)) + " of " +
                           std::to_string(bytes));
  }
  *used = from.BytesRead();
  return OkStatus();
}

template <class Bits>
int64_t LeastPackedBytes(int64_t n) {
  return n / 8 * (Format<Bits>::kMantissaBits + 1 + kEscapeBits);
}

template void PackFloats(const uint16_t*, int64_t, std::vector<uint8_t>*);
template void PackFloats(const uint32_t*, int64_t, std::vector<uint8_t>*);
template Status UnpackFloats(const uint8_t*, int64_t, int64_t, uint16_t*, int64_t*);
template Status UnpackFloats(const uint8_t*, int64_t, int64_t, uint32_t*, int64_t*);
template int64_t LeastPackedBytes<uint16_t>(int64_t);
template int64_t LeastPackedBytes<uint32_t>(int64_t);

}  // namespace slipstream
