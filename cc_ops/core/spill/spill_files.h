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
#include "cc_ops/core/spill/sealed_files.h"

namespace slipstream {

// A block of a file.
struct Extent {
  int32_t file = -1;
  int64_t offset = 0;
};

// Blocks of one size, each of which is given out once: what lies in a file stays as it is until
// none of its blocks is needed, when the file goes. Thread-safe.
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

  // Files as they are now; `numbers`: of each. Blocks that are taken later are in others. All that
  // are taken must be written, or are released unwritten. ResourceExhausted if the process has too
  // many files open.
  Status Seal(SealedFiles* sealed, std::vector<int32_t>* numbers);

  // Of a file, for transfers. Stays valid, but reads what was written as long as a block is taken.
  int descriptor(int32_t file) const;
  // That the files take on the disk.
  int64_t bytes() const;

  // Of each file, the blocks it has room for; 0 where no block is to be moved to other files: it
  // is still being filled, or empty.
  std::vector<int64_t> ClosedRoom() const;

 private:
  struct File {
    int descriptor = -1;
    uint64_t serial = 0;  // of no other file
    int64_t room = 0;     // blocks
    int64_t begun = 0;    // blocks that were taken so far
    int64_t taken = 0;    // that still are
  };
  SpillFiles(std::string folder, int64_t block_bytes);
  // A new file without blocks; its number.
  Status Begin(int32_t* number);
  // Lets a file go whose blocks nobody needs.
  void End(int32_t number);
  int64_t BytesBegun() const;

  const std::string folder_;
  const int64_t block_bytes_;
  const std::string name_;  // of no other table, in any process
  const int nothing_;       // the descriptor of an empty file
  mutable std::mutex mutex_;
  std::vector<File> files_;
  std::vector<int32_t> ended_;  // numbers of files that went
  int32_t open_ = -1;           // the file that blocks are begun in
  uint64_t serials_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_SPILL_FILES_H_
