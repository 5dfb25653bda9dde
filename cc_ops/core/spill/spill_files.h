// The files that a table's rows are spilled to. They have no name: whatever ends the process, the
// system takes their space back.
#ifndef SLIPSTREAM_CC_OPS_CORE_SPILL_SPILL_FILES_H_
#define SLIPSTREAM_CC_OPS_CORE_SPILL_SPILL_FILES_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cc_ops/core/base/status.h"

namespace slipstream {

// A block of a file.
struct Extent {
  int32_t file = -1;
  int64_t offset = 0;
};

// Blocks of one size. Thread-safe.
class SpillFiles {
 public:
  // InvalidArgument if no file can be made in the folder. block_bytes: a multiple of kPageUnit.
  static Status Open(const std::string& folder, int64_t block_bytes,
                     std::unique_ptr<SpillFiles>* files);
  ~SpillFiles();
  SpillFiles(const SpillFiles&) = delete;
  SpillFiles& operator=(const SpillFiles&) = delete;

  const std::string& folder() const { return folder_; }
  int64_t block_bytes() const { return block_bytes_; }

  // A block that nobody uses, with its room on the disk. ResourceExhausted without any.
  Status Take(Extent* extent);
  void Release(Extent extent);

  // Of a file, for transfers. Valid while a block of it is taken.
  int descriptor(int32_t file) const;
  // That the files take on the disk.
  int64_t bytes() const;

 private:
  struct File {
    int descriptor = -1;
    int64_t begun = 0;          // blocks that were ever taken, from the file's start
    std::vector<int64_t> free;  // offsets of blocks that were released
    int64_t taken = 0;
  };
  SpillFiles(std::string folder, int64_t block_bytes);
  // A new file without blocks; its number.
  Status Begin(int32_t* number);
  int64_t BytesBegun() const;

  const std::string folder_;
  const int64_t block_bytes_, most_blocks_;
  mutable std::mutex mutex_;
  std::vector<File> files_;
  std::vector<int32_t> with_free_;  // files with released blocks, at least once each
  std::vector<int32_t> idle_;       // files without a block
  int32_t open_ = -1;               // the file that blocks are begun in
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_SPILL_FILES_H_
