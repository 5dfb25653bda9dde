// Runs CUDA kernels on the CPU, for tests on machines without a GPU.
//
// The threads of a block are fibers on one host thread. A fiber runs until it waits in a collective
// of its warp or block, or until an atomic lets others run; then any ready thread continues. Blocks
// run one after the other. The orders of blocks and threads are random. Each stream has a host
// thread, which begins late. Therefore results are not there before the host waits for them, and
// copies read their source late, as from pinned memory.
//
// Environment variables:
//   SLIPSTREAM_EMULATION_SEED        Seed of all orders. Default 1. Each launch of a process has
//                                    other orders, therefore each repetition of a test does, too.
//   SLIPSTREAM_EMULATION_MAX_BLOCKS  Larger grids get this number of blocks, so that their threads
//                                    make several rounds (grid-stride loops). Default 3.
//
// The program ends with a message and abort() if threads of a kernel wait for each other or for a
// thread that has exited, if they wait in different collectives, if a lane is not in its mask, if
// device memory next to an allocation was written, or if a copy or CUB's scratch memory is
// larger than its allocation. AddressSanitizer finds all accesses outside of allocations, and
// ThreadSanitizer finds races between threads of a kernel; barriers order memory for it exactly as
// far as CUDA guarantees it. Compile this file without -fsanitize=thread, because its own state
// belongs to no thread of the kernel.
//
// Not emulated: the memory model of GPUs, lanes in lockstep, blocks at the same time, and speed.
#undef _FORTIFY_SOURCE  // Its longjmp() rejects jumps to other stacks.
#include <setjmp.h>
#include <ucontext.h>

#include <array>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/testing/cuda_emulation/cuda_runtime.h"

// Functions of the sanitizers; null in programs without them.
extern "C" {
[[gnu::weak]] void __sanitizer_start_switch_fiber(void** fake_stack, const void* stack,
                                                  size_t bytes);
[[gnu::weak]] void __sanitizer_finish_switch_fiber(void* fake_stack, const void** stack,
                                                   size_t* bytes);
[[gnu::weak]] void* __tsan_get_current_fiber();
[[gnu::weak]] void* __tsan_create_fiber(unsigned flags);
[[gnu::weak]] void __tsan_switch_to_fiber(void* fiber, unsigned flags);
[[gnu::weak]] void __tsan_acquire(void* tag);
[[gnu::weak]] void __tsan_release(void* tag);
}

__thread uint3 threadIdx, blockIdx, blockDim, gridDim;

namespace slipstream::emulation {
namespace {

uint64_t Setting(const char* name, uint64_t otherwise) {
  const char* const text = std::getenv(name);
  return text == nullptr ? otherwise : std::strtoull(text, nullptr, 10);
}
const uint64_t seed = Setting("SLIPSTREAM_EMULATION_SEED", 1);
const uint64_t max_blocks = std::max<uint64_t>(1, Setting("SLIPSTREAM_EMULATION_MAX_BLOCKS", 3));

[[noreturn]] void Fail(const std::string& message) {
  std::fprintf(stderr, "CUDA emulation: %s (seed %llu, at most %llu blocks)\n", message.c_str(),
               static_cast<unsigned long long>(seed), static_cast<unsigned long long>(max_blocks));
  std::abort();
}

std::string Text(const Call& call) {
  return std::string(call.function) + " at " + call.line.file + ":" +
         std::to_string(call.line.number);
}

// The compiler may store equal names twice.
bool operator==(const Call& a, const Call& b) {
  return a.line.number == b.line.number && std::strcmp(a.function, b.function) == 0 &&
         std::strcmp(a.line.file, b.line.file) == 0;
}

void Acquire(void* tag) {
  if (__tsan_acquire != nullptr) __tsan_acquire(tag);
}
void Release(void* tag) {
  if (__tsan_release != nullptr) __tsan_release(tag);
}

constexpr size_t kStackBytes = size_t{128} << 10;
constexpr unsigned kLanes = 32;
constexpr unsigned kMaxThreads = 1024;

// A stream begins so much later than its work is enqueued, unless the host waits for it.
constexpr std::chrono::milliseconds kDelay{5};

// A stack that runs the threads of blocks, or the stack of the host thread.
struct Fiber {
  ucontext_t start = {};
  bool is_new = false;
  jmp_buf position;  // If it is not new. swapcontext() makes system calls.
  std::unique_ptr<char[]> memory;
  const void* stack = nullptr;
  size_t bytes = 0;
  void* fake_stack = nullptr;  // For AddressSanitizer.
  void* tsan = nullptr;
};

enum class State { kReady, kInWarp, kInBlock, kExited };

struct Thread {
  State state = State::kReady;
  Fiber* fiber = nullptr;  // Null before the thread starts.
  unsigned mask = 0;       // Lanes of the collective in which the thread waits.
  Call call;
  uint64_t value = 0;
  uint64_t values[kLanes];  // Values of the lanes in the last collective.
};

// Tags of a barrier for ThreadSanitizer. Threads that arrive release the current tag, and acquire
// it when they leave. Two barriers in succession need different tags: otherwise a thread that
// leaves the first one late would acquire what a faster thread released at the second one, and
// races in between would not be found. A thread cannot be late by two barriers.
struct BarrierTags {
  char tags[2] = {};
  unsigned current = 0;
};

// Runs one kernel at a time.
class Device {
 public:
  void Run(const cudaLaunchConfig_t& config, const std::function<void()>& kernel, uint64_t launch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    kernel_ = &kernel;
    random_ = Mix64(seed + Mix64(launch));
    std::vector<unsigned> blocks(std::min<uint64_t>(config.gridDim.x, max_blocks));
    std::iota(blocks.begin(), blocks.end(), 0u);
    const auto num_blocks = static_cast<unsigned>(blocks.size());
    const auto run_block = [&] {
      gridDim = {num_blocks, 1, 1};
      blockDim = {config.blockDim.x, 1, 1};
      blockIdx = {blocks.back(), 0, 0};
      if (HasTsan()) host_.tsan = __tsan_get_current_fiber();
      // All threads of the kernel run after the work before it, in any order among themselves.
      Release(&begin_);
      RunBlock(config.blockDim.x);
    };
    while (!blocks.empty()) {
      std::swap(blocks[Random(blocks.size())], blocks.back());
      // For the shared memory of the block; see __shared__.
      if (HasTsan()) {
        std::thread(run_block).join();
      } else {
        run_block();
      }
      blocks.pop_back();
    }
    Acquire(&end_);
  }

  const uint64_t* MeetWarp(const Call& call, unsigned mask, uint64_t value, bool orders_memory) {
    Thread& own = Current();
    Thread* const warp = &threads_[current_ / kLanes * kLanes];
    const unsigned lane = current_ % kLanes;
    if ((mask >> lane & 1) == 0) FailAt("a lane is not in the mask of its collective", call);
    own.mask = mask;
    own.value = value;
    bool is_last = true;
    for (unsigned other = 0; other < kLanes; ++other) {
      if ((mask >> other & 1) == 0 || other == lane) continue;
      if (current_ - lane + other >= threads_.size() || warp[other].state == State::kExited) {
        FailAt("lane " + std::to_string(other) + " of the mask has exited", call);
      }
      const bool waits = warp[other].state == State::kInWarp && warp[other].mask == mask;
      if (waits && !(warp[other].call == call)) FailWithDifferentCalls(warp[other].call, call);
      is_last &= waits;
    }
    BarrierTags* const tags = orders_memory ? TagsOf(current_ / kLanes, mask) : nullptr;
    char* const tag = tags == nullptr ? nullptr : &tags->tags[tags->current];
    if (tag != nullptr) Release(tag);
    if (is_last) {
      for (unsigned to = 0; to < kLanes; ++to) {
        if ((mask >> to & 1) == 0) continue;
        for (unsigned from = 0; from < kLanes; ++from) {
          warp[to].values[from] = (mask >> from & 1) == 0 ? 0 : warp[from].value;
        }
        if (to != lane) MakeReady(current_ - lane + to);
      }
      if (tags != nullptr) tags->current ^= 1;
    } else {
      Wait(State::kInWarp, call);
    }
    if (tag != nullptr) Acquire(tag);
    return own.values;
  }

  int MeetBlock(const Call& call, int value) {
    Thread& own = Current();
    if (num_exited_ > 0) FailAt("a thread of the block has exited before this barrier", call);
    if (num_arrived_ == 0) barrier_ = call;
    if (!(call == barrier_)) FailWithDifferentCalls(barrier_, call);
    own.value = static_cast<uint64_t>(value);
    BarrierTags* const tags = TagsOf(0, kBlock);
    char* const tag = &tags->tags[tags->current];
    Release(tag);
    if (++num_arrived_ == threads_.size()) {
      uint64_t sum = 0;
      for (const Thread& thread : threads_) sum += thread.value;
      for (unsigned i = 0; i < threads_.size(); ++i) {
        threads_[i].value = sum;
        if (i != current_) MakeReady(i);
      }
      num_arrived_ = 0;
      tags->current ^= 1;
    } else {
      Wait(State::kInBlock, call);
    }
    Acquire(tag);
    return static_cast<int>(own.value);
  }

  void Interleave() {
    if (Random(8) != 0 || ready_.empty()) return;
    ready_.push_back(current_);
    Wait(State::kReady, {});
  }

  [[noreturn]] void FailAt(const std::string& message, const Call& call) const {
    Fail(message + "; " + Text(call) + ", block " + std::to_string(blockIdx.x) + ", thread " +
         std::to_string(current_));
  }

 private:
  static bool HasTsan() { return __tsan_create_fiber != nullptr; }

  // ThreadSanitizer finds no race between accesses of one fiber, or between accesses that a tag
  // orders. Therefore this number of blocks have separate fibers and tags.
  static constexpr unsigned kSeparateBlocks = 3;
  static unsigned BlockSlot() { return blockIdx.x % kSeparateBlocks; }

  [[noreturn]] void FailWithDifferentCalls(const Call& other, const Call& call) const {
    FailAt("threads wait in different collectives; the other is " + Text(other), call);
  }

  // Returns the tags of the barriers of some lanes of a warp, or of the block (kBlock).
  static constexpr unsigned kBlock = 0;  // No mask of lanes.
  BarrierTags* TagsOf(unsigned warp, unsigned mask) { return &tags_[{BlockSlot(), warp, mask}]; }

  uint64_t Random(uint64_t end) { return Mix64(random_++) % end; }
  Thread& Current() { return threads_[current_]; }

  void RunBlock(unsigned threads) {
    ready_.reserve(kMaxThreads);
    idle_.reserve(kMaxThreads);
    threads_.assign(threads, Thread());
    // ThreadSanitizer must not see memory of the emulation that a thread of the kernel allocates.
    while (HasTsan() && fibers_.size() < threads * kSeparateBlocks) AddFiber();
    ready_.resize(threads);
    std::iota(ready_.begin(), ready_.end(), 0u);
    num_exited_ = num_arrived_ = 0;
    Choose();
    comes_from_host_ = true;
    Switch(&host_, FiberOf(current_));
  }

  void MakeReady(unsigned thread) {
    threads_[thread].state = State::kReady;
    ready_.push_back(thread);
  }

  // Makes a random ready thread the current one. Not inlined, because compilers keep the addresses
  // of thread-local variables, and a fiber may continue on another host thread.
  [[gnu::noinline]] void Choose() {
    if (ready_.empty()) FailWithDeadlock();
    std::swap(ready_[Random(ready_.size())], ready_.back());
    current_ = ready_.back();
    threadIdx = {current_, 0, 0};
    ready_.pop_back();
  }

  // Returns the fiber of a thread. With ThreadSanitizer, which sees fibers instead of threads, each
  // thread has its own fiber. Otherwise one fiber runs threads until one of them waits.
  Fiber* FiberOf(unsigned thread) {
    Fiber*& fiber = threads_[thread].fiber;
    if (fiber != nullptr) return fiber;
    if (HasTsan()) {
      fiber = fibers_[thread * kSeparateBlocks + BlockSlot()].get();
    } else {
      if (idle_.empty()) idle_.push_back(AddFiber());
      fiber = idle_.back();
      idle_.pop_back();
    }
    return fiber;
  }

  Fiber* AddFiber() {
    fibers_.push_back(std::make_unique<Fiber>());
    Fiber* const fiber = fibers_.back().get();
    fiber->memory.reset(new char[kStackBytes]);
    fiber->stack = fiber->memory.get();
    fiber->bytes = kStackBytes;
    if (HasTsan()) fiber->tsan = __tsan_create_fiber(0);
    getcontext(&fiber->start);
    fiber->start.uc_stack.ss_sp = fiber->memory.get();
    fiber->start.uc_stack.ss_size = kStackBytes;
    makecontext(&fiber->start, Main, 0);
    fiber->is_new = true;
    return fiber;
  }

  void Switch(Fiber* from, Fiber* to) {
    if (__sanitizer_start_switch_fiber != nullptr) {
      __sanitizer_start_switch_fiber(&from->fake_stack, to->stack, to->bytes);
    }
    if (_setjmp(from->position) == 0) {
      // Flag 1: the switch itself orders no memory accesses.
      if (HasTsan()) __tsan_switch_to_fiber(to->tsan, 1);
      if (!std::exchange(to->is_new, false)) _longjmp(to->position, 1);
      setcontext(&to->start);
    }
    Arrive(from);
  }

  // Tells AddressSanitizer that a fiber has begun or continues.
  void Arrive(Fiber* fiber) {
    if (__sanitizer_finish_switch_fiber == nullptr) return;
    const void* stack = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fiber->fake_stack, &stack, &bytes);
    if (std::exchange(comes_from_host_, false)) {
      host_.stack = stack;
      host_.bytes = bytes;
    }
  }

  // Runs other threads until the current one is ready and chosen.
  void Wait(State state, const Call& call) {
    Fiber* const own = Current().fiber;
    Current().state = state;
    Current().call = call;
    const unsigned before = current_;
    Choose();
    if (current_ != before) Switch(own, FiberOf(current_));
  }

  // The main function of all fibers.
  static void Main();
  void RunThreads() {
    Fiber* const own = Current().fiber;
    Arrive(own);
    for (;;) {
      Acquire(&begin_);
      (*kernel_)();
      Release(&end_);
      Exit();
      const bool ends = num_exited_ == threads_.size();
      if (!ends) Choose();
      if (!ends && Current().fiber == nullptr && !HasTsan()) {
        Current().fiber = own;
        continue;
      }
      if (!HasTsan()) idle_.push_back(own);
      Switch(own, ends ? &host_ : FiberOf(current_));
    }
  }

  void Exit() {
    Current().state = State::kExited;
    ++num_exited_;
    const unsigned first = current_ / kLanes * kLanes;
    for (unsigned i = 0; i < threads_.size(); ++i) {
      const Thread& other = threads_[i];
      const bool waits_for_lane = other.state == State::kInWarp && i / kLanes * kLanes == first &&
                                  (other.mask >> current_ % kLanes & 1) != 0;
      if (waits_for_lane || other.state == State::kInBlock) {
        FailAt("thread " + std::to_string(i) + " waits for a thread that exits", other.call);
      }
    }
  }

  [[noreturn]] void FailWithDeadlock() const {
    std::map<std::string, int> waiting;
    for (const Thread& thread : threads_) {
      if (thread.state != State::kExited) ++waiting[Text(thread.call)];
    }
    std::string message = "threads wait for each other in block " + std::to_string(blockIdx.x);
    for (const auto& [call, count] : waiting) {
      message += "; " + std::to_string(count) + " in " + call;
    }
    Fail(message);
  }

  std::mutex mutex_;
  const std::function<void()>* kernel_ = nullptr;
  uint64_t random_ = 0;
  Fiber host_;
  bool comes_from_host_ = false;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> idle_;
  std::vector<Thread> threads_;  // Threads of the running block.
  std::vector<unsigned> ready_;
  unsigned current_ = 0, num_exited_ = 0, num_arrived_ = 0;
  Call barrier_;  // At which `num_arrived_` threads wait.
  // Tags for ThreadSanitizer: before and after a kernel, and of barriers by block, warp and mask.
  char begin_ = 0, end_ = 0;
  std::map<std::array<unsigned, 3>, BarrierTags> tags_;
};

Device& TheDevice() {
  static Device& device = *new Device;  // Never deleted, because streams may outlive main().
  return device;
}

void Device::Main() { TheDevice().RunThreads(); }

// Protects streams, events and allocations.
std::mutex& mutex = *new std::mutex;
std::condition_variable& changed = *new std::condition_variable;
std::vector<cudaStream_t>& streams = *new std::vector<cudaStream_t>;
thread_local cudaError_t last_error = cudaSuccess;

#ifdef __SANITIZE_ADDRESS__
constexpr size_t kGuard = 0;
#else
constexpr size_t kGuard = 64;  // Bytes after each allocation that must not change.
#endif
constexpr std::align_val_t kAlignment{256};
constexpr int kUnset = 0xa5;
std::map<void*, size_t>& allocations = *new std::map<void*, size_t>;

}  // namespace
}  // namespace slipstream::emulation

struct CUstream_st {
  std::deque<std::function<void()>> queue;  // The first is running.
  bool is_awaited = false;
  bool ends = false;
  std::thread worker;

  void Work() {
    std::unique_lock<std::mutex> lock(slipstream::emulation::mutex);
    for (bool is_idle = true;; is_idle = queue.empty()) {
      slipstream::emulation::changed.wait(lock, [&] { return ends || !queue.empty(); });
      if (queue.empty()) return;
      if (is_idle) {
        slipstream::emulation::changed.wait_for(lock, slipstream::emulation::kDelay,
                                                [&] { return ends || is_awaited; });
      }
      std::function<void()> work = std::move(queue.front());
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
      queue.pop_front();
      is_awaited &= !queue.empty();
      slipstream::emulation::changed.notify_all();
    }
  }
};

struct CUevent_st {
  int num_pending = 0;
  std::chrono::steady_clock::time_point time;
};

namespace slipstream::emulation {
namespace {

// Waits for one stream, or for all.
void WaitFor(cudaStream_t stream) {
  std::unique_lock<std::mutex> lock(mutex);
  for (const cudaStream_t one : streams) {
    if (stream == nullptr || stream == one) one->is_awaited = !one->queue.empty();
  }
  changed.notify_all();
  changed.wait(lock, [&] {
    if (stream != nullptr) return stream->queue.empty();
    return std::all_of(streams.begin(), streams.end(), [](auto* s) { return s->queue.empty(); });
  });
}

void CheckGuard(const char* data, size_t bytes) {
  for (size_t i = bytes; i < bytes + kGuard; ++i) {
    if (static_cast<unsigned char>(data[i]) != kUnset) {
      Fail("device memory after an allocation of " + std::to_string(bytes) + " bytes was written");
    }
  }
}

// Fails if the bytes begin in an allocation and end after it.
void CheckRange(const void* data, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto after = allocations.upper_bound(const_cast<void*>(data));
  if (after == allocations.begin()) return;
  const auto& [first, size] = *std::prev(after);
  const auto offset =
      static_cast<size_t>(static_cast<const char*>(data) - static_cast<const char*>(first));
  if (offset <= size && bytes > size - offset) {
    Fail(std::to_string(bytes) + " bytes from byte " + std::to_string(offset) +
         " of an allocation of " + std::to_string(size) + " bytes are used");
  }
}

}  // namespace

cudaError_t Report(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

void Enqueue(cudaStream_t stream, std::function<void()> work) {
  if (stream == nullptr) {
    WaitFor(nullptr);
    return work();
  }
  const std::lock_guard<std::mutex> lock(mutex);
  stream->queue.push_back(std::move(work));
  changed.notify_all();
}

cudaError_t EnqueueWithScratch(cudaStream_t stream, void* scratch, size_t needed, size_t* bytes,
                               std::function<void()> work) {
  if (scratch == nullptr) {
    *bytes = needed;
    return cudaSuccess;
  }
  if (*bytes < needed) return Report(cudaErrorInvalidValue);
  CheckRange(scratch, needed);
  Enqueue(stream, [=] {
    std::memset(scratch, kUnset, needed);
    work();
  });
  return cudaSuccess;
}

cudaError_t Launch(const cudaLaunchConfig_t& config, std::function<void()> thread) {
  const dim3 grid = config.gridDim, block = config.blockDim;
  if (grid.x == 0 || grid.y * grid.z != 1 || block.x == 0 || block.x > kMaxThreads ||
      block.y * block.z != 1) {
    return Report(cudaErrorInvalidConfiguration);
  }
  static uint64_t launches = 0;
  const uint64_t launch = __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
  Enqueue(config.stream, [=] { TheDevice().Run(config, thread, launch); });
  return cudaSuccess;
}

const uint64_t* MeetWarp(const Call& call, unsigned mask, uint64_t value, bool orders_memory) {
  return TheDevice().MeetWarp(call, mask, value, orders_memory);
}
int MeetBlock(const Call& call, int value) { return TheDevice().MeetBlock(call, value); }
void Interleave() { TheDevice().Interleave(); }
void FailRead(const Call& call, unsigned mask, unsigned lane) {
  char text[100];
  std::snprintf(text, sizeof(text), "lane %u is read, but is not in the mask 0x%x", lane, mask);
  TheDevice().FailAt(text, call);
}

}  // namespace slipstream::emulation

using slipstream::emulation::Enqueue;
using slipstream::emulation::Report;
using slipstream::emulation::WaitFor;
namespace emulation = slipstream::emulation;

const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaSuccess:
      return "cudaSuccess";
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorInvalidConfiguration:
      return "cudaErrorInvalidConfiguration";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    default:
      return "cudaErrorUnknown";
  }
}
const char* cudaGetErrorString(cudaError_t error) { return cudaGetErrorName(error); }
cudaError_t cudaGetLastError() { return std::exchange(emulation::last_error, cudaSuccess); }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"CUDA emulation", size_t{1} << 33, 9, 0, 1, 1 << 20};
  return cudaSuccess;
}
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrL2CacheSize ? 1 << 20 : 1000000;
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }

cudaError_t cudaMalloc(void** data, size_t bytes) {
  *data = nullptr;
  if (bytes == 0) return cudaSuccess;
  const size_t all = bytes + emulation::kGuard;
  *data = ::operator new(all, emulation::kAlignment, std::nothrow);
  if (*data == nullptr) return Report(cudaErrorMemoryAllocation);
  std::memset(*data, emulation::kUnset, all);
  const std::lock_guard<std::mutex> lock(emulation::mutex);
  emulation::allocations[*data] = bytes;
  return cudaSuccess;
}
cudaError_t cudaFree(void* data) {
  if (data == nullptr) return cudaSuccess;
  WaitFor(nullptr);
  const std::lock_guard<std::mutex> lock(emulation::mutex);
  const auto found = emulation::allocations.find(data);
  if (found == emulation::allocations.end()) return Report(cudaErrorInvalidValue);
  emulation::CheckGuard(static_cast<const char*>(data), found->second);
  emulation::allocations.erase(found);
  ::operator delete(data, emulation::kAlignment);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                            cudaStream_t stream) {
  emulation::CheckRange(to, bytes);
  emulation::CheckRange(from, bytes);
  Enqueue(stream, [=] {
    if (bytes > 0) std::memcpy(to, from, bytes);
  });
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpyAsync(to, from, bytes, kind, nullptr);
}
cudaError_t cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  emulation::CheckRange(data, bytes);
  Enqueue(stream, [=] {
    if (bytes > 0) std::memset(data, value, bytes);
  });
  return cudaSuccess;
}
cudaError_t cudaMemset(void* data, int value, size_t bytes) {
  return cudaMemsetAsync(data, value, bytes, nullptr);
}

cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new CUstream_st;
  const std::lock_guard<std::mutex> lock(emulation::mutex);
  emulation::streams.push_back(*stream);
  (*stream)->worker = std::thread(&CUstream_st::Work, *stream);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  {
    const std::lock_guard<std::mutex> lock(emulation::mutex);
    stream->ends = true;
    auto& streams = emulation::streams;
    streams.erase(std::find(streams.begin(), streams.end(), stream));
    emulation::changed.notify_all();
  }
  stream->worker.join();
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  WaitFor(stream);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = new CUevent_st;
  return cudaSuccess;
}
cudaError_t cudaEventCreateWithFlags(cudaEvent_t* event, unsigned) {
  return cudaEventCreate(event);
}
cudaError_t cudaEventDestroy(cudaEvent_t event) {
  cudaEventSynchronize(event);
  delete event;
  return cudaSuccess;
}
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  {
    const std::lock_guard<std::mutex> lock(emulation::mutex);
    ++event->num_pending;
  }
  Enqueue(stream, [=] {
    const std::lock_guard<std::mutex> lock(emulation::mutex);
    event->time = std::chrono::steady_clock::now();
    --event->num_pending;
    emulation::changed.notify_all();
  });
  return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
  const std::lock_guard<std::mutex> lock(emulation::mutex);
  return event->num_pending == 0 ? cudaSuccess : Report(cudaErrorNotReady);
}
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
  std::unique_lock<std::mutex> lock(emulation::mutex);
  emulation::changed.wait(lock, [&] { return event->num_pending == 0; });
  return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  *milliseconds = std::chrono::duration<float, std::milli>(stop->time - start->time).count();
  return cudaSuccess;
}
