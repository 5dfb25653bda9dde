#include "cc_ops/core/spill/page_layout.h"

#include "cc_ops/core/base/hash.h"

namespace slipstream {

uint64_t PageLayout::ChecksumOf(const char* page) const {
  // Four independent sums, which each word changes by a bijection.
  constexpr uint64_t kPrime = 0x9e3779b97f4a7c15ULL;
  uint64_t sums[4] = {1, 2, 3, 4};
  const int64_t words = bytes / 8;
  for (int64_t i = 1; i < words; ++i) {  // The first word is the checksum itself.
    uint64_t word;
    std::memcpy(&word, page + 8 * i, sizeof(word));
    uint64_t& sum = sums[i % 4];
    sum = (sum ^ word) * kPrime;
    sum ^= sum >> 32;
  }
  return Mix64(sums[0]) ^ Mix64(sums[1] + 1) ^ Mix64(sums[2] + 2) ^ Mix64(sums[3] + 3);
}

void PageLayout::Seal(char* page, uint32_t number, int64_t used) const {
  const int64_t end = kHeadBytes + used * entry_bytes;
  std::memset(page + end, 0, static_cast<size_t>(bytes - end));
  Head head = {0, number, static_cast<uint32_t>(used)};
  std::memcpy(page, &head, sizeof(head));
  head.checksum = ChecksumOf(page);
  std::memcpy(page, &head, sizeof(head));
}

bool PageLayout::IsWhole(const char* page, uint32_t number) const {
  Head head;
  std::memcpy(&head, page, sizeof(head));
  return head.number == number && static_cast<int64_t>(head.rows) <= rows &&
         head.checksum == ChecksumOf(page);
}

}  // namespace slipstream
