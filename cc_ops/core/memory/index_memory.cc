#include "cc_ops/core/memory/index_memory.h"

#include <algorithm>
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

// The most bytes of a block that lies with one of so many.
size_t LargestOf(size_t bytes) {
  size_t largest = kAlignment;
  while (largest < bytes) largest = RoundUp(largest + largest / 4, kAlignment);
  return largest;
}

}  // namespace

IndexMemory::Region IndexMemory::MakeRegion(size_t bytes) const {
  const bool is_huge = bytes >= kHugePage;
  const std::align_val_t alignment{is_huge ? kHugePage : kAlignment};
  Region region;
  region.size = RoundUp(bytes, is_huge ? kHugePage : kAlignment);
  // Pages that nobody has written to cost no memory.
  region.memory = std::unique_ptr<char, Free>(
      static_cast<char*>(::operator new(region.size, alignment)), Free(alignment));
#if defined(__linux__)
  // Only a wish: without huge pages everything works as well.
  if (is_huge) madvise(region.memory.get(), region.size, MADV_HUGEPAGE);
#endif
  return region;
}

void* IndexMemory::Allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t block = RoundUp(bytes, kAlignment), largest = LargestOf(block);
  std::vector<Region>& regions = regions_[largest];
  if (regions.empty() || regions.back().size - regions.back().begun < block) {
    regions.push_back(MakeRegion(largest * static_cast<size_t>(blocks_)));
  }
  Region& region = regions.back();
  char* begin = region.memory.get() + region.begun;
  region.begun += block;
  ++region.blocks;
  return begin;
}

void IndexMemory::Release(void* block, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t size = RoundUp(bytes, kAlignment);
  char* begin = static_cast<char*>(block);
  std::vector<Region>& regions = regions_[LargestOf(size)];
  const auto region = std::find_if(regions.begin(), regions.end(), [&](const Region& r) {
    return begin >= r.memory.get() && begin < r.memory.get() + r.size;
  });
  if (--region->blocks == 0) {
    regions.erase(region);
  } else {
    GiveBack(begin, begin + size);
  }
}

}  // namespace slipstream
