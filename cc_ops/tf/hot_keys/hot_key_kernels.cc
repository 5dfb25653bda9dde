// CPU kernels of the sketch of hot keys: checks of shapes, then calls into cc_ops/core.
#include "cc_ops/tf/hot_keys/hot_key_kernels.h"

#include <algorithm>

#include "cc_ops/tf/base/memory_checked.h"

namespace slipstream {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

struct CpuDevice {
  static absl::Status Fill(OpKernelContext*, int64_t value, Tensor* values) {
    std::fill_n(values->flat<int64_t>().data(), values->NumElements(), value);
    return absl::OkStatus();
  }
  static absl::Status Copy(OpKernelContext*, const Tensor& from, Tensor* to) {
    std::copy_n(from.flat<int64_t>().data(), from.NumElements(), to->flat<int64_t>().data());
    return absl::OkStatus();
  }
  static absl::Status Count(OpKernelContext*, const HotKeySketch& hot, const int64_t* keys,
                            const bool* counts, int64_t n, int64_t unit) {
    CountAccesses(hot, keys, counts, n, unit);
    return absl::OkStatus();
  }
  static absl::Status Decay(OpKernelContext*, const AccessSketch& sketch, uint64_t factor) {
    DecayAccesses(sketch, factor);
    return absl::OkStatus();
  }
  static absl::Status Estimate(OpKernelContext*, const AccessSketch& sketch, const int64_t* keys,
                               int64_t n, int64_t* estimates) {
    EstimateAccesses(sketch, keys, n, estimates);
    return absl::OkStatus();
  }
};

SLIPSTREAM_CPU_KERNEL("SlipstreamHotKeys", CreateHotKeysKernel<CpuDevice>);
SLIPSTREAM_CPU_KERNEL("SlipstreamCountAccesses", ResourceKernel<CountBatch<CpuDevice>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamDecayAccesses", ResourceKernel<DecayCounts<CpuDevice>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamHotKeyCandidates", ResourceKernel<OutputCandidates<CpuDevice>>);
SLIPSTREAM_CPU_KERNEL("SlipstreamEstimateAccesses", ResourceKernel<EstimateKeys<CpuDevice>>);

}  // namespace
}  // namespace slipstream
