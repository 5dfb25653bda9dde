// Kernels that set and watch a table's update policy.
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/deferral/update_policy.h"
#include "cc_ops/core/update/policy_update.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/table/one_table_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

class SetPolicyOp : public OneTableOp {
 public:
  explicit SetPolicyOp(tf::OpKernelConstruction* c) : OneTableOp(c) {
    std::string mode, trigger;
    OP_REQUIRES_OK(c, c->GetAttr("mode", &mode));
    OP_REQUIRES_OK(c, c->GetAttr("trigger", &trigger));
    OP_REQUIRES_OK(c, c->GetAttr("decay_skipped", &policy_.decay_skipped));
    OP_REQUIRES_OK(c, c->GetAttr("ranks", &policy_.ranks));
    OP_REQUIRES_OK(c, c->GetAttr("is_shadow", &policy_.is_shadow));
    OP_REQUIRES_OK(c, c->GetAttr("is_exchanged", &policy_.is_exchanged));
    if (mode == "mask") policy_.mode = UpdatePolicy::Mode::kMask;
    if (mode == "defer") policy_.mode = UpdatePolicy::Mode::kDefer;
    if (trigger == "interval") policy_.trigger = UpdatePolicy::Trigger::kInterval;
  }

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    const char* names[] = {"handle", "movement", "max_age", "max_rows"};
    for (int i = 1; i < 4; ++i) TF_RETURN_IF_ERROR(RequireRank(c, i, names[i], 0));
    UpdatePolicy policy = policy_;
    policy.movement = c->input(1).scalar<float>()();
    policy.max_age = c->input(2).scalar<int64_t>()();
    policy.max_rows = c->input(3).scalar<int64_t>()();
    TF_RETURN_IF_ERROR(ToAbsl(ValidateUpdatePolicy(policy)));
    const ExclusiveLock lock(table->mutex());
    const UpdatePolicy& now = table->updates().policy();
    if (now.mode != policy.mode || now.trigger != policy.trigger || now.ranks != policy.ranks ||
        now.is_shadow != policy.is_shadow || now.is_exchanged != policy.is_exchanged) {
      FlushDeferred(table, ParallelOf(c));
      if (table->updates().num_deferred() > 0 && !now.is_shadow) {
        const char* why = now.is_exchanged
                              ? "wait to be exchanged with other processes; they must be collected "
                                "before its policy becomes another"
                              : "cannot be applied before its policy becomes another: it has had "
                                "neither an update nor a learning rate";
        return absl::FailedPreconditionError(absl::StrCat(table->updates().num_deferred(),
                                                          " deferred gradients of table '",
                                                          table->options().name, "' ", why));
      }
    }
    table->updates().SetPolicy(policy);
    return absl::OkStatus();
  }

 private:
  UpdatePolicy policy_;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableSetPolicy").Device(tf::DEVICE_CPU),
                        MemoryChecked<SetPolicyOp>);

class SetRowFlagsOp : public OneTableOp {
 public:
  explicit SetRowFlagsOp(tf::OpKernelConstruction* c) : OneTableOp(c) {
    OP_REQUIRES_OK(c, c->GetAttr("create_missing", &create_missing_));
  }

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    const tf::Tensor &keys = c->input(1), &flags = c->input(2);
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
    if (flags.shape() != keys.shape()) {
      return absl::InvalidArgumentError(
          absl::StrCat("flags have shape ", flags.shape().DebugString(),
                       "; allowed: that of the keys, ", keys.shape().DebugString()));
    }
    const ExclusiveLock lock(table->mutex());
    return ToAbsl(table->SetFlags(keys.flat<int64_t>().data(), flags.flat<uint8_t>().data(),
                                  keys.NumElements(), ParallelOf(c), create_missing_));
  }

 private:
  bool create_missing_ = false;
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableSetRowFlags").Device(tf::DEVICE_CPU),
                        MemoryChecked<SetRowFlagsOp>);

class SquaredUpdateLengthsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
    const tf::Tensor& keys = c->input(1);
    tf::Tensor* lengths = nullptr;
    TF_RETURN_IF_ERROR(c->allocate_output(0, keys.shape(), &lengths));
    const SharedLock lock(table->mutex());
    table->flags().GetSquaredUpdateLengths(keys.flat<int64_t>().data(), keys.NumElements(),
                                           ParallelOf(c), table->rows(),
                                           lengths->flat<float>().data());
    return absl::OkStatus();
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableSquaredUpdateLengths").Device(tf::DEVICE_CPU),
                        MemoryChecked<SquaredUpdateLengthsOp>);

class UpdateCountsOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    std::vector<int64_t> values;
    {
      const SharedLock lock(table->mutex());
      const UpdateCounts n = table->updates().counts();
      values = {n.offered,
                n.sent,
                n.masked,
                n.deferred,
                n.due_by_movement,
                n.due_by_age,
                n.flushed,
                n.over_budget,
                n.evicted,
                table->updates().num_deferred(),
                table->updates().deferred_bytes()};
    }
    return Output(c, 0, tf::TensorShape({static_cast<int64_t>(values.size())}), values);
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableUpdateCounts").Device(tf::DEVICE_CPU),
                        MemoryChecked<UpdateCountsOp>);

class FlushOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    const ExclusiveLock lock(table->mutex());
    FlushDeferred(table, ParallelOf(c));
    return absl::OkStatus();
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamTableFlush").Device(tf::DEVICE_CPU),
                        MemoryChecked<FlushOp>);

}  // namespace
}  // namespace slipstream
