// Resources of key tables, and functions that fill them, for CPU and GPU kernels.
#ifndef SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_TABLE_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_TABLE_KERNELS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace slipstream {

// An immutable table of keys, built on the CPU. A new table replaces it as a whole.
template <class Table>
struct KeyTableContent {
  std::string Describe() const { return absl::StrCat("a table of ", table.size(), " keys"); }

  Table table;
  tensorflow::Tensor on_device;  // uint8, a copy of the entries in GPU memory; unused on the CPU
};

using KeySetContent = KeyTableContent<KeySet>;
using KeySetResource = ReplacedResource<KeySetContent>;

// CPU kernels look up keys in the table itself. For GPU kernels see OnGpu in table_on_gpu.h.
struct OnCpu {
  template <class Content>
  static absl::Status CopyEntries(tensorflow::OpKernelContext*, Content*) {
    return absl::OkStatus();
  }
};

// Replaces the content of a resource by a table that build(&table) fills. Device: OnCpu or OnGpu.
// Returns the errors of `build`; the content is unchanged then.
template <class Device, class Table, class Resource, class Build>
absl::Status ReplaceTable(tensorflow::OpKernelContext* context, Resource* resource,
                          const Build& build) {
  auto content = std::make_shared<KeyTableContent<Table>>();
  TF_RETURN_IF_ERROR(ToAbsl(build(&content->table)));
  TF_RETURN_IF_ERROR(Device::CopyEntries(context, content.get()));
  resource->Replace(std::move(content));
  return absl::OkStatus();
}

// Replaces the content of a key set by input 1, which is in host memory.
template <class Device>
absl::Status AssignKeySet(tensorflow::OpKernelContext* context, KeySetResource* resource) {
  TF_RETURN_IF_ERROR(CheckInputs(context, 1, "keys: [n]"));
  return ReplaceTable<Device, KeySet>(context, resource, [&](KeySet* set) {
    return set->Build(Data<int64_t>(context, 1), context->input(1).NumElements());
  });
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_TABLE_KERNELS_H_
