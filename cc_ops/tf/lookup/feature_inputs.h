// Reads the keys, row splits and weights of multiple features from op inputs.
#ifndef SLIPSTREAM_CC_OPS_TF_LOOKUP_FEATURE_INPUTS_H_
#define SLIPSTREAM_CC_OPS_TF_LOOKUP_FEATURE_INPUTS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "cc_ops/core/lookup/feature_view.h"
#include "tensorflow/core/framework/op_kernel.h"

// The inputs and attributes of every op over features:
//   REGISTER_OP("X").Input("...") SLIPSTREAM_FEATURE_INPUTS ...
#define SLIPSTREAM_FEATURE_INPUTS              \
  .Input("keys: num_keys * int64")             \
      .Input("row_splits: num_splits * int64") \
      .Input("weights: num_weights * float")   \
      .Attr("num_keys: int >= 1")              \
      .Attr("num_splits: int >= 0")            \
      .Attr("num_weights: int >= 0")           \
      .Attr("feature_keys: list(int) >= 1")    \
      .Attr("feature_column: list(int) >= 1")  \
      .Attr("feature_splits: list(int) >= 1")  \
      .Attr("feature_weights: list(int) >= 1") \
      .Attr("feature_table: list(int) >= 1")   \
      .Attr("padding_keys: list(int) >= 1")    \
      .Attr("has_padding: list(bool) >= 1")    \
      .Attr("feature_names: list(string) = []")

// Text for the .Doc of an op with these inputs and attributes.
#define SLIPSTREAM_FEATURE_DOC                                                            \
  "keys: int64 [batch] or [batch, width], or [total] for a feature with row splits.\n"    \
  "row_splits: int64 [batch + 1]. Start of each example's keys, and their number.\n"      \
  "weights: float32, one per key, in the shape of the keys.\n"                            \
  "feature_keys: For each feature, the index of its keys tensor.\n"                       \
  "feature_column: For each feature, its column of a [batch, width] tensor with one key"  \
  " per example, or -1 for the whole tensor (a bag).\n"                                   \
  "feature_splits: For each feature, the index of its row splits, or -1.\n"               \
  "feature_weights: For each feature, the index of its weights, or -1.\n"                 \
  "feature_table: For each feature, the index of its table.\n"                            \
  "padding_keys: For each feature, the key that means 'no key', if has_padding is set.\n" \
  "has_padding: For each feature, whether it has a padding key.\n"                        \
  "feature_names: Names of the features for errors; if empty, errors use their numbers.\n"

namespace slipstream {

// Reads the features of an op. The constructor of a kernel calls Init once; each step calls Read.
class FeatureInputs {
 public:
  // Returns InvalidArgument if the attribute lists differ in length, or an index is beyond the
  // inputs of the op or `num_tables`.
  absl::Status Init(tensorflow::OpKernelConstruction* context, int num_tables);

  // Sets `features` to views of this step's inputs, one per feature, and `batch` to the number of
  // examples. Checks ranks, columns, row splits, the lengths of weights, and that all features
  // have the same batch size.
  absl::Status Read(tensorflow::OpKernelContext* context, std::vector<FeatureView>* features,
                    int64_t* batch) const;

  int num_features() const { return static_cast<int>(feature_keys_.size()); }
  const std::vector<int>& feature_table() const { return feature_table_; }

 private:
  // Returns the name of a feature for errors.
  std::string Name(size_t feature) const;

  std::vector<std::string> names_;
  std::vector<int> feature_keys_, feature_column_, feature_splits_, feature_weights_,
      feature_table_;
  std::vector<int64_t> padding_keys_;
  std::vector<bool> has_padding_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_TF_LOOKUP_FEATURE_INPUTS_H_
