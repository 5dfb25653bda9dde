// The embedding table as a TensorFlow resource.
#ifndef SLIPSTREAM_CC_OPS_TF_TABLE_TABLE_RESOURCE_H_
#define SLIPSTREAM_CC_OPS_TF_TABLE_TABLE_RESOURCE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/table/embedding_table.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace slipstream {

class TableResource : public tensorflow::ResourceBase {
 public:
  explicit TableResource(const TableOptions& options) : table_(options) {}

  EmbeddingTable* table() { return &table_; }

  std::string DebugString() const override {
    return absl::StrCat("EmbeddingTable '", table_.options().name, "', dim ", table_.dim());
  }

 private:
  EmbeddingTable table_;
};

using TableResources = std::vector<tensorflow::core::RefCountPtr<TableResource>>;

// The tables of the inputs "handles", which must be distinct; `resources` keeps them alive.
absl::Status ReadTables(tensorflow::OpKernelContext* context, TableResources* resources,
                        std::vector<EmbeddingTable*>* tables);

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_TABLE_TABLE_RESOURCE_H_
