#include "cc_ops/tf/lookup/feature_inputs.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "cc_ops/tf/base/kernel_values.h"

namespace slipstream {
namespace tf = tensorflow;

absl::Status FeatureInputs::Init(tf::OpKernelConstruction* context, int num_tables) {
  int num_keys = 0, num_splits = 0, num_weights = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_keys", &num_keys));
  TF_RETURN_IF_ERROR(context->GetAttr("num_splits", &num_splits));
  TF_RETURN_IF_ERROR(context->GetAttr("num_weights", &num_weights));
  TF_RETURN_IF_ERROR(context->GetAttr("padding_keys", &padding_keys_));
  TF_RETURN_IF_ERROR(context->GetAttr("has_padding", &has_padding_));
  TF_RETURN_IF_ERROR(context->GetAttr("feature_names", &names_));
  struct List {
    const char* name;
    std::vector<int>* values;
    int low, high;  // allowed: low <= value < high
  };
  const List lists[] = {{"feature_keys", &feature_keys_, 0, num_keys},
                        {"feature_column", &feature_column_, -1, 1 << 30},
                        {"feature_splits", &feature_splits_, -1, num_splits},
                        {"feature_weights", &feature_weights_, -1, num_weights},
                        {"feature_table", &feature_table_, 0, num_tables}};
  for (const List& list : lists) {
    TF_RETURN_IF_ERROR(context->GetAttr(list.name, list.values));
    if (list.values->size() != feature_keys_.size()) {
      return absl::InvalidArgumentError(absl::StrCat(list.name, " has ", list.values->size(),
                                                     " entries; expected ", feature_keys_.size(),
                                                     ", the length of feature_keys"));
    }
    for (size_t f = 0; f < list.values->size(); ++f) {
      const int value = (*list.values)[f];
      if (value < list.low || value >= list.high) {
        return absl::InvalidArgumentError(absl::StrCat(list.name, "[", f, "] is ", value,
                                                       "; expected an integer from ", list.low,
                                                       " to ", list.high - 1));
      }
    }
  }
  if (padding_keys_.size() != feature_keys_.size() || has_padding_.size() != feature_keys_.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "padding_keys has ", padding_keys_.size(), " entries and has_padding ", has_padding_.size(),
        "; expected ", feature_keys_.size(), " each, the length of feature_keys"));
  }
  return absl::OkStatus();
}

std::string FeatureInputs::Name(size_t feature) const {
  if (feature >= names_.size()) return std::to_string(feature);
  return absl::StrCat("'", names_[feature], "'");
}

absl::Status FeatureInputs::Read(tf::OpKernelContext* context, std::vector<FeatureView>* features,
                                 int64_t* batch) const {
  tf::OpInputList keys, splits, weights;
  TF_RETURN_IF_ERROR(context->input_list("keys", &keys));
  TF_RETURN_IF_ERROR(context->input_list("row_splits", &splits));
  TF_RETURN_IF_ERROR(context->input_list("weights", &weights));
  features->clear();
  features->reserve(feature_keys_.size());
  for (size_t f = 0; f < feature_keys_.size(); ++f) {
    const tf::Tensor& k = keys[feature_keys_[f]];
    FeatureView view;
    view.table = feature_table_[f];
    view.keys = k.flat<int64_t>().data();
    view.num_keys = k.NumElements();
    view.padding_key = padding_keys_[f];
    view.has_padding = has_padding_[f];
    if (feature_splits_[f] >= 0) {
      const tf::Tensor& s = splits[feature_splits_[f]];
      if (k.dims() != 1 || s.dims() != 1 || s.dim_size(0) < 1) {
        return absl::InvalidArgumentError(
            absl::StrCat("feature ", Name(f), " has keys of shape ", k.shape().DebugString(),
                         " and row_splits of shape ", s.shape().DebugString(),
                         "; expected [total] and [batch + 1]"));
      }
      view.row_splits = s.flat<int64_t>().data();
      view.batch = s.dim_size(0) - 1;
    } else {
      if (k.dims() != 1 && k.dims() != 2) {
        return absl::InvalidArgumentError(absl::StrCat("keys of feature ", Name(f), " have shape ",
                                                       k.shape().DebugString(),
                                                       "; expected [batch] or [batch, width]"));
      }
      view.batch = k.dim_size(0);
      const int64_t width = k.dims() == 2 ? k.dim_size(1) : 1;
      view.stride = width;
      view.width = width;
      if (feature_column_[f] >= 0) {
        if (feature_column_[f] >= width) {
          return absl::InvalidArgumentError(absl::StrCat(
              "feature_column of feature ", Name(f), " is ", feature_column_[f],
              " for keys of shape ", k.shape().DebugString(), "; expected a column below ", width));
        }
        view.keys += feature_column_[f];
        view.num_keys -= feature_column_[f];
        view.width = 1;
      }
    }
    if (feature_weights_[f] >= 0) {
      const tf::Tensor& w = weights[feature_weights_[f]];
      if (w.shape() != k.shape() || feature_column_[f] >= 0) {
        return absl::InvalidArgumentError(
            absl::StrCat("weights of feature ", Name(f), " have shape ", w.shape().DebugString(),
                         "; expected the shape of its keys, ", k.shape().DebugString(),
                         ", and no feature_column"));
      }
      view.weights = w.flat<float>().data();
    }
    if (view.row_splits != nullptr) TF_RETURN_IF_ERROR(ToAbsl(ValidateRowSplits(view, Name(f))));
    if (f == 0) *batch = view.batch;
    if (view.batch != *batch) {
      return absl::InvalidArgumentError(absl::StrCat("feature ", Name(f), " has ", view.batch,
                                                     " examples; expected ", *batch,
                                                     ", as in feature ", Name(0)));
    }
    features->push_back(view);
  }
  return absl::OkStatus();
}

}  // namespace slipstream
