// Shared parts of the CPU and GPU kernels of deferred gradients: the resource, checks, and
// operations between steps.
#ifndef SLIPSTREAM_CC_OPS_TF_DEFERRAL_DEFERRED_GRADIENTS_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_DEFERRAL_DEFERRED_GRADIENTS_KERNELS_H_

#include <algorithm>
#include <cstdint>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/base/row_dim.h"
#include "cc_ops/core/deferral/deferred_buffers.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/containers/key_table_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

// The buffers. Copies of this struct share the memory.
struct DeferredTensors {
  tensorflow::Tensor keys{tensorflow::DT_INT64, tensorflow::TensorShape({0})};     // [capacity]
  tensorflow::Tensor since{tensorflow::DT_INT64, tensorflow::TensorShape({0})};    // [capacity]
  tensorflow::Tensor sums{tensorflow::DT_FLOAT, tensorflow::TensorShape({0, 0})};  // and by dim

  int64_t capacity() const { return keys.NumElements(); }
  DeferredBuffers View(int64_t dim) {
    return {keys.flat<int64_t>().data(), since.flat<int64_t>().data(), sums.flat<float>().data(),
            capacity(), dim};
  }
};

constexpr tensorflow::Tensor DeferredTensors::* kDeferredTensors[] = {
    &DeferredTensors::keys, &DeferredTensors::since, &DeferredTensors::sums};

class DeferredGradientsResource : public tensorflow::ResourceBase {
 public:
  explicit DeferredGradientsResource(int64_t dim) : dim(dim) {}
  std::string DebugString() const override {
    return absl::StrCat("SlipstreamDeferredGradients, dim ", dim);
  }

  const int64_t dim;
  std::mutex mutex;  // guards all members below
  DeferredTensors tensors;
  // `step` is the number of the last step. The other members, for example `flushes`, are for the
  // next step.
  DeferralRule rule;
  bool is_shadow = false;
  StepCounts counts;  // Counts of all steps. On a GPU the counts of a step arrive after the step.
  DueBound bound;     // Used on GPUs only, where it gives the sizes of a step.
};

using DeferredGradientsRef = tensorflow::core::RefCountPtr<DeferredGradientsResource>;

// Reads the rows of a step from the inputs of SlipstreamTakeDue, except the saturated rows.
inline absl::Status ReadStep(tensorflow::OpKernelContext* context, int64_t dim, StepRows* rows) {
  TF_RETURN_IF_ERROR(CheckInputs(context, 2, "keys: [n], indices: [n], sums: [n, d], may_wait: [n]",
                                 {{'d', dim}}));
  *rows = {Data<int64_t>(context, 2), context->input(2).NumElements(), Data<int64_t>(context, 3),
           Data<float>(context, 4),   Data<bool>(context, 5),          {}};
  return absl::OkStatus();
}

// The inputs and outputs of SlipstreamAddDeferred.
struct AddedRows {
  absl::Status Read(tensorflow::OpKernelContext* context,
                    const DeferredGradientsResource& resource) {
    TF_RETURN_IF_ERROR(
        CheckInputs(context, 1, "keys: [n], gradients: [n, d]", {{'d', resource.dim}}));
    keys = Data<int64_t>(context, 1);
    gradients = Data<float>(context, 2);
    n = context->input(1).NumElements();
    TF_RETURN_IF_ERROR(Allocate(context, 0, context->input(1).shape(), &indices));
    TF_RETURN_IF_ERROR(Allocate(context, 1, context->input(2).shape(), &sums));
    return OutputScalar(context, 2, resource.rule.by_movement && resource.rule.MayDefer());
  }

  const int64_t* keys = nullptr;
  const float* gradients = nullptr;
  int64_t n = 0;
  int64_t* indices = nullptr;
  float* sums = nullptr;
};

// Kernels lock the mutex of the resource of input 0. A kernel that runs out of memory (see
// MemoryChecked) fails before it changes the resource.
using DeferredLock = std::lock_guard<std::mutex>;

class CreateDeferredKernel : public tensorflow::OpKernel {
 public:
  explicit CreateDeferredKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(context, ToAbsl(ValidateDim(dim_, " of deferred gradients")));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    OP_REQUIRES_OK(
        context,
        OutputResource(context, DeferredGradientsRef(new DeferredGradientsResource(dim_))));
  }

 private:
  int64_t dim_ = 1;
};

// Returns the deferred sums after the last step. The caller holds the mutex. This function may wait
// for the device, because it does not run in a step.
//
// Device: ToHost and ToDevice copy a tensor if necessary and wait for the copy.
template <class Device>
absl::Status ReadBuffers(tensorflow::OpKernelContext* context, DeferredGradientsResource* resource,
                         DeferredContents* contents) {
  DeferredTensors on_host;
  for (auto part : kDeferredTensors) {
    TF_RETURN_IF_ERROR(Device::ToHost(context, resource->tensors.*part, &(on_host.*part)));
  }
  *contents = ExportDeferred(on_host.View(resource->dim), resource->rule.step);
  return absl::OkStatus();
}

// Replaces the buffers of the resource by new buffers of this capacity with these contents. The
// caller holds the mutex. This function may wait for the device, too. Device: as for ReadBuffers.
template <class Device>
absl::Status ReplaceBuffers(tensorflow::OpKernelContext* context, int64_t capacity,
                            const DeferredContents& contents, DeferredGradientsResource* resource) {
  tensorflow::AllocatorAttributes on_host;
  on_host.set_on_host(true);
  tensorflow::TensorShape keys, rows;
  TF_RETURN_IF_ERROR(tensorflow::TensorShape::BuildTensorShape({capacity}, &keys));
  TF_RETURN_IF_ERROR(tensorflow::TensorShape::BuildTensorShape({capacity, resource->dim}, &rows));
  DeferredTensors made, moved;
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, keys, &made.keys, on_host));
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, keys, &made.since, on_host));
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, rows, &made.sums, on_host));
  TF_RETURN_IF_ERROR(
      ToAbsl(ImportDeferred(contents, resource->rule.step, made.View(resource->dim))));
  for (auto part : kDeferredTensors) {
    TF_RETURN_IF_ERROR(Device::ToDevice(context, made.*part, &(moved.*part)));
  }
  resource->tensors = moved;
  return absl::OkStatus();
}

// Reads a scalar input. Returns InvalidArgument if it is not in [minimum, maximum].
inline absl::Status ReadFrom(tensorflow::OpKernelContext* context, int input, const char* name,
                             int64_t minimum, int64_t maximum, int64_t* value) {
  TF_RETURN_IF_ERROR(ReadScalar(context, input, name, value));
  if (*value >= minimum && *value <= maximum) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " is ", *value, "; expected an integer from ", minimum, " to ", maximum));
}

template <class Device>
absl::Status ConfigureDeferred(tensorflow::OpKernelContext* context,
                               DeferredGradientsResource* resource) {
  constexpr int64_t kAny = std::numeric_limits<int64_t>::max();
  const DeferredLock lock(resource->mutex);
  DeferralRule rule = resource->rule;
  int64_t capacity = 0;
  bool is_shadow = false;
  TF_RETURN_IF_ERROR(ReadFrom(context, 1, "capacity", 0, Device::kMaxCapacity, &capacity));
  TF_RETURN_IF_ERROR(ReadFrom(context, 2, "max_rows", 0, kAny, &rule.max_rows));
  TF_RETURN_IF_ERROR(ReadFrom(context, 3, "max_age", 1, kAny, &rule.max_age));
  TF_RETURN_IF_ERROR(ReadAttribute(context, "defers", &rule.defers));
  TF_RETURN_IF_ERROR(ReadAttribute(context, "by_movement", &rule.by_movement));
  TF_RETURN_IF_ERROR(ReadAttribute(context, "is_shadow", &is_shadow));
  if (capacity != resource->tensors.capacity()) {
    // Counted in the buffers, because on a GPU the counts of a step arrive after the step.
    DeferredContents contents;
    TF_RETURN_IF_ERROR(ReadBuffers<Device>(context, resource, &contents));
    TF_RETURN_IF_ERROR(
        ReplaceBuffers<Device>(context, std::max(capacity, contents.size()), contents, resource));
  }
  resource->rule = rule;
  resource->is_shadow = is_shadow;
  return absl::OkStatus();
}

template <class Device>
absl::Status FlushDeferred(tensorflow::OpKernelContext* context,
                           DeferredGradientsResource* resource) {
  const DeferredLock lock(resource->mutex);
  bool drops = false;
  TF_RETURN_IF_ERROR(ReadAttribute(context, "drops", &drops));
  StepCounts& counts = resource->counts;
  // Sums that a flush has made due were deferred by a real policy, not by a dry run.
  if (!drops || resource->rule.flushes) {
    resource->rule.flushes = counts.num_deferred > 0;
  } else if (counts.num_deferred > 0) {
    TF_RETURN_IF_ERROR(ReplaceBuffers<Device>(context, resource->tensors.capacity(), {}, resource));
    counts.flushed += counts.num_deferred;
    counts.without_gradient += counts.num_deferred;
    counts.num_deferred = 0;
    resource->bound.Reset(0, resource->rule.step);
  }
  return absl::OkStatus();
}

// All outputs are in host memory.
inline absl::Status OutputState(tensorflow::OpKernelContext* context,
                                DeferredGradientsResource* resource) {
  const DeferredLock lock(resource->mutex);
  const StepCounts& counts = resource->counts;
  const std::vector<int64_t> numbers = {counts.deferred,    counts.due_by_movement,
                                        counts.due_by_age,  counts.flushed,
                                        counts.over_budget, counts.without_gradient};
  TF_RETURN_IF_ERROR(Output(context, 0, numbers));
  TF_RETURN_IF_ERROR(OutputScalar(context, 1, counts.num_deferred));
  TF_RETURN_IF_ERROR(OutputScalar(context, 2, resource->tensors.capacity()));
  return OutputScalar(context, 3, resource->rule.flushes);
}

// All outputs are in host memory.
template <class Device>
absl::Status ExportDeferred(tensorflow::OpKernelContext* context,
                            DeferredGradientsResource* resource) {
  const DeferredLock lock(resource->mutex);
  DeferredContents contents;
  TF_RETURN_IF_ERROR(ReadBuffers<Device>(context, resource, &contents));
  TF_RETURN_IF_ERROR(Output(context, 0, contents.keys));
  TF_RETURN_IF_ERROR(Output(context, 1, contents.ages));
  return Output(context, 2, tensorflow::TensorShape({contents.size(), resource->dim}),
                contents.sums);
}

// All inputs are in host memory.
template <class Device>
absl::Status ImportDeferred(tensorflow::OpKernelContext* context,
                            DeferredGradientsResource* resource) {
  const DeferredLock lock(resource->mutex);
  TF_RETURN_IF_ERROR(
      CheckInputs(context, 1, "keys: [n], ages: [n], sums: [n, d]", {{'d', resource->dim}}));
  const int64_t n = context->input(1).NumElements();
  if (n > Device::kMaxCapacity) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the import has ", n, " deferred gradients; expected at most ", Device::kMaxCapacity));
  }
  const DeferredContents contents = {ValuesOf<int64_t>(context, 1),
                                     ValuesOf<int64_t>(context, 2),
                                     {},
                                     ValuesOf<float>(context, 3)};
  TF_RETURN_IF_ERROR(ReplaceBuffers<Device>(context, std::max(n, resource->tensors.capacity()),
                                            contents, resource));
  resource->counts.num_deferred = n;
  resource->bound.Reset(n, resource->rule.step);
  // The sums that a flush had made due were replaced.
  resource->rule.flushes = false;
  return absl::OkStatus();
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_DEFERRAL_DEFERRED_GRADIENTS_KERNELS_H_
