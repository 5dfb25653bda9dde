// What the CPU and the GPU kernels of held sums share: resource, checks, and what happens between
// steps.
#ifndef SLIPSTREAM_CC_OPS_TF_DEFERRAL_HELD_SUMS_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_DEFERRAL_HELD_SUMS_KERNELS_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <mutex>
#include <new>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/base/row_dim.h"
#include "cc_ops/core/deferral/held_sums.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/replaced_resource.h"
#include "cc_ops/tf/containers/key_set_kernels.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

// Of one number of places; copies share the memory.
struct HeldBuffers {
  tensorflow::Tensor keys{tensorflow::DT_INT64, tensorflow::TensorShape({0})};     // [capacity]
  tensorflow::Tensor since{tensorflow::DT_INT64, tensorflow::TensorShape({0})};    // [capacity]
  tensorflow::Tensor sums{tensorflow::DT_FLOAT, tensorflow::TensorShape({0, 0})};  // and by dim

  int64_t capacity() const { return keys.NumElements(); }
  HeldSums View(int64_t dim) {
    return {keys.flat<int64_t>().data(), since.flat<int64_t>().data(), sums.flat<float>().data(),
            capacity(), dim};
  }
};

class HeldSumsResource : public tensorflow::ResourceBase {
 public:
  explicit HeldSumsResource(int64_t dim) : dim(dim) {}
  std::string DebugString() const override { return absl::StrCat("SlipstreamHeldSums, dim ", dim); }

  // What a step did; the caller holds the mutex.
  void Add(const HeldCounts& step) {
    counts.held += step.held;
    counts.due_by_movement += step.due_by_movement;
    counts.due_by_age += step.due_by_age;
    counts.flushed += step.flushed;
    counts.refused += step.refused;
    counts.left_alone += step.left_alone;
    counts.pending = step.pending;
  }

  const int64_t dim;
  std::mutex mutex;  // of all below
  HeldBuffers buffers;
  // `step` is that of the last one; `lets_go` and the rest are of the next one.
  HoldRule rule = {0, 1, 0, false, false, true};
  bool is_shadow = false;
  // So far; but `pending` is after the last step, and `leaving` is not used.
  HeldCounts counts = {};
};

using HeldSumsRef = tensorflow::core::RefCountPtr<HeldSumsResource>;

// The sums of input 0; the kernel's own reference to them.
inline absl::Status FindHeldSums(tensorflow::OpKernelContext* context, HeldSumsRef* resource) {
  if (context->input(0).dims() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "handle has shape ", context->input(0).shape().DebugString(), "; allowed: a scalar"));
  }
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

// Of all inputs of SlipstreamTakeDue.
inline absl::Status CheckTaken(tensorflow::OpKernelContext* context, int64_t dim) {
  const tensorflow::Tensor &keys = context->input(2), &places = context->input(3),
                           &may_wait = context->input(5);
  TF_RETURN_IF_ERROR(CheckRows(keys, context->input(4), dim));
  if (places.shape() == keys.shape() && may_wait.shape() == keys.shape()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "places and may_wait have shapes ", places.shape().DebugString(), " and ",
      may_wait.shape().DebugString(), "; allowed: that of the keys, ", keys.shape().DebugString()));
}

template <class T>
absl::Status OutputScalar(tensorflow::OpKernelContext* context, int index, T value) {
  tensorflow::Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(index, tensorflow::TensorShape({}), &output));
  output->scalar<T>()() = value;
  return absl::OkStatus();
}

// A kernel whose input 0 are sums. If it runs out of memory (see MemoryChecked), then before it
// changes them.
class HeldSumsKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    HeldSumsRef resource;
    OP_REQUIRES_OK(context, FindHeldSums(context, &resource));
    const std::lock_guard<std::mutex> lock(resource->mutex);
    OP_REQUIRES_OK(context, Run(context, resource.get()));
  }

 private:
  // The mutex is held.
  virtual absl::Status Run(tensorflow::OpKernelContext* context, HeldSumsResource* resource) = 0;
};

class CreateHeldSumsKernel : public tensorflow::OpKernel {
 public:
  explicit CreateHeldSumsKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("dim", &dim_));
    OP_REQUIRES_OK(context, ToAbsl(ValidateDim(dim_, " of held sums")));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    OP_REQUIRES_OK(context, OutputResource(context, HeldSumsRef(new HeldSumsResource(dim_))));
  }

 private:
  int64_t dim_ = 1;
};

// Gives the sums buffers of `capacity` places that hold what `before`, in host memory, holds. The
// caller holds the mutex, and sees to it that there is room. No step's work: it may wait for the
// device.
//
// Device: ToHost and ToDevice copy a tensor, where that is needed, and wait for it.
template <class Device>
absl::Status ReplaceBuffers(tensorflow::OpKernelContext* context, int64_t capacity,
                            HeldBuffers before, HeldSumsResource* resource) {
  tensorflow::AllocatorAttributes on_host;
  on_host.set_on_host(true);
  tensorflow::TensorShape places, rows;
  TF_RETURN_IF_ERROR(tensorflow::TensorShape::BuildTensorShape({capacity}, &places));
  TF_RETURN_IF_ERROR(tensorflow::TensorShape::BuildTensorShape({capacity, resource->dim}, &rows));
  HeldBuffers made, moved;
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, places, &made.keys, on_host));
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_INT64, places, &made.since, on_host));
  TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, rows, &made.sums, on_host));
  TF_RETURN_IF_ERROR(ToAbsl(CopyHeld(before.View(resource->dim), made.View(resource->dim))));
  TF_RETURN_IF_ERROR(Device::ToDevice(context, made.keys, &moved.keys));
  TF_RETURN_IF_ERROR(Device::ToDevice(context, made.since, &moved.since));
  TF_RETURN_IF_ERROR(Device::ToDevice(context, made.sums, &moved.sums));
  resource->buffers = moved;
  return absl::OkStatus();
}

template <class Device>
absl::Status BuffersOnHost(tensorflow::OpKernelContext* context, const HeldBuffers& buffers,
                           HeldBuffers* on_host) {
  TF_RETURN_IF_ERROR(Device::ToHost(context, buffers.keys, &on_host->keys));
  TF_RETURN_IF_ERROR(Device::ToHost(context, buffers.since, &on_host->since));
  return Device::ToHost(context, buffers.sums, &on_host->sums);
}

// Makes buffers of another number of places, or of more if more sums are held. These are counted in
// the buffers: what steps count a GPU knows only after them.
template <class Device>
absl::Status Resize(tensorflow::OpKernelContext* context, int64_t capacity,
                    HeldSumsResource* resource) {
  if (capacity == resource->buffers.capacity()) return absl::OkStatus();
  HeldBuffers before;
  TF_RETURN_IF_ERROR(BuffersOnHost<Device>(context, resource->buffers, &before));
  capacity = std::max(capacity, CountHeld(before.View(resource->dim)));
  if (capacity == resource->buffers.capacity()) return absl::OkStatus();
  return ReplaceBuffers<Device>(context, capacity, before, resource);
}

template <class Device>
class ConfigureHeldSumsKernel : public tensorflow::OpKernel {
 public:
  explicit ConfigureHeldSumsKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("defers", &defers_));
    OP_REQUIRES_OK(context, context->GetAttr("by_movement", &by_movement_));
    OP_REQUIRES_OK(context, context->GetAttr("is_shadow", &is_shadow_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    HeldSumsRef resource;
    OP_REQUIRES_OK(context, FindHeldSums(context, &resource));
    int64_t capacity = 0, max_rows = 0, max_age = 0;
    OP_REQUIRES_OK(context, Read(context, 1, "capacity", 0, Device::kMaxPlaces, &capacity));
    OP_REQUIRES_OK(context, Read(context, 2, "max_rows", 0, kAny, &max_rows));
    OP_REQUIRES_OK(context, Read(context, 3, "max_age", 1, kAny, &max_age));
    const std::lock_guard<std::mutex> lock(resource->mutex);
    OP_REQUIRES_OK(context, Resize<Device>(context, capacity, resource.get()));
    HoldRule& rule = resource->rule;
    rule = {rule.step, max_age, max_rows, defers_, rule.lets_go, by_movement_};
    resource->is_shadow = is_shadow_;
  }

 private:
  static constexpr int64_t kAny = std::numeric_limits<int64_t>::max();

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
class LetGoHeldSumsKernel : public tensorflow::OpKernel {
 public:
  explicit LetGoHeldSumsKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("drops", &drops_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    HeldSumsRef resource;
    OP_REQUIRES_OK(context, FindHeldSums(context, &resource));
    const std::lock_guard<std::mutex> lock(resource->mutex);
    HeldCounts& counts = resource->counts;
    // What is on its way out was held in earnest, whatever the policy is now.
    if (!drops_ || resource->rule.lets_go) {
      resource->rule.lets_go = counts.pending > 0;
    } else if (counts.pending > 0) {
      OP_REQUIRES_OK(context, ReplaceBuffers<Device>(context, resource->buffers.capacity(),
                                                     HeldBuffers(), resource.get()));
      counts.flushed += counts.pending;
      counts.left_alone += counts.pending;
      counts.pending = 0;
    }
  }

 private:
  bool drops_ = false;
};

// All outputs are in host memory.
class HeldSumsStateKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    HeldSumsRef resource;
    OP_REQUIRES_OK(context, FindHeldSums(context, &resource));
    const std::lock_guard<std::mutex> lock(resource->mutex);
    const HeldCounts& counts = resource->counts;
    const std::vector<int64_t> numbers = {counts.held,       counts.due_by_movement,
                                          counts.due_by_age, counts.flushed,
                                          counts.refused,    counts.left_alone};
    OP_REQUIRES_OK(context, Output(context, 0, tensorflow::TensorShape({6}), numbers));
    OP_REQUIRES_OK(context, OutputScalar(context, 1, counts.pending));
    OP_REQUIRES_OK(context, OutputScalar(context, 2, resource->buffers.capacity()));
    OP_REQUIRES_OK(context, OutputScalar(context, 3, resource->rule.lets_go));
  }
};

// All outputs are in host memory.
template <class Device>
class ExportHeldSumsKernel : public HeldSumsKernel {
 public:
  using HeldSumsKernel::HeldSumsKernel;

 private:
  absl::Status Run(tensorflow::OpKernelContext* context, HeldSumsResource* resource) override {
    HeldBuffers on_host;
    TF_RETURN_IF_ERROR(BuffersOnHost<Device>(context, resource->buffers, &on_host));
    const HeldSums held = on_host.View(resource->dim);
    std::vector<int64_t> places;
    for (int64_t p = 0; p < held.capacity; ++p) {
      if (held.keys[p] != HeldSums::kFree) places.push_back(p);
    }
    std::sort(places.begin(), places.end(), [&](int64_t a, int64_t b) {
      return held.since[a] != held.since[b] ? held.since[a] < held.since[b]
                                            : held.keys[a] < held.keys[b];
    });
    std::vector<int64_t> keys, ages;
    std::vector<float> sums;
    for (int64_t p : places) {
      keys.push_back(held.keys[p]);
      ages.push_back(resource->rule.step - held.since[p]);
      sums.insert(sums.end(), held.sums + p * held.dim, held.sums + (p + 1) * held.dim);
    }
    const int64_t n = static_cast<int64_t>(keys.size());
    TF_RETURN_IF_ERROR(Output(context, 0, tensorflow::TensorShape({n}), keys));
    TF_RETURN_IF_ERROR(Output(context, 1, tensorflow::TensorShape({n}), ages));
    TF_RETURN_IF_ERROR(Output(context, 2, tensorflow::TensorShape({n, held.dim}), sums));
    return absl::OkStatus();
  }
};

// All inputs are in host memory.
template <class Device>
class ImportHeldSumsKernel : public HeldSumsKernel {
 public:
  using HeldSumsKernel::HeldSumsKernel;

 private:
  // In steps: longer than any training.
  static constexpr int64_t kMostAge = int64_t{1} << 48;

  absl::Status Run(tensorflow::OpKernelContext* context, HeldSumsResource* resource) override {
    const tensorflow::Tensor &keys = context->input(1), &ages = context->input(2);
    TF_RETURN_IF_ERROR(CheckRows(keys, context->input(3), resource->dim));
    TF_RETURN_IF_ERROR(CheckSums(keys, ages, context->input(3)));
    const int64_t n = keys.NumElements();
    if (n > Device::kMaxPlaces) {
      return absl::InvalidArgumentError(
          absl::StrCat("there are ", n, " sums; allowed: up to ", Device::kMaxPlaces));
    }
    HeldBuffers given;
    given.keys = keys;
    given.sums = context->input(3);
    tensorflow::AllocatorAttributes on_host;
    on_host.set_on_host(true);
    TF_RETURN_IF_ERROR(
        context->allocate_temp(tensorflow::DT_INT64, keys.shape(), &given.since, on_host));
    for (int64_t i = 0; i < n; ++i) {
      given.since.flat<int64_t>()(i) = resource->rule.step - ages.flat<int64_t>()(i);
    }
    const int64_t capacity = std::max(n, resource->buffers.capacity());
    TF_RETURN_IF_ERROR(ReplaceBuffers<Device>(context, capacity, given, resource));
    resource->counts.pending = n;
    // What was on its way out is gone.
    resource->rule.lets_go = false;
    return absl::OkStatus();
  }

  static absl::Status CheckSums(const tensorflow::Tensor& keys, const tensorflow::Tensor& ages,
                                const tensorflow::Tensor& sums) {
    if (ages.shape() != keys.shape()) {
      return absl::InvalidArgumentError(absl::StrCat("ages has shape ", ages.shape().DebugString(),
                                                     "; allowed: that of the keys, ",
                                                     keys.shape().DebugString()));
    }
    const auto flat = keys.flat<int64_t>();
    std::vector<int64_t> sorted(flat.data(), flat.data() + flat.size());
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("key ", *twice, " comes twice; allowed: each once"));
    }
    if (!sorted.empty() && sorted.front() == HeldSums::kFree) {
      return absl::InvalidArgumentError(
          absl::StrCat("key ", HeldSums::kFree, " cannot be held; allowed: all others"));
    }
    for (int64_t i = 0; i < ages.NumElements(); ++i) {
      const int64_t age = ages.flat<int64_t>()(i);
      if (age >= 0 && age <= kMostAge) continue;
      return absl::InvalidArgumentError(absl::StrCat("age ", age, " of key ", flat(i),
                                                     ", at place ", i, "; allowed: from 0 to ",
                                                     kMostAge, ". Nothing was replaced"));
    }
    const auto values = sums.matrix<float>();
    for (int64_t i = 0; i < values.dimension(0); ++i) {
      for (int64_t j = 0; j < values.dimension(1); ++j) {
        if (std::isfinite(values(i, j))) continue;
        return absl::InvalidArgumentError(absl::StrCat("sum of key ", flat(i), ", at place ", i,
                                                       ", has ", values(i, j),
                                                       "; allowed: finite values. Nothing was "
                                                       "replaced"));
      }
    }
    return absl::OkStatus();
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_DEFERRAL_HELD_SUMS_KERNELS_H_
