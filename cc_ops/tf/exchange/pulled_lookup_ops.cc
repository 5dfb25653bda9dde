// Registrations of the ops that look up rows from other ranks.
#include <utility>

#include "cc_ops/tf/base/shapes.h"
#include "cc_ops/tf/lookup/lookup_shape.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {

using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("SlipstreamRouteKeys")
    .Input("handles: num_tables * resource") SLIPSTREAM_FEATURE_INPUTS SLIPSTREAM_COMBINERS_ATTR
    .Attr("num_tables: int >= 1")
    .Attr("ranks: int >= 1")
    .Output("request_sizes: int64")
    .Output("requests: int64")
    .Output("plan: variant")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      int ranks = 0, num_tables = 0;
      TF_RETURN_IF_ERROR(c->GetAttr("ranks", &ranks));
      TF_RETURN_IF_ERROR(c->GetAttr("num_tables", &num_tables));
      c->set_output(0, c->Matrix(ranks, num_tables));
      c->set_output(1, c->Vector(InferenceContext::kUnknownDim));
      c->set_output(2, c->Scalar());
      return absl::OkStatus();
    })
    .Doc(
        "Plans the lookup of a batch, and returns the distinct keys to request from each "
        "rank.\n"
        "\n"
        "handles: Scalars. The tables of replicas of this rank, each once. A replica is the copy "
        "of a row that another rank owns.\n"
        "combiners: For each feature, as in SlipstreamLookUpPulled.\n"
        "ranks: Number of ranks that own keys. A hash of the key selects the rank.\n"
        "request_sizes: [ranks, tables]. Number of keys to request from each rank.\n"
        "requests: [n]. The keys, by rank, then by table.\n"
        "plan: Scalar. Input of SlipstreamLookUpPulled.\n" SLIPSTREAM_FEATURE_DOC);

REGISTER_OP("SlipstreamLookUpPulled")
    .Input("handles: num_tables * resource") SLIPSTREAM_FEATURE_INPUTS.Input("plan: variant")
    .Input("sizes: int64")
    .Input("requests: int64")
    .Input("messages: uint8") SLIPSTREAM_LOOKUP_ATTRS.Attr("training: bool")
    .Attr("joins_step: bool = false")
    .Output("pooled: num_outputs * float")
    .Output("looked_up: variant")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* c) -> absl::Status {
      ShapeHandle shape;
      const int plan = c->num_inputs() - 4;
      for (const auto& [input, rank] : {std::pair{0, 0}, {1, 2}, {2, 1}, {3, 1}}) {
        TF_RETURN_IF_ERROR(c->WithRank(c->input(plan + input), rank, &shape));
      }
      return LookupShape(c);
    })
    .Doc(
        "Looks up a batch in the rows that the ranks sent for it.\n"
        "\n"
        "plan: Scalar, from SlipstreamRouteKeys for the same features.\n"
        "sizes: [ranks, tables]. Number of rows from each rank: request_sizes of "
        "SlipstreamRouteKeys.\n"
        "requests: [n]. The keys of the rows, as returned by SlipstreamRouteKeys.\n"
        "messages: [bytes]. One message of SlipstreamPullRows from each rank, rank 0 first. If a "
        "message has no summary of the slots, the slots of its rows are 0, so that the movements"
        " of the rows are not underestimated.\n"
        "training: Whether accesses are counted and the rows are stored as replicas, so that an "
        "update may follow.\n"
        "joins_step: As in SlipstreamLookup.\n"
        "looked_up: Scalar. The plan for SlipstreamCollectGradients.\n" SLIPSTREAM_LOOKUP_DOC);

}  // namespace slipstream
