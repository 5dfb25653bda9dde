#include "cc_ops/tf/base/kernel_values.h"

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

absl::Status RequireRank(tf::OpKernelContext* context, int input, const char* name, int rank) {
  const tf::TensorShape& shape = context->input(input).shape();
  if (shape.dims() == rank) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has shape ", shape.DebugString(), "; allowed: rank ", rank));
}

}  // namespace slipstream
