#include "cc_ops/core/exchange/pulled_lookup.h"

#include <algorithm>
#include <new>

#include "cc_ops/core/exchange/buffer_parts.h"
#include "cc_ops/core/exchange/pulled_rows.h"
#include "cc_ops/core/lookup/key_sort.h"
#include "cc_ops/core/table/out_of_memory.h"
#include "cc_ops/core/table/table_locks.h"

namespace slipstream {
namespace {

// Calls fn(part, &unpacker) for every part of valid messages. fn must read all rows of the part.
template <class Fn>
void ForEachPulledPart(const std::vector<EmbeddingTable*>& tables, const SendBufferView& keys,
                       const std::vector<RowsView>& rows, Fn fn) {
  int rank = -1;
  const uint8_t* bytes = nullptr;
  ForEachPart(tables, keys, [&](const BufferPart& part) {
    const RowsView& of_rank = rows[static_cast<size_t>(part.rank)];
    if (part.rank != rank) bytes = of_rank.bytes;
    rank = part.rank;
    RowUnpacker unpacker(*part.table, of_rank.format, part.rows, bytes);
    fn(part, &unpacker);
    bytes = unpacker.End();
  });
}

// A distinct key of a batch and the number of its part in the requests.
struct RoutedKey {
  PlannedKey key;
  size_t part;
};

// Returns the parts of the distinct keys in the buckets [first, last).
std::vector<RoutedKey> RouteBuckets(const LookupPlan& plan, int ranks, int64_t first,
                                    int64_t last) {
  const size_t num_tables = plan.tables.size();
  std::vector<RoutedKey> routed;
  for (int64_t b = first; b < last; ++b) {
    const size_t t = static_cast<size_t>(b / kNumShards);
    const int64_t begin = plan.unique_begin[b];
    int64_t use = begin;
    for (int64_t u = begin; u < begin + plan.unique_count[b]; ++u) {
      const PlannedKey planned = {u, plan.uses_end[u] - use};
      use = plan.uses_end[u];
      const size_t owner = static_cast<size_t>(OwnerOf(plan.unique_key[u], ranks));
      routed.push_back({planned, owner * num_tables + t});
    }
  }
  return routed;
}

// Returns InvalidArgument unless `keys` are the keys that the plan requested.
Status CheckRequested(const LookupWorkspace& workspace, const std::vector<int64_t>& layout,
                      const SendBufferView& keys) {
  const std::vector<int64_t>& planned = workspace.plan.unique_key;
  const std::vector<int64_t>& sizes = workspace.sizes;
  const size_t parts = static_cast<size_t>(keys.ranks) * workspace.plan.tables.size();
  bool is_right = workspace.layout == layout && sizes.size() == parts &&
                  std::equal(sizes.begin(), sizes.end(), keys.sizes) &&
                  static_cast<int64_t>(workspace.requested.size()) == keys.num_keys;
  for (int64_t i = 0; i < keys.num_keys && is_right; ++i) {
    is_right = planned[static_cast<size_t>(workspace.requested[i].unique)] == keys.keys[i];
  }
  if (is_right) return OkStatus();
  return InvalidArgument(
      "plan belongs to another batch; expected the plan that SlipstreamRouteKeys returned for "
      "these features and keys");
}

// Splits the messages into rows and checks them.
Status ReadMessages(const std::vector<EmbeddingTable*>& tables, const PulledMessages& messages,
                    std::vector<RowsView>* rows) {
  Status status = SplitRowMessages(messages.bytes, messages.num_bytes, messages.keys.ranks, rows);
  return status.ok() ? CheckPulledRows(tables, messages.keys, *rows) : status;
}

// Stores the rows of a plan as replicas.
Status StorePulled(const PulledMessages& messages, const std::vector<RowsView>& rows,
                   LookupWorkspace* workspace, bool joins_step) {
  LookupPlan* plan = &workspace->plan;
  const Status status = BeginLookup(workspace, joins_step);
  if (!status.ok()) return status;
  const PlannedKey* planned = workspace->requested.data();
  const auto set_row = [&](const PlannedKey& key, StoredRow* row, uint32_t index) {
    plan->unique_row[static_cast<size_t>(key.unique)] = row;
    plan->unique_index[static_cast<size_t>(key.unique)] = index;
  };
  ForEachPulledPart(plan->tables, messages.keys, rows,
                    [&](const BufferPart& part, RowUnpacker* unpacker) {
                      // The slots of replicas may be placeholders (UpdateRule::FillSlots).
                      for (int s = 0; s < kNumShards; ++s) {
                        part.table->rows().shard(s)->is_in_range = false;
                      }
                      const auto find = [&](int64_t i, uint32_t* index) {
                        const auto uses = static_cast<float>(planned[i].uses);
                        return part.table->rows().FindOrInsert(part.keys[i], uses, index);
                      };
                      FindAhead(part, find, [&](int64_t i, const FoundRow& found) {
                        unpacker->Next(part.keys[i], found.row);
                        set_row(planned[i], found.row, found.index);
                      });
                      planned += part.rows;
                    });
  return OkStatus();
}

// Reads the rows of a plan into the workspace.
void UnpackPulled(const PulledMessages& messages, const std::vector<RowsView>& rows,
                  LookupWorkspace* workspace) {
  LookupPlan* plan = &workspace->plan;
  plan->generations.assign(plan->tables.size(), -1);
  int64_t bytes = 0;
  ForEachPart(plan->tables, messages.keys, [&](const BufferPart& part) {
    bytes += part.rows * part.table->rows().layout().bytes();
  });
  workspace->rows.resize(static_cast<size_t>(bytes / kFloatBytes));
  auto* at = reinterpret_cast<char*>(workspace->rows.data());
  const PlannedKey* planned = workspace->requested.data();
  ForEachPulledPart(plan->tables, messages.keys, rows,
                    [&](const BufferPart& part, RowUnpacker* unpacker) {
                      const int64_t stride = part.table->rows().layout().bytes();
                      for (int64_t i = 0; i < part.rows; ++i, at += stride, ++planned) {
                        auto* const row = reinterpret_cast<StoredRow*>(at);
                        unpacker->Next(part.keys[i], row);
                        plan->unique_row[static_cast<size_t>(planned->unique)] = row;
                      }
                    });
}

}  // namespace

Status RouteKeys(const std::vector<EmbeddingTable*>& replicas,
                 const std::vector<FeatureView>& features, const std::vector<Combiner>& combiners,
                 int ranks, const Parallel& parallel, LookupWorkspace* workspace,
                 SendBuffer* requests) {
  try {
    const Status status = SortKeys(replicas, features, combiners, parallel, workspace);
    if (!status.ok()) return status;
    workspace->layout = LayoutOf(features, combiners);
    GroupKeys(parallel, workspace);
    const LookupPlan& plan = workspace->plan;
    const std::vector<int64_t> bounds = BalancedBuckets(plan.unique_begin, parallel.threads);
    std::vector<std::vector<RoutedKey>> routed(static_cast<size_t>(parallel.threads));
    parallel.run(parallel.threads, [&](int task) {
      routed[task] = RouteBuckets(plan, ranks, bounds[task], bounds[task + 1]);
    });
    // Counting sort by part.
    requests->ranks = ranks;
    requests->sizes.assign(static_cast<size_t>(ranks) * replicas.size(), 0);
    for (const std::vector<RoutedKey>& of_task : routed) {
      for (const RoutedKey& one : of_task) ++requests->sizes[one.part];
    }
    workspace->sizes = requests->sizes;
    std::vector<int64_t> next;
    int64_t total = 0;
    for (const int64_t size : requests->sizes) {
      next.push_back(total);
      total += size;
    }
    requests->keys.resize(static_cast<size_t>(total));
    requests->values.clear();
    workspace->requested.resize(static_cast<size_t>(total));
    for (const std::vector<RoutedKey>& of_task : routed) {
      for (const RoutedKey& one : of_task) {
        const auto at = static_cast<size_t>(next[one.part]++);
        workspace->requested[at] = one.key;
        requests->keys[at] = plan.unique_key[static_cast<size_t>(one.key.unique)];
      }
    }
  } catch (const std::bad_alloc&) {
    return OutOfMemory("sorting the keys of a batch", replicas);
  }
  return OkStatus();
}

Status LookUpPulled(const std::vector<FeatureView>& features,
                    const std::vector<Combiner>& combiners,
                    const std::vector<PooledOutput>& outputs, const PulledMessages& messages,
                    bool training, const Parallel& parallel, LookupWorkspace* workspace,
                    bool joins_step) {
  const std::vector<EmbeddingTable*>& tables = workspace->plan.tables;
  try {
    std::vector<RowsView> rows;
    Status status = CheckRequested(*workspace, LayoutOf(features, combiners), messages.keys);
    if (!status.ok()) return status;
    status = ReadMessages(tables, messages, &rows);
    if (!status.ok()) return status;
    const ExclusiveTableLocks locks(tables);
    if (training) {
      status = StorePulled(messages, rows, workspace, joins_step);
      if (!status.ok()) return status;
    } else {
      UnpackPulled(messages, rows, workspace);
    }
    DeliverRows(features, combiners, outputs, parallel, workspace);
  } catch (const std::bad_alloc&) {
    return OutOfMemory("looking up pulled rows", tables);
  }
  return OkStatus();
}

}  // namespace slipstream
