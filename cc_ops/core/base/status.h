// Framework-free error values, which the op layer converts to absl::Status.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_STATUS_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_STATUS_H_

#include <string>
#include <utility>

namespace slipstream {

enum class StatusCode { kOk, kInvalidArgument, kResourceExhausted, kDataLoss };

// Result of a call that can fail on user data. The message contains the value, its place and the
// allowed values.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == StatusCode::kOk; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  StatusCode code_ = StatusCode::kOk;
  std::string message_;
};

inline Status OkStatus() { return Status(); }
inline Status InvalidArgument(std::string message) {
  return Status(StatusCode::kInvalidArgument, std::move(message));
}
inline Status ResourceExhausted(std::string message) {
  return Status(StatusCode::kResourceExhausted, std::move(message));
}
// The disk did not return the data that was written.
inline Status DataLoss(std::string message) {
  return Status(StatusCode::kDataLoss, std::move(message));
}

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_STATUS_H_
