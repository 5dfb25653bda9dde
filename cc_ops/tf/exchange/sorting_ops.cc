// Registration of SlipstreamSortKeys.
#include "absl/status/status.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {

REGISTER_OP("SlipstreamSortKeys")
    .Input("keys: N * int64")
    .Output("sorted: N * int64")
    .Attr("N: int >= 1")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* c) -> absl::Status {
      for (int i = 0; i < c->num_inputs(); ++i) {
        tensorflow::shape_inference::ShapeHandle keys;
        TF_RETURN_IF_ERROR(c->WithRank(c->input(i), 1, &keys));
        c->set_output(i, keys);
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sorts each list of keys.

keys: [n], for each list its own n.
sorted: [n]. Ascending.
)doc");

}  // namespace slipstream
