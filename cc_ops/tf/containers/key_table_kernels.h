// What the CPU and the GPU kernels of key maps and key sets share: resources and how they are
// filled.
#ifndef SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_TABLE_KERNELS_H_
#define SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_TABLE_KERNELS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/containers/key_map.h"
#include "cc_ops/core/containers/key_set.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace slipstream {

// A table of keys that is never changed, only replaced. It is built on the CPU.
template <class Table>
struct KeyTableContent {
  std::string Describe() const { return absl::StrCat("a table of ", table.size(), " keys"); }

  Table table;
  tensorflow::Tensor on_device;  // uint8, a copy of the entries in GPU memory; unused on the CPU
};

using KeyMapContent = KeyTableContent<KeyMap>;
using KeyMapResource = ReplacedResource<KeyMapContent>;
using KeySetContent = KeyTableContent<KeySet>;
using KeySetResource = ReplacedResource<KeySetContent>;

// Where kernels of the CPU look up: in the table itself. See OnGpu in table_on_gpu.h.
struct OnCpu {
  template <class Content>
  static absl::Status CopyEntries(tensorflow::OpKernelContext*, Content*) {
    return absl::OkStatus();
  }
};

// Replaces the content of a resource by a table that `build(table)` fills.
template <class Device, class Table, class Resource, class Build>
absl::Status ReplaceTable(tensorflow::OpKernelContext* context, Resource* resource,
                          const Build& build) {
  auto content = std::make_shared<KeyTableContent<Table>>();
  TF_RETURN_IF_ERROR(ToAbsl(build(&content->table)));
  TF_RETURN_IF_ERROR(Device::CopyEntries(context, content.get()));
  resource->Replace(std::move(content));
  return absl::OkStatus();
}

// Inputs are in host memory, here and below.
template <class Device>
absl::Status AssignKeySet(tensorflow::OpKernelContext* context, KeySetResource* resource) {
  TF_RETURN_IF_ERROR(CheckInputs(context, 1, "keys: [n]"));
  return ReplaceTable<Device, KeySet>(context, resource, [&](KeySet* set) {
    return set->Build(Data<int64_t>(context, 1), context->input(1).NumElements());
  });
}

template <class Device>
absl::Status AssignKeyMap(tensorflow::OpKernelContext* context, KeyMapResource* resource) {
  const bool has_states = context->input(2).NumElements() > 0;
  const absl::Status status =
      CheckInputs(context, 1, has_states ? "keys: [n], states: [n]" : "keys: [n], states: [0]");
  if (!status.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(status.message(), "; none have states [0]"));
  }
  const uint8_t* states = has_states ? Data<uint8_t>(context, 2) : nullptr;
  return ReplaceTable<Device, KeyMap>(context, resource, [&](KeyMap* map) {
    return map->Build(Data<int64_t>(context, 1), states, context->input(1).NumElements());
  });
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_CONTAINERS_KEY_TABLE_KERNELS_H_
