// Shared attributes, documentation and shape function of the lookup ops.
#ifndef SLIPSTREAM_CC_OPS_TF_LOOKUP_LOOKUP_SHAPE_H_
#define SLIPSTREAM_CC_OPS_TF_LOOKUP_LOOKUP_SHAPE_H_

#include "absl/status/status.h"
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "tensorflow/core/framework/shape_inference.h"

#define SLIPSTREAM_COMBINERS_ATTR .Attr("combiners: list({'sum', 'mean', 'sqrtn', 'none'}) >= 1")
#define SLIPSTREAM_LOOKUP_ATTRS                                                              \
  .Attr("num_tables: int >= 1")                                                              \
      .Attr("table_dims: list(int) >= 1") SLIPSTREAM_COMBINERS_ATTR.Attr("is_stacked: bool") \
      .Attr("num_outputs: int >= 1")

#define SLIPSTREAM_LOOKUP_DOC                                                        \
  "table_dims: For each table, its number of values per row.\n"                      \
  "combiners: For each feature, how the rows of an example become one vector: the "  \
  "weighted sum, divided by 1, sum(w) or sqrt(sum(w^2)). 'none': not pooled.\n"      \
  "is_stacked: Whether there is one output [batch, features, dim] instead of one "   \
  "[batch, dim] per feature. It requires equal dims and pooled features.\n"          \
  "handles: Scalars. The tables, each once.\n"                                       \
  "pooled: float32 [batch, dim] for each feature, or [batch, features, dim]. For a " \
  "feature that is not pooled: [number of keys including padding, dim].\n" SLIPSTREAM_FEATURE_DOC

namespace slipstream {

// Shape function of lookups. The inputs are handles, features and then any others. The outputs are
// the pooled vectors and at most one plan.
absl::Status LookupShape(tensorflow::shape_inference::InferenceContext* context);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_LOOKUP_LOOKUP_SHAPE_H_
