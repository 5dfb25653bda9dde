#include "cc_ops/core/exchange/float_packing.h"

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

constexpr int SmallBits(uint32_t number) {
  if (number < kEscape) return kEscapeBits;
  const uint32_t ones = number - kEscape;
  return kEscapeBits + (ones < kLongest ? static_cast<int>(ones) + 1 : kLongest + kExponentBits);
}
// Codes of up to kFewBits bits, which most are, without branches: nobody can predict them.
constexpr int kFewBits = 8;
constexpr uint32_t kFew = kFewBits + 1;  // numbers below have such codes
struct SmallCodes {
  constexpr SmallCodes() {
    for (uint32_t number = 0; number <= kMaxExponent; ++number) {
      bits[number] = static_cast<uint8_t>(SmallBits(number));
    }
    for (uint32_t number = 0; number < kFew; ++number) {
      // From three on, as many ones less one, and a zero.
      code[number] = static_cast<uint8_t>(number < kEscape ? number : (1u << (number - 1)) - 1);
      for (uint32_t next = code[number]; next < 1u << kFewBits; next += 1u << bits[number]) {
        found[next] = {static_cast<uint8_t>(number), bits[number]};
      }
    }
  }
  struct Found {
    uint8_t number = 0, bits = 0;
  };
  uint8_t bits[kMaxExponent + 1] = {};  // of every number's code
  uint8_t code[kFew] = {};              // of few numbers
  Found found[1 << kFewBits] = {};      // whose code bits begin with, if it is of few
};
constexpr SmallCodes kSmall;
constexpr uint32_t kManyOnes = (1u << kFewBits) - 1;  // bits that no code of few begins with

// Signed differences of exponents, modulo 256, as numbers that are small where these are.
uint32_t Fold(uint32_t difference) {
  const uint32_t low = difference & kMaxExponent;
  return low < 128 ? 2 * low : 2 * (256 - low) - 1;
}
uint32_t Unfold(uint32_t folded) { return folded % 2 == 0 ? folded / 2 : 256 - (folded + 1) / 2; }

// Lowest byte first; compilers do not see one load or store in a loop over bytes.
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
uint64_t Load64(const uint8_t* from) {
  uint64_t number = 0;
  std::memcpy(&number, from, sizeof(number));
  return number;
}
void Store32(uint32_t number, uint8_t* to) { std::memcpy(to, &number, sizeof(number)); }
#else
uint64_t Load64(const uint8_t* from) {
  uint64_t number = 0;
  for (int i = 0; i < 8; ++i) number |= static_cast<uint64_t>(from[i]) << (8 * i);
  return number;
}
void Store32(uint32_t number, uint8_t* to) {
  for (int i = 0; i < 4; ++i) to[i] = static_cast<uint8_t>(number >> (8 * i));
}
#endif

// Lowest bits first.
class BitWriter {
 public:
  // most_bits: that will be put.
  BitWriter(std::vector<uint8_t>* bytes, int64_t most_bits) : bytes_(bytes), at_(bytes->size()) {
    bytes_->resize(at_ + static_cast<size_t>(most_bits / 8) + sizeof(uint64_t));
  }

  // count: 0 to 32.
  void Put(uint32_t bits, int count) {
    held_ |= static_cast<uint64_t>(bits) << num_held_;
    num_held_ += count;
    if (num_held_ < 32) return;
    Store32(static_cast<uint32_t>(held_), bytes_->data() + at_);
    at_ += 4;
    held_ >>= 32;
    num_held_ -= 32;
  }
  void PutSmall(uint32_t number) {
    if (number < kEscape) return Put(number, kEscapeBits);
    Put(kEscape, kEscapeBits);
    const uint32_t ones = number - kEscape;
    if (ones < kLongest) return Put((1u << ones) - 1, static_cast<int>(ones) + 1);
    Put((1u << kLongest) - 1, kLongest);
    Put(number, kExponentBits);
  }
  // After all others.
  void EndByte() {
    for (; num_held_ > 0; num_held_ -= 8, held_ >>= 8) {
      (*bytes_)[at_++] = static_cast<uint8_t>(held_);
    }
    bytes_->resize(at_);
  }

 private:
  std::vector<uint8_t>* bytes_;
  size_t at_;
  uint64_t held_ = 0;
  int num_held_ = 0;  // below 32
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
  // A small number, and `count` bits behind it, up to 32.
  uint32_t GetSmall(int count, uint32_t* behind) {
    const uint64_t bits = Peek();
    const uint32_t first = bits & ((1u << kFewBits) - 1);
    if (first == kManyOnes) {
      const uint32_t number = GetSmall();
      *behind = Get(count);
      return number;
    }
    const SmallCodes::Found found = kSmall.found[first];
    *behind = static_cast<uint32_t>(bits >> found.bits & ((uint64_t{1} << count) - 1));
    at_ += found.bits + count;
    return found.number;
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
      bits = Load64(bytes_ + byte);
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
  constexpr int kRestBits = F::kMantissaBits + 1;
  // A block takes a bit more than it would as it is, at most.
  BitWriter to(packed, n * F::kBits + n / kBlock + 1);
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
      bits += kSmall.bits[greatest - F::Exponent(*value)];
    }
    const bool is_shorter = bits < kExponentBits * static_cast<int>(end - first);
    to.Put(is_shorter, 1);
    if (is_shorter) {
      to.PutSmall(change);
      before = greatest;
    }
    for (const Bits* value = first; value < end; ++value) {
      if (is_shorter) {
        const uint32_t distance = greatest - F::Exponent(*value), rest = F::Rest(*value);
        if (distance < kFew) {
          const int bits_of_it = kSmall.bits[distance];
          to.Put(kSmall.code[distance] | rest << bits_of_it, bits_of_it + kRestBits);
        } else {
          to.PutSmall(distance);
          to.Put(rest, kRestBits);
        }
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
        uint32_t rest = 0;
        const uint32_t distance = from.GetSmall(F::kMantissaBits + 1, &rest);
        is_damaged |= distance > before;
        *value = F::Value((before - distance) & kMaxExponent, rest);
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
