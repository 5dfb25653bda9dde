// Plants faults in kernels and in host code. Each must be detected in at most three runs with
// different orders of threads: by the emulation, by a wrong result or by a sanitizer. The same code
// without the fault must pass.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <numeric>
#include <ostream>
#include <string>
#include <vector>

#include "cc_ops/core/gpu/launch.cu.h"
#include "cc_ops/core/gpu/scan_and_sort.cu.h"
#include "cc_ops/core/testing/test_gpu.h"
#include "gtest/gtest.h"

namespace slipstream {
namespace {

#ifdef __SANITIZE_ADDRESS__
constexpr bool kHasAsan = true;
#else
constexpr bool kHasAsan = false;
#endif
#ifdef __SANITIZE_THREAD__
constexpr bool kHasTsan = true;
#else
constexpr bool kHasTsan = false;
#endif

constexpr unsigned kBlocks = 3;
constexpr int kThreads = kBlocks * kThreadsPerBlock;
constexpr int kNone = -1;

using Ints = std::vector<int>;

Ints Sequence(int count) {
  Ints values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

// Runs a kernel with the parameters (is_faulty, values) on `values`.
std::function<Ints(bool)> Kernel(void (*kernel)(bool, int*), unsigned blocks, Ints values) {
  return [=](bool is_faulty) {
    const TestStream stream;
    OnDevice<int> on_device(values);
    EXPECT_EQ(Launch(stream.get(), blocks, kernel, is_faulty, on_device.data()), cudaSuccess);
    stream.Wait();
    return on_device.ToHost();
  };
}

// Collectives.

__global__ void ReverseBlock(bool is_faulty, int* values) {
  __shared__ int shared[kThreadsPerBlock];
  int& value = values[ThreadOfGrid()];
  shared[threadIdx.x] = value;
  if (!is_faulty) __syncthreads();
  value = shared[kThreadsPerBlock - 1 - threadIdx.x];
}

__global__ void ReverseWarp(bool is_faulty, int* values) {
  __shared__ int shared[kThreadsPerBlock];
  shared[threadIdx.x] = values[threadIdx.x];
  if (!is_faulty) __syncwarp();
  values[threadIdx.x] = shared[threadIdx.x ^ (kWarpSize - 1)];
}

// A thread that leaves the first barrier late must not seem to be ordered by the last one.
__global__ void WriteBetweenBarriers(bool is_faulty, int* values) {
  __shared__ int shared;
  __syncthreads();
  if (threadIdx.x == 0) shared = 1;
  if (!is_faulty) __syncthreads();
  values[threadIdx.x] = shared;
  __syncthreads();
}

// A barrier of half a warp does not order the other half.
__global__ void ReverseHalves(bool is_faulty, int* values) {
  __shared__ int shared[kThreadsPerBlock];
  shared[threadIdx.x] = values[threadIdx.x];
  const unsigned half = threadIdx.x % kWarpSize < 16 ? 0xffffu : 0xffff0000u;
  __syncwarp(is_faulty ? half : kAllLanes);
  values[threadIdx.x] = shared[threadIdx.x ^ (kWarpSize - 1)];
}

// Threads of a block that count together need the same number of rounds.
__global__ void CountInRounds(bool is_faulty, int* count) {
  const int n = kThreadsPerBlock - 1;
  const int end = is_faulty ? n : kThreadsPerBlock;
  for (int i = static_cast<int>(threadIdx.x); i < end; i += kThreadsPerBlock) {
    const int found = __syncthreads_count(i < n);
    if (threadIdx.x == 0) *count += found;
  }
}

__global__ void TwoBarriers(bool is_faulty, int* values) {
  if (is_faulty && threadIdx.x % 2 == 0) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  values[threadIdx.x] = 1;
}

// Both barriers are on one line, because the emulation must compare more than the line.
__global__ void TwoKindsOfBarriers(bool is_faulty, int* values) {
  const bool counts = is_faulty && threadIdx.x % 2 == 0;
  values[threadIdx.x] = counts ? __syncthreads_count(true) : (__syncthreads(), 1);
}

__global__ void DivergentCollectives(bool is_faulty, int* values) {
  const bool is_first = threadIdx.x % kWarpSize < 16;
  int value = 1;
  if (!is_faulty || is_first) value = __shfl_xor_sync(kAllLanes, value, 1);
  if (!is_faulty || !is_first) value += __popc(__ballot_sync(kAllLanes, true));
  values[threadIdx.x] = value;
}

__global__ void SumOfWarp(bool is_faulty, int* values) {
  int sum = 1;
  if (is_faulty && threadIdx.x % kWarpSize >= 16) return;
  for (unsigned delta = 16; delta > 0; delta /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, delta);
  }
  if (threadIdx.x % kWarpSize == 0) values[threadIdx.x / kWarpSize] = sum;
}

__global__ void VoteOfHalfWarp(bool is_faulty, int* values) {
  if (threadIdx.x % kWarpSize >= 16) return;
  const unsigned votes = __ballot_sync(is_faulty ? 0xff00u : 0xffffu, 1);
  values[threadIdx.x] = __popc(votes);
}

__global__ void ReadOtherHalf(bool is_faulty, int* values) {
  const unsigned lane = threadIdx.x % kWarpSize;
  const unsigned half = lane < 16 ? 0xffffu : 0xffff0000u;
  values[threadIdx.x] =
      __shfl_xor_sync(is_faulty ? half : kAllLanes, static_cast<int>(threadIdx.x), 16);
}

// Half a warp waits for the whole warp, and everything else for the block.
__global__ void WaitInTwoOrders(bool is_faulty, int* values) {
  const bool waits_for_warp = is_faulty && threadIdx.x < kWarpSize / 2;
  if (waits_for_warp) __syncwarp();
  __syncthreads();
  if (!waits_for_warp) __syncwarp();
  values[threadIdx.x] = 1;
}

// Memory.

__global__ void Count(bool is_faulty, int* count) {
  if (is_faulty) {
    *count += 1;
  } else {
    atomicAdd(count, 1);
  }
}

// Threads of different blocks use the same counter. A barrier orders the threads of one block only.
__global__ void CountByThread(bool is_faulty, int* counts) {
  __syncthreads();
  Count(is_faulty, counts + threadIdx.x);
}

// Other threads may run at the atomic between the read and the write.
__global__ void CountInTwoSteps(bool is_faulty, int* counts) {
  if (is_faulty) {
    const int before = counts[0];
    atomicAdd(&counts[1], 1);
    counts[0] = before + 1;
  } else {
    atomicAdd(&counts[0], 1);
    atomicAdd(&counts[1], 1);
  }
}

// Each thread takes the next free bucket.
__global__ void TakeBuckets(bool is_faulty, int* buckets) {
  const int own = static_cast<int>(ThreadOfGrid());
  int i = own % 2;
  if (is_faulty) {
    while (buckets[i] != kNone) ++i;
    buckets[i] = 1;
  } else {
    while (atomicCAS(&buckets[i], kNone, 1) != kNone) ++i;
  }
}

__global__ void NegateTwoRounds(bool is_faulty, int* values) {
  const int64_t n = 2 * kThreads;
  for (int64_t i = ThreadOfGrid(); i < n; i += is_faulty ? n : ThreadsOfGrid()) {
    values[i] = -values[i];
  }
}

__global__ void NegateAll(bool is_faulty, int* values) {
  const int64_t n = kThreads - 1 + (is_faulty ? 1 : 0);
  for (int64_t i = ThreadOfGrid(); i < n; i += ThreadsOfGrid()) values[i] = -values[i];
}

__global__ void SumOfNeighbors(bool is_faulty, int* values) {
  __shared__ int sums[kThreadsPerBlock];
  const int i = static_cast<int>(threadIdx.x);
  const bool reads_next = is_faulty || i + 1 < kThreadsPerBlock;
  sums[i] = values[i] + (reads_next ? values[i + 1] : 0);
  __syncthreads();
  values[i] = i + 1 < kThreadsPerBlock ? sums[i] : 0;
}

__global__ void AddOne(bool, int* values) { values[ThreadOfGrid()] += 1; }

// Host code.

Ints AddToUnsetMemory(bool is_faulty) {
  const TestStream stream;
  OnDevice<int> values(kThreads);
  if (!is_faulty) {
    EXPECT_EQ(cudaMemsetAsync(values.data(), 0, kThreads * sizeof(int), stream.get()), cudaSuccess);
  }
  EXPECT_EQ(Launch(stream.get(), kBlocks, AddOne, false, values.data()), cudaSuccess);
  stream.Wait();
  return values.ToHost();
}

Ints CopyWithLength(bool is_faulty) {
  OnDevice<int> values(Sequence(3));
  Ints copied(4);
  EXPECT_EQ(cudaMemcpy(copied.data(), values.data(), sizeof(int) * (is_faulty ? 4 : 3),
                       cudaMemcpyDeviceToHost),
            cudaSuccess);
  copied.resize(3);
  return copied;
}

Ints SortWithScratch(bool is_faulty) {
  const int64_t n = kThreads;
  size_t scan_bytes = 0, sort_bytes = 0;
  EXPECT_EQ(ScanBytes(n, &scan_bytes), cudaSuccess);
  EXPECT_EQ(SortBytes<int32_t>(n, &sort_bytes), cudaSuccess);
  const TestStream stream;
  OnDevice<char> scratch(is_faulty ? scan_bytes : sort_bytes);
  Ints keys = Sequence(kThreads);
  std::reverse(keys.begin(), keys.end());
  OnDevice<int> from(keys), sorted_keys(keys), positions(Sequence(kThreads)), sorted(keys);
  EXPECT_EQ(LaunchSort(stream.get(), scratch.data(), sort_bytes, n, from.data(), positions.data(),
                       sorted_keys.data(), sorted.data()),
            cudaSuccess);
  stream.Wait();
  return sorted_keys.ToHost();
}

Ints ReadResult(bool is_faulty) {
  const TestStream stream;
  OnDevice<int> values(Sequence(kThreads));
  EXPECT_EQ(Launch(stream.get(), kBlocks, AddOne, false, values.data()), cudaSuccess);
  if (!is_faulty) stream.Wait();
  const Ints found(values.data(), values.data() + kThreads);
  stream.Wait();
  return found;
}

Ints CopyFromTemporary(bool is_faulty) {
  const TestStream stream;
  OnDevice<int> values(kThreads);
  Ints source = Sequence(kThreads);
  EXPECT_EQ(cudaMemcpyAsync(values.data(), source.data(), source.size() * sizeof(int),
                            cudaMemcpyHostToDevice, stream.get()),
            cudaSuccess);
  if (!is_faulty) stream.Wait();
  std::fill(source.begin(), source.end(), 0);
  source = {};
  stream.Wait();
  return values.ToHost();
}

Ints CopyFromStack(bool is_faulty) {
  const TestStream stream;
  OnDevice<int> values(3);
  const auto copy = [&] {
    volatile int source[3] = {0, 1, 2};
    EXPECT_EQ(cudaMemcpyAsync(values.data(), const_cast<int*>(source), sizeof(source),
                              cudaMemcpyHostToDevice, stream.get()),
              cudaSuccess);
    if (!is_faulty) stream.Wait();
    for (volatile int& value : source) value = 9;  // As the next function on the stack does.
  };
  copy();
  stream.Wait();
  return values.ToHost();
}

Ints UseTwoStreams(bool is_faulty) {
  const TestStream first, second;
  OnDevice<int> values(Sequence(kThreads)), results(kThreads);
  cudaEvent_t event = nullptr;
  EXPECT_EQ(cudaEventCreate(&event), cudaSuccess);
  EXPECT_EQ(Launch(first.get(), kBlocks, AddOne, false, values.data()), cudaSuccess);
  EXPECT_EQ(cudaEventRecord(event, first.get()), cudaSuccess);
  if (!is_faulty) {
    EXPECT_EQ(cudaEventSynchronize(event), cudaSuccess);
  }
  EXPECT_EQ(cudaMemcpyAsync(results.data(), values.data(), kThreads * sizeof(int),
                            cudaMemcpyDeviceToDevice, second.get()),
            cudaSuccess);
  second.Wait();
  first.Wait();
  EXPECT_EQ(cudaEventDestroy(event), cudaSuccess);
  return results.ToHost();
}

Ints LaunchWithGrid(bool is_faulty) {
  const TestStream stream;
  OnDevice<int> values(Ints(kThreads, 0));
  const cudaError_t error =
      Launch(stream.get(), is_faulty ? 0 : kBlocks, AddOne, false, values.data());
  EXPECT_EQ(cudaGetLastError(), error);
  if (error != cudaSuccess) return {kNone};
  stream.Wait();
  return values.ToHost();
}

struct Fault {
  const char* name;
  std::function<Ints(bool is_faulty)> run;
  Ints expected;
  // Message without sanitizers, with AddressSanitizer and with ThreadSanitizer; null if the fault
  // is not detected there.
  const char* plain;
  const char* asan;
  const char* tsan;
};
void PrintTo(const Fault& fault, std::ostream* out) { *out << fault.name; }

constexpr char kWrong[] = "wrong result";
constexpr char kOutside[] = "heap-buffer-overflow";

std::vector<Fault> Faults() {
  const int block = kThreadsPerBlock;
  Ints reversed, by_warp, halves, negated = Sequence(2 * kThreads), one_less, next_sums;
  for (int i = 0; i < kThreads; ++i) reversed.push_back(i / block * block + block - 1 - i % block);
  for (int i = 0; i < block; ++i) {
    by_warp.push_back(i ^ 31);
    halves.push_back(i ^ 16);
    next_sums.push_back(i + 1 < block ? 2 * i + 1 : 0);
  }
  for (int& value : negated) value = -value;
  for (int i = 0; i < kThreads - 1; ++i) one_less.push_back(-i);
  Ints votes(block, 0);
  for (int i = 0; i < block; ++i) votes[static_cast<size_t>(i)] = i % kWarpSize < 16 ? 16 : 0;
  Ints plus_one = Sequence(kThreads);
  for (int& value : plus_one) ++value;

  // Faults with the same message everywhere.
  const auto message = [](const char* name, std::function<Ints(bool)> run, Ints expected,
                          const char* text) {
    return Fault{name, std::move(run), std::move(expected), text, text, text};
  };
  // Data races between threads of a kernel.
  const auto race = [](const char* name, std::function<Ints(bool)> run, Ints expected,
                       const char* text) {
    return Fault{name, std::move(run), std::move(expected), text, text, "data race"};
  };
  return {
      race("BarrierIsMissing", Kernel(ReverseBlock, kBlocks, Sequence(kThreads)), reversed, kWrong),
      race("WarpBarrierIsMissing", Kernel(ReverseWarp, 1, Sequence(block)), by_warp, kWrong),
      race("BarrierIsMissingBetweenOthers", Kernel(WriteBetweenBarriers, 1, Ints(block, 0)),
           Ints(block, 1), kWrong),
      race("BarrierOfHalfWarp", Kernel(ReverseHalves, 1, Sequence(block)), by_warp, kWrong),
      message("BarrierInDivergentLoop", Kernel(CountInRounds, 1, {0}), {block - 1},
              "waits for a thread that exits|has exited before this barrier"),
      message("DifferentBarriers", Kernel(TwoBarriers, 1, Ints(block, 0)), Ints(block, 1),
              "wait in different collectives"),
      message("BarrierAndCount", Kernel(TwoKindsOfBarriers, 1, Ints(block, 0)), Ints(block, 1),
              "wait in different collectives"),
      message("DivergentCollectives", Kernel(DivergentCollectives, 1, Ints(block, 0)),
              Ints(block, kWarpSize + 1), "wait in different collectives"),
      message("LaneOfCollectiveHasExited", Kernel(SumOfWarp, 1, Ints(block / kWarpSize, 0)),
              Ints(block / kWarpSize, kWarpSize), "waits for a thread that exits|has exited"),
      message("LaneIsNotInItsMask", Kernel(VoteOfHalfWarp, 1, Ints(block, 0)), votes,
              "a lane is not in the mask of its collective"),
      message("ReadLaneIsNotInMask", Kernel(ReadOtherHalf, 1, Ints(block, 0)), halves,
              "is read, but is not in the mask"),
      message("ThreadsWaitForEachOther", Kernel(WaitInTwoOrders, 1, Ints(block, 0)), Ints(block, 1),
              "threads wait for each other in block 0"),
      race("CounterWithoutAtomics", Kernel(Count, kBlocks, {0}), {kThreads}, nullptr),
      race("BlocksShareCountersWithoutAtomics", Kernel(CountByThread, kBlocks, Ints(block, 0)),
           Ints(block, kBlocks), nullptr),
      race("UpdateInTwoSteps", Kernel(CountInTwoSteps, kBlocks, {0, 0}), {kThreads, kThreads},
           kWrong),
      race("BucketsWithoutAtomics", Kernel(TakeBuckets, 1, Ints(block, kNone)), Ints(block, 1),
           nullptr),
      message("SecondRoundIsMissing", Kernel(NegateTwoRounds, 100, Sequence(2 * kThreads)), negated,
              kWrong),
      Fault{"WriteAfterAllocation", Kernel(NegateAll, kBlocks, Sequence(kThreads - 1)), one_less,
            "device memory after an allocation of 3068 bytes was written", kOutside,
            "device memory after an allocation of 3068 bytes was written"},
      Fault{"ReadAfterAllocation", Kernel(SumOfNeighbors, 1, Sequence(block)), next_sums, nullptr,
            kOutside, nullptr},
      message("MemoryIsNotSet", AddToUnsetMemory, Ints(kThreads, 1), kWrong),
      message("CopyIsTooLarge", CopyWithLength, Sequence(3),
              "16 bytes from byte 0 of an allocation of 12 bytes are used"),
      message("ScratchIsTooSmall", SortWithScratch, Sequence(kThreads),
              "of an allocation of 257 bytes are used"),
      message("HostReadsTooEarly", ReadResult, plus_one, kWrong),
      message("SourceOfCopyIsFreed", CopyFromTemporary, Sequence(kThreads),
              "wrong result|heap-use-after-free"),
      message("SourceOfCopyOnStackIsOverwritten", CopyFromStack, {0, 1, 2},
              "wrong result|stack-use-after-scope"),
      message("StreamsWithoutEvent", UseTwoStreams, plus_one, kWrong),
      message("GridIsEmpty", LaunchWithGrid, Ints(kThreads, 1), kWrong),
  };
}

class CudaEmulationTest : public testing::TestWithParam<Fault> {
 protected:
  static constexpr int kRuns = 3;  // Each has other orders of threads.
};

TEST_P(CudaEmulationTest, PassesCorrectCode) {
  for (int i = 0; i < kRuns; ++i) EXPECT_EQ(GetParam().run(false), GetParam().expected);
}

TEST_P(CudaEmulationTest, DetectsFault) {
  const Fault& fault = GetParam();
  const char* const message = kHasAsan ? fault.asan : kHasTsan ? fault.tsan : fault.plain;
  if (message == nullptr) GTEST_SKIP() << "only with a sanitizer (make sanitize)";
  testing::GTEST_FLAG(death_test_style) = "threadsafe";
  const auto run = [&] {
    for (int i = 0; i < kRuns; ++i) {
      if (fault.run(true) == fault.expected) continue;
      std::fputs(kWrong, stderr);
      std::abort();
    }
  };
  EXPECT_DEATH(run(), message);
}

__global__ void RecordOrder(bool, int* order) {
  order[1 + atomicAdd(&order[0], 1)] = static_cast<int>(ThreadOfGrid());
}

TEST(CudaEmulationOrderTest, EachLaunchHasOtherOrders) {
  const auto run = Kernel(RecordOrder, kBlocks, Ints(kThreads + 1, 0));
  const Ints first = run(false);
  EXPECT_NE(run(false), first);
}

INSTANTIATE_TEST_SUITE_P(Faults, CudaEmulationTest, testing::ValuesIn(Faults()),
                         [](const auto& fault) { return std::string(fault.param.name); });

}  // namespace
}  // namespace slipstream
