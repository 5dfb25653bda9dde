// Shared parts of the CPU and GPU kernels of the hot-key sketch: the resource and checks.
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
#include "cc_ops/tf/base/resource_kernel.h"
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

  // Number of counters in all rows of the sketch.
  int64_t num_counters() const { return int64_t{AccessSketch::kRows} << log2_width_; }
  HotKeySketch View() {
    return {{counters.flat<int64_t>().data(), log2_width_},
            owners.flat<int64_t>().data(),
            reinterpret_cast<uint64_t*>(challenges.flat<int64_t>().data())};
  }

  // Lock it to read or change the tensors.
  std::mutex mutex;
  // int64 [num_counters()] each, in device memory.
  tensorflow::Tensor counters, owners, challenges;

 private:
  const int log2_width_;
};

// Creates the sketch. Device is a class of static functions that call the functions of cc_ops/core
// on the CPU or launch them on a GPU, here and below:
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
    OP_REQUIRES(context, log2_width >= 1 && log2_width <= AccessSketch::kMaxLog2Width,
                absl::InvalidArgumentError(absl::StrCat("log2_width is ", log2_width,
                                                        "; expected an integer from 1 to ",
                                                        AccessSketch::kMaxLog2Width)));
    log2_width_ = static_cast<int>(log2_width);
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<HotKeysResource> resource(new HotKeysResource(log2_width_));
    const tensorflow::TensorShape shape({resource->num_counters()});
    for (tensorflow::Tensor* part :
         {&resource->counters, &resource->owners, &resource->challenges}) {
      OP_REQUIRES_OK(context, context->allocate_temp(tensorflow::DT_INT64, shape, part));
      const int64_t value = part == &resource->owners ? HotKeySketch::kNoOwner : 0;
      OP_REQUIRES_OK(context, Device::Fill(context, value, part));
    }
    OP_REQUIRES_OK(context, OutputResource(context, std::move(resource)));
  }

 private:
  int log2_width_ = 1;
};

struct CountAttributes {
  explicit CountAttributes(tensorflow::OpKernelConstruction* context) {
    OP_REQUIRES_OK(context, context->GetAttr("unit", &unit));
  }
  int64_t unit = 1;
};

// Kernels on the sketch of input 0. On a GPU all launches are in the order of one stream.
template <class Device>
absl::Status CountBatch(tensorflow::OpKernelContext* context, HotKeysResource* resource,
                        const CountAttributes& attributes) {
  const std::lock_guard<std::mutex> lock(resource->mutex);
  TF_RETURN_IF_ERROR(CheckInputs(context, 1, "keys: [n], counts: [n]"));
  const int64_t n = context->input(1).NumElements();
  if (n > HotKeySketch::kMaxBatch) {
    return absl::InvalidArgumentError(
        absl::StrCat("keys has ", n, " elements; expected at most ", HotKeySketch::kMaxBatch));
  }
  return Device::Count(context, resource->View(), Data<int64_t>(context, 1), Data<bool>(context, 2),
                       n, attributes.unit);
}

template <class Device>
absl::Status DecayCounts(tensorflow::OpKernelContext* context, HotKeysResource* resource) {
  const std::lock_guard<std::mutex> lock(resource->mutex);
  double factor = 0.0;
  TF_RETURN_IF_ERROR(ReadScalar(context, 1, "factor", &factor));
  if (!(factor >= 0.0 && factor <= 1.0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("factor is ", factor, "; expected a number from 0 to 1"));
  }
  const auto units = std::llround(factor * static_cast<double>(kNoDecay));
  return Device::Decay(context, resource->View().sketch, static_cast<uint64_t>(units));
}

template <class Device>
absl::Status OutputCandidates(tensorflow::OpKernelContext* context, HotKeysResource* resource) {
  const std::lock_guard<std::mutex> lock(resource->mutex);
  tensorflow::Tensor* keys = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(0, resource->owners.shape(), &keys));
  return Device::Copy(context, resource->owners, keys);
}

template <class Device>
absl::Status EstimateKeys(tensorflow::OpKernelContext* context, HotKeysResource* resource) {
  const std::lock_guard<std::mutex> lock(resource->mutex);
  TF_RETURN_IF_ERROR(CheckInputs(context, 1, "keys: [n]"));
  const tensorflow::TensorShape& shape = context->input(1).shape();
  int64_t* estimates = nullptr;
  TF_RETURN_IF_ERROR(Allocate(context, 0, shape, &estimates));
  return Device::Estimate(context, resource->View().sketch, Data<int64_t>(context, 1),
                          shape.num_elements(), estimates);
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_HOT_KEYS_HOT_KEY_KERNELS_H_
