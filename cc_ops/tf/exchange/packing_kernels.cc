// Kernels that pack keys and floats for a wire, without loss.
#include <limits>
#include <type_traits>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "cc_ops/core/exchange/float_packing.h"
#include "cc_ops/core/exchange/key_packing.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

// The sum of sizes, which are those of parts.
absl::Status AddUpSizes(const tf::Tensor& sizes, int64_t* total) {
  *total = 0;
  const auto parts = sizes.flat<int64_t>();
  for (int64_t p = 0; p < parts.size(); ++p) {
    if (parts(p) < 0 || parts(p) > std::numeric_limits<int64_t>::max() - *total) {
      return absl::InvalidArgumentError(absl::StrCat("sizes has ", parts(p), " in place ", p,
                                                     "; allowed: 0 or more, 2^63 - 1 in total"));
    }
    *total += parts(p);
  }
  return absl::OkStatus();
}

// what: "keys" or "values", of which there are n.
absl::Status CheckSizes(const tf::Tensor& sizes, int64_t n, absl::string_view what) {
  int64_t total = 0;
  TF_RETURN_IF_ERROR(AddUpSizes(sizes, &total));
  if (total == n) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("sizes name ", total, " ", what, "; there are ", n));
}

tf::TensorShape VectorOf(size_t n) { return tf::TensorShape({static_cast<int64_t>(n)}); }

class PackKeysOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tf::OpKernelContext* c) override {
    const tf::Tensor &sizes = c->input(0), &keys = c->input(1);
    OP_REQUIRES(c, sizes.dims() == 2 && keys.dims() == 1,
                absl::InvalidArgumentError("sizes must be a matrix, keys a vector"));
    OP_REQUIRES_OK(c, CheckSizes(sizes, keys.NumElements(), "keys"));
    const int64_t ranks = sizes.dim_size(0), tables = sizes.dim_size(1);
    std::vector<uint8_t> packed;
    std::vector<int64_t> ends;
    PackKeys(sizes.flat<int64_t>().data(), ranks * tables, keys.flat<int64_t>().data(), &packed,
             &ends);
    std::vector<int32_t> rank_bytes;
    int64_t before = 0;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      const int64_t end = tables > 0 ? ends[static_cast<size_t>((rank + 1) * tables - 1)] : 0;
      rank_bytes.push_back(static_cast<int32_t>(end - before));
      before = end;
    }
    OP_REQUIRES_OK(c, Output(c, 0, VectorOf(packed.size()), packed));
    OP_REQUIRES_OK(c, Output(c, 1, VectorOf(rank_bytes.size()), rank_bytes));
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamPackKeys").Device(tf::DEVICE_CPU),
                        MemoryChecked<PackKeysOp>);

class UnpackKeysOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tf::OpKernelContext* c) override {
    const tf::Tensor &sizes = c->input(0), &packed = c->input(1);
    OP_REQUIRES(c, sizes.dims() == 2 && packed.dims() == 1,
                absl::InvalidArgumentError("sizes must be a matrix, packed a vector"));
    std::vector<int64_t> keys;
    OP_REQUIRES_OK(c,
                   ToAbsl(UnpackKeys(sizes.flat<int64_t>().data(), sizes.NumElements(),
                                     packed.flat<uint8_t>().data(), packed.NumElements(), &keys)));
    const int64_t size = static_cast<int64_t>(keys.size());
    OP_REQUIRES_OK(c, Output(c, 0, tf::TensorShape({size}), keys));
  }
};
REGISTER_KERNEL_BUILDER(Name("SlipstreamUnpackKeys").Device(tf::DEVICE_CPU),
                        MemoryChecked<UnpackKeysOp>);

// The type of the bits that a tensor's values are packed as.
template <class T>
using BitsOfType = std::conditional_t<sizeof(T) == 2, uint16_t, uint32_t>;

template <class T>
class PackFloatsOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tf::OpKernelContext* c) override {
    const tf::Tensor &sizes = c->input(0), &values = c->input(1);
    OP_REQUIRES(c, sizes.dims() == 1 && values.dims() == 1,
                absl::InvalidArgumentError("sizes and values must be vectors"));
    OP_REQUIRES_OK(c, CheckSizes(sizes, values.NumElements(), "values"));
    const auto* at = reinterpret_cast<const BitsOfType<T>*>(values.data());
    std::vector<uint8_t> packed;
    std::vector<int32_t> part_bytes;
    for (int64_t p = 0; p < sizes.NumElements(); ++p) {
      const size_t before = packed.size();
      const int64_t n = sizes.flat<int64_t>()(p);
      PackFloats(at, n, &packed);
      at += n;
      const size_t bytes = packed.size() - before;
      OP_REQUIRES(c, bytes <= static_cast<size_t>(std::numeric_limits<int32_t>::max()),
                  absl::ResourceExhaustedError(absl::StrCat(
                      "the rows for one rank take ", bytes,
                      " bytes; at most 2^31 - 1 can be sent: make the batches smaller")));
      part_bytes.push_back(static_cast<int32_t>(bytes));
    }
    OP_REQUIRES_OK(c, Output(c, 0, VectorOf(packed.size()), packed));
    OP_REQUIRES_OK(c, Output(c, 1, VectorOf(part_bytes.size()), part_bytes));
  }
};

template <class T>
class UnpackFloatsOp : public tf::OpKernel {
 public:
  using OpKernel::OpKernel;
  void Compute(tf::OpKernelContext* c) override {
    using Bits = BitsOfType<T>;
    const tf::Tensor &sizes = c->input(0), &packed = c->input(1);
    OP_REQUIRES(c, sizes.dims() == 1 && packed.dims() == 1,
                absl::InvalidArgumentError("sizes and packed must be vectors"));
    int64_t total = 0, at = 0;
    OP_REQUIRES_OK(c, AddUpSizes(sizes, &total));
    // Before memory is taken for them.
    OP_REQUIRES(c, LeastPackedBytes<Bits>(total) <= packed.NumElements(),
                absl::InvalidArgumentError(absl::StrCat(
                    "sizes name ", total, " values; packed has ", packed.NumElements(), " bytes")));
    tf::Tensor* values = nullptr;
    OP_REQUIRES_OK(c, c->allocate_output(0, tf::TensorShape({total}), &values));
    auto* to = reinterpret_cast<Bits*>(values->data());
    for (int64_t p = 0; p < sizes.NumElements(); ++p) {
      const int64_t n = sizes.flat<int64_t>()(p);
      int64_t used = 0;
      OP_REQUIRES_OK(c, ToAbsl(UnpackFloats(packed.flat<uint8_t>().data() + at,
                                            packed.NumElements() - at, n, to, &used)));
      at += used;
      to += n;
    }
    OP_REQUIRES(c, at == packed.NumElements(),
                absl::InvalidArgumentError(absl::StrCat(
                    "packed floats take ", at, " bytes; there are ", packed.NumElements())));
  }
};

#define SLIPSTREAM_REGISTER(T)                                                      \
  REGISTER_KERNEL_BUILDER(                                                          \
      Name("SlipstreamPackFloats").Device(tf::DEVICE_CPU).TypeConstraint<T>("T"),   \
      MemoryChecked<PackFloatsOp<T>>)                                               \
  REGISTER_KERNEL_BUILDER(                                                          \
      Name("SlipstreamUnpackFloats").Device(tf::DEVICE_CPU).TypeConstraint<T>("T"), \
      MemoryChecked<UnpackFloatsOp<T>>)
SLIPSTREAM_REGISTER(float);
SLIPSTREAM_REGISTER(uint16_t);
#undef SLIPSTREAM_REGISTER

}  // namespace
}  // namespace slipstream
