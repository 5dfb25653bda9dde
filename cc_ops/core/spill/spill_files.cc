#include "cc_ops/core/spill/spill_files.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <utility>

namespace slipstream {
namespace {

// A file has room for kMinBlocks blocks, or for 1 / kPartOfAll of all blocks if that is more. A
// table therefore has about 64 files, whatever its size.
constexpr int64_t kMinBlocks = 64, kPartOfAll = 64;

// Creates an unnamed file for direct I/O, if the file system supports it. Returns -1 and sets errno
// on error.
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

std::string NameOfTable() {
  std::random_device random;
  std::string name;
  for (int word = 0; word < 4; ++word) {
    char digits[9];
    std::snprintf(digits, sizeof(digits), "%08x", random());
    name += digits;
  }
  return name;
}

}  // namespace

SpillFiles::SpillFiles(std::string folder, int64_t block_bytes)
    : folder_(std::move(folder)),
      block_bytes_(block_bytes),
      name_(NameOfTable()),
      nothing_(open("/dev/null", O_RDONLY | O_CLOEXEC)) {}

SpillFiles::~SpillFiles() {
  for (const File& file : files_) close(file.descriptor);
  close(nothing_);
}

Status SpillFiles::Open(const std::string& folder, int64_t block_bytes,
                        std::unique_ptr<SpillFiles>* files) {
  files->reset(new SpillFiles(folder, block_bytes));
  int32_t first = -1;
  const Status status = (*files)->Begin(&first);
  if (status.ok()) return status;
  files->reset();
  return InvalidArgument("spill: " + status.message() +
                         "; expected an existing folder with write permission");
}

Status SpillFiles::Begin(int32_t* number) {
  files_.reserve(files_.size() + 1);
  ended_.reserve(files_.size() + 1);
  const int descriptor = OpenNameless(folder_);
  if (descriptor < 0) {
    return ResourceExhausted("cannot create a file in '" + folder_ + "': " + std::strerror(errno));
  }
  if (ended_.empty()) {
    *number = static_cast<int32_t>(files_.size());
    files_.emplace_back();
    files_.back().descriptor = descriptor;
  } else {
    *number = ended_.back();
    ended_.pop_back();
    // Keep the descriptor number, because a read-ahead may still use it.
    dup3(descriptor, files_[static_cast<size_t>(*number)].descriptor, O_CLOEXEC);
    close(descriptor);
  }
  File& file = files_[static_cast<size_t>(*number)];
  file.serial = ++serials_;
  file.room = std::max(kMinBlocks, BytesBegun() / block_bytes_ / kPartOfAll);
  open_ = *number;
  return OkStatus();
}

void SpillFiles::End(int32_t number) {
  File& file = files_[static_cast<size_t>(number)];
  // Keep the descriptor number, because a read-ahead of a page that is no longer needed may use it.
  dup3(nothing_, file.descriptor, O_CLOEXEC);
  file.room = file.begun = 0;
  ended_.push_back(number);
}

Status SpillFiles::Take(Extent* extent) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (open_ >= 0) {
    const File& file = files_[static_cast<size_t>(open_)];
    if (file.begun == file.room) {
      const int32_t full = std::exchange(open_, -1);
      if (file.taken == 0) End(full);
    }
  }
  if (open_ < 0) {
    int32_t number = -1;
    const Status status = Begin(&number);
    if (!status.ok()) return status;
  }
  File& file = files_[static_cast<size_t>(open_)];
  const int64_t offset = file.begun * block_bytes_;
  // Allocate now, so that a full disk is detected before rows leave memory.
  if (fallocate(file.descriptor, 0, offset, block_bytes_) != 0 && errno != EOPNOTSUPP) {
    const int error = errno;
    return ResourceExhausted("cannot allocate " + std::to_string(block_bytes_) +
                             " more bytes in '" + folder_ + "' in addition to the " +
                             std::to_string(BytesBegun()) +
                             " bytes of the table: " + std::strerror(error));
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
  if (file.taken == 0 && extent.file != open_) End(extent.file);
}

Status SpillFiles::Seal(SealedFiles* sealed, std::vector<int32_t>* numbers) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (open_ >= 0) {
    const int32_t last = std::exchange(open_, -1);
    if (files_[static_cast<size_t>(last)].taken == 0) End(last);
  }
  for (size_t number = 0; number < files_.size(); ++number) {
    const File& file = files_[number];
    if (file.taken == 0) continue;
    const std::string name = name_ + "-" + std::to_string(file.serial);
    const Status status = sealed->Add(file.descriptor, name);
    if (!status.ok()) return status;
    numbers->push_back(static_cast<int32_t>(number));
  }
  return OkStatus();
}

int SpillFiles::descriptor(int32_t file) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return files_[static_cast<size_t>(file)].descriptor;
}

int64_t SpillFiles::bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return BytesBegun();
}

std::vector<int64_t> SpillFiles::ClosedRoom() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<int64_t> rooms(files_.size());
  for (size_t number = 0; number < files_.size(); ++number) {
    const bool is_open = static_cast<int32_t>(number) == open_;
    rooms[number] = is_open ? 0 : files_[number].room;
  }
  return rooms;
}

int64_t SpillFiles::BytesBegun() const {
  int64_t blocks = 0;
  for (const File& file : files_) blocks += file.begun;
  return blocks * block_bytes_;
}

}  // namespace slipstream
