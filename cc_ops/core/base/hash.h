// The hashes of keys, which spread any int64 over 64 bits: HashKey is the same everywhere, and its
// top bits choose a key's shard; KeyedHash goes by a seed. And random numbers made of them.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_HASH_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_HASH_H_

#include <cstdint>
#include <random>

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

// Drawn when the process starts.
inline const uint64_t kHashSeed = (uint64_t{std::random_device()()} << 32) | std::random_device()();

// Where a key lies in an open-addressing table: nobody can choose keys that all lie in one line.
// Nothing but the time of a search may depend on the seed.
SLIPSTREAM_HOST_DEVICE inline uint64_t KeyedHash(int64_t key, uint64_t seed) {
  return Mix64(static_cast<uint64_t>(key) ^ seed);
}
inline uint64_t KeyedHash(int64_t key) { return KeyedHash(key, kHashSeed); }

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

inline int ShardOf(int64_t key) { return static_cast<int>(HashKey(key) >> (64 - kShardBits)); }

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_HASH_H_
