// CPU kernels of SOK's `lookup_sparse`, for tests only.
//
// The ops look up bags of keys. Every rank sends its bags to all ranks. Each rank sums the rows
// that it owns in every bag and sends the sums back. The requesting rank adds the sums of all
// ranks.
//
// The intermediate tensors have a private layout. The sums that a rank sends to another rank are
// [lookup][example][dim]. Offsets give the keys of a bag.

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "hash_variable.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/resource_var.h"

namespace sok_on_cpu {
namespace {

using tensorflow::DEVICE_CPU;
using tensorflow::HandleFromInput;
using tensorflow::LookupResource;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Base class with the attributes that all lookup ops have.
class LookupOp : public OpKernel {
 public:
  explicit LookupOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_lookups", &lookups));
    OP_REQUIRES_OK(context, context->GetAttr("num_gpus", &ranks));
    OP_REQUIRES_OK(context, context->GetAttr("combiners", &combiners));
    OP_REQUIRES_OK(context, context->GetAttr("shard", &shard));
    OP_REQUIRES_OK(context, context->GetAttr("dimensions", &dims));
    OP_REQUIRES_OK(context, context->GetAttr("rank", &rank));
    OP_REQUIRES_OK(context, context->GetAttr("use_sp_weight", &is_weighted));
  }

  // Returns the offset of the sums of `lookup` in the part for a rank with `inputs` examples.
  int64_t Start(int lookup, int64_t inputs) const {
    int64_t start = 0;
    for (int i = 0; i < lookup; ++i) start += inputs * dims[i];
    return start;
  }

  bool Owns(int lookup, int64_t key) const {
    return shard[lookup] < 0 ? OwnerOf(key, ranks) == rank : shard[lookup] == rank;
  }

 protected:
  int lookups, ranks, rank;
  bool is_weighted;
  std::vector<std::string> combiners;
  std::vector<int> shard, dims;
};

class HotnessOp : public OpKernel {
 public:
  explicit HotnessOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_lookups", &lookups_));
    OP_REQUIRES_OK(context, context->GetAttr("num_gpus", &ranks_));
  }

  void Compute(OpKernelContext* context) override {
    const auto lengths = context->input(0).flat<int64_t>();
    const int64_t inputs = lengths.size() / (lookups_ * ranks_);
    Tensor* maximum = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({lookups_}), &maximum));
    maximum->vec<int32_t>().setZero();
    for (int64_t i = 0; i < lengths.size(); ++i) {
      int32_t& longest = maximum->vec<int32_t>()(i / inputs % lookups_);
      longest = std::max(longest, static_cast<int32_t>(lengths(i)));
    }
  }

 private:
  int lookups_, ranks_;
};

// Concatenates `count` inputs of shape [n], from input `first` on, into one output.
template <typename T>
void Concatenate(OpKernelContext* context, int first, int count, int output) {
  int64_t size = 0;
  for (int i = first; i < first + count; ++i) size += context->input(i).NumElements();
  Tensor* out = nullptr;
  OP_REQUIRES_OK(context, context->allocate_output(output, TensorShape({size}), &out));
  T* place = out->flat<T>().data();
  for (int i = first; i < first + count; ++i) {
    const auto part = context->input(i).flat<T>();
    place = std::copy(part.data(), part.data() + part.size(), place);
  }
}

template <bool kHasWeights>
class PreprocessingOp : public LookupOp {
 public:
  using LookupOp::LookupOp;

  void Compute(OpKernelContext* context) override {
    Concatenate<int64_t>(context, 0, lookups, 0);
    Concatenate<int64_t>(context, lookups, lookups, 1);
    Concatenate<float>(context, 2 * lookups, kHasWeights ? lookups : 0, 2);
  }
};

// The rows of a hash table or of a dense variable.
class Rows {
 public:
  tensorflow::Status Open(OpKernelContext* context, int input, bool is_dynamic, int divisor) {
    divisor_ = divisor;
    const auto handle = HandleFromInput(context, input);
    if (is_dynamic) return LookupResource(context, handle, &hashed_);
    return LookupResource(context, handle, &dense_);
  }

  // Adds `weight` times the row of `key` to `sum`.
  void Add(int64_t key, float weight, int64_t dim, float* sum) {
    const float* row = nullptr;
    if (hashed_) {
      const std::lock_guard<std::mutex> lock(hashed_->mutex());
      row = hashed_->FindOrInsert(key);
    } else {
      row = dense_->tensor()->flat<float>().data() + key / divisor_ * dim;
    }
    for (int64_t i = 0; i < dim; ++i) sum[i] += weight * row[i];
  }

 private:
  int divisor_ = 1;
  tensorflow::core::RefCountPtr<HashVariable> hashed_;
  tensorflow::core::RefCountPtr<tensorflow::Var> dense_;
};

template <bool kIsDynamic>
class LookupForwardOp : public LookupOp {
 public:
  using LookupOp::LookupOp;

  void Compute(OpKernelContext* context) override {
    const auto keys = context->input(lookups).flat<int64_t>();
    const auto lengths = context->input(lookups + 1).flat<int64_t>();
    const auto weights = context->input(lookups + 3).flat<float>();
    const int64_t inputs = lengths.size() / (lookups * ranks);
    std::vector<float*> parts(ranks);
    for (int to = 0; to < ranks; ++to) {
      Tensor* part = nullptr;
      const TensorShape shape({Start(lookups, inputs)});
      OP_REQUIRES_OK(context, context->allocate_output(to, shape, &part));
      part->flat<float>().setZero();
      parts[to] = part->flat<float>().data();
    }
    std::vector<int64_t> own_keys, offsets = {0};
    std::vector<float> own_weights;
    int64_t next = 0;
    for (int to = 0; to < ranks; ++to) {
      for (int lookup = 0; lookup < lookups; ++lookup) {
        Rows rows;
        OP_REQUIRES_OK(context,
                       rows.Open(context, lookup, kIsDynamic, shard[lookup] < 0 ? ranks : 1));
        float* sum = parts[to] + Start(lookup, inputs);
        for (int64_t input = 0; input < inputs; ++input, sum += dims[lookup]) {
          const int64_t bag = (to * lookups + lookup) * inputs + input;
          for (const int64_t end = next + lengths(bag); next < end; ++next) {
            if (!Owns(lookup, keys(next))) continue;
            own_keys.push_back(keys(next));
            own_weights.push_back(is_weighted ? weights(next) : 1.0F);
            rows.Add(own_keys.back(), own_weights.back(), dims[lookup], sum);
          }
          offsets.push_back(static_cast<int64_t>(own_keys.size()));
        }
      }
    }
    Put(context, ranks, own_keys);
    Put(context, ranks + 1, offsets);
    Put(context, ranks + 2, own_weights);
  }

 private:
  template <typename T>
  static void Put(OpKernelContext* context, int output, const std::vector<T>& values) {
    Tensor* out = nullptr;
    const TensorShape shape({static_cast<int64_t>(values.size())});
    OP_REQUIRES_OK(context, context->allocate_output(output, shape, &out));
    std::copy(values.begin(), values.end(), out->flat<T>().data());
  }
};

class LookupBackwardOp : public LookupOp {
 public:
  using LookupOp::LookupOp;

  void Compute(OpKernelContext* context) override {
    const auto keys = context->input(ranks).flat<int64_t>();
    const auto offsets = context->input(ranks + 1).flat<int64_t>();
    const auto weights = context->input(ranks + 2).flat<float>();
    const int64_t inputs = (offsets.size() - 1) / (lookups * ranks);
    for (int lookup = 0; lookup < lookups; ++lookup) {
      const int64_t dim = dims[lookup];
      std::map<int64_t, std::vector<float>> sums;
      for (int from = 0; from < ranks; ++from) {
        const float* gradient = context->input(from).flat<float>().data() + Start(lookup, inputs);
        for (int64_t input = 0; input < inputs; ++input, gradient += dim) {
          const int64_t bag = (from * lookups + lookup) * inputs + input;
          for (int64_t i = offsets(bag); i < offsets(bag + 1); ++i) {
            std::vector<float>& sum = sums[keys(i)];
            sum.resize(dim);
            for (int64_t j = 0; j < dim; ++j) sum[j] += weights(i) * gradient[j];
          }
        }
      }
      Tensor *out_keys = nullptr, *out_rows = nullptr;
      const int64_t count = static_cast<int64_t>(sums.size());
      OP_REQUIRES_OK(context, context->allocate_output(lookup, TensorShape({count}), &out_keys));
      OP_REQUIRES_OK(context, context->allocate_output(lookups + lookup, TensorShape({count, dim}),
                                                       &out_rows));
      int64_t place = 0;
      for (const auto& [key, sum] : sums) {
        out_keys->vec<int64_t>()(place) = key;
        std::copy(sum.begin(), sum.end(), out_rows->flat<float>().data() + place++ * dim);
      }
    }
  }
};

// Returns the divisor of an example's sum.
float Divisor(const std::string& combiner, int64_t length, const float* weight_sum) {
  if (combiner != "mean" || length == 0) return 1.0F;
  return weight_sum == nullptr ? static_cast<float>(length) : *weight_sum;
}

class PostprocessingForwardOp : public LookupOp {
 public:
  using LookupOp::LookupOp;

  void Compute(OpKernelContext* context) override {
    const float* weight_sums = context->input(ranks + lookups + 1).flat<float>().data();
    for (int lookup = 0; lookup < lookups; ++lookup) {
      const auto lengths = context->input(ranks + lookup).flat<int64_t>();
      const int64_t inputs = lengths.size(), dim = dims[lookup];
      Tensor* out = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(lookup, TensorShape({inputs, dim}), &out));
      out->flat<float>().setZero();
      float* pooled = out->flat<float>().data();
      for (int from = 0; from < ranks; ++from) {
        const float* part = context->input(from).flat<float>().data() + Start(lookup, inputs);
        for (int64_t i = 0; i < inputs * dim; ++i) pooled[i] += part[i];
      }
      for (int64_t i = 0; i < inputs * dim; ++i) {
        const float* weight_sum = is_weighted ? weight_sums + lookup * inputs + i / dim : nullptr;
        pooled[i] /= Divisor(combiners[lookup], lengths(i / dim), weight_sum);
      }
    }
    Tensor* sizes = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(lookups, TensorShape({ranks}), &sizes));
    for (int i = 0; i < ranks; ++i) sizes->vec<int64_t>()(i) = context->input(i).NumElements();
  }
};

class PostprocessingBackwardOp : public LookupOp {
 public:
  using LookupOp::LookupOp;

  void Compute(OpKernelContext* context) override {
    const float* weight_sums = context->input(2 * lookups + 2).flat<float>().data();
    for (int to = 0; to < ranks; ++to) {
      const int64_t inputs = context->input(lookups + 1).NumElements();
      Tensor* out = nullptr;
      const TensorShape shape({Start(lookups, inputs)});
      OP_REQUIRES_OK(context, context->allocate_output(to, shape, &out));
      for (int lookup = 0; lookup < lookups; ++lookup) {
        const auto lengths = context->input(lookups + 1 + lookup).flat<int64_t>();
        const auto gradient = context->input(lookup).flat<float>();
        const int64_t dim = dims[lookup];
        float* part = out->flat<float>().data() + Start(lookup, inputs);
        for (int64_t i = 0; i < inputs * dim; ++i) {
          const float* weight_sum = is_weighted ? weight_sums + lookup * inputs + i / dim : nullptr;
          part[i] = gradient(i) / Divisor(combiners[lookup], lengths(i / dim), weight_sum);
        }
      }
    }
  }
};

#define REGISTER(name, Kernel)                                      \
  REGISTER_KERNEL_BUILDER(Name(name)                                \
                              .Device(DEVICE_CPU)                   \
                              .TypeConstraint<int64_t>("Tindices")  \
                              .TypeConstraint<int64_t>("Toffsets"), \
                          Kernel)
REGISTER("PreprocessingForward", PreprocessingOp<false>);
REGISTER("PreprocessingForwardWithWeight", PreprocessingOp<true>);
REGISTER("LookupForward", LookupForwardOp<false>);
REGISTER("LookupForwardDynamic", LookupForwardOp<true>);
REGISTER("LookupBackward", LookupBackwardOp);
REGISTER("PostprocessingForward", PostprocessingForwardOp);
REGISTER("PostprocessingBackward", PostprocessingBackwardOp);
#undef REGISTER
REGISTER_KERNEL_BUILDER(
    Name("HotnessCalculate").Device(DEVICE_CPU).TypeConstraint<int64_t>("Tindices"), HotnessOp);

}  // namespace
}  // namespace sok_on_cpu
