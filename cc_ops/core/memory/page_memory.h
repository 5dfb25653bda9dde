// Memory from the system, in huge pages if it is large enough. Random accesses then cause fewer TLB
// misses.
#ifndef SLIPSTREAM_CC_OPS_CORE_MEMORY_PAGE_MEMORY_H_
#define SLIPSTREAM_CC_OPS_CORE_MEMORY_PAGE_MEMORY_H_

#include <cstddef>
#include <memory>
#include <new>

namespace slipstream {

// Minimum alignment of memory for rows and indexes.
constexpr size_t kLineBytes = 64;

constexpr size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Owns a block that is aligned to at least kLineBytes. Pages that were never written need no
// physical memory.
class PageMemory {
 public:
  PageMemory() = default;
  // Allocates at least `bytes`, uninitialized. The alignment is at least `min_alignment`, a power
  // of two. Throws std::bad_alloc.
  explicit PageMemory(size_t bytes, size_t min_alignment = kLineBytes);

  char* data() const { return data_.get(); }
  size_t size() const { return data_ == nullptr ? 0 : size_; }  // 0 after a move.

 private:
  struct Free {
    void operator()(char* p) const;
    std::align_val_t alignment;
    size_t size;
  };

  std::unique_ptr<char, Free> data_{nullptr, Free{std::align_val_t{kLineBytes}, 0}};
  size_t size_ = 0;
};

// Returns the physical memory of the whole pages in [begin, end) to the system. Their contents are
// lost; their addresses stay valid.
void DropPages(char* begin, char* end);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_MEMORY_PAGE_MEMORY_H_
