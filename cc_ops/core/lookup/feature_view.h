// The keys of one feature in a batch, in dense or ragged layout.
#ifndef SLIPSTREAM_CC_OPS_CORE_LOOKUP_FEATURE_VIEW_H_
#define SLIPSTREAM_CC_OPS_CORE_LOOKUP_FEATURE_VIEW_H_

#include <cstdint>
#include <string>

#include "cc_ops/core/base/status.h"

namespace slipstream {

// A view of keys that the caller owns. The keys of example i are
//
//   ragged: keys[row_splits[i] .. row_splits[i + 1])
//   dense:  keys[i * stride .. i * stride + width)
//
// If has_padding, keys equal to padding_key are skipped. Weights have the layout of the keys.
struct FeatureView {
  int table = 0;      // Index into the tables of the call.
  int64_t batch = 0;  // Number of examples.
  const int64_t* keys = nullptr;
  int64_t num_keys = 0;                 // Number of readable elements of `keys`.
  int64_t width = 1;                    // Dense layout: keys per example.
  int64_t stride = 1;                   // Dense layout: distance between examples.
  const int64_t* row_splits = nullptr;  // [batch + 1]; null for the dense layout.
  const float* weights = nullptr;       // Null if all weights are 1.
  bool has_padding = false;
  int64_t padding_key = -1;

  // Return the range of positions in `keys` of an example.
  int64_t begin(int64_t example) const {
    return row_splits != nullptr ? row_splits[example] : example * stride;
  }
  int64_t end(int64_t example) const {
    return row_splits != nullptr ? row_splits[example + 1] : example * stride + width;
  }
  // Returns whether a position has a key, not padding.
  bool is_key(int64_t position) const { return !has_padding || keys[position] != padding_key; }

  // Makes each key position, including padding, an example, so that no keys are pooled.
  void SplitPositions() {
    if (row_splits == nullptr && width == 1) return;
    row_splits = nullptr;
    batch = num_keys;
    width = stride = 1;
  }
};

// Returns InvalidArgument unless row splits start at 0, never decrease and end at the number of
// keys. `name` is the name of the feature in the message.
inline Status ValidateRowSplits(const FeatureView& f, const std::string& name) {
  if (f.row_splits == nullptr) return OkStatus();
  const auto split = [&](int64_t i) {
    return "row_splits[" + std::to_string(i) + "] of feature " + name + " is " +
           std::to_string(f.row_splits[i]);
  };
  if (f.row_splits[0] != 0) return InvalidArgument(split(0) + "; expected 0");
  for (int64_t i = 0; i < f.batch; ++i) {
    if (f.row_splits[i + 1] < f.row_splits[i]) {
      return InvalidArgument(split(i + 1) + "; expected at least " +
                             std::to_string(f.row_splits[i]) +
                             ", because row splits never decrease");
    }
  }
  if (f.row_splits[f.batch] != f.num_keys) {
    return InvalidArgument(split(f.batch) + "; expected " + std::to_string(f.num_keys) +
                           ", the number of keys");
  }
  return OkStatus();
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_LOOKUP_FEATURE_VIEW_H_
