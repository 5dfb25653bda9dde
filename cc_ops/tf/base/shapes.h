// Shape functions as an op's documentation says them.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_SHAPES_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_SHAPES_H_

#include "tensorflow/core/framework/op.h"

namespace slipstream {

// The shape function of, for example, "[], [n], [n, dim] -> [n], [2, ?]": [] is a scalar; a name
// is one number wherever it stands, and that of the attribute where the op has one of the name;
// ? may be any number; [*] is a scalar or a vector. Inputs before those that are named, as lists of
// handles, are not checked.
tensorflow::OpShapeInferenceFn Shapes(const char* text);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_SHAPES_H_
