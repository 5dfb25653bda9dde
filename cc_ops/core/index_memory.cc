#include "cc_ops/core/index_memory.h"

#include <new>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace slipstream {
namespace {

constexpr size_t kAlignment = 64;
constexpr size_t kHugePage = size_t{2} << 20;

size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Gives the whole pages of [begin, end) back; their content is lost.
void GiveBack(char* begin, char* end) {
#if defined(__linux__)
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t first = RoundUp(reinterpret_cast<size_t>(begin), page);
  const size_t last = reinterpret_cast<size_t>(end) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
  (void)begin, (void)end;
#endif
}

}  // namespace

void* IndexMemory::Allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t block = RoundUp(bytes, kAlignment);
  auto place = regions_.find(block);
  if (place == regions_.end()) {
    const size_t wanted = block * static_cast<size_t>(blocks_);
    const bool is_huge = wanted >= kHugePage;
    const size_t size = RoundUp(wanted, is_huge ? kHugePage : kAlignment);
    const std::align_val_t alignment{is_huge ? kHugePage : kAlignment};
    Region made;
    // Pages that nobody has written to cost no memory.
    made.memory = std::unique_ptr<char, Free>(static_cast<char*>(::operator new(size, alignment)),
                                              Free(alignment));
#if defined(__linux__)
    // Only a wish: without huge pages everything works as well.
    if (is_huge) madvise(made.memory.get(), size, MADV_HUGEPAGE);
#endif
    place = regions_.emplace(block, std::move(made)).first;
  }
  Region& region = place->second;
  for (int b = 0; b < blocks_; ++b) {
    const uint64_t bit = uint64_t{1} << b;
    if ((region.used & bit) != 0) continue;
    region.used |= bit;
    return region.memory.get() + static_cast<size_t>(b) * block;
  }
  throw std::bad_alloc();
}

void IndexMemory::Release(void* block, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t size = RoundUp(bytes, kAlignment);
  const auto region = regions_.find(size);
  char* begin = static_cast<char*>(block);
  const size_t number = static_cast<size_t>(begin - region->second.memory.get()) / size;
  region->second.used &= ~(uint64_t{1} << number);
  if (region->second.used == 0) {
    regions_.erase(region);
  } else {
    GiveBack(begin, begin + size);
  }
}

}  // namespace slipstream
