// Registrations of the ops that connect lookups with the update after them.
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;
using tf::shape_inference::InferenceContext;

REGISTER_OP("SlipstreamRowSource")
    .Input("anchors: num_anchors * float")
    .Input("previous: num_previous * variant")
    .Output("source: variant")
    .Attr("num_anchors: int >= 1")
    .Attr("num_previous: int >= 0")
    .Attr("store: int")
    .Attr("apply: {'backward', 'step'}")
    .SetShapeFn(tf::shape_inference::ScalarShape)
    .Doc(R"doc(
Represents all rows of a store in the tape of TensorFlow.

The lookups of a training step share one source (SlipstreamConnectRows). The tape sums their
gradients and then calls the gradient function of the source once, which updates the rows or returns
their gradients.

anchors: Scalars. The trainable variables that receive the gradient.
previous: No tensor, or an earlier source of the store. A tape that has recorded it passes the
  gradients on to it, so that they are one update with the gradients of earlier lookups.
store: Number of the store in this process.
apply: 'backward': the gradient function updates the rows. 'step': it returns their gradients.
source: Scalar without gradients.
)doc");

REGISTER_OP("SlipstreamConnectRows")
    .Input("source: variant")
    .Input("plan: variant")
    .Input("anchors: num_anchors * float")
    .Input("pooled: num_pooled * float")
    .Output("connected: num_pooled * float")
    .Attr("num_anchors: int >= 0")
    .Attr("num_pooled: int >= 1")
    .Attr("ranks: int >= 1")
    .SetShapeFn([](InferenceContext* c) {
      const int first = c->num_inputs() - c->num_outputs();
      for (int i = 0; i < c->num_outputs(); ++i) c->set_output(i, c->input(first + i));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns the pooled outputs of a lookup and connects their gradients with the source.

source: Scalar, from SlipstreamRowSource.
plan: Scalar, the plan of the lookup.
anchors: Scalars. Further variables of the layer, which receive the gradient 0.
pooled: The pooled outputs of the lookup.
ranks: The gradients are divided by this number of ranks.
connected: The pooled outputs, without a copy.
)doc");

REGISTER_OP("SlipstreamRowGradients")
    .Input("plan: variant")
    .Input("gradients: num_gradients * float")
    .Output("row_gradients: variant")
    .Attr("num_gradients: int >= 1")
    .SetShapeFn(tf::shape_inference::ScalarShape)
    .Doc(R"doc(
Packs the gradients of a lookup into one tensor.

The sum (AddN) of such tensors contains the gradients of all lookups. It is the input `plan` of
SlipstreamApplyGradients or SlipstreamCollectGradients.

plan: Scalar, the plan of the lookup.
gradients: The gradients of its pooled outputs, in their shapes.
row_gradients: Scalar.
)doc");

}  // namespace
}  // namespace slipstream
