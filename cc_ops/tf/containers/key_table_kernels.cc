// CPU kernels of key maps and key sets: checks of shapes, then calls into cc_ops/core.
#include "cc_ops/tf/containers/key_table_kernels.h"

#include "cc_ops/core/containers/key_probe.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::TensorShape;

absl::Status ProbeOnCpu(OpKernelContext* context, KeyMapResource* resource) {
  TF_RETURN_IF_ERROR(CheckInputs(context, 1, "keys: [n]"));
  const int64_t n = context->input(1).NumElements();
  int64_t *indices = nullptr, *hits = nullptr, *misses = nullptr;
  TF_RETURN_IF_ERROR(Allocate(context, 0, TensorShape({n}), &indices));
  const std::shared_ptr<const KeyMapContent> content = resource->content();
  const int64_t num_hits =
      ProbeKeys(Data<int64_t>(context, 1), n, content->table.view(), ParallelOf(context), indices);
  TF_RETURN_IF_ERROR(Allocate(context, 1, TensorShape({num_hits}), &hits));
  TF_RETURN_IF_ERROR(Allocate(context, 2, TensorShape({n - num_hits}), &misses));
  SplitProbed(indices, n, hits, misses);
  return absl::OkStatus();
}

absl::Status LookUpStatesOnCpu(OpKernelContext* context, KeyMapResource* resource) {
  TF_RETURN_IF_ERROR(CheckInputs(context, 1, "keys: [n]"));
  uint8_t* states = nullptr;
  TF_RETURN_IF_ERROR(Allocate(context, 0, context->input(1).shape(), &states));
  const std::shared_ptr<const KeyMapContent> content = resource->content();
  LookUpStates(Data<int64_t>(context, 1), context->input(1).NumElements(), content->table.view(),
               ParallelOf(context), states);
  return absl::OkStatus();
}

SLIPSTREAM_CPU_KERNEL("SlipstreamKeySet", FunctionKernel<CreateResource<KeySetResource>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamKeySetAssign", ResourceKernel<AssignKeySet<OnCpu>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamKeyMap", FunctionKernel<CreateResource<KeyMapResource>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamKeyMapAssign", ResourceKernel<AssignKeyMap<OnCpu>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamProbeKeys", ResourceKernel<ProbeOnCpu>);
SLIPSTREAM_CPU_KERNEL("SlipstreamLookUpStates", ResourceKernel<LookUpStatesOnCpu>);

}  // namespace
}  // namespace slipstream
