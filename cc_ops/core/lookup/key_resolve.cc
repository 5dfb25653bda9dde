#include "cc_ops/core/lookup/key_resolve.h"

#include <algorithm>
#include <cstring>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/simd_clones.h"

namespace slipstream {
namespace {

// Prefetch distance for buckets with so many keys that data prefetched at the start may have left
// the cache.
constexpr int64_t kPrefetchDistance = 16;
constexpr int64_t kManyKeys = 512;

// Copies the values of rows with a dimension that is known at compile time.
template <int kDim>
struct CopyFloats {
  void operator()(const StoredRow* row, float* out) const {
    std::memcpy(out, RowLayout::Floats(row), kDim * sizeof(float));
  }
};

template <int kDim>
struct CopyBfloat16 {
  void operator()(const StoredRow* row, float* out) const {
    ReadHalves<Bfloat16Rounding>(reinterpret_cast<const uint8_t*>(row), kDim, out);
  }
};

// Processes buckets in stages, so that memory prefetched in one stage has arrived in the next:
//
//   Deduplicate  Numbers the distinct keys.      Prefetches their lines of the index.
//   Find         Finds their rows.               Prefetches the rows.
//   Group        Groups the uses of each key.    Prefetches the outputs.
//   Deliver      Copies the rows to the outputs.
class BucketResolver {
 public:
  BucketResolver(const SortedKeys& sorted, const RowTargets& targets, ResolveScratch* scratch,
                 LookupPlan* plan)
      : sorted_(sorted), targets_(targets), scratch_(scratch), plan_(plan) {}

  SLIPSTREAM_PREFETCHES void PrefetchShard(int64_t bucket) { ShardOfBucket(bucket)->Prefetch(); }

  // is_to_be_found: whether Find follows.
  void Deduplicate(int64_t bucket, bool is_to_be_found) {
    if (!is_to_be_found) return Number(bucket, [](uint64_t) {});
    const RowShard* shard = ShardOfBucket(bucket);
    if (sorted_.begin[bucket] < sorted_.begin[bucket + 1]) shard->arena.PrefetchChunks();
    Number(bucket, [&](uint64_t hash) SLIPSTREAM_LAMBDA_INLINE { shard->index.Prefetch(hash); });
  }

  template <class See>
  void Number(int64_t bucket, const See& see) {
    const int64_t begin = sorted_.begin[bucket], n = sorted_.begin[bucket + 1] - begin;
    plan_->unique_count[bucket] = 0;
    if (n == 0) return;
    Buffers& buffers = scratch_->buffers[bucket % 2];
    // Load of at most a quarter; at most an eighth for few keys.
    scratch_->numbers.Reset(scratch_->numbers.PowerOfTwo(std::max<int64_t>(64, 4 * n)));
    // Checked separately, because an allocation between the two may have failed in an earlier
    // batch.
    if (buffers.hash.size() < static_cast<size_t>(n)) buffers.hash.resize(static_cast<size_t>(n));
    if (buffers.number_of.size() < static_cast<size_t>(n)) {
      buffers.number_of.resize(static_cast<size_t>(n));
    }
    KeyNumber<int32_t>* __restrict__ entries = scratch_->numbers.begin();
    const FlatTableView<KeyNumber<int32_t>> numbers = {entries, scratch_->numbers.capacity(),
                                                       kHashSeed};
    int32_t* __restrict__ number_of = buffers.number_of.data();
    uint64_t* __restrict__ hashes = buffers.hash.data();
    const int64_t* __restrict__ keys = sorted_.key.data() + begin;
    int64_t* __restrict__ unique = plan_->unique_key.data() + begin;
    int64_t* __restrict__ uses = plan_->uses_end.data() + begin;
    int32_t count = 0;
    for (int64_t i = 0; i < n; ++i) {
      const int64_t key = keys[i];
      const uint64_t hash = KeyedHash(key);
      see(hash);
      KeyNumber<int32_t>* const entry = &entries[numbers.Probe(numbers.Home(hash), {unique, key})];
      // No branch on whether the key is new, because it is unpredictable. Data written for a known
      // key is overwritten by the next new key.
      const int32_t found = entry->number;
      const bool is_new = found < 0;
      const int32_t number = is_new ? count : found;
      entry->number = number;
      number_of[i] = number;
      unique[count] = key;
      hashes[count] = hash;
      uses[count] = 0;
      ++uses[number];
      count += is_new ? 1 : 0;
    }
    plan_->unique_count[bucket] = count;
  }

  void Find(int64_t bucket) {
    const int64_t begin = sorted_.begin[bucket];
    const int64_t count = plan_->unique_count[bucket];
    if (count == 0) return;
    EmbeddingTable* table = plan_->tables[bucket / kNumShards];
    RowShard* shard = ShardOfBucket(bucket);
    const RowLayout& layout = table->rows().layout();
    const Buffers& buffers = scratch_->buffers[bucket % 2];
    const uint64_t* hashes = buffers.hash.data();
    const int64_t* __restrict__ keys = plan_->unique_key.data() + begin;
    const int64_t* __restrict__ uses = plan_->uses_end.data() + begin;
    StoredRow** __restrict__ rows = plan_->unique_row.data() + begin;
    uint32_t* __restrict__ indices = plan_->unique_index.data() + begin;
    // Two passes, because a key outside the prefetched line would stall the keys after it.
    scratch_->missed.clear();
    for (int64_t u = 0; u < count; ++u) {
      if (count > kManyKeys && u + kPrefetchDistance < count) {
        shard->index.Prefetch(hashes[u + kPrefetchDistance]);
      }
      uint32_t index = 0;
      rows[u] =
          table->rows().FindAtOnce(shard, keys[u], hashes[u], static_cast<float>(uses[u]), &index);
      indices[u] = index;
      if (rows[u] == nullptr && !IsOnDisk(index)) {
        scratch_->missed.push_back(static_cast<int32_t>(u));
      }
    }
    for (const int32_t u : scratch_->missed) {
      rows[u] = table->rows().FindOrAdmit(keys[u], static_cast<float>(uses[u]), &indices[u]);
    }
    // More rows would leave the cache before they are used.
    const int64_t prefetched = std::min(count, kManyKeys);
    const int64_t bytes = layout.value_bytes();
    const bool has_parts_of_lines = layout.bytes() % kLine != 0;
    for (int64_t u = 0; u < prefetched; ++u) {
      const auto* const first = reinterpret_cast<const char*>(rows[u]);
      for (int64_t j = 0; j < bytes; j += kLine) __builtin_prefetch(first + j);
      // If rows do not fill whole lines, a row may extend into one more line.
      if (has_parts_of_lines) __builtin_prefetch(first + bytes - 1);
    }
  }

  void Group(int64_t bucket) {
    const int64_t begin = sorted_.begin[bucket], n = sorted_.begin[bucket + 1] - begin;
    const int64_t count = plan_->unique_count[bucket];
    if (count == 0) return;
    const Buffers& buffers = scratch_->buffers[bucket % 2];
    // Counting sort of the uses by key. uses_end first contains counts, then starts, and finally
    // ends when all uses are placed.
    int64_t next = begin;
    for (int64_t u = begin; u < begin + count; ++u) {
      const int64_t uses = plan_->uses_end[u];
      plan_->uses_end[u] = next;
      next += uses;
    }
    const bool has_positions = !sorted_.position.empty();
    for (int64_t i = 0; i < n; ++i) {
      const int64_t at = plan_->uses_end[begin + buffers.number_of[i]]++;
      const Occurrence& use = sorted_.use[begin + i];
      plan_->uses[at] = use;
      if (has_positions) plan_->use_position[at] = sorted_.position[begin + i];
      const PooledOutput& out = targets_.copied[use.feature];
      if (out.data != nullptr) __builtin_prefetch(out.data + use.example * out.stride, 1);
    }
  }

  void Deliver(int64_t bucket) {
    if (plan_->unique_count[bucket] == 0) return;
    const RowStore& rows = plan_->tables[bucket / kNumShards]->rows();
    const RowLayout& layout = rows.layout();
    if (rows.scale() != 1.f) {
      return DeliverBy(bucket, [&layout, scale = rows.scale()](const StoredRow* row, float* out) {
        layout.ReadValues(row, out);
        for (int64_t j = 0; j < layout.dim; ++j) out[j] *= scale;
      });
    }
    switch (layout.dtype) {
      case RowDtype::kFloat32:
        return DeliverOfDim<CopyFloats>(bucket, layout);
      case RowDtype::kBfloat16:
        return DeliverOfDim<CopyBfloat16>(bucket, layout);
      default:
        return DeliverOfAnyDim(bucket, layout);
    }
  }

 private:
  using Buffers = ResolveScratch::Buffers;
  static constexpr auto kLine = static_cast<int64_t>(kLineBytes);

  RowShard* ShardOfBucket(int64_t bucket) const {
    return plan_->tables[bucket / kNumShards]->rows().shard(bucket % kNumShards);
  }

  template <template <int> class Copy>
  void DeliverOfDim(int64_t bucket, const RowLayout& layout) {
    switch (layout.dim) {
      case 16:
        return DeliverBy(bucket, Copy<16>());
      case 32:
        return DeliverBy(bucket, Copy<32>());
      case 64:
        return DeliverBy(bucket, Copy<64>());
      case 128:
        return DeliverBy(bucket, Copy<128>());
      default:
        return DeliverOfAnyDim(bucket, layout);
    }
  }

  void DeliverOfAnyDim(int64_t bucket, const RowLayout& layout) {
    DeliverBy(bucket, [&](const StoredRow* row, float* out) { layout.ReadValues(row, out); });
  }

  template <class Copy>
  void DeliverBy(int64_t bucket, const Copy& copy) {
    const int64_t begin = sorted_.begin[bucket], end = begin + plan_->unique_count[bucket];
    const RowStore& rows = plan_->tables[bucket / kNumShards]->rows();
    const RowLayout& layout = rows.layout();
    const bool lies_as_floats = layout.dtype == RowDtype::kFloat32;
    int64_t use = begin;
    for (int64_t u = begin; u < end; ++u) {
      if (end - begin > kManyKeys && u + kPrefetchDistance < end) {
        __builtin_prefetch(plan_->unique_row[u + kPrefetchDistance]);
      }
      const StoredRow* const row = plan_->unique_row[u];
      const float* values = lies_as_floats && row != nullptr ? RowLayout::Floats(row) : nullptr;
      for (; use < plan_->uses_end[u]; ++use) {
        const Occurrence& o = plan_->uses[use];
        const PooledOutput& out = targets_.copied[o.feature];
        if (out.data != nullptr) {
          float* const target = out.data + o.example * out.stride;
          row == nullptr ? rows.CopyRow(plan_->unique_key[u], row, target) : copy(row, target);
          continue;
        }
        if (values == nullptr) {
          float* const own = targets_.copies + u * targets_.copy_dim;
          row == nullptr ? rows.NewAsStored(plan_->unique_key[u], own)
                         : layout.ReadValues(row, own);
          values = own;
        }
        (*targets_.row_of_position)[plan_->use_position[use]] = values;
      }
    }
  }

  const SortedKeys& sorted_;
  const RowTargets& targets_;
  ResolveScratch* scratch_;
  LookupPlan* plan_;
};

RowTargets Nowhere(const LookupPlan& plan) {
  RowTargets nowhere;
  nowhere.copied.resize(plan.feature_table.size());
  return nowhere;
}

}  // namespace

void ResolveBuckets(const SortedKeys& sorted, int64_t first, int64_t last,
                    const RowTargets& targets, ResolveScratch* scratch, LookupPlan* plan) {
  BucketResolver resolver(sorted, targets, scratch, plan);
  for (int64_t bucket = first; bucket < last + 2; ++bucket) {
    if (bucket + 1 < last) resolver.PrefetchShard(bucket + 1);
    if (bucket < last) resolver.Deduplicate(bucket, true);
    if (bucket - 1 >= first && bucket - 1 < last) {
      resolver.Find(bucket - 1);
      resolver.Group(bucket - 1);
    }
    if (bucket - 2 >= first) resolver.Deliver(bucket - 2);
  }
}

void FindBuckets(const SortedKeys& sorted, int64_t first, int64_t last, ResolveScratch* scratch,
                 LookupPlan* plan) {
  const RowTargets nowhere = Nowhere(*plan);
  BucketResolver resolver(sorted, nowhere, scratch, plan);
  for (int64_t bucket = first; bucket <= last; ++bucket) {
    if (bucket + 1 < last) resolver.PrefetchShard(bucket + 1);
    if (bucket < last) resolver.Deduplicate(bucket, true);
    if (bucket == first) continue;
    resolver.Find(bucket - 1);
    resolver.Group(bucket - 1);
  }
}

void GroupBuckets(const SortedKeys& sorted, int64_t first, int64_t last, ResolveScratch* scratch,
                  LookupPlan* plan) {
  const RowTargets nowhere = Nowhere(*plan);
  BucketResolver resolver(sorted, nowhere, scratch, plan);
  for (int64_t bucket = first; bucket < last; ++bucket) {
    resolver.Deduplicate(bucket, false);
    resolver.Group(bucket);
  }
}

void DeliverBuckets(const SortedKeys& sorted, int64_t first, int64_t last,
                    const RowTargets& targets, LookupPlan* plan) {
  BucketResolver resolver(sorted, targets, nullptr, plan);
  for (int64_t bucket = first; bucket < last; ++bucket) resolver.Deliver(bucket);
}

}  // namespace slipstream
