// Kernels that limit how far datasets prepare batches in advance.
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/saturation/look_ahead_resource.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

using tensorflow::CancellationManager;
using tensorflow::CancellationToken;
using tensorflow::OpKernelContext;

absl::Status ReadCount(OpKernelContext* context, int input, const char* name, int64_t* count) {
  TF_RETURN_IF_ERROR(ReadScalar(context, input, name, count));
  if (*count >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is ", *count, "; expected at least 0"));
}

absl::Status BeginWindow(OpKernelContext* context, LookAheadResource* resource) {
  int64_t batches = 0, pulled = 0;
  TF_RETURN_IF_ERROR(ReadCount(context, 1, "batches", &batches));
  TF_RETURN_IF_ERROR(ReadCount(context, 2, "pulled", &pulled));
  resource->ahead.BeginWindow(batches, pulled);
  return absl::OkStatus();
}

absl::Status WaitUntilIdle(OpKernelContext* context, LookAheadResource* resource) {
  LookAhead& ahead = resource->ahead;
  LookAhead::Wait wait;
  CancellationManager* const step = context->cancellation_manager();
  const bool can_be_cancelled = step != nullptr;
  const CancellationToken token = can_be_cancelled ? step->get_cancellation_token() : 0;
  if (can_be_cancelled && !step->RegisterCallback(token, [&] { ahead.Cancel(&wait); })) {
    ahead.Cancel(&wait);
  }
  const bool is_done = ahead.WaitUntilIdle(&wait);
  // Returns after the callback, if it runs, has ended.
  if (can_be_cancelled) step->DeregisterCallback(token);
  if (is_done) return absl::OkStatus();
  return absl::CancelledError(
      "the step was cancelled while it waited for the input pipeline to finish a batch");
}

SLIPSTREAM_CPU_KERNEL("SlipstreamLookAhead", FunctionKernel<CreateResource<LookAheadResource>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamLookAheadBeginWindow", ResourceKernel<BeginWindow>);
SLIPSTREAM_CPU_KERNEL("SlipstreamLookAheadWaitUntilIdle", ResourceKernel<WaitUntilIdle>);

}  // namespace
}  // namespace slipstream
