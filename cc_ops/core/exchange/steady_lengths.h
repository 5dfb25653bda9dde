// Chooses message lengths that rarely change.
//
// Horovod caches the negotiation of a tensor by name and shape. A message with another length would
// be negotiated again, which costs an additional round trip. Messages are therefore padded, and
// their length is reused while the payload fits.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_STEADY_LENGTHS_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_STEADY_LENGTHS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace slipstream {

// Maximum bytes of a message from one rank to another. With padding, its length fits in an int32.
constexpr int64_t kMaxMessageBytes = int64_t{1} << 30;

// Keeps the last length for each rank.
class SteadyLengths {
 public:
  // Returns the length in bytes of the next message to `rank` with a payload of `bytes`: the last
  // length if the payload fits. A larger payload increases the length. After more than 64
  // consecutive payloads that left over a quarter unused, the length shrinks to fit the largest of
  // them. A new length is the payload plus 1/32, rounded up to a multiple of 8, at least 1024.
  int64_t Of(size_t rank, int64_t bytes);

 private:
  struct Length {
    int64_t bytes = 0;    // Length of the last message; 0 before the first.
    int too_long = 0;     // Number of consecutive messages that left over a quarter unused.
    int64_t maximum = 0;  // Largest payload of these messages.
  };
  std::vector<Length> lengths_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_STEADY_LENGTHS_H_
