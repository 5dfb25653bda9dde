// NVIDIA's HierarchicalKV as merlin-sok ships it: a table in GPU memory, as SOK's variables use it
// (int64 keys, float32 rows, the rows written longest ago are evicted first).
#ifndef SLIPSTREAM_BENCHMARKS_GPU_HIERARCHICAL_KV_H_
#define SLIPSTREAM_BENCHMARKS_GPU_HIERARCHICAL_KV_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

namespace slipstream {

// Its own errors are exceptions, all std::runtime_error. Arrays are in device memory.
class HierarchicalKv {
 public:
  // Room for `capacity` rows, a power of two, none of them in host memory.
  HierarchicalKv(int64_t capacity, int64_t dim);
  HierarchicalKv(const HierarchicalKv&) = delete;
  HierarchicalKv& operator=(const HierarchicalKv&) = delete;
  ~HierarchicalKv();

  // keys [n], rows [n, dim].
  void Insert(cudaStream_t stream, const int64_t* keys, const float* rows, int64_t n);

  // Rows in the table; waits for the stream.
  int64_t Size(cudaStream_t stream) const;

  // Copies the rows of keys [n] that are there to rows [n, dim]; found [n].
  void FindRows(cudaStream_t stream, const int64_t* keys, int64_t n, float* rows,
                bool* found) const;

  // The same, but for addresses [n] of rows.
  void FindAddresses(cudaStream_t stream, const int64_t* keys, int64_t n, float** addresses,
                     bool* found) const;

  // FindAddresses looks at the load of the table in every seventh call, waiting for the GPU, and
  // chooses its kernel by it. If the next call would, one for a single key is made instead.
  //   keys, addresses, found: [1].
  void ChooseKernel(cudaStream_t stream, const int64_t* keys, float** addresses, bool* found) const;

 private:
  class Table;

  std::unique_ptr<Table> table_;
};

// Copies the rows [dim] at addresses [n], of those found, to rows [n, dim].
cudaError_t LaunchGather(cudaStream_t stream, float* const* addresses, const bool* found, int64_t n,
                         int64_t dim, float* rows);

}  // namespace slipstream

#endif  // SLIPSTREAM_BENCHMARKS_GPU_HIERARCHICAL_KV_H_
