#include "cc_ops/core/spill/spill_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace slipstream {
namespace {

constexpr int64_t kFileBytes = int64_t{256} << 20, kLeastBlocks = 16;

// A file that no folder has, open for direct reads and writes where the file system knows them; or
// -1, with errno.
int OpenNameless(const std::string& folder) {
  for (const int direct : {O_DIRECT, 0}) {
    const int flags = O_RDWR | O_CLOEXEC | direct;
    int file = open(folder.c_str(), flags | O_TMPFILE, 0600);
    if (file >= 0) return file;
    if (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL) {
      std::string name = folder + "/slipstream-spill-XXXXXX";
      file = mkostemp(name.data(), O_CLOEXEC | direct);
      if (file >= 0) {
        unlink(name.c_str());
        return file;
      }
    }
    if (errno != EINVAL) return -1;
  }
  return -1;
}

}  // namespace

SpillFiles::SpillFiles(std::string folder, int64_t block_bytes)
    : folder_(std::move(folder)),
      block_bytes_(block_bytes),
      most_blocks_(std::max(kLeastBlocks, kFileBytes / block_bytes)) {}

SpillFiles::~SpillFiles() {
  for (const File& file : files_) close(file.descriptor);
}

Status SpillFiles::Open(const std::string& folder, int64_t block_bytes,
                        std::unique_ptr<SpillFiles>* files) {
  files->reset(new SpillFiles(folder, block_bytes));
  int32_t first = -1;
  const Status status = (*files)->Begin(&first);
  if (status.ok()) return status;
  files->reset();
  return InvalidArgument("spill: " + status.message() +
                         "; allowed: a folder that exists and may be written to");
}

Status SpillFiles::Begin(int32_t* number) {
  if (!idle_.empty()) {
    *number = open_ = idle_.back();
    idle_.pop_back();
    return OkStatus();
  }
  files_.reserve(files_.size() + 1);
  const int descriptor = OpenNameless(folder_);
  if (descriptor < 0) {
    return ResourceExhausted("no file can be made in '" + folder_ + "': " + std::strerror(errno));
  }
  *number = open_ = static_cast<int32_t>(files_.size());
  files_.emplace_back();
  files_.back().descriptor = descriptor;
  return OkStatus();
}

Status SpillFiles::Take(Extent* extent) {
  const std::lock_guard<std::mutex> lock(mutex_);
  while (!with_free_.empty()) {
    const int32_t number = with_free_.back();
    File& file = files_[static_cast<size_t>(number)];
    if (file.free.empty()) {
      with_free_.pop_back();
      continue;
    }
    *extent = {number, file.free.back()};
    file.free.pop_back();
    ++file.taken;
    return OkStatus();
  }
  if (open_ < 0 || files_[static_cast<size_t>(open_)].begun == most_blocks_) {
    int32_t number = -1;
    const Status status = Begin(&number);
    if (!status.ok()) return status;
  }
  File& file = files_[static_cast<size_t>(open_)];
  const int64_t offset = file.begun * block_bytes_;
  // A disk that is full says so now, not when the rows have left memory.
  if (fallocate(file.descriptor, 0, offset, block_bytes_) != 0 && errno != EOPNOTSUPP) {
    const int error = errno;
    return ResourceExhausted(
        "there is no room for " + std::to_string(block_bytes_) + " bytes more in '" + folder_ +
        "', beside the " + std::to_string(BytesBegun()) + " of the table: " + std::strerror(error));
  }
  ++file.begun;
  ++file.taken;
  *extent = {open_, offset};
  return OkStatus();
}

void SpillFiles::Release(Extent extent) {
  const std::lock_guard<std::mutex> lock(mutex_);
  File& file = files_[static_cast<size_t>(extent.file)];
  --file.taken;
  // A file stays open: somebody may be reading ahead what is not needed any more.
  if (file.taken == 0 && extent.file != open_ && ftruncate(file.descriptor, 0) == 0) {
    file.begun = 0;
    file.free.clear();
    idle_.push_back(extent.file);
    return;
  }
  if (file.free.empty()) with_free_.push_back(extent.file);
  file.free.push_back(extent.offset);
}

int SpillFiles::descriptor(int32_t file) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return files_[static_cast<size_t>(file)].descriptor;
}

int64_t SpillFiles::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return BytesBegun();
}

int64_t SpillFiles::BytesBegun() const {
  int64_t blocks = 0;
  for (const File& file : files_) blocks += file.begun;
  return blocks * block_bytes_;
}

}  // namespace slipstream
