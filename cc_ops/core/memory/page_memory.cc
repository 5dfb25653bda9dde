#include "cc_ops/core/memory/page_memory.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace slipstream {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;

}  // namespace

PageMemory::PageMemory(size_t bytes, size_t min_alignment) {
  const size_t unit = bytes >= kHugePage ? kHugePage : min_alignment;
  const std::align_val_t alignment{unit};
  size_ = RoundUp(bytes, unit);
  data_ = {static_cast<char*>(::operator new(size_, alignment)), Free{alignment, size_}};
#if defined(__linux__)
  // Only a hint: the memory also works without huge pages.
  if (unit == kHugePage) madvise(data_.get(), size_, MADV_HUGEPAGE);
#endif
}

void PageMemory::Free::operator()(char* p) const {
  // The heap may keep the block for later allocations, but not its pages. Small allocations there
  // must not receive huge pages.
  DropPages(p, p + size);
#if defined(__linux__)
  if (size >= kHugePage) madvise(p, size, MADV_NOHUGEPAGE);
#endif
  ::operator delete(p, alignment);
}

void DropPages(char* begin, char* end) {
#if defined(__linux__)
  static const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t first = RoundUp(reinterpret_cast<size_t>(begin), page);
  const size_t last = reinterpret_cast<size_t>(end) / page * page;
  if (first < last) madvise(reinterpret_cast<void*>(first), last - first, MADV_DONTNEED);
#else
  (void)begin, (void)end;
#endif
}

}  // namespace slipstream
