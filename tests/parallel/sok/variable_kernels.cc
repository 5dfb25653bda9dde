// CPU kernels of SOK's variable and routing ops, for tests only.
//
// SOK registers these ops with GPU kernels only. These kernels replace them, so that SOK's Python
// code runs on machines without a GPU. A hash map replaces SOK's hash tables and has the same
// visible behavior: A lookup allocates the rows of missing keys. A full "hybrid" table (HKV) evicts
// the key that was written longest ago. A lookup of an existing key does not change its age.
// `scatter_update` writes only existing keys.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "hash_variable.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace sok_on_cpu {
namespace {

using tensorflow::DataTypeToEnum;
using tensorflow::DEVICE_CPU;
using tensorflow::DT_FLOAT;
using tensorflow::DT_INT32;
using tensorflow::DtypeAndPartialTensorShape;
using tensorflow::HandleFromInput;
using tensorflow::LookupResource;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::TensorShape;

using Pointer = tensorflow::core::RefCountPtr<HashVariable>;

// Returns the number after `name` in `config`, which is JSON, or `otherwise` if `name` is missing.
int64_t Setting(const std::string& config, const std::string& name, int64_t otherwise) {
  const size_t place = config.find('"' + name + "\":");
  return place == std::string::npos ? otherwise
                                    : std::stoll(config.substr(place + name.size() + 3));
}

class HandleOp : public OpKernel {
 public:
  explicit HandleOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("container", &container_));
    OP_REQUIRES_OK(context, context->GetAttr("shared_name", &name_));
    OP_REQUIRES_OK(context, context->GetAttr("shape", &shape_));
  }

  void Compute(OpKernelContext* context) override {
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({}), &handle));
    const std::vector<DtypeAndPartialTensorShape> kind = {{DT_FLOAT, shape_}};
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::MakeResourceHandle<HashVariable>(context, container_, name_, kind);
  }

 private:
  std::string container_, name_;
  PartialTensorShape shape_;
};

class InitializeOp : public OpKernel {
 public:
  explicit InitializeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("var_type", &kind_));
    OP_REQUIRES_OK(context, context->GetAttr("config", &config_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& given = context->input(1);
    float initial = 0.0F;
    if (given.dtype() == DT_FLOAT) {
      initial = given.flat<float>()(0);
    } else {
      try {
        initial = std::stof(given.flat<tensorflow::tstring>()(0));
      } catch (const std::exception&) {
        // A name of a random initializer. Tests could not compare random rows.
        context->SetStatus(absl::UnimplementedError("only numbers as initializers on a CPU"));
        return;
      }
    }
    const auto handle = HandleFromInput(context, 0);
    const int64_t dim = handle.dtypes_and_shapes()[0].shape.dim_size(1);
    const bool is_bounded = kind_ == "hybrid";
    const int64_t capacity = is_bounded ? Setting(config_, "max_capacity", 64 << 20) : INT64_MAX;
    OP_REQUIRES_OK(context, tensorflow::CreateResource(context, handle,
                                                       new HashVariable(dim, initial, capacity)));
  }

 private:
  std::string kind_, config_;
};

template <typename Out>
class ShapeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Pointer variable;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &variable));
    Tensor* shape = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({2}), &shape));
    const std::lock_guard<std::mutex> lock(variable->mutex());
    shape->vec<Out>()(0) = static_cast<Out>(variable->size());
    shape->vec<Out>()(1) = static_cast<Out>(variable->dim());
  }
};

class SparseReadOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Pointer variable;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &variable));
    const auto keys = context->input(1).flat<int64_t>();
    const std::lock_guard<std::mutex> lock(variable->mutex());
    const int64_t dim = variable->dim();
    Tensor* rows = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({keys.size(), dim}), &rows));
    for (int64_t i = 0; i < keys.size(); ++i) {
      const float* row = variable->FindOrInsert(keys(i));
      std::copy(row, row + dim, rows->flat<float>().data() + i * dim);
    }
  }
};

enum class Write { kAssign, kAdd, kUpdate };

template <Write kWrite>
class WriteOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    Pointer variable;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &variable));
    const auto keys = context->input(1).flat<int64_t>();
    const auto values = context->input(2).flat<float>();
    const std::lock_guard<std::mutex> lock(variable->mutex());
    const int64_t dim = variable->dim();
    OP_REQUIRES(context, values.size() == keys.size() * dim,
                absl::InvalidArgumentError("as many rows as keys are needed"));
    for (int64_t i = 0; i < keys.size(); ++i) {
      if (kWrite == Write::kUpdate && !variable->Has(keys(i))) continue;
      float* row = variable->FindOrInsert(keys(i));
      for (int64_t j = 0; j < dim; ++j) {
        const float value = values(i * dim + j);
        row[j] = kWrite == Write::kAdd ? row[j] + value : value;
      }
      variable->Touch(keys(i));
    }
  }
};

class ExportOp : public OpKernel {
 public:
  explicit ExportOp(OpKernelConstruction* context) : OpKernel(context) {}

  void Compute(OpKernelContext* context) override {
    Pointer variable;
    OP_REQUIRES_OK(context, LookupResource(context, HandleFromInput(context, 0), &variable));
    // `DummyVarExportIf` has the time as its second input.
    const uint64_t threshold =
        context->num_inputs() == 2 ? context->input(1).flat<uint64_t>()(0) : 0;
    const std::lock_guard<std::mutex> lock(variable->mutex());
    std::vector<int64_t> keys = variable->KeysWrittenAfter(threshold);
    const int64_t dim = variable->dim(), count = static_cast<int64_t>(keys.size());
    Tensor *out_keys = nullptr, *out_rows = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({count}), &out_keys));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({count, dim}), &out_rows));
    for (int64_t i = 0; i < count; ++i) {
      out_keys->vec<int64_t>()(i) = keys[i];
      const float* row = variable->FindOrInsert(keys[i]);
      std::copy(row, row + dim, out_rows->flat<float>().data() + i * dim);
    }
  }
};

// Sorts keys by owner, which is the key modulo the number of owners. `order` contains the former
// position of each key.
template <typename Key>
class SelectOp : public OpKernel {
 public:
  explicit SelectOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_splits", &owners_));
  }

  void Compute(OpKernelContext* context) override {
    const auto keys = context->input(0).flat<Key>();
    Tensor *sorted = nullptr, *order = nullptr, *splits = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, TensorShape({keys.size()}), &sorted));
    OP_REQUIRES_OK(context, context->allocate_output(1, TensorShape({keys.size()}), &order));
    OP_REQUIRES_OK(context, context->allocate_output(2, TensorShape({owners_}), &splits));
    int64_t place = 0;
    for (int owner = 0; owner < owners_; ++owner) {
      const int64_t start = place;
      for (int64_t i = 0; i < keys.size(); ++i) {
        if (OwnerOf(keys(i), owners_) != owner) continue;
        sorted->vec<Key>()(place) = keys(i);
        order->vec<int32_t>()(place++) = static_cast<int32_t>(i);
      }
      splits->vec<int32_t>()(owner) = static_cast<int32_t>(place - start);
    }
  }

 private:
  int owners_;
};

// Permutes rows: `kTakes` gathers them from the positions in `order`, otherwise it scatters them to
// these positions.
template <bool kTakes>
class ReorderOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& in = context->input(0);
    const auto order = context->input(1).flat<int32_t>();
    Tensor* out = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, in.shape(), &out));
    const auto from = in.matrix<float>();
    auto to = out->matrix<float>();
    for (int64_t i = 0; i < order.size(); ++i) {
      if (kTakes) {
        to.chip<0>(i) = from.chip<0>(order(i));
      } else {
        to.chip<0>(order(i)) = from.chip<0>(i);
      }
    }
  }
};

REGISTER_KERNEL_BUILDER(Name("DummyVarHandle").Device(DEVICE_CPU), HandleOp);
REGISTER_KERNEL_BUILDER(Name("DummyVarInitialize").Device(DEVICE_CPU), InitializeOp);
REGISTER_KERNEL_BUILDER(
    Name("DummyVarShape").Device(DEVICE_CPU).TypeConstraint<int32_t>("out_type"), ShapeOp<int32_t>);
REGISTER_KERNEL_BUILDER(
    Name("DummyVarShape").Device(DEVICE_CPU).TypeConstraint<int64_t>("out_type"), ShapeOp<int64_t>);
REGISTER_KERNEL_BUILDER(
    Name("DummyVarSparseRead").Device(DEVICE_CPU).TypeConstraint<int64_t>("key_type"),
    SparseReadOp);
REGISTER_KERNEL_BUILDER(
    Name("DummyVarAssign").Device(DEVICE_CPU).TypeConstraint<int64_t>("key_type"),
    WriteOp<Write::kAssign>);
REGISTER_KERNEL_BUILDER(
    Name("DummyVarScatterAdd").Device(DEVICE_CPU).TypeConstraint<int64_t>("key_type"),
    WriteOp<Write::kAdd>);
REGISTER_KERNEL_BUILDER(
    Name("DummyVarScatterUpdate").Device(DEVICE_CPU).TypeConstraint<int64_t>("key_type"),
    WriteOp<Write::kUpdate>);
REGISTER_KERNEL_BUILDER(
    Name("DummyVarExport").Device(DEVICE_CPU).TypeConstraint<int64_t>("key_type"), ExportOp);
REGISTER_KERNEL_BUILDER(
    Name("DummyVarExportIf").Device(DEVICE_CPU).TypeConstraint<int64_t>("key_type"), ExportOp);
REGISTER_KERNEL_BUILDER(Name("DistSelect").Device(DEVICE_CPU).TypeConstraint<int32_t>("Tindices"),
                        SelectOp<int32_t>);
REGISTER_KERNEL_BUILDER(Name("DistSelect").Device(DEVICE_CPU).TypeConstraint<int64_t>("Tindices"),
                        SelectOp<int64_t>);
REGISTER_KERNEL_BUILDER(Name("Reorder").Device(DEVICE_CPU), ReorderOp<false>);
REGISTER_KERNEL_BUILDER(Name("GatherEx").Device(DEVICE_CPU), ReorderOp<true>);

}  // namespace
}  // namespace sok_on_cpu
