#include "cc_ops/tf/table/table_resource.h"

#include <set>
#include <utility>

namespace slipstream {
namespace tf = tensorflow;

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
