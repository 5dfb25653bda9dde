#include "benchmarks/gpu/hierarchical_kv.h"

#include <cuda_runtime.h>

#include <exception>

#include "cc_ops/core/gpu/launch.cu.h"
#include "merlin_hashtable.cuh"

namespace slipstream {
namespace {

constexpr int kCallsPerChoice = 7;  // HashTable::kernel_select_interval_

// HierarchicalKV counts in a variable of the thread, for all tables.
int calls_of_find_addresses = 0;

__global__ void GatherKernel(float* const* __restrict__ addresses, const bool* __restrict__ found,
                             int64_t n, int64_t dim, float* __restrict__ rows) {
  for (int64_t i = ThreadOfGrid(); i < n * dim; i += ThreadsOfGrid()) {
    if (found[i / dim]) rows[i] = addresses[i / dim][i % dim];
  }
}

}  // namespace

class HierarchicalKv::Table : public nv::merlin::HashTable<int64_t, float, uint64_t> {};

HierarchicalKv::HierarchicalKv(int64_t capacity, int64_t dim) : table_(std::make_unique<Table>()) {
  nv::merlin::HashTableOptions options;
  // The same twice: the table is never rehashed.
  options.init_capacity = options.max_capacity = static_cast<size_t>(capacity);
  options.dim = static_cast<size_t>(dim);
  // Twice what it needs, so that nothing goes to host memory for a rounded size.
  options.max_hbm_for_vectors = 2 * sizeof(float) * options.dim * options.max_capacity;
  table_->init(options);
}

HierarchicalKv::~HierarchicalKv() {
  // After an error the table's own destructor would throw another one, and end the program before
  // anybody has told of the first.
  if (std::uncaught_exceptions() > 0) table_.release();
}

void HierarchicalKv::Insert(cudaStream_t stream, const int64_t* keys, const float* rows,
                            int64_t n) {
  table_->insert_or_assign(static_cast<size_t>(n), keys, rows, nullptr, stream);
}

int64_t HierarchicalKv::Size(cudaStream_t stream) const {
  return static_cast<int64_t>(table_->size(stream));
}

void HierarchicalKv::FindRows(cudaStream_t stream, const int64_t* keys, int64_t n, float* rows,
                              bool* found) const {
  table_->find(static_cast<size_t>(n), keys, rows, found, nullptr, stream);
}

void HierarchicalKv::FindAddresses(cudaStream_t stream, const int64_t* keys, int64_t n,
                                   float** addresses, bool* found) const {
  ++calls_of_find_addresses;
  table_->find(static_cast<size_t>(n), keys, addresses, found, nullptr, stream);
}

void HierarchicalKv::ChooseKernel(cudaStream_t stream, const int64_t* keys, float** addresses,
                                  bool* found) const {
  if (calls_of_find_addresses % kCallsPerChoice == 0) {
    FindAddresses(stream, keys, 1, addresses, found);
  }
}

// clang-format off
cudaError_t LaunchGather(cudaStream_t stream, float* const* addresses, const bool* found, int64_t n,
                         int64_t dim, float* rows) {
  GatherKernel<<<BlocksFor(n * dim), kThreadsPerBlock, 0, stream>>>(
      addresses, found, n, dim, rows);
  return cudaGetLastError();
}
// clang-format on

}  // namespace slipstream
