// Kernel of SlipstreamSortKeys: threads take the lists in turn.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/core/base/radix_sort.h"
#include "cc_ops/tf/base/kernel_values.h"
#include "cc_ops/tf/base/memory_checked.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace slipstream {
namespace {

class SortKeysKernel : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    const int lists = context->num_inputs();
    std::vector<tensorflow::Tensor*> sorted(static_cast<size_t>(lists));
    for (int i = 0; i < lists; ++i) {
      const tensorflow::Tensor& keys = context->input(i);
      OP_REQUIRES(context, keys.dims() == 1,
                  absl::InvalidArgumentError(absl::StrCat(
                      "keys ", i, " have shape ", keys.shape().DebugString(), "; allowed: [n]")));
      OP_REQUIRES_OK(context, context->allocate_output(i, keys.shape(), &sorted[i]));
    }
    const Parallel parallel = ParallelOf(context);
    parallel.run(parallel.threads, [&](int task) {
      for (int i = task; i < lists; i += parallel.threads) {
        const auto keys = context->input(i).flat<int64_t>();
        std::vector<int64_t> own(keys.data(), keys.data() + keys.size());
        RadixSort(&own, [](int64_t key) { return AscendingBits(key); });
        std::copy(own.begin(), own.end(), sorted[i]->flat<int64_t>().data());
      }
    });
  }
};

REGISTER_KERNEL_BUILDER(Name("SlipstreamSortKeys").Device(tensorflow::DEVICE_CPU),
                        MemoryChecked<SortKeysKernel>);

}  // namespace
}  // namespace slipstream
