// Kernels on what a table has beside its rows: its update policy, deferred gradients and row flags.
#include <cmath>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/deferral/update_policy.h"
#include "cc_ops/core/update/deferred_export.h"
#include "cc_ops/core/update/policy_update.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/table/one_table_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

// A kernel without attributes.
template <absl::Status (*kRun)(tf::OpKernelContext*, EmbeddingTable*)>
class TableFunctionOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Run(tf::OpKernelContext* c, EmbeddingTable* table) override {
    return kRun(c, table);
  }
};

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

absl::Status GetUpdateCounts(tf::OpKernelContext* c, EmbeddingTable* table) {
  std::vector<int64_t> values;
  {
    const SharedLock lock(table->mutex());
    const UpdateCounts n = table->updates().counts();
    const int64_t deferred = table->updates().num_deferred(),
                  bytes = table->updates().deferred_bytes();
    values = {n.offered,         n.sent,       n.masked,  n.deferred,
              n.due_by_movement, n.due_by_age, n.flushed, n.over_budget,
              n.evicted,         deferred,     bytes};
  }
  return Output(c, 0, tf::TensorShape({static_cast<int64_t>(values.size())}), values);
}

absl::Status Flush(tf::OpKernelContext* c, EmbeddingTable* table) {
  const ExclusiveLock lock(table->mutex());
  FlushDeferred(table, ParallelOf(c));
  return absl::OkStatus();
}

absl::Status GetDeferred(tf::OpKernelContext* c, EmbeddingTable* table) {
  DeferredContents contents;
  float rate = 0.f;
  {
    const ExclusiveLock lock(table->mutex());
    contents = ExportDeferred(table);
    rate = table->updates().last_learning_rate();
  }
  const int64_t n = contents.size();
  TF_RETURN_IF_ERROR(Output(c, 0, tf::TensorShape({n}), contents.keys));
  TF_RETURN_IF_ERROR(Output(c, 1, tf::TensorShape({n}), contents.ages));
  TF_RETURN_IF_ERROR(Output(c, 2, tf::TensorShape({n}), contents.ranks));
  TF_RETURN_IF_ERROR(Output(c, 3, tf::TensorShape({n, table->dim()}), contents.sums));
  return OutputScalar(c, 4, rate);
}

absl::Status SetDeferred(tf::OpKernelContext* c, EmbeddingTable* table) {
  const char* names[] = {"handle", "keys", "ages", "ranks"};
  for (int i = 1; i < 4; ++i) TF_RETURN_IF_ERROR(RequireRank(c, i, names[i], 1));
  const int64_t n = c->input(1).NumElements();
  const tf::TensorShape expected({n, table->dim()});
  if (c->input(4).shape() != expected) {
    return absl::InvalidArgumentError(
        absl::StrCat("sums of table '", table->options().name, "' have shape ",
                     c->input(4).shape().DebugString(), "; allowed: ", expected.DebugString()));
  }
  float rate = 0.f;
  TF_RETURN_IF_ERROR(ReadScalar(c, 5, "learning_rate", &rate));
  if (!std::isfinite(rate)) {
    return absl::InvalidArgumentError(
        absl::StrCat("learning_rate of the deferred gradients of table '", table->options().name,
                     "' is ", rate, "; allowed: a finite number"));
  }
  const DeferredContents contents = {ValuesOf<int64_t>(c->input(1)), ValuesOf<int64_t>(c->input(2)),
                                     ValuesOf<int32_t>(c->input(3)), ValuesOf<float>(c->input(4))};
  const ExclusiveLock lock(table->mutex());
  TF_RETURN_IF_ERROR(ToAbsl(ImportDeferred(table, contents)));
  table->updates().set_last_learning_rate(rate);
  return absl::OkStatus();
}

// Output 0: a value of each key of input 1, which `get(keys, n, values)` writes.
template <class T, class Get>
absl::Status OutputOfKeys(tf::OpKernelContext* c, EmbeddingTable* table, const Get& get) {
  TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
  const tf::Tensor& keys = c->input(1);
  tf::Tensor* values = nullptr;
  TF_RETURN_IF_ERROR(c->allocate_output(0, keys.shape(), &values));
  const SharedLock lock(table->mutex());
  get(keys.flat<int64_t>().data(), keys.NumElements(), values->flat<T>().data());
  return absl::OkStatus();
}

absl::Status GetRowFlags(tf::OpKernelContext* c, EmbeddingTable* table) {
  return OutputOfKeys<uint8_t>(c, table, [&](const int64_t* keys, int64_t n, uint8_t* flags) {
    table->flags().Get(keys, n, table->rows(), flags);
  });
}

absl::Status GetSquaredUpdateLengths(tf::OpKernelContext* c, EmbeddingTable* table) {
  return OutputOfKeys<float>(c, table, [&](const int64_t* keys, int64_t n, float* lengths) {
    table->flags().GetSquaredUpdateLengths(keys, n, ParallelOf(c), table->rows(), lengths);
  });
}

absl::Status SetSquaredUpdateLengths(tf::OpKernelContext* c, EmbeddingTable* table) {
  const tf::Tensor &keys = c->input(1), &lengths = c->input(2);
  TF_RETURN_IF_ERROR(RequireRank(c, 1, "keys", 1));
  if (lengths.shape() != keys.shape()) {
    return absl::InvalidArgumentError(
        absl::StrCat("lengths has shape ", lengths.shape().DebugString(),
                     "; allowed: that of the keys, ", keys.shape().DebugString()));
  }
  const auto values = lengths.flat<float>();
  for (int64_t i = 0; i < values.size(); ++i) {
    if (values(i) >= 0.f) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("squared update length of key ", keys.flat<int64_t>()(i), " of table '",
                     table->options().name, "', at index ", i, ", is ", values(i),
                     "; allowed: 0 or more. Nothing was replaced"));
  }
  const ExclusiveLock lock(table->mutex());
  table->flags().SetSquaredUpdateLengths(keys.flat<int64_t>().data(), lengths.flat<float>().data(),
                                         keys.NumElements(), table->rows());
  return absl::OkStatus();
}

#define REGISTER_CPU(name, ...)                                                \
  REGISTER_KERNEL_BUILDER(Name("SlipstreamTable" name).Device(tf::DEVICE_CPU), \
                          MemoryChecked<__VA_ARGS__>)
REGISTER_CPU("SetPolicy", SetPolicyOp);
REGISTER_CPU("UpdateCounts", TableFunctionOp<GetUpdateCounts>);
REGISTER_CPU("Flush", TableFunctionOp<Flush>);
REGISTER_CPU("ExportDeferred", TableFunctionOp<GetDeferred>);
REGISTER_CPU("ImportDeferred", TableFunctionOp<SetDeferred>);
REGISTER_CPU("SetRowFlags", SetRowFlagsOp);
REGISTER_CPU("RowFlags", TableFunctionOp<GetRowFlags>);
REGISTER_CPU("SquaredUpdateLengths", TableFunctionOp<GetSquaredUpdateLengths>);
REGISTER_CPU("SetSquaredUpdateLengths", TableFunctionOp<SetSquaredUpdateLengths>);
#undef REGISTER_CPU

}  // namespace
}  // namespace slipstream
