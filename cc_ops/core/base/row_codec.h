// Encodes rows of floats in fewer bytes for storage and messages.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_ROW_CODEC_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_ROW_CODEC_H_

#include <cstdint>

namespace slipstream {

// Encoding of the values of a row. float32, bfloat16 and float16 store the nearest value. int8
// stores a float32 scale, which is a 127th of the row's largest magnitude unless this is extremely
// small or large, and then one byte per value: the number by which the scale is multiplied.
enum class RowDtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2, kInt8 = 3 };
constexpr int kRowDtypes = 4;

// Rounding of int8 values. kByChance rounds up or down by a hash of the key and the values, which
// acts as a random number: the same row of the same key always has the same encoding, but errors
// average to 0 over different rows.
enum class RowRounding { kNearest, kByChance };

// Bytes of an encoded row with `dim` values; 0 if dim is 0.
int64_t EncodedBytes(RowDtype dtype, int64_t dim);

// Encode and decode rows. keys: [n]; must not be null for kInt8 with kByChance, ignored otherwise.
// values: [n, dim]. out and encoded: n * EncodedBytes(dtype, dim) bytes. If a value of an int8 row
// is not finite, all values of the row are decoded as NaN.
void EncodeRows(const float* values, const int64_t* keys, int64_t n, int64_t dim, RowDtype dtype,
                RowRounding rounding, uint8_t* out);
void DecodeRows(const uint8_t* encoded, int64_t n, int64_t dim, RowDtype dtype, float* values);

// IsHeldBy returns whether |value| is at most the largest finite value of the type; false for a
// NaN. NumbersHeldBy describes these values for error messages. Not for int8.
bool IsHeldBy(RowDtype dtype, float value);
const char* NumbersHeldBy(RowDtype dtype);

// Returns whether DecodeRows of one encoded row gives finite values.
bool EncodedIsFinite(const uint8_t* encoded, int64_t dim, RowDtype dtype);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_ROW_CODEC_H_
