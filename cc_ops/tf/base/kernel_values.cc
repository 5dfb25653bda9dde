#include "cc_ops/tf/base/kernel_values.h"

#include <cctype>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>

#include "cc_ops/core/base/work_crew.h"
#include "tensorflow/core/lib/core/threadpool.h"

namespace slipstream {
namespace tf = tensorflow;

absl::Status ToAbsl(const Status& status) {
  switch (status.code()) {
    case StatusCode::kOk:
      return absl::OkStatus();
    case StatusCode::kResourceExhausted:
      return absl::ResourceExhaustedError(status.message());
    case StatusCode::kDataLoss:
      return absl::DataLossError(status.message());
    case StatusCode::kInvalidArgument:
      break;
  }
  return absl::InvalidArgumentError(status.message());
}

Parallel ParallelOf(tf::OpKernelContext* context) {
  const tf::DeviceBase::CpuWorkerThreads* workers =
      context->device()->tensorflow_cpu_worker_threads();
  Parallel parallel;
  parallel.threads = std::max(1, workers->num_threads);
  tf::thread::ThreadPool* pool = workers->workers;
  if (parallel.threads == 1 || pool == nullptr) return parallel;
  const auto schedule = [pool](std::function<void()> fn) { pool->Schedule(std::move(fn)); };
  parallel.run = [crew = std::make_shared<WorkCrew>(parallel.threads, schedule)](
                     int tasks, const std::function<void(int)>& fn) { crew->Run(tasks, fn); };
  return parallel;
}

absl::Status CheckInputs(tf::OpKernelContext* context, int first, const char* text,
                         std::initializer_list<KnownSize> known, const std::string* table) {
  int64_t sizes[26];  // size of each letter; -1: not yet known
  std::fill_n(sizes, 26, -1);
  for (const KnownSize& size : known) sizes[size.name - 'a'] = size.size;
  for (const char* at = text; *at != '\0'; ++first) {
    const char* const name = at + std::strspn(at, ", ");
    const char* const end_of_name = std::strchr(name, ':');
    const char* const allowed = end_of_name + 2;
    const tf::TensorShape& shape = context->input(first).shape();
    int rank = 0;
    uint32_t own = 0;  // letters whose size this input determines
    bool fits = true;
    for (at = allowed + 1; *at != ']'; ++rank) {
      at += std::strspn(at, ", ");
      const int64_t size = rank < shape.dims() ? shape.dim_size(rank) : -1;
      if (std::isdigit(*at)) {
        char* end = nullptr;
        fits &= size == std::strtoll(at, &end, 10);
        at = end;
      } else {
        int64_t* const letter = *at == '?' ? nullptr : &sizes[*at - 'a'];
        if (letter != nullptr && *letter < 0) {
          *letter = size;
          own |= 1u << (*at - 'a');
        }
        fits &= letter == nullptr || size == *letter;
        ++at;
      }
    }
    ++at;
    if (fits && rank == shape.dims()) continue;
    std::string message = absl::StrCat(std::string(name, end_of_name),
                                       table == nullptr ? "" : " of table '" + *table + "'",
                                       " has shape ", shape.DebugString(), "; expected ");
    for (const char* c = allowed; c != at; ++c) {
      if (*c == ' ') continue;  // the format of TensorFlow
      const bool is_known = std::islower(*c) && (own >> (*c - 'a') & 1u) == 0;
      absl::StrAppend(&message, is_known ? std::to_string(sizes[*c - 'a']) : std::string(1, *c));
    }
    return absl::InvalidArgumentError(message);
  }
  return absl::OkStatus();
}

}  // namespace slipstream
