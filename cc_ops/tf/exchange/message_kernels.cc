// Kernels that pack one message per rank, and unpack the messages of the ranks.
#include <cstdint>
#include <mutex>
#include <numeric>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/exchange/merged_rows.h"
#include "cc_ops/core/exchange/message.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/exchange/buffer_inputs.h"
#include "cc_ops/tf/exchange/row_dtype.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

constexpr int64_t kMaxFloats = 1 << 20;

absl::Status ReadRowFloats(tf::OpKernelConstruction* c, std::vector<int64_t>* row_floats) {
  TF_RETURN_IF_ERROR(c->GetAttr("row_floats", row_floats));
  for (size_t t = 0; t < row_floats->size(); ++t) {
    if ((*row_floats)[t] < 0 || (*row_floats)[t] > kMaxFloats) {
      return absl::InvalidArgumentError(absl::StrCat("row_floats[", t, "] is ", (*row_floats)[t],
                                                     "; expected an integer from 0 to ",
                                                     kMaxFloats));
    }
  }
  return absl::OkStatus();
}

class PackMessagesOp : public tf::OpKernel {
 public:
  explicit PackMessagesOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, ReadRowFloats(c, &row_floats_));
  }
  void Compute(tf::OpKernelContext* c) override {
    RowDtype dtype = RowDtype::kFloat32;
    SendBufferView buffer;
    OP_REQUIRES_OK(c, ReadBuffer(c, 0, static_cast<int64_t>(row_floats_.size()), true, &buffer));
    OP_REQUIRES_OK(c, ReadRowDtype(c, 3, &dtype));
    MessageWriter writer(row_floats_, dtype);
    {
      // Two calls of a function may run the same op at the same time.
      const std::lock_guard<std::mutex> lock(mutex_);
      OP_REQUIRES_OK(c, ToAbsl(writer.Take(buffer, &lengths_[static_cast<size_t>(dtype)])));
    }
    const std::vector<int64_t>& lengths = writer.lengths();
    const int64_t bytes = std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
    uint8_t* messages = nullptr;
    OP_REQUIRES_OK(c, Allocate(c, 0, tf::TensorShape({bytes}), &messages));
    writer.Write(messages);
    OP_REQUIRES_OK(c, Output(c, 1, std::vector<int32_t>(lengths.begin(), lengths.end())));
  }

 private:
  std::vector<int64_t> row_floats_;
  std::mutex mutex_;
  LengthsByDtype lengths_;  // guarded by mutex_
};

class MergeRowsOp : public tf::OpKernel {
 public:
  explicit MergeRowsOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, ReadRowFloats(c, &row_floats_));
    OP_REQUIRES_OK(c, c->GetAttr("ranks", &ranks_));
  }
  void Compute(tf::OpKernelContext* c) override {
    const auto tables = static_cast<int64_t>(row_floats_.size());
    SendBufferView rows;
    OP_REQUIRES_OK(c, ReadBuffer(c, 0, tables, true, &rows));
    SendBuffer merged;
    OP_REQUIRES_OK(c, ToAbsl(MergeRows(rows, row_floats_, ranks_, &merged)));
    const tf::TensorShape parts({ranks_, tables});
    OP_REQUIRES_OK(c, Output(c, 0, parts, merged.sizes));
    OP_REQUIRES_OK(c, Output(c, 1, merged.keys));
    OP_REQUIRES_OK(c, Output(c, 2, merged.values));
    OP_REQUIRES_OK(c, Output(c, 3, parts, merged.squares));
  }

 private:
  std::vector<int64_t> row_floats_;
  int ranks_ = 1;
};

class UnpackMessagesOp : public tf::OpKernel {
 public:
  explicit UnpackMessagesOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, ReadRowFloats(c, &row_floats_));
    OP_REQUIRES_OK(c, c->GetAttr("ranks", &ranks_));
  }
  void Compute(tf::OpKernelContext* c) override {
    OP_REQUIRES_OK(c, CheckInputs(c, 0, "messages: [?]"));
    MessageReader reader(row_floats_);
    OP_REQUIRES_OK(c, ToAbsl(reader.Take(Data<uint8_t>(c, 0), c->input(0).NumElements(), ranks_)));
    int64_t *sizes = nullptr, *keys = nullptr;
    float* values = nullptr;
    const auto tables = static_cast<int64_t>(row_floats_.size());
    OP_REQUIRES_OK(c, Allocate(c, 0, tf::TensorShape({ranks_, tables}), &sizes));
    OP_REQUIRES_OK(c, Allocate(c, 1, tf::TensorShape({reader.num_keys()}), &keys));
    OP_REQUIRES_OK(c, Allocate(c, 2, tf::TensorShape({reader.num_values()}), &values));
    reader.Read(sizes, keys, values);
  }

 private:
  std::vector<int64_t> row_floats_;
  int ranks_ = 1;
};

SLIPSTREAM_CPU_KERNEL("SlipstreamPackMessages", PackMessagesOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamUnpackMessages", UnpackMessagesOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamMergeRows", MergeRowsOp);

}  // namespace
}  // namespace slipstream
