#include "cc_ops/core/memory/index_memory.h"

#include <algorithm>

namespace slipstream {
namespace {

// Returns the maximum size of blocks that share regions with blocks of `bytes`.
size_t LargestOf(size_t bytes) {
  size_t largest = kLineBytes;
  while (largest < bytes) largest = RoundUp(largest + largest / 4, kLineBytes);
  return largest;
}

}  // namespace

void* IndexMemory::Allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t block = RoundUp(bytes, kLineBytes), largest = LargestOf(block);
  std::vector<Region>& regions = regions_[largest];
  if (regions.empty() || regions.back().memory.size() - regions.back().begun < block) {
    regions.push_back({PageMemory(largest * static_cast<size_t>(blocks_))});
  }
  Region& region = regions.back();
  char* begin = region.memory.data() + region.begun;
  region.begun += block;
  ++region.blocks;
  return begin;
}

void IndexMemory::Release(void* block, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const size_t size = RoundUp(bytes, kLineBytes);
  char* begin = static_cast<char*>(block);
  std::vector<Region>& regions = regions_[LargestOf(size)];
  const auto region = std::find_if(regions.begin(), regions.end(), [&](const Region& r) {
    return begin >= r.memory.data() && begin < r.memory.data() + r.memory.size();
  });
  if (--region->blocks == 0) {
    regions.erase(region);
  } else {
    DropPages(begin, begin + size);
  }
}

}  // namespace slipstream
