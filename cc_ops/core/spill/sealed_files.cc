#include "cc_ops/core/spill/sealed_files.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "cc_ops/core/spill/disk_threads.h"

namespace slipstream {
namespace {

constexpr int64_t kCopiedAtOnce = 4 << 20;

Status Failed(const std::string& what, const std::string& path) {
  return ResourceExhausted(what + " '" + path + "': " + std::strerror(errno));
}

// Writes all bytes. On error returns false and sets errno.
bool WriteAll(int file, const char* bytes, int64_t size) {
  while (size > 0) {
    const ssize_t written = write(file, bytes, static_cast<size_t>(size));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes += written;
    size -= written;
  }
  return true;
}

}  // namespace

SealedFiles::~SealedFiles() {
  for (const File& file : files_) close(file.descriptor);
}

Status SealedFiles::Add(int descriptor, std::string name) {
  files_.reserve(files_.size() + 1);
  const int own = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  struct stat found;
  if (own < 0 || fstat(own, &found) != 0)
    return Failed("cannot duplicate the file descriptor of", name);
  files_.push_back({own, std::move(name), static_cast<int64_t>(found.st_size)});
  return OkStatus();
}

Status SealedFiles::Link(size_t file, const std::string& path, bool* is_linked) const {
  const int descriptor = files_[file].descriptor;
  const std::string opened = "/proc/self/fd/" + std::to_string(descriptor);
  *is_linked = linkat(AT_FDCWD, opened.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0;
  if (*is_linked && fsync(descriptor) != 0) return Failed("cannot flush to disk", path);
  return OkStatus();
}

Status SealedFiles::Copy(size_t file, const std::string& path) const {
  const File& from = files_[file];
  const int to = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (to < 0) return Failed("cannot create", path);
  const PageMemory memory(static_cast<size_t>(kCopiedAtOnce), static_cast<size_t>(kPageUnit));
  Status status;
  int64_t done = 0;
  while (status.ok() && done < from.bytes) {
    const auto size = static_cast<size_t>(std::min(kCopiedAtOnce, from.bytes - done));
    const ssize_t read = pread(from.descriptor, memory.data(), size, done);
    if (read < 0 && errno == EINTR) continue;
    if (read <= 0) {
      if (read == 0) errno = EIO;
      status = Failed("cannot read the spill file to copy to", path);
    } else if (!WriteAll(to, memory.data(), read)) {
      status = Failed("cannot write to", path);
    }
    done += read;
  }
  if (status.ok() && fsync(to) != 0) status = Failed("cannot flush to disk", path);
  close(to);
  return status;
}

Status ReadBlocks(const std::string& path, const PageLayout& layout, const BlocksToRead& blocks,
                  PageMemory* memory) {
  const auto damaged = [&](int64_t offset, const std::string& how) {
    return DataLoss("the rows at byte " + std::to_string(offset) + " of '" + path + "' " + how);
  };
  int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
  if (file < 0) file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return damaged(0, std::string("cannot be read: ") + std::strerror(errno));
  const int64_t block_bytes = blocks.pages * layout.bytes;
  *memory = PageMemory(static_cast<size_t>(std::max<int64_t>(1, blocks.blocks) * block_bytes),
                       static_cast<size_t>(kPageUnit));
  std::vector<Transfer> transfers(static_cast<size_t>(blocks.blocks));
  TransferGroup group;
  for (int64_t b = 0; b < blocks.blocks; ++b) {
    Transfer& transfer = transfers[static_cast<size_t>(b)];
    transfer.file = file;
    transfer.bytes = memory->data() + b * block_bytes;
    transfer.size = block_bytes;
    transfer.offset = blocks.offsets[b];
  }
  DiskThreads::OfProcess().Begin(transfers.data(), transfers.size(), &group);
  group.Wait();
  close(file);
  for (int64_t b = 0; b < blocks.blocks; ++b) {
    const Transfer& transfer = transfers[static_cast<size_t>(b)];
    if (transfer.error != 0) {
      return damaged(transfer.offset, "cannot be read: " + transfer.ErrorText());
    }
    for (int64_t page = 0; page < blocks.pages; ++page) {
      const auto number = static_cast<uint32_t>(blocks.numbers[b] + page);
      if (layout.IsWhole(transfer.bytes + page * layout.bytes, number)) continue;
      return damaged(transfer.offset + page * layout.bytes,
                     "are damaged: they do not match their checksum");
    }
  }
  return OkStatus();
}

}  // namespace slipstream
