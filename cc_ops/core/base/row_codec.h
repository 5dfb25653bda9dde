// Encodes rows of floats in fewer bytes for storage and messages.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_ROW_CODEC_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_ROW_CODEC_H_

#include <cstdint>

namespace slipstream {

// Encoding of the values of a row. float32, bfloat16 and float16 store the nearest value. int8
// stores multiples of a 127th of the row's largest magnitude, after a float32 scale.
enum class RowDtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };
constexpr int kRowDtypes = 4;

// Rounding of int8 values. kByChance rounds stochastically with a hash of the key and the values:
// over different rows the mean error is 0, and equal rows have equal encodings.
enum class RowRounding { kNearest, kByChance };

// Bytes of an encoded row with `dim` values; 0 if dim is 0.
int64_t EncodedBytes(RowDtype dtype, int64_t dim);

// Encode and decode rows. keys: [n], used by kByChance, or null. values: [n, dim]. out and encoded:
// n * EncodedBytes(dtype, dim) bytes. An int8 row with a value that is not finite is decoded as
// NaN.
void EncodeRows(const float* values, const int64_t* keys, int64_t n, int64_t dim, RowDtype dtype,
                RowRounding rounding, uint8_t* out);
void DecodeRows(const uint8_t* encoded, int64_t n, int64_t dim, RowDtype dtype, float* values);

// IsHeldBy returns whether a value is finite and stays finite when encoded. NumbersHeldBy describes
// these values for error messages. Not for int8.
bool IsHeldBy(RowDtype dtype, float value);
const char* NumbersHeldBy(RowDtype dtype);

// Returns whether DecodeRows of one encoded row gives finite values.
bool EncodedIsFinite(const uint8_t* encoded, int64_t dim, RowDtype dtype);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_ROW_CODEC_H_
