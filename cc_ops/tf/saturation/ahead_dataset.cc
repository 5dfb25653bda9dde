// A tf.data transformation that makes the next element while the current one is used. In contrast
// to `prefetch`, it starts only when an element is returned and only if LookAhead allows it, and
// training can wait for it to finish. Therefore the state that making an element changes is the
// same as without the transformation whenever training reads it.
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "cc_ops/tf/base/resource_kernel.h"
#include "cc_ops/tf/saturation/look_ahead_resource.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/partial_tensor_shape.h"
#include "tensorflow/core/graph/graph.h"

namespace slipstream {
namespace {

using tensorflow::CancellationManager;
using tensorflow::CancellationToken;
using tensorflow::DataTypeVector;
using tensorflow::Node;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;
using tensorflow::data::CardinalityOptions;
using tensorflow::data::DatasetBase;
using tensorflow::data::DatasetContext;
using tensorflow::data::DatasetIterator;
using tensorflow::data::IteratorBase;
using tensorflow::data::IteratorContext;
using tensorflow::data::IteratorStateReader;
using tensorflow::data::IteratorStateWriter;
using tensorflow::data::SerializationContext;
using tensorflow::data::UnaryDatasetOpKernel;

// Keys of the checkpoint of an iterator.
constexpr char kHasElement[] = "has_element";
constexpr char kIsEnd[] = "is_end";
constexpr char kErrorCode[] = "error_code";
constexpr char kErrorMessage[] = "error_message";
constexpr char kNumComponents[] = "num_components";

class AheadDataset : public DatasetBase {
 public:
  AheadDataset(OpKernelContext* context, const DatasetBase* input, LookAheadRef ahead,
               const Tensor& handle)
      : DatasetBase(DatasetContext(context)),
        input_(input),
        ahead_(std::move(ahead)),
        handle_(handle) {
    input_->Ref();
  }
  ~AheadDataset() override { input_->Unref(); }

  const DataTypeVector& output_dtypes() const override { return input_->output_dtypes(); }
  const std::vector<PartialTensorShape>& output_shapes() const override {
    return input_->output_shapes();
  }
  std::string DebugString() const override { return "SlipstreamAheadDataset"; }
  int64_t CardinalityInternal(CardinalityOptions options) const override {
    return input_->Cardinality(options);
  }
  absl::Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->push_back(input_);
    return absl::OkStatus();
  }
  absl::Status CheckExternalState() const override { return input_->CheckExternalState(); }

 protected:
  std::unique_ptr<IteratorBase> MakeIteratorInternal(const std::string& prefix) const override;

  absl::Status AsGraphDefInternal(SerializationContext* context, DatasetGraphDefBuilder* builder,
                                  Node** output) const override {
    Node *input = nullptr, *handle = nullptr;
    TF_RETURN_IF_ERROR(builder->AddInputDataset(context, input_, &input));
    if (context->is_graph_rewrite()) {
      // A constant would not keep the resource alive.
      TF_RETURN_IF_ERROR(builder->AddPlaceholder(handle_, &handle));
      context->input_list()->emplace_back(handle->name(), handle_);
    } else {
      TF_RETURN_IF_ERROR(builder->AddTensor(handle_, &handle));
    }
    return builder->AddDataset(this, {input, handle}, output);
  }

 private:
  class Iterator;

  const DatasetBase* const input_;
  const LookAheadRef ahead_;
  const Tensor handle_;
};

class AheadDataset::Iterator : public DatasetIterator<AheadDataset> {
 public:
  explicit Iterator(const Params& params) : DatasetIterator<AheadDataset>(params) {}

  ~Iterator() override {
    // The element that is being made is discarded, so no caller must wait for it.
    cancellation_.StartCancel();
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      is_over_ = true;
      if (is_making_) dataset()->ahead_->ahead.Made();
    }
    changed_.notify_all();
    thread_.reset();  // Joins it.
    if (parent_ != nullptr) parent_->DeregisterCallback(token_);
  }

  absl::Status Initialize(IteratorContext* context) override {
    if (context->cancellation_manager() != nullptr) {
      CancellationManager* parent = context->cancellation_manager();
      token_ = parent->get_cancellation_token();
      if (!parent->RegisterCallback(token_, [this] { cancellation_.StartCancel(); })) {
        return absl::CancelledError(
            "the step was cancelled before the iterator of the dataset was created");
      }
      parent_ = parent;
    }
    IteratorContext own = OwnContext(context);
    TF_RETURN_IF_ERROR(dataset()->input_->MakeIterator(&own, this, prefix(), &input_));
    context->MergeCheckpoint(own.checkpoint());
    return absl::OkStatus();
  }

  absl::Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* out,
                               bool* is_end) override {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!next_.is_present) {
      if (is_making_) {
        RecordStop(context);
        Wait(&lock);
        RecordStart(context);
      } else {
        IteratorContext own = OwnContext(context);
        Make(&own, &next_);
      }
    }
    Element element = std::move(next_);
    next_ = Element();
    *is_end = element.is_end;
    if (!element.status.ok() || element.is_end) return element.status;
    *out = std::move(element.components);
    // Without a thread, elements are made when they are requested.
    if (!EnsureThread(context)) return absl::OkStatus();
    if (dataset()->ahead_->ahead.Pull()) {
      is_making_ = true;
      changed_.notify_all();
    }
    return absl::OkStatus();
  }

 protected:
  absl::Status SaveInternal(SerializationContext* context, IteratorStateWriter* writer) override {
    std::unique_lock<std::mutex> lock(mutex_);
    Wait(&lock);
    TF_RETURN_IF_ERROR(SaveInput(context, writer, input_));
    TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), kHasElement, next_.is_present));
    if (!next_.is_present) return absl::OkStatus();
    TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), kIsEnd, next_.is_end));
    TF_RETURN_IF_ERROR(
        writer->WriteScalar(prefix(), kErrorCode, static_cast<int64_t>(next_.status.code())));
    TF_RETURN_IF_ERROR(
        writer->WriteScalar(prefix(), kErrorMessage, std::string(next_.status.message())));
    const auto n = static_cast<int64_t>(next_.components.size());
    TF_RETURN_IF_ERROR(writer->WriteScalar(prefix(), kNumComponents, n));
    for (int64_t i = 0; i < n; ++i) {
      TF_RETURN_IF_ERROR(writer->WriteTensor(prefix(), ComponentKey(i), next_.components[i]));
    }
    return absl::OkStatus();
  }

  absl::Status RestoreInternal(IteratorContext* context, IteratorStateReader* reader) override {
    std::unique_lock<std::mutex> lock(mutex_);
    Wait(&lock);
    next_ = Element();
    TF_RETURN_IF_ERROR(RestoreInput(context, reader, input_));
    int64_t has_element = 0, is_end = 0, code = 0, n = 0;
    TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kHasElement, &has_element));
    if (has_element == 0) return absl::OkStatus();
    Element element;
    tensorflow::tstring message;
    TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kIsEnd, &is_end));
    TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kErrorCode, &code));
    TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kErrorMessage, &message));
    TF_RETURN_IF_ERROR(reader->ReadScalar(prefix(), kNumComponents, &n));
    for (int64_t i = 0; i < n; ++i) {
      Tensor component;
      TF_RETURN_IF_ERROR(reader->ReadTensor(context->flr(), prefix(), ComponentKey(i), &component));
      element.components.push_back(std::move(component));
    }
    element.is_present = true;
    element.is_end = is_end != 0;
    element.status = absl::Status(static_cast<absl::StatusCode>(code), std::string(message));
    next_ = std::move(element);
    return absl::OkStatus();
  }

 private:
  struct Element {
    bool is_present = false;
    bool is_end = false;
    absl::Status status;
    std::vector<Tensor> components;
  };

  static std::string ComponentKey(int64_t i) { return absl::StrCat("component_", i); }

  IteratorContext OwnContext(IteratorContext* context) {
    IteratorContext::Params params(context);
    params.cancellation_manager = &cancellation_;
    return IteratorContext(std::move(params));
  }

  // Called by one thread at a time: the caller of GetNext, or `thread_` while `is_making_`.
  void Make(IteratorContext* context, Element* element) {
    element->status = input_->GetNext(context, &element->components, &element->is_end);
    element->is_present = true;
  }

  // Waits until no element is being made.
  void Wait(std::unique_lock<std::mutex>* lock) {
    changed_.wait(*lock, [this] { return !is_making_; });
  }

  bool EnsureThread(IteratorContext* context) {
    if (thread_ != nullptr) return true;
    auto own = std::make_shared<IteratorContext>(OwnContext(context));
    thread_ = context->StartThread("slipstream_ahead", [this, own] { Run(own.get()); });
    return thread_ != nullptr;
  }

  void Run(IteratorContext* context) {
    RecordStart(context);
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      RecordStop(context);
      changed_.wait(lock, [this] { return is_making_ || is_over_; });
      RecordStart(context);
      if (!is_making_) break;
      lock.unlock();
      Element made;
      Make(context, &made);
      lock.lock();
      next_ = std::move(made);
      is_making_ = false;
      if (!is_over_) dataset()->ahead_->ahead.Made();
      changed_.notify_all();
    }
    RecordStop(context);
  }

  CancellationManager cancellation_;
  CancellationManager* parent_ = nullptr;
  CancellationToken token_ = 0;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_making_ = false;
  bool is_over_ = false;
  Element next_;
  // Used while `mutex_` is held, or by `thread_` while `is_making_`.
  std::unique_ptr<IteratorBase> input_;
  std::unique_ptr<tensorflow::Thread> thread_;
};

std::unique_ptr<IteratorBase> AheadDataset::MakeIteratorInternal(const std::string& prefix) const {
  return std::make_unique<Iterator>(
      Iterator::Params{this, absl::StrCat(prefix, "::SlipstreamAhead")});
}

class AheadDatasetOp : public UnaryDatasetOpKernel {
 public:
  explicit AheadDatasetOp(OpKernelConstruction* context) : UnaryDatasetOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("output_types", &types_));
  }

 protected:
  void MakeDataset(OpKernelContext* context, DatasetBase* input, DatasetBase** output) override {
    OP_REQUIRES(context, types_ == input->output_dtypes(),
                absl::InvalidArgumentError(absl::StrCat(
                    "output_types are ", tensorflow::DataTypeVectorString(types_), "; expected ",
                    tensorflow::DataTypeVectorString(input->output_dtypes()),
                    ", the output types of input_dataset")));
    LookAheadRef ahead;
    OP_REQUIRES_OK(context, FindResource(context, 1, &ahead));
    try {
      *output = new AheadDataset(context, input, std::move(ahead), context->input(1));
    } catch (const std::bad_alloc&) {
      context->CtxFailure(absl::ResourceExhaustedError(
          "out of memory in SlipstreamAheadDataset. Reduce the batch size or free memory"));
    }
  }

 private:
  DataTypeVector types_;
};

REGISTER_KERNEL_BUILDER(Name("SlipstreamAheadDataset").Device(tensorflow::DEVICE_CPU),
                        AheadDatasetOp);

}  // namespace
}  // namespace slipstream
