// The encoding of a row in memory: its values, followed by the slots of its optimizer.
//
// Values are float32, bfloat16 or float16, slots are float32 or bfloat16. Updates compute in
// float32. A float32 row is updated in place. Other rows are decoded, updated and written back with
// stochastic rounding, so that small steps are not lost. The random bits are a hash of the key and
// the update, therefore a repeated run gives the same bits.
//
// A 16-bit value with a float32 slot borrows the lowest 8 bits of that slot. The value then has 24
// bits, its steps are rounded 256 times finer, and the row needs no more memory. Lookups read the
// nearest 16-bit value.
#ifndef SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_LAYOUT_H_
#define SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_LAYOUT_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/narrow_floats.h"
#include "cc_ops/core/base/row_codec.h"
#include "cc_ops/core/base/simd_clones.h"
#include "cc_ops/core/memory/row_arena.h"

namespace slipstream {

// Describes and converts the stored form of a row. See the top of the file.
struct RowLayout {
  RowDtype dtype = RowDtype::kFloat32;       // Type of the values; not int8.
  RowDtype slot_dtype = RowDtype::kFloat32;  // float32 or bfloat16, because sums need its range.
  int64_t dim = 0;
  int64_t slots = 0;
  uint64_t seed = 0;  // Seed of the random numbers, so that tables round independently.

  bool is_floats() const { return dtype == RowDtype::kFloat32 && slot_dtype == RowDtype::kFloat32; }
  // Whether the first `dim` slots lend their lowest 8 bits to the values (see the top of the file).
  bool lends() const {
    return dtype != RowDtype::kFloat32 && slot_dtype == RowDtype::kFloat32 && slots >= dim;
  }
  int64_t value_bytes() const { return EncodedBytes(dtype, dim); }
  int64_t slot_bytes() const { return EncodedBytes(slot_dtype, slots); }
  // Bytes of a row, rounded up to a multiple of 16, so that rows cross few cache lines.
  int64_t bytes() const { return (value_bytes() + slot_bytes() + 15) / 16 * 16; }
  // Number of floats in a decoded row.
  int64_t floats() const { return dim + slots; }

  // Requires is_floats().
  static float* Floats(StoredRow* row) { return reinterpret_cast<float*>(row); }
  static const float* Floats(const StoredRow* row) { return reinterpret_cast<const float*>(row); }

  // Decodes a row for updates and checkpoints: values ([dim]) with borrowed bits, and slots
  // ([slots]).
  void Read(const StoredRow* stored, float* values, float* slots) const;
  // Decodes the values for lookups, without borrowed bits. values: [dim].
  void ReadValues(const StoredRow* stored, float* values) const;
  // Decodes the slots. slots: [slots].
  void ReadSlots(const StoredRow* stored, float* slots) const;
  // Writes a decoded row ([floats()]) with stochastic rounding. key: of the row. rounding:
  // StepRates::rounding of the update.
  void Write(const float* row, int64_t key, uint64_t rounding, StoredRow* stored) const;
  // Write values ([dim]) or slots ([slots]) that are not the result of an update, for example from
  // a checkpoint. They are rounded to nearest.
  void WriteValues(const float* values, StoredRow* stored) const;
  void WriteSlots(const float* slots, StoredRow* stored) const;
  // Round values ([dim]) or slots ([slots]) to what is read after they were written.
  void Round(float* values) const;
  void RoundSlots(float* values) const;

  // Returns the row as floats ([floats()]) that the caller may change: the row itself if it is
  // stored as floats, else a decoded copy in `copy` ([floats()]). Call Close afterwards.
  float* Open(StoredRow* stored, float* copy) const {
    if (is_floats()) return Floats(stored);
    Read(stored, copy, copy + dim);
    return copy;
  }
  // Stores a row that Open returned. key, rounding: as in Write.
  void Close(const float* opened, int64_t key, uint64_t rounding, StoredRow* stored) const {
    if (!is_floats()) Write(opened, key, rounding, stored);
  }

  // Read and Write with dimensions as arguments. Functions that are compiled for multiple
  // instruction sets inline them with constants.
  SLIPSTREAM_ALWAYS_INLINE void ReadInline(const StoredRow* stored, int64_t of_dim,
                                           int64_t of_slots, float* values, float* slots_to) const {
    const auto* const bytes = reinterpret_cast<const uint8_t*>(stored);
    const uint8_t* const of_first_slot = bytes + EncodedWidth(dtype) * of_dim;
    if (!lends()) {
      ReadPart(dtype, bytes, of_dim, values);
      return ReadPart(slot_dtype, of_first_slot, of_slots, slots_to);
    }
    if (dtype == RowDtype::kBfloat16) {
      ReadBorrowed<Bfloat16Rounding>(bytes, of_first_slot, of_dim, values, slots_to);
    } else {
      ReadBorrowed<Float16Rounding>(bytes, of_first_slot, of_dim, values, slots_to);
    }
    const int64_t others = std::max<int64_t>(of_slots - of_dim, 0);
    ReadPart(slot_dtype, of_first_slot + 4 * of_dim, others, slots_to + of_dim);
  }
  SLIPSTREAM_ALWAYS_INLINE void WriteInline(const float* row, int64_t of_dim, int64_t of_slots,
                                            int64_t key, uint64_t rounding,
                                            StoredRow* stored) const {
    auto* const bytes = reinterpret_cast<uint8_t*>(stored);
    const auto chance =
        static_cast<uint32_t>(Mix64(static_cast<uint64_t>(key) ^ rounding ^ seed) >> 32);
    uint8_t* const of_first_slot = bytes + EncodedWidth(dtype) * of_dim;
    if (!lends()) {
      WritePart(dtype, row, of_dim, chance, 0, bytes);
      // The offset gives slots other random bits than values.
      return WritePart(slot_dtype, row + of_dim, of_slots, chance, (of_dim + 31) / 32 * 32,
                       of_first_slot);
    }
    if (dtype == RowDtype::kBfloat16) {
      WriteBorrowed<Bfloat16Rounding>(row, row + of_dim, of_dim, chance, 0, bytes, of_first_slot);
    } else {
      WriteBorrowed<Float16Rounding>(row, row + of_dim, of_dim, chance, 0, bytes, of_first_slot);
    }
    const int64_t others = std::max<int64_t>(of_slots - of_dim, 0);
    WritePart(slot_dtype, row + 2 * of_dim, others, 0, 0, of_first_slot + 4 * of_dim);
  }

 private:
  static int64_t EncodedWidth(RowDtype dtype) { return dtype == RowDtype::kFloat32 ? 4 : 2; }

  static SLIPSTREAM_ALWAYS_INLINE void ReadPart(RowDtype dtype, const uint8_t* bytes, int64_t n,
                                                float* values) {
    if (n == 0) return;  // `values` is null if the rule has no slots and the caller has no memory.
    if (dtype == RowDtype::kFloat32) {
      std::memcpy(values, bytes, static_cast<size_t>(n) * sizeof(float));
    } else if (dtype == RowDtype::kBfloat16) {
      ReadHalves<Bfloat16Rounding>(bytes, n, values);
    } else {
      ReadHalves<Float16Rounding>(bytes, n, values);
    }
  }
  static SLIPSTREAM_ALWAYS_INLINE void WritePart(RowDtype dtype, const float* values, int64_t n,
                                                 uint32_t chance, int64_t first, uint8_t* bytes) {
    if (dtype == RowDtype::kFloat32) {
      std::memcpy(bytes, values, static_cast<size_t>(n) * sizeof(float));
    } else if (dtype == RowDtype::kBfloat16) {
      WriteHalves<Bfloat16Rounding>(values, n, chance, first, bytes);
    } else {
      WriteHalves<Float16Rounding>(values, n, chance, first, bytes);
    }
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_TABLE_ROW_LAYOUT_H_
