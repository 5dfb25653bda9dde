// Read-only snapshots of the files of spilled rows, which a checkpoint keeps.
#ifndef SLIPSTREAM_CC_OPS_CORE_SPILL_SEALED_FILES_H_
#define SLIPSTREAM_CC_OPS_CORE_SPILL_SEALED_FILES_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cc_ops/core/base/status.h"
#include "cc_ops/core/memory/page_memory.h"
#include "cc_ops/core/spill/page_layout.h"

namespace slipstream {

// The contents of the files do not change while this object exists, even if the table changes.
class SealedFiles {
 public:
  SealedFiles() = default;
  ~SealedFiles();
  SealedFiles(const SealedFiles&) = delete;
  SealedFiles& operator=(const SealedFiles&) = delete;

  size_t size() const { return files_.size(); }  // Number of files.
  // Returns the name of a file, which is unique among the files of all tables in all processes. It
  // is no path.
  const std::string& name(size_t file) const { return files_[file].name; }
  int64_t bytes(size_t file) const { return files_[file].bytes; }

  // Adds a file by a descriptor, which the caller continues to own. Returns ResourceExhausted if
  // duplicating it fails.
  Status Add(int descriptor, std::string name);

  // Creates a hard link to a file at a path and waits until it is on disk. If the link cannot be
  // created, for example because the file system does not support it, sets `is_linked` to false and
  // returns OK. Returns ResourceExhausted if the file cannot be brought to the disk.
  Status Link(size_t file, const std::string& path, bool* is_linked) const;
  // Copies a file to a path and waits until the copy is on disk. Returns ResourceExhausted if it
  // cannot be read or written.
  Status Copy(size_t file, const std::string& path) const;

 private:
  struct File {
    int descriptor;
    std::string name;
    int64_t bytes;
  };
  std::vector<File> files_;
};

// Blocks of a sealed file to be read into memory.
struct BlocksToRead {
  int64_t pages = 0;                 // Pages of a block.
  const int64_t* offsets = nullptr;  // [blocks]; position of each block in the file, in bytes.
  const int64_t* numbers = nullptr;  // [blocks]; number of the first page of each block.
  int64_t blocks = 0;
};
// Reads blocks of the file at `path` into `memory`, one after the other. Returns DataLoss if a page
// is missing or damaged.
Status ReadBlocks(const std::string& path, const PageLayout& layout, const BlocksToRead& blocks,
                  PageMemory* memory);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_SEALED_FILES_H_
