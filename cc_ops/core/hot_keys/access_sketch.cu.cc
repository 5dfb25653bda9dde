#include "cc_ops/core/hot_keys/access_sketch.cu.h"

#include <cuda_runtime.h>

#include "cc_ops/core/gpu/launch.cu.h"

namespace slipstream {
namespace {

__global__ void DecayKernel(AccessSketch sketch, uint64_t factor) {
  for (int64_t c = ThreadOfGrid(); c < sketch.NumCounters(); c += ThreadsOfGrid()) {
    sketch.counters[c] = Decayed(sketch.counters[c], factor);
  }
}

__global__ void EstimateKernel(AccessSketch sketch, const int64_t* __restrict__ keys, int64_t n,
                               int64_t* __restrict__ estimates) {
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) {
    estimates[i] = sketch.Estimate(keys[i]);
  }
}

}  // namespace

cudaError_t LaunchDecayAccesses(cudaStream_t stream, const AccessSketch& sketch, uint64_t factor) {
  return Launch(stream, BlocksFor(sketch.NumCounters()), DecayKernel, sketch, factor);
}

cudaError_t LaunchEstimateAccesses(cudaStream_t stream, const AccessSketch& sketch,
                                   const int64_t* keys, int64_t n, int64_t* estimates) {
  return Launch(stream, BlocksFor(n), EstimateKernel, sketch, keys, n, estimates);
}

}  // namespace slipstream
