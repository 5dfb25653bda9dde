// The one hash of keys: spreads any int64 over 64 bits; its top bits choose the
// shard, the next ones the place in the shard's index. And random numbers made of it.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_HASH_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_HASH_H_

#include <cstdint>

#include "cc_ops/core/base/host_device.h"

namespace slipstream {

// A bijection on 64 bits (the finaliser of SplitMix64).
SLIPSTREAM_HOST_DEVICE inline uint64_t Mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

SLIPSTREAM_HOST_DEVICE inline uint64_t HashKey(int64_t key) {
  return Mix64(static_cast<uint64_t>(key));
}

// A hash as a place among n: its top bits count. Below n.
SLIPSTREAM_HOST_DEVICE inline uint64_t ScaleHash(uint64_t hash, uint64_t n) {
#ifdef __CUDA_ARCH__
  return __umul64hi(hash, n);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * n) >> 64);
#endif
}

// Random number `counter` of the stream `seed`: needs no state, so that results depend on
// neither threads nor call sizes.
SLIPSTREAM_HOST_DEVICE inline uint64_t CounterRandom(uint64_t seed, uint64_t counter) {
  return Mix64(Mix64(seed) ^ Mix64(counter + 0x632be59bd9b4e019ULL));
}

constexpr int kShardBits = 6;
constexpr int kNumShards = 1 << kShardBits;

inline int ShardOf(uint64_t hash) { return static_cast<int>(hash >> (64 - kShardBits)); }

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_HASH_H_
