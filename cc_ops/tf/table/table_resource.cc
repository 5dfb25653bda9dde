#include "cc_ops/tf/table/table_resource.h"

#include <set>
#include <utility>

namespace slipstream {
namespace tf = tensorflow;

void TableResource::Release() {
  is_released_ = true;
  const ExclusiveLock lock(table_.mutex());
  try {
    [[maybe_unused]] const Status status = table_.Import(TableContents());
  } catch (const std::bad_alloc&) {  // The last handle frees the memory.
  }
}

absl::Status TableResource::CheckNotReleased() const {
  if (!is_released_) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("table '", table_.options().name,
                   "' was deleted with its layer or store; expected a table that exists. Keep a "
                   "reference to the layer or store while its tf.functions are used"));
}

absl::Status ReadTables(tf::OpKernelContext* c, TableResources* resources,
                        std::vector<EmbeddingTable*>* tables) {
  tf::OpInputList handles;
  TF_RETURN_IF_ERROR(c->input_list("handles", &handles));
  std::set<EmbeddingTable*> distinct;
  for (const tf::Tensor& handle : handles) {
    if (handle.dims() != 0) {
      return absl::InvalidArgumentError(absl::StrCat("handles[", tables->size(), "] has shape ",
                                                     handle.shape().DebugString(),
                                                     "; expected a scalar"));
    }
    tf::core::RefCountPtr<TableResource> resource;
    TF_RETURN_IF_ERROR(tf::LookupResource(c, handle.flat<tf::ResourceHandle>()(0), &resource));
    TF_RETURN_IF_ERROR(resource->CheckNotReleased());
    EmbeddingTable* table = resource->table();
    if (!distinct.insert(table).second) {
      return absl::InvalidArgumentError(absl::StrCat(
          "table '", table->options().name, "' occurs twice in handles; expected distinct tables"));
    }
    tables->push_back(table);
    resources->push_back(std::move(resource));
  }
  return absl::OkStatus();
}

absl::Status ReadRowDtype(tensorflow::OpKernelConstruction* c, const char* attribute,
                          RowDtype* dtype) {
  std::string name;
  TF_RETURN_IF_ERROR(c->GetAttr(attribute, &name));
  *dtype = name == "bfloat16"  ? RowDtype::kBfloat16
           : name == "float16" ? RowDtype::kFloat16
                               : RowDtype::kFloat32;
  return absl::OkStatus();
}

}  // namespace slipstream
