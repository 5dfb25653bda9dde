#include "cc_ops/tf/lookup/lookup_op.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "cc_ops/tf/base/kernel_values.h"

namespace slipstream {

namespace tf = tensorflow;

absl::Status FeatureCombiners::Init(tf::OpKernelConstruction* c, int num_features) {
  std::vector<std::string> names;
  TF_RETURN_IF_ERROR(c->GetAttr("combiners", &names));
  if (static_cast<int>(names.size()) != num_features) {
    return absl::InvalidArgumentError(absl::StrCat("combiners has ", names.size(),
                                                   " entries; expected ", num_features,
                                                   ", the number of features"));
  }
  for (const std::string& name : names) {
    is_unpooled_.push_back(name == "none");
    combiners_.push_back(name == "mean"    ? Combiner::kMean
                         : name == "sqrtn" ? Combiner::kSqrtn
                                           : Combiner::kSum);
  }
  return absl::OkStatus();
}

void FeatureCombiners::SplitPositions(std::vector<FeatureView>* features) const {
  for (size_t f = 0; f < features->size(); ++f) {
    if (is_unpooled_[f]) (*features)[f].SplitPositions();
  }
}

LookupOpBase::LookupOpBase(tf::OpKernelConstruction* c) : OpKernel(c) {
  int num_tables = 0;
  OP_REQUIRES_OK(c, c->GetAttr("num_tables", &num_tables));
  OP_REQUIRES_OK(c, inputs_.Init(c, num_tables));
  OP_REQUIRES_OK(c, c->GetAttr("is_stacked", &is_stacked_));
  OP_REQUIRES_OK(c, c->GetAttr("table_dims", &dims_));
  OP_REQUIRES_OK(c, combiners_.Init(c, inputs_.num_features()));
  // Eager calls run no shape function.
  int num_outputs = 0;
  OP_REQUIRES_OK(c, c->GetAttr("num_outputs", &num_outputs));
  const int needed = is_stacked_ ? 1 : inputs_.num_features();
  OP_REQUIRES(c, num_outputs == needed,
              absl::InvalidArgumentError(
                  absl::StrCat("num_outputs is ", num_outputs, "; expected ", needed,
                               is_stacked_ ? " if is_stacked" : ", the number of features")));
  OP_REQUIRES(c, static_cast<int>(dims_.size()) == num_tables,
              absl::InvalidArgumentError(absl::StrCat("table_dims has ", dims_.size(),
                                                      " entries; expected ", num_tables,
                                                      ", the number of handles")));
  const auto dim_of = [&](int f) { return dims_[inputs_.feature_table()[f]]; };
  for (int f = 1; is_stacked_ && f < inputs_.num_features(); ++f) {
    OP_REQUIRES(c, dim_of(f) == dim_of(0),
                absl::InvalidArgumentError(absl::StrCat("features 0 and ", f, " have dims ",
                                                        dim_of(0), " and ", dim_of(f),
                                                        "; expected equal dims if is_stacked")));
  }
  for (int f = 0; is_stacked_ && f < inputs_.num_features(); ++f) {
    OP_REQUIRES(
        c, !combiners_.is_unpooled(f),
        absl::InvalidArgumentError(absl::StrCat(
            "feature ", f, " has combiner 'none'; expected pooled features if is_stacked")));
  }
}

absl::Status LookupOpBase::Prepare(tf::OpKernelContext* c, TableResources* resources,
                                   std::vector<EmbeddingTable*>* tables,
                                   std::vector<FeatureView>* features,
                                   std::vector<PooledOutput>* outputs) const {
  TF_RETURN_IF_ERROR(ReadTables(c, resources, tables));
  for (size_t t = 0; t < tables->size(); ++t) {
    const EmbeddingTable& table = *(*tables)[t];
    if (table.dim() != dims_[t]) {
      return absl::InvalidArgumentError(
          absl::StrCat("table_dims[", t, "] is ", dims_[t], "; expected ", table.dim(),
                       ", the dim of table '", table.options().name, "'"));
    }
  }
  int64_t batch = 0;
  TF_RETURN_IF_ERROR(inputs_.Read(c, features, &batch));
  combiners_.SplitPositions(features);
  tf::OpOutputList pooled;
  TF_RETURN_IF_ERROR(c->output_list("pooled", &pooled));
  const int64_t num_features = inputs_.num_features();
  tf::Tensor* out = nullptr;
  for (int f = 0; f < num_features; ++f) {
    const int64_t dim = dims_[inputs_.feature_table()[f]];
    if (!is_stacked_ || f == 0) {
      const tf::TensorShape shape = is_stacked_ ? tf::TensorShape({batch, num_features, dim})
                                                : tf::TensorShape({(*features)[f].batch, dim});
      TF_RETURN_IF_ERROR(pooled.allocate(f, shape, &out));
    }
    float* const data = out->flat<float>().data();
    outputs->push_back(is_stacked_ ? PooledOutput{data + f * dim, num_features * dim}
                                   : PooledOutput{data, dim});
  }
  return absl::OkStatus();
}

}  // namespace slipstream
