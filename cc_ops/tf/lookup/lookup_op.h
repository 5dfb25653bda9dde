// Shared parts of kernels that look up features.
#ifndef SLIPSTREAM_CC_OPS_TF_LOOKUP_LOOKUP_OP_H_
#define SLIPSTREAM_CC_OPS_TF_LOOKUP_LOOKUP_OP_H_

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/tf/lookup/feature_inputs.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {

// The attribute "combiners": how the rows of each feature are pooled.
class FeatureCombiners {
 public:
  // Reads the attribute. Returns InvalidArgument unless it has one combiner per feature.
  absl::Status Init(tensorflow::OpKernelConstruction* context, int num_features);
  // Calls FeatureView::SplitPositions for the features that are not pooled.
  void SplitPositions(std::vector<FeatureView>* features) const;

  // Returns whether the combiner of a feature is "none".
  bool is_unpooled(int feature) const { return is_unpooled_[feature]; }
  // Returns one combiner per feature; kSum for features that are not pooled.
  const std::vector<Combiner>& list() const { return combiners_; }

 private:
  std::vector<Combiner> combiners_;
  std::vector<bool> is_unpooled_;
};

// Keeps the memory of finished lookups for later lookups.
class WorkspacePool : public std::enable_shared_from_this<WorkspacePool> {
 public:
  // Returns a workspace that returns to this pool when its last owner releases it.
  std::shared_ptr<LookupWorkspace> Take() {
    std::unique_ptr<LookupWorkspace> workspace;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        workspace = std::move(free_.back());
        free_.pop_back();
      }
    }
    if (workspace == nullptr) workspace = std::make_unique<LookupWorkspace>();
    return std::shared_ptr<LookupWorkspace>(
        workspace.release(), [pool = shared_from_this()](LookupWorkspace* w) { pool->Put(w); });
  }

 private:
  static constexpr size_t kMaxKept = 4;

  void Put(LookupWorkspace* workspace) {
    std::unique_ptr<LookupWorkspace> owned(workspace);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.size() < kMaxKept) free_.push_back(std::move(owned));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<LookupWorkspace>> free_;
};

// Base of kernels that output pooled vectors of features.
class LookupOpBase : public tensorflow::OpKernel {
 public:
  explicit LookupOpBase(tensorflow::OpKernelConstruction* context);

 protected:
  // Reads the tables and the features of this step, and allocates the outputs of the op for the
  // pooled vectors. `resources` keeps the tables alive. outputs: one per feature.
  absl::Status Prepare(tensorflow::OpKernelContext* context, TableResources* resources,
                       std::vector<EmbeddingTable*>* tables, std::vector<FeatureView>* features,
                       std::vector<PooledOutput>* outputs) const;

  const std::vector<Combiner>& combiners() const { return combiners_.list(); }

 private:
  FeatureInputs inputs_;
  bool is_stacked_ = false;
  std::vector<int> dims_;
  FeatureCombiners combiners_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_LOOKUP_LOOKUP_OP_H_
