// Kernels of resources, and resources with immutable content. Steps read the content while another
// step may replace it: a running step keeps the content it started with.
#ifndef SLIPSTREAM_CC_OPS_TF_BASE_RESOURCE_KERNEL_H_
#define SLIPSTREAM_CC_OPS_TF_BASE_RESOURCE_KERNEL_H_

#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_handle.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/tensor_shape.h"
#include "tensorflow/core/platform/refcount.h"

namespace slipstream {

// A resource with content that is replaced as a whole. Content: a default-constructible class with
// `std::string Describe() const`.
template <class Content>
class ReplacedResource : public tensorflow::ResourceBase {
 public:
  std::string DebugString() const override { return content()->Describe(); }
  std::shared_ptr<const Content> content() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return content_;
  }
  void Replace(std::shared_ptr<const Content> content) {
    const std::lock_guard<std::mutex> lock(mutex_);
    content_ = std::move(content);
  }

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<const Content> content_ = std::make_shared<Content>();
};

// Outputs the handle of a new resource as output 0. The function is the same on all devices: only
// the memory type of the handle differs.
template <class Resource>
absl::Status OutputResource(tensorflow::OpKernelContext* context,
                            tensorflow::core::RefCountPtr<Resource> resource) {
  tensorflow::Tensor* handle = nullptr;
  tensorflow::AllocatorAttributes on_host;
  on_host.set_on_host(true);
  TF_RETURN_IF_ERROR(context->allocate_output(0, tensorflow::TensorShape({}), &handle, on_host));
  // The handle owns the reference.
  handle->scalar<tensorflow::ResourceHandle>()() =
      tensorflow::ResourceHandle::MakeRefCountingHandle(resource.release(),
                                                        context->device()->name());
  return absl::OkStatus();
}

// Returns a reference to the resource of an input, which must be a single handle.
template <class Resource>
absl::Status FindResource(tensorflow::OpKernelContext* context, int input,
                          tensorflow::core::RefCountPtr<Resource>* resource,
                          const char* shape = "handle: []") {
  // TensorFlow reads the first handle of a tensor without checking the number of handles.
  TF_RETURN_IF_ERROR(CheckInputs(context, input, shape));
  return tensorflow::LookupResource(context, tensorflow::HandleFromInput(context, input), resource);
}

// Returns the current content of a ReplacedResource.
template <class Content>
absl::Status FindContent(tensorflow::OpKernelContext* context, int input,
                         std::shared_ptr<const Content>* content,
                         const char* shape = "handle: []") {
  tensorflow::core::RefCountPtr<ReplacedResource<Content>> resource;
  TF_RETURN_IF_ERROR(FindResource(context, input, &resource, shape));
  *content = resource->content();
  return absl::OkStatus();
}

// A kernel without attributes.
template <absl::Status (*kRun)(tensorflow::OpKernelContext*)>
class FunctionKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    OP_REQUIRES_OK(context, kRun(context));
  }
};

// Creates an empty resource.
template <class Resource>
absl::Status CreateResource(tensorflow::OpKernelContext* context) {
  return OutputResource(context, tensorflow::core::RefCountPtr<Resource>(new Resource));
}

// A kernel on the resource of input 0. kRun is one of
//   absl::Status kRun(OpKernelContext*, Resource*)
//   absl::Status kRun(OpKernelContext*, Resource*, const Attributes&)
// where the constructor of Attributes takes an OpKernelConstruction* and reads the attributes once.
template <auto kRun>
class ResourceKernel;

template <class Resource, absl::Status (*kRun)(tensorflow::OpKernelContext*, Resource*)>
class ResourceKernel<kRun> : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<Resource> resource;
    OP_REQUIRES_OK(context, FindResource(context, 0, &resource));
    OP_REQUIRES_OK(context, kRun(context, resource.get()));
  }
};

template <class Resource, class Attributes,
          absl::Status (*kRun)(tensorflow::OpKernelContext*, Resource*, const Attributes&)>
class ResourceKernel<kRun> : public tensorflow::OpKernel {
 public:
  explicit ResourceKernel(tensorflow::OpKernelConstruction* context)
      : OpKernel(context), attributes_(context) {}

  void Compute(tensorflow::OpKernelContext* context) override {
    tensorflow::core::RefCountPtr<Resource> resource;
    OP_REQUIRES_OK(context, FindResource(context, 0, &resource));
    OP_REQUIRES_OK(context, kRun(context, resource.get(), attributes_));
  }

 private:
  const Attributes attributes_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_BASE_RESOURCE_KERNEL_H_
