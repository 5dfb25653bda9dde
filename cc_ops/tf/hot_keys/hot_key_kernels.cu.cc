// GPU kernels of the sketch of hot keys: launches on the op's own stream, no device code here.
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
    // Pageable memory: returns when it has been read. Once per sketch.
    return Checked(cudaMemcpyAsync(values->data(), on_host.data(), values->TotalBytes(),
                                   cudaMemcpyHostToDevice, StreamOf(context)),
                   "SlipstreamHotKeys could not fill its memory");
  }
  static absl::Status Copy(OpKernelContext* context, const Tensor& from, Tensor* to) {
    return Checked(cudaMemcpyAsync(to->data(), from.data(), to->TotalBytes(),
                                   cudaMemcpyDeviceToDevice, StreamOf(context)),
                   "SlipstreamHotKeyCandidates could not copy the keys");
  }
  static absl::Status Count(OpKernelContext* context, const HotKeySketch& hot, const int64_t* keys,
                            const bool* counts, int64_t n, int64_t unit) {
    return Checked(LaunchCountAccesses(StreamOf(context), hot, keys, counts, n, unit),
                   "SlipstreamCountAccesses could not be launched");
  }
  static absl::Status Decay(OpKernelContext* context, const AccessSketch& sketch, uint64_t factor) {
    return Checked(LaunchDecayAccesses(StreamOf(context), sketch, factor),
                   "SlipstreamDecayAccesses could not be launched");
  }
  static absl::Status Estimate(OpKernelContext* context, const AccessSketch& sketch,
                               const int64_t* keys, int64_t n, int64_t* estimates) {
    return Checked(LaunchEstimateAccesses(StreamOf(context), sketch, keys, n, estimates),
                   "SlipstreamEstimateAccesses could not be launched");
  }
};

#define REGISTER_GPU(name, Kernel)                                                        \
  REGISTER_KERNEL_BUILDER(Name(name).Device(tensorflow::DEVICE_GPU).HostMemory("handle"), \
                          MemoryChecked<Kernel>)
REGISTER_GPU("SlipstreamHotKeys", CreateHotKeysKernel<GpuDevice>);
REGISTER_GPU("SlipstreamCountAccesses", CountAccessesKernel<GpuDevice>);
REGISTER_GPU("SlipstreamHotKeyCandidates", HotKeyCandidatesKernel<GpuDevice>);
REGISTER_GPU("SlipstreamEstimateAccesses", EstimateAccessesKernel<GpuDevice>);
#undef REGISTER_GPU
REGISTER_KERNEL_BUILDER(Name("SlipstreamDecayAccesses")
                            .Device(tensorflow::DEVICE_GPU)
                            .HostMemory("handle")
                            .HostMemory("factor"),
                        MemoryChecked<DecayAccessesKernel<GpuDevice>>);

}  // namespace
}  // namespace slipstream
