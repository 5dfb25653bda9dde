// Shape functions in the notation of the op documentation.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_SHAPES_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_SHAPES_H_

#include "tensorflow/core/framework/op.h"

namespace slipstream {

// Returns a shape function for a text such as "[], [n], [n, dim] -> [n], [2, ?]". [] is a scalar. A
// name is the same size everywhere, and equals the attribute of that name if the op has one. ? is
// any size, and [*] is a scalar or a vector. The text describes the last inputs: earlier inputs,
// such as lists of handles, are not checked.
tensorflow::OpShapeInferenceFn Shapes(const char* text);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_SHAPES_H_
