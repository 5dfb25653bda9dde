#include "cc_ops/core/table/row_layout.h"

#include <cstring>

#include "cc_ops/core/base/bfloat16.h"
#include "cc_ops/core/base/float16.h"
#include "cc_ops/core/base/float_bits.h"

namespace slipstream {
namespace {

SLIPSTREAM_SIMD_CLONES void ReadWhole(const RowLayout& layout, const StoredRow* stored,
                                      float* values, float* slots) {
  layout.ReadInline(stored, layout.dim, layout.slots, values, slots);
}

SLIPSTREAM_SIMD_CLONES void WriteWhole(const RowLayout& layout, const float* row, int64_t key,
                                       uint64_t rounding, StoredRow* stored) {
  layout.WriteInline(row, layout.dim, layout.slots, key, rounding, stored);
}

const uint8_t* Bytes(const StoredRow* row) { return reinterpret_cast<const uint8_t*>(row); }
uint8_t* Bytes(StoredRow* row) { return reinterpret_cast<uint8_t*>(row); }

void RoundTo(RowDtype dtype, int64_t n, float* values) {
  if (dtype == RowDtype::kFloat32) return;
  for (int64_t j = 0; j < n; ++j) {
    values[j] = dtype == RowDtype::kBfloat16 ? FromBfloat16(RoundToBfloat16(values[j]))
                                             : FromFloat16(RoundToFloat16(values[j]));
  }
}

// Round to nearest in 24 bits: a 16-bit value with borrowed bits, and a float that lends 8 bits.
uint32_t RoundValue(RowDtype dtype, float value) {
  const uint32_t bits = BitsOf(value);
  return dtype == RowDtype::kBfloat16 ? Bfloat16Rounding::Round<8>(bits, kToNearest)
                                      : Float16Rounding::Round<8>(bits, kToNearest);
}
uint32_t RoundLender(float value) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  const uint32_t bits = BitsOf(value), up = bits + kHalfOfLent;
  // Do not round the largest finite numbers up to infinity.
  return ((up & kInfinity) == kInfinity ? bits : up) & ~kLentBits;
}

}  // namespace

void RowLayout::Read(const StoredRow* stored, float* values, float* of_slots) const {
  ReadWhole(*this, stored, values, of_slots);
}

void RowLayout::ReadValues(const StoredRow* stored, float* values) const {
  DecodeRows(Bytes(stored), 1, dim, dtype, values);
}

void RowLayout::ReadSlots(const StoredRow* stored, float* values) const {
  DecodeRows(Bytes(stored) + value_bytes(), 1, slots, slot_dtype, values);
  for (int64_t j = 0; lends() && j < dim; ++j) values[j] = FloatOf(BitsOf(values[j]) & ~kLentBits);
}

void RowLayout::Write(const float* row, int64_t key, uint64_t rounding, StoredRow* stored) const {
  WriteWhole(*this, row, key, rounding, stored);
}

void RowLayout::WriteValues(const float* values, StoredRow* stored) const {
  if (!lends()) {
    return EncodeRows(values, nullptr, 1, dim, dtype, RowRounding::kNearest, Bytes(stored));
  }
  for (int64_t j = 0; j < dim; ++j) {
    const uint32_t bits = RoundValue(dtype, values[j]);
    const auto half = static_cast<uint16_t>((bits + kHalfOfLent) >> 8);
    const auto lent = static_cast<uint8_t>(bits & kLentBits);
    std::memcpy(Bytes(stored) + 2 * j, &half, sizeof(half));
    // The lowest byte comes first (little endian).
    Bytes(stored)[value_bytes() + 4 * j] = lent;
  }
}

void RowLayout::WriteSlots(const float* values, StoredRow* stored) const {
  uint8_t* const first = Bytes(stored) + value_bytes();
  if (!lends()) {
    return EncodeRows(values, nullptr, 1, slots, slot_dtype, RowRounding::kNearest, first);
  }
  for (int64_t j = 0; j < slots; ++j) {
    uint32_t word = j < dim ? RoundLender(values[j]) | first[4 * j] : BitsOf(values[j]);
    std::memcpy(first + 4 * j, &word, sizeof(word));
  }
}

void RowLayout::Round(float* values) const { RoundTo(dtype, dim, values); }

void RowLayout::RoundSlots(float* values) const {
  if (!lends()) return RoundTo(slot_dtype, slots, values);
  for (int64_t j = 0; j < dim; ++j) values[j] = FloatOf(RoundLender(values[j]));
}

}  // namespace slipstream
