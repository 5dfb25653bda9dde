// What the CPU and the GPU kernels of deferred gradients share: resource, checks, and what happens
// between steps.
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
#include "cc_ops/tf/base/replaced_resource.h"
#include "cc_ops/tf/containers/key_set_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

// The buffers; copies share the memory.
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

class DeferredGradientsResource : public tensorflow::ResourceBase {
 public:
  explicit DeferredGradientsResource(int64_t dim) : dim(dim) {}
  std::string DebugString() const override {
    return absl::StrCat("SlipstreamDeferredGradients, dim ", dim);
  }

  // What a step did; the caller holds the mutex.
  void Add(const StepCounts& step) {
    counts.Add(step);
    counts.num_deferred = step.num_deferred;
  }

  const int64_t dim;
  std::mutex mutex;  // of all below
  DeferredTensors tensors;
  // `step` is that of the last one; `flushes` and the rest are of the next one.
  DeferralRule rule;
  bool is_shadow = false;
  // So far. On a GPU a step's arrive after it: they are shown, and nothing is laid out by them.
  StepCounts counts;
};

using DeferredGradientsRef = tensorflow::core::RefCountPtr<DeferredGradientsResource>;

// The resource of input 0; the kernel's own reference to it.
inline absl::Status FindDeferred(tensorflow::OpKernelContext* context,
                                 DeferredGradientsRef* resource) {
  TF_RETURN_IF_ERROR(RequireRank(context, 0, "handle", 0));
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), resource);
}

// Of inputs `keys` [n] and `rows` [n, dim].
inline absl::Status CheckRows(const tensorflow::Tensor& keys, const tensorflow::Tensor& rows,
                              int64_t dim) {
  if (keys.dims() == 1 && rows.dims() == 2 && rows.dim_size(0) == keys.dim_size(0) &&
      rows.dim_size(1) == dim) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("keys and their rows have shapes ", keys.shape().DebugString(), " and ",
                   rows.shape().DebugString(), "; allowed: [n] and [n, ", dim, "]"));
}

// The inputs of SlipstreamTakeDue, but for the saturated rows.
inline absl::Status ReadStep(tensorflow::OpKernelContext* context, int64_t dim, StepRows* rows) {
  const tensorflow::Tensor &keys = context->input(2), &indices = context->input(3),
                           &sums = context->input(4), &may_wait = context->input(5);
  TF_RETURN_IF_ERROR(CheckRows(keys, sums, dim));
  if (indices.shape() != keys.shape() || may_wait.shape() != keys.shape()) {
    return absl::InvalidArgumentError(
        absl::StrCat("indices and may_wait have shapes ", indices.shape().DebugString(), " and ",
                     may_wait.shape().DebugString(), "; allowed: that of the keys, ",
                     keys.shape().DebugString()));
  }
  *rows = {keys.flat<int64_t>().data(),    keys.NumElements(),
           indices.flat<int64_t>().data(), sums.flat<float>().data(),
           may_wait.flat<bool>().data(),   {}};
  return absl::OkStatus();
}

// A kernel on the resource of input 0. If it runs out of memory (see MemoryChecked), then before it
// changes that.
class DeferredKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    DeferredGradientsRef resource;
    OP_REQUIRES_OK(context, FindDeferred(context, &resource));
    const std::lock_guard<std::mutex> lock(resource->mutex);
    OP_REQUIRES_OK(context, Run(context, resource.get()));
  }

 private:
  // The mutex is held.
  virtual absl::Status Run(tensorflow::OpKernelContext* context,
                           DeferredGradientsResource* resource) = 0;
};

// One without attributes.
template <absl::Status (*kRun)(tensorflow::OpKernelContext*, DeferredGradientsResource*)>
class DeferredFunctionKernel : public DeferredKernel {
 public:
  using DeferredKernel::DeferredKernel;

 private:
  absl::Status Run(tensorflow::OpKernelContext* context,
                   DeferredGradientsResource* resource) override {
    return kRun(context, resource);
  }
};

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

// What is deferred after the last step. The caller holds the mutex. No step's work: it may wait for
// the device.
//
// Device: ToHost and ToDevice copy a tensor, where that is needed, and wait for it.
template <class Device>
absl::Status ReadBuffers(tensorflow::OpKernelContext* context, DeferredGradientsResource* resource,
                         DeferredContents* contents) {
  DeferredTensors on_host;
  TF_RETURN_IF_ERROR(Device::ToHost(context, resource->tensors.keys, &on_host.keys));
  TF_RETURN_IF_ERROR(Device::ToHost(context, resource->tensors.since, &on_host.since));
  TF_RETURN_IF_ERROR(Device::ToHost(context, resource->tensors.sums, &on_host.sums));
  *contents = ExportDeferred(on_host.View(resource->dim), resource->rule.step);
  return absl::OkStatus();
}

// Gives the resource new buffers with these contents; as ReadBuffers.
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
  TF_RETURN_IF_ERROR(Device::ToDevice(context, made.keys, &moved.keys));
  TF_RETURN_IF_ERROR(Device::ToDevice(context, made.since, &moved.since));
  TF_RETURN_IF_ERROR(Device::ToDevice(context, made.sums, &moved.sums));
  resource->tensors = moved;
  return absl::OkStatus();
}

template <class Device>
class ConfigureDeferredKernel : public DeferredKernel {
 public:
  explicit ConfigureDeferredKernel(tensorflow::OpKernelConstruction* context)
      : DeferredKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("defers", &defers_));
    OP_REQUIRES_OK(context, context->GetAttr("by_movement", &by_movement_));
    OP_REQUIRES_OK(context, context->GetAttr("is_shadow", &is_shadow_));
  }

 private:
  static constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

  absl::Status Run(tensorflow::OpKernelContext* context,
                   DeferredGradientsResource* resource) override {
    int64_t capacity = 0, max_rows = 0, max_age = 0;
    TF_RETURN_IF_ERROR(Read(context, 1, "capacity", 0, Device::kMaxCapacity, &capacity));
    TF_RETURN_IF_ERROR(Read(context, 2, "max_rows", 0, kAny, &max_rows));
    TF_RETURN_IF_ERROR(Read(context, 3, "max_age", 1, kAny, &max_age));
    if (capacity != resource->tensors.capacity()) {
      // Counted in the buffers: what steps count a GPU knows only after them.
      DeferredContents contents;
      TF_RETURN_IF_ERROR(ReadBuffers<Device>(context, resource, &contents));
      TF_RETURN_IF_ERROR(
          ReplaceBuffers<Device>(context, std::max(capacity, contents.size()), contents, resource));
    }
    DeferralRule& rule = resource->rule;
    rule = {rule.step, max_age, max_rows, defers_, rule.flushes, by_movement_};
    resource->is_shadow = is_shadow_;
    return absl::OkStatus();
  }

  static absl::Status Read(tensorflow::OpKernelContext* context, int input, const char* name,
                           int64_t least, int64_t most, int64_t* value) {
    TF_RETURN_IF_ERROR(ReadScalar(context, input, name, value));
    if (*value >= least && *value <= most) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(name, " is ", *value, "; allowed: ", least, " to ", most));
  }

  bool defers_ = false, by_movement_ = true, is_shadow_ = false;
};

template <class Device>
class FlushDeferredKernel : public DeferredKernel {
 public:
  explicit FlushDeferredKernel(tensorflow::OpKernelConstruction* context)
      : DeferredKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("drops", &drops_));
  }

 private:
  absl::Status Run(tensorflow::OpKernelContext* context,
                   DeferredGradientsResource* resource) override {
    StepCounts& counts = resource->counts;
    // What is on its way out was deferred in earnest, whatever the policy is now.
    if (!drops_ || resource->rule.flushes) {
      resource->rule.flushes = counts.num_deferred > 0;
    } else if (counts.num_deferred > 0) {
      TF_RETURN_IF_ERROR(
          ReplaceBuffers<Device>(context, resource->tensors.capacity(), {}, resource));
      counts.flushed += counts.num_deferred;
      counts.without_gradient += counts.num_deferred;
      counts.num_deferred = 0;
    }
    return absl::OkStatus();
  }

  bool drops_ = false;
};

// All outputs are in host memory.
inline absl::Status OutputState(tensorflow::OpKernelContext* context,
                                DeferredGradientsResource* resource) {
  const StepCounts& counts = resource->counts;
  const std::vector<int64_t> numbers = {counts.deferred,    counts.due_by_movement,
                                        counts.due_by_age,  counts.flushed,
                                        counts.over_budget, counts.without_gradient};
  TF_RETURN_IF_ERROR(Output(context, 0, tensorflow::TensorShape({6}), numbers));
  TF_RETURN_IF_ERROR(OutputScalar(context, 1, counts.num_deferred));
  TF_RETURN_IF_ERROR(OutputScalar(context, 2, resource->tensors.capacity()));
  return OutputScalar(context, 3, resource->rule.flushes);
}

// All outputs are in host memory.
template <class Device>
absl::Status OutputDeferred(tensorflow::OpKernelContext* context,
                            DeferredGradientsResource* resource) {
  DeferredContents contents;
  TF_RETURN_IF_ERROR(ReadBuffers<Device>(context, resource, &contents));
  const int64_t n = contents.size();
  TF_RETURN_IF_ERROR(Output(context, 0, tensorflow::TensorShape({n}), contents.keys));
  TF_RETURN_IF_ERROR(Output(context, 1, tensorflow::TensorShape({n}), contents.ages));
  return Output(context, 2, tensorflow::TensorShape({n, resource->dim}), contents.sums);
}

// All inputs are in host memory.
template <class Device>
absl::Status InputDeferred(tensorflow::OpKernelContext* context,
                           DeferredGradientsResource* resource) {
  const tensorflow::Tensor &keys = context->input(1), &ages = context->input(2),
                           &sums = context->input(3);
  TF_RETURN_IF_ERROR(CheckRows(keys, sums, resource->dim));
  if (ages.shape() != keys.shape()) {
    return absl::InvalidArgumentError(absl::StrCat("ages has shape ", ages.shape().DebugString(),
                                                   "; allowed: that of the keys, ",
                                                   keys.shape().DebugString()));
  }
  const int64_t n = keys.NumElements();
  if (n > Device::kMaxCapacity) {
    return absl::InvalidArgumentError(absl::StrCat(
        "there are ", n, " deferred gradients; allowed: up to ", Device::kMaxCapacity));
  }
  const DeferredContents contents = {
      ValuesOf<int64_t>(keys), ValuesOf<int64_t>(ages), {}, ValuesOf<float>(sums)};
  TF_RETURN_IF_ERROR(ReplaceBuffers<Device>(context, std::max(n, resource->tensors.capacity()),
                                            contents, resource));
  resource->counts.num_deferred = n;
  // What was on its way out is gone.
  resource->rule.flushes = false;
  return absl::OkStatus();
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_DEFERRAL_DEFERRED_GRADIENTS_KERNELS_H_
