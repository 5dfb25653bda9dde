// Hashes of int64 keys, and random numbers derived from them.
//
// `HashKey` is the same in every process; its top bits choose the shard of a key. `KeyedHash`
// depends on a seed that is drawn at process start. It places keys in hash tables, so that keys
// cannot be chosen to collide.
#ifndef SLIPSTREAM_CC_OPS_CORE_BASE_HASH_H_
#define SLIPSTREAM_CC_OPS_CORE_BASE_HASH_H_

#include <cstdint>
#include <random>

#include "cc_ops/core/base/host_device.h"

namespace slipstream {

// A bijection on 64 bits (the finalizer of SplitMix64).
SLIPSTREAM_HOST_DEVICE inline uint64_t Mix64(uint64_t x) {
  x += 0x9e3779b97f4a7c15ULL;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// Returns a hash that is the same in every process.
SLIPSTREAM_HOST_DEVICE inline uint64_t HashKey(int64_t key) {
  return Mix64(static_cast<uint64_t>(key));
}

// Seed of KeyedHash, drawn at process start.
inline const uint64_t kHashSeed = (uint64_t{std::random_device()()} << 32) | std::random_device()();

// Hash for open-addressing tables. Note: results must not depend on the seed; only the time of a
// search may.
SLIPSTREAM_HOST_DEVICE inline uint64_t KeyedHash(int64_t key, uint64_t seed) {
  return Mix64(static_cast<uint64_t>(key) ^ seed);
}
inline uint64_t KeyedHash(int64_t key) { return KeyedHash(key, kHashSeed); }

// Maps a hash to [0, n) by its top bits.
SLIPSTREAM_HOST_DEVICE inline uint64_t ScaleHash(uint64_t hash, uint64_t n) {
#ifdef __CUDA_ARCH__
  return __umul64hi(hash, n);
#else
  return static_cast<uint64_t>((static_cast<unsigned __int128>(hash) * n) >> 64);
#endif
}

// Returns random number `counter` of the stream `seed`. It has no state, so that results depend
// neither on threads nor on the sizes of calls.
SLIPSTREAM_HOST_DEVICE inline uint64_t CounterRandom(uint64_t seed, uint64_t counter) {
  return Mix64(Mix64(seed) ^ Mix64(counter + 0x632be59bd9b4e019ULL));
}

constexpr int kShardBits = 6;
constexpr int kNumShards = 1 << kShardBits;

// Returns the shard of a key within its table, in [0, kNumShards).
inline int ShardOf(int64_t key) { return static_cast<int>(HashKey(key) >> (64 - kShardBits)); }

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_BASE_HASH_H_
