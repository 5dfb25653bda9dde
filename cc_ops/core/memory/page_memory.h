// Memory from the system, in huge pages where it is large enough and the system has them: random
// accesses cost fewer TLB misses then.
#ifndef SLIPSTREAM_CC_OPS_CORE_MEMORY_PAGE_MEMORY_H_
#define SLIPSTREAM_CC_OPS_CORE_MEMORY_PAGE_MEMORY_H_

#include <cstddef>
#include <memory>
#include <new>

namespace slipstream {

// Of all memory for rows and indexes.
constexpr size_t kLineBytes = 64;

constexpr size_t RoundUp(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

// Owns a block, aligned to kLineBytes or more. Pages that nobody has written to cost no memory.
class PageMemory {
 public:
  PageMemory() = default;
  // `bytes` or a little more, uninitialised, aligned to a power of two. Throws std::bad_alloc.
  explicit PageMemory(size_t bytes, size_t least_alignment = kLineBytes);

  char* data() const { return data_.get(); }
  size_t size() const { return data_ == nullptr ? 0 : size_; }  // none once it is moved

 private:
  struct Free {
    std::align_val_t alignment;
    void operator()(char* p) const { ::operator delete(p, alignment); }
  };

  std::unique_ptr<char, Free> data_{nullptr, Free{}};
  size_t size_ = 0;
};

// Gives the whole pages of [begin, end) back to the system; their content is lost.
void DropPages(char* begin, char* end);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_MEMORY_PAGE_MEMORY_H_
