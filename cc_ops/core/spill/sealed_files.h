// Files of a table's rows as they were at one time, to be kept by a checkpoint.
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

// What the files hold stays as it is as long as this lives, whatever becomes of the table.
class SealedFiles {
 public:
  SealedFiles() = default;
  ~SealedFiles();
  SealedFiles(const SealedFiles&) = delete;
  SealedFiles& operator=(const SealedFiles&) = delete;

  size_t size() const { return files_.size(); }
  // That no other file has, of any table in any process.
  const std::string& name(size_t file) const { return files_[file].name; }
  int64_t bytes(size_t file) const { return files_[file].bytes; }

  // Opens one more file by a descriptor, which stays the caller's. ResourceExhausted if that fails.
  Status Add(int descriptor, std::string name);

  // Gives a file a path, and waits until it is on the disk there: the same file where the file
  // system allows it, without reading it.
  Status Link(size_t file, const std::string& path, bool* is_linked) const;
  // Copies it to a path, and waits until that is on the disk. ResourceExhausted if it cannot be
  // written, or read.
  Status Copy(size_t file, const std::string& path) const;

 private:
  struct File {
    int descriptor;
    std::string name;
    int64_t bytes;
  };
  std::vector<File> files_;
};

// Blocks of a file that was sealed, read into memory.
struct BlocksToRead {
  int64_t pages = 0;                 // of a block
  const int64_t* offsets = nullptr;  // of each block, in bytes
  const int64_t* numbers = nullptr;  // of its first page
  int64_t blocks = 0;
};
// DataLoss if a page is not what was written, or not there.
Status ReadBlocks(const std::string& path, const PageLayout& layout, const BlocksToRead& blocks,
                  PageMemory* memory);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_SPILL_SEALED_FILES_H_
