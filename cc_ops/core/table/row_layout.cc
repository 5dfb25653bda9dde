#include "cc_ops/core/table/row_layout.h"

#include <algorithm>

#include "cc_ops/core/base/bfloat16.h"
#include "cc_ops/core/base/float16.h"

namespace slipstream {
namespace {

SLIPSTREAM_SIMD_CLONES void ReadWhole(const RowLayout& layout, const StoredRow* stored,
                                      float* row) {
  layout.ReadInline(stored, layout.dim, layout.slots, row);
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

}  // namespace

void RowLayout::Read(const StoredRow* stored, float* row) const { ReadWhole(*this, stored, row); }

void RowLayout::ReadValues(const StoredRow* stored, float* values) const {
  DecodeRows(Bytes(stored), 1, dim, dtype, values);
}

void RowLayout::ReadSlots(const StoredRow* stored, float* values) const {
  DecodeRows(Bytes(stored) + value_bytes(), 1, slots, slot_dtype, values);
}

void RowLayout::Write(const float* row, int64_t key, uint64_t rounding, StoredRow* stored) const {
  WriteWhole(*this, row, key, rounding, stored);
}

void RowLayout::WriteValues(const float* values, StoredRow* stored) const {
  EncodeRows(values, nullptr, 1, dim, dtype, RowRounding::kNearest, Bytes(stored));
}

void RowLayout::WriteSlots(const float* values, StoredRow* stored) const {
  EncodeRows(values, nullptr, 1, slots, slot_dtype, RowRounding::kNearest,
             Bytes(stored) + value_bytes());
}

void RowLayout::Round(float* values) const { RoundTo(dtype, dim, values); }

void RowLayout::RoundSlots(float* values) const { RoundTo(slot_dtype, slots, values); }

}  // namespace slipstream
