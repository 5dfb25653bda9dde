// GPU kernels of the sketch of hot keys: they launch functions of cc_ops/core
// on the stream of the op.
#define EIGEN_USE_GPU
#include "cc_ops/tf/hot_keys/hot_key_kernels.h"

#include <vector>

#include "cc_ops/core/hot_keys/access_sketch.cu.h"
#include "cc_ops/core/hot_keys/hot_key_sketch.cu.h"
#include "cc_ops/tf/base/gpu_step.h"
#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

struct GpuDevice {
  static absl::Status Fill(OpKernelContext* context, int64_t value, Tensor* values) {
    const std::vector<int64_t> on_host(static_cast<size_t>(values->NumElements()), value);
    return CopyAndWait(context, values->data(), on_host.data(), values->TotalBytes(),
                       cudaMemcpyHostToDevice, "could not fill its memory");
  }
  static absl::Status Copy(OpKernelContext* context, const Tensor& from, Tensor* to) {
    return Checked(context,
                   cudaMemcpyAsync(to->data(), from.data(), to->TotalBytes(),
                                   cudaMemcpyDeviceToDevice, StreamOf(context)),
                   "could not copy the keys");
  }
  static absl::Status Count(OpKernelContext* context, const HotKeySketch& hot, const int64_t* keys,
                            const bool* counts, int64_t n, int64_t unit) {
    return Checked(context, LaunchCountAccesses(StreamOf(context), hot, keys, counts, n, unit),
                   "could not be launched");
  }
  static absl::Status Decay(OpKernelContext* context, const AccessSketch& sketch, uint64_t factor) {
    return Checked(context, LaunchDecayAccesses(StreamOf(context), sketch, factor),
                   "could not be launched");
  }
  static absl::Status Estimate(OpKernelContext* context, const AccessSketch& sketch,
                               const int64_t* keys, int64_t n, int64_t* estimates) {
    return Checked(context, LaunchEstimateAccesses(StreamOf(context), sketch, keys, n, estimates),
                   "could not be launched");
  }
};

SLIPSTREAM_GPU_KERNEL("SlipstreamHotKeys", , CreateHotKeysKernel<GpuDevice>);
SLIPSTREAM_GPU_KERNEL("SlipstreamCountAccesses", , ResourceKernel<CountBatch<GpuDevice>>);
SLIPSTREAM_GPU_KERNEL("SlipstreamDecayAccesses", .HostMemory("factor"),
                      ResourceKernel<DecayCounts<GpuDevice>>);
SLIPSTREAM_GPU_KERNEL("SlipstreamHotKeyCandidates", , ResourceKernel<OutputCandidates<GpuDevice>>);
SLIPSTREAM_GPU_KERNEL("SlipstreamEstimateAccesses", , ResourceKernel<EstimateKeys<GpuDevice>>);

}  // namespace
}  // namespace slipstream
