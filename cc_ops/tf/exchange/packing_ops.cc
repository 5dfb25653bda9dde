// Registrations of the ops that pack keys and floats for a wire, without loss.
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {

namespace tf = tensorflow;
using tf::shape_inference::InferenceContext;
using tf::shape_inference::ShapeHandle;

REGISTER_OP("SlipstreamPackKeys")
    .Input("sizes: int64")
    .Input("keys: int64")
    .Output("packed: uint8")
    .Output("rank_bytes: int32")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle sizes, unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &sizes));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, c->Vector(c->Dim(sizes, 0)));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Packs keys, each parcel as differences; ascending keys take one or two bytes each.

sizes: [ranks, tables], keys of each.
keys: [n], by rank, then by table.
packed: the bytes.
rank_bytes: [ranks], of them, those of each rank's keys.
)doc");

REGISTER_OP("SlipstreamUnpackKeys")
    .Input("sizes: int64")
    .Input("packed: uint8")
    .Output("keys: int64")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 2, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gives back the keys that SlipstreamPackKeys packed.

sizes: [ranks, tables], keys of each.
packed: bytes of all parcels, in that order.
keys: [n].
)doc");

REGISTER_OP("SlipstreamPackFloats")
    .Input("sizes: int64")
    .Input("values: T")
    .Attr("T: {float, uint16}")
    .Output("packed: uint8")
    .Output("part_bytes: int32")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle sizes, unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &sizes));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(1, sizes);
      return absl::OkStatus();
    })
    .Doc(R"doc(
Packs floats without loss; neighbours share the bits of their magnitude.

sizes: [parts], values of each.
values: [n], part by part; as uint16: the bits of bfloat16.
packed: the bytes.
part_bytes: [parts], of them, those of each part.
)doc");

REGISTER_OP("SlipstreamUnpackFloats")
    .Input("sizes: int64")
    .Input("packed: uint8")
    .Attr("T: {float, uint16}")
    .Output("values: T")
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle unused;
      TF_RETURN_IF_ERROR(c->WithRank(c->input(0), 1, &unused));
      TF_RETURN_IF_ERROR(c->WithRank(c->input(1), 1, &unused));
      c->set_output(0, c->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Gives back the floats that SlipstreamPackFloats packed.

sizes: [parts], values of each.
packed: bytes of all parts, in that order.
values: [n].
)doc");

}  // namespace slipstream
