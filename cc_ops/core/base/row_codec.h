// Rows of floats in fewer bytes, and back.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_ROW_CODEC_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_ROW_CODEC_H_

#include <cstdint>

namespace slipstream {

// What a row's values become. Float32, bfloat16 and float16: the nearest, one behind the other.
// Int8: multiples of a 127th of the row's largest magnitude, behind a float that tells how large
// that is.
enum class RowDtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };
constexpr int kRowDtypes = 4;

// How an int8 is chosen. kByChance: one of its two neighbours, drawn by a hash of the key and the
// row's values: over rows that differ the mean error is 0, and equal rows become equal bytes.
enum class RowRounding { kNearest, kByChance };

// Of a row of so many values; 0 of none.
int64_t EncodedBytes(RowDtype dtype, int64_t dim);

// keys: [n], or null with kNearest; values: [n, dim]; out: n * EncodedBytes. An int8 row with a
// value that is not finite comes back as NaN.
void EncodeRows(const float* values, const int64_t* keys, int64_t n, int64_t dim, RowDtype dtype,
                RowRounding rounding, uint8_t* out);
void DecodeRows(const uint8_t* encoded, int64_t n, int64_t dim, RowDtype dtype, float* values);

// Whether a value comes back finite; and which do, for errors. Not of int8.
bool IsHeldBy(RowDtype dtype, float value);
const char* NumbersHeldBy(RowDtype dtype);

// Whether DecodeRows of a row gives finite values.
bool EncodedIsFinite(const uint8_t* encoded, int64_t dim, RowDtype dtype);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_ROW_CODEC_H_
