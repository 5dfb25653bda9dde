// The files to which a table spills its rows.
//
// They have no names, so that the system frees their space however the process ends.
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

// The place of a block in a file.
struct Extent {
  int32_t file = -1;   // Number of the file in its SpillFiles; -1 for no place.
  int64_t offset = 0;  // In bytes.
};

// Allocates blocks of one size. A block is never reused: the contents of a file do not change until
// all of its blocks are released, then the file is removed. Thread-safe.
class SpillFiles {
 public:
  // Returns InvalidArgument if no file can be created in the folder. block_bytes: a multiple of
  // kPageUnit.
  static Status Open(const std::string& folder, int64_t block_bytes,
                     std::unique_ptr<SpillFiles>* files);
  ~SpillFiles();
  SpillFiles(const SpillFiles&) = delete;
  SpillFiles& operator=(const SpillFiles&) = delete;

  const std::string& folder() const { return folder_; }
  int64_t block_bytes() const { return block_bytes_; }

  // Takes an unused block and allocates its space on disk. Returns ResourceExhausted if the disk is
  // full.
  Status Take(Extent* extent);
  // Releases a block. When all blocks of a file are released, the file is removed, unless new
  // blocks are still taken in it.
  void Release(Extent extent);

  // Adds all files with taken blocks to `sealed`, and their numbers to `numbers`. Blocks that are
  // taken later are in other files. All taken blocks must have been written, unless they are
  // released unwritten. Returns ResourceExhausted if the process has too many open files.
  Status Seal(SealedFiles* sealed, std::vector<int32_t>* numbers);

  // Returns the descriptor of a file for transfers. It stays valid, but reads written data only
  // while a block of the file is taken.
  int descriptor(int32_t file) const;
  // Size of the files on disk.
  int64_t bytes() const;

  // Returns, by number of the file, the number of blocks for which each file has room; 0 for
  // removed files and for the file that is still being filled, which must not be compacted.
  std::vector<int64_t> ClosedRoom() const;

 private:
  struct File {
    int descriptor = -1;
    uint64_t serial = 0;  // Unique number of the file.
    int64_t room = 0;     // In blocks.
    int64_t begun = 0;    // Number of blocks that were taken so far.
    int64_t taken = 0;    // Number of blocks that are still taken.
  };
  SpillFiles(std::string folder, int64_t block_bytes);
  // Creates a file without blocks and returns its number.
  Status Begin(int32_t* number);
  // Removes a file without taken blocks.
  void End(int32_t number);
  int64_t BytesBegun() const;

  const std::string folder_;
  const int64_t block_bytes_;
  const std::string name_;  // Unique among all tables in all processes.
  const int nothing_;       // Descriptor of an empty file, which replaces removed files.
  mutable std::mutex mutex_;
  std::vector<File> files_;
  std::vector<int32_t> ended_;  // Numbers of removed files.
  int32_t open_ = -1;           // File in which new blocks are taken.
  uint64_t serials_ = 0;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_SPILL_FILES_H_
