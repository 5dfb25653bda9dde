// Kernels that checkpoint tables with rows on disk.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/spill/sealed_files.h"
#include "cc_ops/core/table/row_layout.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "cc_ops/tf/table/table_resource.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace slipstream {
namespace {

namespace tf = tensorflow;

// Sealed files as a tensor, which keeps the files open.
struct SealedVariant {
  std::shared_ptr<SealedRows> rows;

  // The interface that tf::Variant requires. Open files cannot leave the process.
  static std::string TypeName() { return "slipstream::SealedFiles"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tf::VariantTensorData* data) const { data->set_type_name(TypeName()); }
  bool Decode(const tf::VariantTensorData&) { return false; }
};

absl::Status Seal(tf::OpKernelContext* c, EmbeddingTable* table) {
  if (table->rows().spilled() == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("table '", table->options().name,
                     "' has all rows in memory; expected a table that spills to disk"));
  }
  auto sealed = std::make_shared<SealedRows>();
  std::vector<int64_t> steps;
  {
    const ExclusiveLock lock(table->mutex());
    TF_RETURN_IF_ERROR(ToAbsl(table->rows().Seal(ParallelOf(c), sealed.get())));
    steps = {table->updates().step(), table->rows().lookup_step()};
  }
  const auto num_files = static_cast<int64_t>(sealed->files.size());
  tf::Tensor *files = nullptr, *names = nullptr;
  TF_RETURN_IF_ERROR(c->allocate_output(0, {}, &files));
  TF_RETURN_IF_ERROR(c->allocate_output(1, {num_files}, &names));
  for (int64_t i = 0; i < num_files; ++i) {
    names->vec<tf::tstring>()(i) = sealed->files.name(static_cast<size_t>(i));
  }
  TF_RETURN_IF_ERROR(Output(c, 2, sealed->file_of));
  TF_RETURN_IF_ERROR(Output(c, 3, sealed->offsets));
  TF_RETURN_IF_ERROR(Output(c, 4, sealed->pages));
  TF_RETURN_IF_ERROR(Output(c, 5, sealed->counts));
  TF_RETURN_IF_ERROR(Output(c, 6, steps));
  TF_RETURN_IF_ERROR(
      Output(c, 7, std::vector<int64_t>{sealed->pages_of_block, sealed->rows_of_block}));
  TF_RETURN_IF_ERROR(Output(c, 8, sealed->last_used));
  files->scalar<tf::Variant>()() = SealedVariant{std::move(sealed)};
  return absl::OkStatus();
}

class SaveSealedFileOp : public tf::OpKernel {
 public:
  explicit SaveSealedFileOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("copies", &copies_));
  }

  void Compute(tf::OpKernelContext* c) override {
    OP_REQUIRES_OK(c, CheckInputs(c, 0, "files: [], index: [], path: []"));
    const auto* const sealed = c->input(0).scalar<tf::Variant>()().get<SealedVariant>();
    OP_REQUIRES(c, sealed != nullptr && sealed->rows != nullptr,
                absl::InvalidArgumentError("files is empty; expected the output `files` of "
                                           "SlipstreamTableSeal in the same process"));
    const SealedFiles& files = sealed->rows->files;
    const int64_t index = c->input(1).scalar<int64_t>()();
    OP_REQUIRES(c, index >= 0 && index < static_cast<int64_t>(files.size()),
                absl::InvalidArgumentError(absl::StrCat("index is ", index,
                                                        "; expected at least 0 and below ",
                                                        files.size(), ", the number of files")));
    const std::string path = c->input(2).scalar<tf::tstring>()();
    const auto file = static_cast<size_t>(index);
    bool is_saved = true;
    const Status status = copies_ ? files.Copy(file, path) : files.Link(file, path, &is_saved);
    OP_REQUIRES_OK(c, ToAbsl(status));
    OP_REQUIRES_OK(c, OutputScalar(c, 0, is_saved));
  }

 private:
  bool copies_ = false;
};

class ReadSealedRowsOp : public tf::OpKernel {
 public:
  explicit ReadSealedRowsOp(tf::OpKernelConstruction* c) : OpKernel(c) {
    OP_REQUIRES_OK(c, c->GetAttr("pages_of_block", &pages_));
    OP_REQUIRES_OK(c, c->GetAttr("dim", &layout_.dim));
    OP_REQUIRES_OK(c, c->GetAttr("slots", &layout_.slots));
    OP_REQUIRES_OK(c, ReadRowDtype(c, "dtype", &layout_.dtype));
    OP_REQUIRES_OK(c, ReadRowDtype(c, "slot_dtype", &layout_.slot_dtype));
    constexpr int64_t kMax = int64_t{1} << 24;
    OP_REQUIRES(c, layout_.dim <= kMax && layout_.slots <= kMax && pages_ <= kMax,
                absl::InvalidArgumentError(absl::StrCat(
                    "dim, slots and pages_of_block are ", layout_.dim, ", ", layout_.slots, " and ",
                    pages_, "; expected at most ", kMax, " each")));
  }

  void Compute(tf::OpKernelContext* c) override { OP_REQUIRES_OK(c, Run(c)); }

 private:
  absl::Status Run(tf::OpKernelContext* c) const {
    TF_RETURN_IF_ERROR(CheckInputs(c, 0, "path: [], offsets: [b], pages: [b]"));
    const PageLayout pages(layout_.bytes());
    const BlocksToRead blocks = {pages_, Data<int64_t>(c, 1), Data<int64_t>(c, 2),
                                 c->input(1).NumElements()};
    PageMemory memory;
    TF_RETURN_IF_ERROR(
        ToAbsl(ReadBlocks(c->input(0).scalar<tf::tstring>()(), pages, blocks, &memory)));
    const int64_t num_pages = blocks.blocks * pages_, n = num_pages * pages.rows;
    int64_t* keys = nullptr;
    float *values = nullptr, *slots = nullptr;
    TF_RETURN_IF_ERROR(Allocate(c, 0, {n}, &keys));
    TF_RETURN_IF_ERROR(Allocate(c, 1, {n, layout_.dim}, &values));
    TF_RETURN_IF_ERROR(Allocate(c, 2, {n, layout_.slots}, &slots));
    const Parallel parallel = ParallelOf(c);
    parallel.run(parallel.threads, [&](int task) {
      const TaskRange range = RangeOf(task, parallel.threads, num_pages);
      for (int64_t p = range.begin; p < range.end; ++p) {
        const char* const page = memory.data() + p * pages.bytes;
        for (int64_t row = 0; row < pages.rows; ++row) {
          const int64_t i = p * pages.rows + row;
          keys[i] = pages.KeyOf(page, row);
          const auto* const stored = reinterpret_cast<const StoredRow*>(pages.RowOf(page, row));
          layout_.Read(stored, values + i * layout_.dim, slots + i * layout_.slots);
        }
      }
    });
    return absl::OkStatus();
  }

  int64_t pages_ = 0;
  RowLayout layout_;
};

SLIPSTREAM_TABLE_KERNEL("Seal", Seal);
SLIPSTREAM_CPU_KERNEL("SlipstreamSaveSealedFile", SaveSealedFileOp);
SLIPSTREAM_CPU_KERNEL("SlipstreamReadSealedRows", ReadSealedRowsOp);

}  // namespace
}  // namespace slipstream
