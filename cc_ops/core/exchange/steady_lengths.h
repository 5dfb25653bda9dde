// Lengths of what is sent at every step.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_STEADY_LENGTHS_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_STEADY_LENGTHS_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace slipstream {

// What one rank can send another: its length, with what is spare, is an int32.
constexpr int64_t kMostMessageBytes = int64_t{1} << 30;

// Lengths of messages that change seldom: what carries them (Horovod) agrees on a tensor in more
// rounds whenever it is longer or shorter than the one of the same name before.
class SteadyLengths {
 public:
  // Returns the length, a multiple of 8, of the next message to a rank, which needs so many bytes:
  // that of the one before, unless it does not hold them, or a quarter of it was spare for long.
  int64_t Of(size_t rank, int64_t bytes);

 private:
  struct Length {
    int64_t bytes = 0;
    int too_long = 0;  // messages in a row that left a quarter of it
    int64_t most = 0;  // that one of these needed
  };
  std::vector<Length> lengths_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_STEADY_LENGTHS_H_
