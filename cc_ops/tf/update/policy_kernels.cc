// Kernels on a table's update policy, deferred gradients and row flags.
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
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

absl::Status SetPolicy(tf::OpKernelContext* c, EmbeddingTable* table) {
  std::string mode, trigger;
  UpdatePolicy policy;
  TF_RETURN_IF_ERROR(ReadAttribute(c, "mode", &mode));
  TF_RETURN_IF_ERROR(ReadAttribute(c, "trigger", &trigger));
  TF_RETURN_IF_ERROR(ReadAttribute(c, "decay_skipped", &policy.decay_skipped));
  TF_RETURN_IF_ERROR(ReadAttribute(c, "ranks", &policy.ranks));
  TF_RETURN_IF_ERROR(ReadAttribute(c, "is_shadow", &policy.is_shadow));
  TF_RETURN_IF_ERROR(ReadAttribute(c, "is_exchanged", &policy.is_exchanged));
  if (mode == "mask") policy.mode = UpdatePolicy::Mode::kMask;
  if (mode == "defer") policy.mode = UpdatePolicy::Mode::kDefer;
  if (trigger == "interval") policy.trigger = UpdatePolicy::Trigger::kInterval;
  TF_RETURN_IF_ERROR(ReadScalar(c, 1, "movement", &policy.movement));
  TF_RETURN_IF_ERROR(ReadScalar(c, 2, "max_age", &policy.max_age));
  TF_RETURN_IF_ERROR(ReadScalar(c, 3, "max_rows", &policy.max_rows));
  TF_RETURN_IF_ERROR(ToAbsl(ValidateUpdatePolicy(policy)));
  const ExclusiveLock lock(table->mutex());
  const UpdatePolicy& now = table->updates().policy();
  if (now.mode != policy.mode || now.trigger != policy.trigger || now.ranks != policy.ranks ||
      now.is_shadow != policy.is_shadow || now.is_exchanged != policy.is_exchanged) {
    TF_RETURN_IF_ERROR(ToAbsl(FlushDeferred(table, ParallelOf(c))));
    if (table->updates().num_deferred() > 0 && !now.is_shadow) {
      const char* why = now.is_exchanged
                            ? "have not been exchanged with other processes. Collect them before "
                              "you change the policy of the table"
                            : "cannot be applied, because no update has set a learning rate. "
                              "Update the table before you change its policy";
      return absl::FailedPreconditionError(absl::StrCat(table->updates().num_deferred(),
                                                        " deferred gradients of table '",
                                                        table->options().name, "' ", why));
    }
  }
  table->updates().SetPolicy(policy);
  return absl::OkStatus();
}

absl::Status SetRowFlags(tf::OpKernelContext* c, EmbeddingTable* table) {
  bool create_missing = false;
  TF_RETURN_IF_ERROR(ReadAttribute(c, "create_missing", &create_missing));
  TF_RETURN_IF_ERROR(CheckInputs(c, 1, "keys: [n], flags: [n]", *table));
  const ExclusiveLock lock(table->mutex());
  return ToAbsl(table->SetFlags(Data<int64_t>(c, 1), Data<uint8_t>(c, 2), c->input(1).NumElements(),
                                ParallelOf(c), create_missing));
}

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
  return Output(c, 0, values);
}

absl::Status Flush(tf::OpKernelContext* c, EmbeddingTable* table) {
  const ExclusiveLock lock(table->mutex());
  return ToAbsl(FlushDeferred(table, ParallelOf(c)));
}

absl::Status GetDeferred(tf::OpKernelContext* c, EmbeddingTable* table) {
  DeferredContents contents;
  float rate = 0.f;
  {
    const ExclusiveLock lock(table->mutex());
    contents = ExportDeferred(table);
    rate = table->updates().last_learning_rate();
  }
  TF_RETURN_IF_ERROR(Output(c, 0, contents.keys));
  TF_RETURN_IF_ERROR(Output(c, 1, contents.ages));
  TF_RETURN_IF_ERROR(Output(c, 2, contents.ranks));
  TF_RETURN_IF_ERROR(Output(c, 3, tf::TensorShape({contents.size(), table->dim()}), contents.sums));
  return OutputScalar(c, 4, rate);
}

absl::Status SetDeferred(tf::OpKernelContext* c, EmbeddingTable* table) {
  TF_RETURN_IF_ERROR(CheckInputs(c, 1, "keys: [n], ages: [?], ranks: [?], sums: [n, d]", *table));
  float rate = 0.f;
  TF_RETURN_IF_ERROR(ReadScalar(c, 5, "learning_rate", &rate));
  if (!std::isfinite(rate)) {
    return absl::InvalidArgumentError(
        absl::StrCat("learning_rate of the deferred gradients of table '", table->options().name,
                     "' is ", rate, "; expected a finite number"));
  }
  const DeferredContents contents = {ValuesOf<int64_t>(c, 1), ValuesOf<int64_t>(c, 2),
                                     ValuesOf<int32_t>(c, 3), ValuesOf<float>(c, 4)};
  const ExclusiveLock lock(table->mutex());
  TF_RETURN_IF_ERROR(ToAbsl(ImportDeferred(table, contents)));
  table->updates().set_last_learning_rate(rate);
  return absl::OkStatus();
}

absl::Status GetRowFlags(tf::OpKernelContext* c, EmbeddingTable* table) {
  TF_RETURN_IF_ERROR(CheckInputs(c, 1, "keys: [n]", *table));
  uint8_t* flags = nullptr;
  TF_RETURN_IF_ERROR(Allocate(c, 0, c->input(1).shape(), &flags));
  const SharedLock lock(table->mutex());
  table->flags().Get(Data<int64_t>(c, 1), c->input(1).NumElements(), table->rows(), flags);
  return absl::OkStatus();
}

SLIPSTREAM_TABLE_KERNEL("SetPolicy", SetPolicy);
SLIPSTREAM_TABLE_KERNEL("UpdateCounts", GetUpdateCounts);
SLIPSTREAM_TABLE_KERNEL("Flush", Flush);
SLIPSTREAM_TABLE_KERNEL("ExportDeferred", GetDeferred);
SLIPSTREAM_TABLE_KERNEL("ImportDeferred", SetDeferred);
SLIPSTREAM_TABLE_KERNEL("SetRowFlags", SetRowFlags);
SLIPSTREAM_TABLE_KERNEL("RowFlags", GetRowFlags);

}  // namespace
}  // namespace slipstream
