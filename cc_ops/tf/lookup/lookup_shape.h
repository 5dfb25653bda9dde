// What registrations of lookups share.
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

#define SLIPSTREAM_LOOKUP_DOC                                                                  \
  "table_dims: the dim of each table.\n"                                                       \
  "combiners: per feature, how the rows of a bag become one vector; 'none': not at all.\n"     \
  "is_stacked: one output float32 [batch, features, dim] instead of one [batch, dim] each.\n"  \
  "handles: scalars, one per table; no table may come twice.\n"                                \
  "pooled: float32 [batch, dim] per feature, or [batch, features, dim]; of a feature that is " \
  "not pooled, [number of its keys, padding included, dim].\n" SLIPSTREAM_FEATURE_DOC

namespace slipstream {

// Inputs: handles, features, then others. Outputs: pooled vectors, then perhaps a plan.
absl::Status LookupShape(tensorflow::shape_inference::InferenceContext* context);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_LOOKUP_LOOKUP_SHAPE_H_
