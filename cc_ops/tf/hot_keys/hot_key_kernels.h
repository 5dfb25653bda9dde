// What the CPU and the GPU kernels of the sketch of hot keys share: resource and checks.
#ifndef SLIPSTREAM_CC_OPS_TF_HOT_KEYS_HOT_KEY_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_HOT_KEYS_HOT_KEY_KERNELS_H_

#include <cmath>
#include <cstdint>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/hot_keys/hot_key_sketch.h"
#include "cc_ops/tf/base/replaced_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

class HotKeysResource : public tensorflow::ResourceBase {
 public:
  explicit HotKeysResource(int log2_width) : log2_width_(log2_width) {}
  std::string DebugString() const override {
    return absl::StrCat("SlipstreamHotKeys of 2^", log2_width_, " counters a row");
  }

  int64_t num_counters() const { return int64_t{AccessSketch::kRows} << log2_width_; }
  HotKeySketch View() {
    return {{counters.flat<int64_t>().data(), log2_width_},
            owners.flat<int64_t>().data(),
            reinterpret_cast<uint64_t*>(challenges.flat<int64_t>().data())};
  }

  // Counts are added to and decayed by one step at a time.
  std::mutex mutex;
  // int64 [num_counters()] each, on the device.
  tensorflow::Tensor counters, owners, challenges;

 private:
  const int log2_width_;
};

using HotKeysRef = tensorflow::core::RefCountPtr<HotKeysResource>;

// The sketch of input 0; the kernel's own reference to it.
inline absl::Status FindHotKeys(tensorflow::OpKernelContext* context, HotKeysRef* resource) {
  if (context->input(0).dims() != 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "handle has shape ", context->input(0).shape().DebugString(), "; allowed: a scalar"));
  }
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, 0), resource);
}

// Inputs 1 and 2 of SlipstreamCountAccesses.
inline absl::Status CheckCounted(const tensorflow::Tensor& keys, const tensorflow::Tensor& counts) {
  if (keys.dims() != 1 || counts.shape() != keys.shape()) {
    return absl::InvalidArgumentError(
        absl::StrCat("keys and counts have shapes ", keys.shape().DebugString(), " and ",
                     counts.shape().DebugString(), "; allowed: [n] and [n]"));
  }
  if (keys.NumElements() <= HotKeySketch::kMaxBatch) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "there are ", keys.NumElements(), " keys; allowed: up to ", HotKeySketch::kMaxBatch));
}

// Input 1 of SlipstreamDecayAccesses, in units of 1 / kNoDecay.
inline absl::Status ReadFactor(tensorflow::OpKernelContext* context, uint64_t* factor) {
  const tensorflow::Tensor& given = context->input(1);
  if (given.dims() != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("factor has shape ", given.shape().DebugString(), "; allowed: a scalar"));
  }
  const double value = given.scalar<double>()();
  if (!(value >= 0.0 && value <= 1.0)) {
    return absl::InvalidArgumentError(absl::StrCat("factor is ", value, "; allowed: 0 to 1"));
  }
  *factor = static_cast<uint64_t>(std::llround(value * static_cast<double>(kNoDecay)));
  return absl::OkStatus();
}

// A kernel with a sketch as input 0, and one vector of keys besides.
inline absl::Status CheckKeys(const tensorflow::Tensor& keys) {
  if (keys.dims() == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("keys have shape ", keys.shape().DebugString(), "; allowed: a vector"));
}

// A kernel whose input 0 is a sketch. Launches of all on a GPU are in the order of one stream.
class HotKeysKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    HotKeysRef resource;
    OP_REQUIRES_OK(context, FindHotKeys(context, &resource));
    const std::lock_guard<std::mutex> lock(resource->mutex);
    OP_REQUIRES_OK(context, Run(context, resource.get()));
  }

 private:
  // The mutex is held.
  virtual absl::Status Run(tensorflow::OpKernelContext* context, HotKeysResource* resource) = 0;
};

// Of a Device, which calls or launches what cc_ops/core has for it:
//   Fill(context, value, tensor)    sets all values of an int64 tensor of the device
//   Copy(context, from, to)         copies a tensor of the device
//   Count(context, hot, keys, counts, n, unit), Decay(context, sketch, factor),
//   Estimate(context, sketch, keys, n, estimates)
template <class Device>
class CreateHotKeysKernel : public tensorflow::OpKernel {
 public:
  explicit CreateHotKeysKernel(tensorflow::OpKernelConstruction* context) : OpKernel(context) {
    int64_t log2_width = 0;
    OP_REQUIRES_OK(context, context->GetAttr("log2_width", &log2_width));
    OP_REQUIRES(
        context, log2_width >= 1 && log2_width <= AccessSketch::kMaxLog2Width,
        absl::InvalidArgumentError(absl::StrCat("log2_width is ", log2_width, "; allowed: 1 to ",
                                                AccessSketch::kMaxLog2Width)));
    log2_width_ = static_cast<int>(log2_width);
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    HotKeysRef resource(new HotKeysResource(log2_width_));
    const tensorflow::TensorShape shape({resource->num_counters()});
    for (tensorflow::Tensor* part :
         {&resource->counters, &resource->owners, &resource->challenges}) {
      OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_INT64, shape, part));
      const int64_t value = part == &resource->owners ? HotKeySketch::kNobody : 0;
      OP_REQUIRES_OK(context, Device::Fill(context, value, part));
    }
    OP_REQUIRES_OK(context, OutputResource(context, std::move(resource)));
  }

 private:
  int log2_width_ = 1;
};

template <class Device>
class CountAccessesKernel : public HotKeysKernel {
 public:
  explicit CountAccessesKernel(tensorflow::OpKernelConstruction* context) : HotKeysKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("unit", &unit_));
  }

 private:
  absl::Status Run(tensorflow::OpKernelContext* context, HotKeysResource* resource) override {
    const tensorflow::Tensor &keys = context->input(1), &counts = context->input(2);
    TF_RETURN_IF_ERROR(CheckCounted(keys, counts));
    return Device::Count(context, resource->View(), keys.flat<int64_t>().data(),
                         counts.flat<bool>().data(), keys.NumElements(), unit_);
  }

  int64_t unit_ = 1;
};

template <class Device>
class DecayAccessesKernel : public HotKeysKernel {
 public:
  using HotKeysKernel::HotKeysKernel;

 private:
  absl::Status Run(tensorflow::OpKernelContext* context, HotKeysResource* resource) override {
    uint64_t factor = 0;
    TF_RETURN_IF_ERROR(ReadFactor(context, &factor));
    return Device::Decay(context, resource->View().sketch, factor);
  }
};

template <class Device>
class HotKeyCandidatesKernel : public HotKeysKernel {
 public:
  using HotKeysKernel::HotKeysKernel;

 private:
  absl::Status Run(tensorflow::OpKernelContext* context, HotKeysResource* resource) override {
    tensorflow::Tensor* keys = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, resource->owners.shape(), &keys));
    return Device::Copy(context, resource->owners, keys);
  }
};

template <class Device>
class EstimateAccessesKernel : public HotKeysKernel {
 public:
  using HotKeysKernel::HotKeysKernel;

 private:
  absl::Status Run(tensorflow::OpKernelContext* context, HotKeysResource* resource) override {
    const tensorflow::Tensor& keys = context->input(1);
    TF_RETURN_IF_ERROR(CheckKeys(keys));
    tensorflow::Tensor* estimates = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, keys.shape(), &estimates));
    return Device::Estimate(context, resource->View().sketch, keys.flat<int64_t>().data(),
                            keys.NumElements(), estimates->flat<int64_t>().data());
  }
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_HOT_KEYS_HOT_KEY_KERNELS_H_
