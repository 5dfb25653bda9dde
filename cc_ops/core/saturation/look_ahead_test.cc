#include "cc_ops/core/saturation/look_ahead.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

namespace slipstream {
namespace {

TEST(LookAhead, StopsBeforeBatchOfNextWindow) {
  LookAhead ahead;
  ahead.BeginWindow(3, 0);
  for (int window = 0; window < 2; ++window) {
    EXPECT_TRUE(ahead.Pull());
    EXPECT_TRUE(ahead.Pull());
    EXPECT_FALSE(ahead.Pull());
    EXPECT_FALSE(ahead.Pull()) << "no window has begun: a batch more is of this one";
    for (int made = 0; made < 2; ++made) ahead.Made();
    ahead.BeginWindow(3, 0);
  }
}

TEST(LookAhead, PullsFreelyWithinWindowAndWithoutWindow) {
  LookAhead ahead;
  for (int i = 0; i < 10; ++i) EXPECT_TRUE(ahead.Pull());
  ahead.BeginWindow(4, 2);
  EXPECT_TRUE(ahead.Pull());
  EXPECT_FALSE(ahead.Pull());
}

TEST(LookAhead, IsIdleWaitsForBatchesInProgress) {
  LookAhead ahead;
  LookAhead::Wait wait;
  EXPECT_TRUE(ahead.WaitUntilIdle(&wait));
  ASSERT_TRUE(ahead.Pull());
  ASSERT_TRUE(ahead.Pull());
  std::atomic<int> made{0};
  std::thread maker([&] {
    for (int i = 0; i < 2; ++i) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ++made;
      ahead.Made();
    }
  });
  EXPECT_TRUE(ahead.WaitUntilIdle(&wait));
  EXPECT_EQ(made, 2);
  maker.join();
}

TEST(LookAhead, WaitEndsWhenCancelled) {
  LookAhead ahead;
  ASSERT_TRUE(ahead.Pull());
  LookAhead::Wait wait, early;
  ahead.Cancel(&early);
  EXPECT_FALSE(ahead.WaitUntilIdle(&early));
  std::thread other([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ahead.Cancel(&wait);
  });
  EXPECT_FALSE(ahead.WaitUntilIdle(&wait));
  other.join();
  ahead.Made();
  EXPECT_TRUE(ahead.WaitUntilIdle(&wait)) << "there is nothing to wait for";
}

}  // namespace
}  // namespace slipstream
