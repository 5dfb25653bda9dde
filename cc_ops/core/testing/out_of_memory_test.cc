// Each allocation of each operation on tables fails once. The test checks the remaining state, then
// repeats the operation, which must succeed.
#include "cc_ops/core/table/out_of_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cc_ops/core/exchange/pull.h"
#include "cc_ops/core/exchange/pulled_lookup.h"
#include "cc_ops/core/exchange/push.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/table/eviction.h"
#include "cc_ops/core/testing/failing_memory.h"
#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/update/deferred_export.h"
#include "cc_ops/core/update/policy_update.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 5;
const Parallel kOneThread;

TableOptions Options(int64_t capacity = 0) {
  TableOptions options;
  options.name = "item";
  options.dim = kDim;
  options.capacity = capacity;
  options.eviction = TableOptions::Eviction::kLru;
  options.initializer.kind = RowInitializer::Kind::kUniform;
  options.initializer.a = -1.f;
  options.initializer.b = 1.f;
  options.rule = RuleNamed("adagrad");
  return options;
}

// Keys of one feature, one per example, and the gradients of their rows.
struct Batch {
  explicit Batch(std::vector<int64_t> of) : keys(std::move(of)) {
    const size_t values = keys.size() * kDim;
    pooled.resize(values);
    for (size_t i = 0; i < values; ++i)
      upstream.push_back(0.01f * static_cast<float>(i % 17) - 0.05f);
    FeatureView view;
    view.batch = view.num_keys = static_cast<int64_t>(keys.size());
    view.keys = keys.data();
    features = {view};
    outputs = {{pooled.data(), kDim}};
    gradients = {{upstream.data(), kDim}};
  }
  std::vector<int64_t> keys;
  std::vector<float> pooled, upstream;
  std::vector<FeatureView> features;
  std::vector<Combiner> combiners = {Combiner::kSum};
  std::vector<PooledOutput> outputs;
  std::vector<PooledGradient> gradients;
};

std::vector<int64_t> Range(int64_t begin, int64_t end) {
  std::vector<int64_t> keys;
  for (int64_t key = begin; key < end; ++key) keys.push_back(key * 7919);
  return keys;
}

UpdatePolicy Defer(bool is_exchanged, float movement = 1e9f) {
  UpdatePolicy policy;
  policy.mode = UpdatePolicy::Mode::kDefer;
  policy.movement = movement;
  policy.max_age = 3;
  policy.max_rows = 1 << 20;
  policy.is_exchanged = is_exchanged;
  return policy;
}

// A table that was trained for some steps and has deferred gradients.
struct Trained {
  explicit Trained(int64_t capacity = 0, bool defers = false, bool is_exchanged = false)
      : table(std::make_unique<EmbeddingTable>(Options(capacity))), tables({table.get()}) {
    if (defers) table->updates().SetPolicy(Defer(is_exchanged));
    for (int64_t step = 0; step < 2; ++step) {
      Batch batch(Range(20 * step, 20 * step + 60));
      EXPECT_TRUE(Lookup(&batch).ok());
      EXPECT_TRUE(Apply(batch).ok());
    }
  }
  Status Lookup(Batch* batch) {
    return LookupForTraining(tables, batch->features, batch->combiners, batch->outputs, kOneThread,
                             &workspace);
  }
  Status Apply(const Batch& batch) {
    return ApplyGradients(workspace.plan, batch.gradients, 0.1f, kOneThread);
  }
  std::unique_ptr<EmbeddingTable> table;
  std::vector<EmbeddingTable*> tables;
  LookupWorkspace workspace;
};

// The complete state of a table.
struct Image {
  explicit Image(EmbeddingTable* table)
      : contents(table->Export()),
        deferred(ExportDeferred(table)),
        generation(table->rows().generation()) {
    flags.resize(contents.keys.size());
    const int64_t n = static_cast<int64_t>(flags.size());
    table->flags().Get(contents.keys.data(), n, table->rows(), flags.data());
  }
  bool operator==(const Image& other) const {
    return contents.keys == other.contents.keys && contents.rows == other.contents.rows &&
           contents.slots == other.contents.slots && contents.counts == other.contents.counts &&
           contents.last_used == other.contents.last_used &&
           contents.update_step == other.contents.update_step &&
           contents.lookup_step == other.contents.lookup_step && generation == other.generation &&
           deferred.keys == other.deferred.keys && deferred.ages == other.deferred.ages &&
           deferred.sums == other.deferred.sums && flags == other.flags;
  }
  // Returns whether all rows of another image are here and unchanged.
  bool Contains(const Image& other) const {
    for (size_t i = 0; i < other.contents.keys.size(); ++i) {
      const auto at =
          std::lower_bound(contents.keys.begin(), contents.keys.end(), other.contents.keys[i]);
      if (at == contents.keys.end() || *at != other.contents.keys[i]) return false;
      const size_t index = static_cast<size_t>(at - contents.keys.begin());
      const size_t slots = contents.slots.size() / contents.keys.size();
      const auto same = [&](const std::vector<float>& a, const std::vector<float>& b,
                            size_t width) {
        return std::equal(a.begin() + index * width, a.begin() + (index + 1) * width,
                          b.begin() + i * width);
      };
      if (!same(contents.rows, other.contents.rows, kDim) ||
          !same(contents.slots, other.contents.slots, slots)) {
        return false;
      }
    }
    return deferred.keys == other.deferred.keys && deferred.sums == other.deferred.sums;
  }
  TableContents contents;
  DeferredContents deferred;
  std::vector<uint8_t> flags;
  int64_t generation;
};

// Fails each allocation of an operation on a table that `make` creates. is_intact compares the
// table before and after a failure. Afterwards the operation must have the same result as without
// failures, except for access counts, steps and times if `counts_twice`, because a batch may be
// counted twice.
template <class Subject>
void FailEach(const std::function<std::unique_ptr<Subject>()>& make,
              const std::function<Status(Subject*)>& operation,
              const std::function<bool(const Image&, const Image&)>& is_intact,
              bool counts_twice = false) {
  const std::unique_ptr<Subject> undisturbed = make();
  ASSERT_TRUE(operation(undisturbed.get()).ok());
  const Image expected(undisturbed->table.get());
  int64_t failures = 0;
  bool has_ended = false;
  for (int64_t n = 0; !has_ended; ++n) {
    const std::unique_ptr<Subject> subject = make();
    const Image before(subject->table.get());
    const bool failed = FailsAt(n, [&] { return operation(subject.get()); }, &has_ended);
    failures += failed;
    if (failed) {
      ASSERT_TRUE(is_intact(before, Image(subject->table.get()))) << "allocation " << n;
      const Status again = operation(subject.get());
      ASSERT_TRUE(again.ok()) << again.message();
      Image after(subject->table.get());
      if (counts_twice) {
        ASSERT_EQ(after.contents.keys, expected.contents.keys) << "allocation " << n;
        ASSERT_TRUE(after.Contains(expected)) << "allocation " << n;
      } else {
        ASSERT_TRUE(after == expected) << "allocation " << n;
      }
    }
  }
  EXPECT_GT(failures, 0);
}

bool Same(const Image& before, const Image& after) { return before == after; }
bool Kept(const Image& before, const Image& after) { return after.Contains(before); }

std::function<std::unique_ptr<Trained>()> Made(int64_t capacity = 0, bool defers = false,
                                               bool is_exchanged = false) {
  return [=] { return std::make_unique<Trained>(capacity, defers, is_exchanged); };
}

TEST(OutOfMemory, LookupWithNewKeysKeepsAllRows) {
  for (const int64_t capacity : {0, 1200}) {
    Batch batch(Range(30, 900));
    FailEach<Trained>(Made(capacity), [&](Trained* t) { return t->Lookup(&batch); }, Kept, true);
  }
}

TEST(OutOfMemory, EvictingLookupKeepsRowsIntact) {
  Batch batch(Range(60, 120));
  const auto is_intact = [](const Image& before, const Image& after) {
    // An evicted row is absent or has its initial values.
    const std::vector<int64_t>& keys = after.contents.keys;
    return before.contents.keys.size() <= 100 && keys.size() <= 100 &&
           std::is_sorted(keys.begin(), keys.end());
  };
  FailEach<Trained>(Made(100), [&](Trained* t) { return t->Lookup(&batch); }, is_intact, true);
}

TEST(OutOfMemory, EvaluationAppliesOrKeepsDeferredGradients) {
  Batch batch(Range(0, 100));
  const auto operation = [&](Trained* t) {
    const Status flushed = FlushBeforeReading(t->tables, kOneThread);
    if (!flushed.ok()) return flushed;
    return LookupForEvaluation(t->tables, batch.features, batch.combiners, batch.outputs,
                               kOneThread);
  };
  const auto is_intact = [](const Image& before, const Image& after) {
    return before == after || after.deferred.keys.empty();
  };
  FailEach<Trained>(Made(0, true), operation, is_intact);
}

// A trained table with a lookup that has not been updated yet.
struct LookedUp : Trained {
  LookedUp(bool defers, bool is_exchanged)
      : Trained(0, defers, is_exchanged), batch(Range(30, 90)) {
    EXPECT_TRUE(Lookup(&batch).ok());
  }
  Batch batch;
};

TEST(OutOfMemory, UpdateIsAtomic) {
  const auto apply = [](LookedUp* t) { return t->Apply(t->batch); };
  const auto make = [](bool defers) {
    return [=] { return std::make_unique<LookedUp>(defers, false); };
  };
  FailEach<LookedUp>(make(false), apply, Same);
}

TEST(OutOfMemory, SumThatCannotBeDeferredIsApplied) {
  // A gradient that cannot be deferred is applied immediately, so that it is not lost and no step
  // fails.
  bool has_ended = false;
  int64_t over_budget = 0;
  for (int64_t n = 0; !has_ended; ++n) {
    LookedUp subject(true, false);
    const Image before(subject.table.get());
    const bool failed = FailsAt(n, [&] { return subject.Apply(subject.batch); }, &has_ended);
    if (failed) {
      ASSERT_TRUE(before == Image(subject.table.get())) << "allocation " << n;
    }
    over_budget += subject.table->updates().counts().over_budget;
    EXPECT_TRUE(FlushDeferred(subject.table.get(), kOneThread).ok());
    EXPECT_EQ(subject.table->updates().num_deferred(), 0);
  }
  EXPECT_GT(over_budget, 0);
}

TEST(OutOfMemory, GradientsAreCollectedOrKept) {
  bool has_ended = false;
  int64_t failures = 0;
  const auto collect = [](LookedUp* t, SendBuffer* buffer) {
    return CollectGradients(t->workspace.plan, t->batch.gradients, {0.1f, 2, true}, kOneThread,
                            buffer);
  };
  for (int64_t n = 0; !has_ended; ++n) {
    LookedUp subject(true, true);
    const Image before(subject.table.get());
    SendBuffer buffer;
    const bool failed = FailsAt(n, [&] { return collect(&subject, &buffer); }, &has_ended);
    failures += failed;
    if (failed) {
      ASSERT_TRUE(before == Image(subject.table.get())) << "allocation " << n;
    }
  }
  EXPECT_GT(failures, 0);
}

TEST(OutOfMemory, DeferredGradientsAreCollectedOrKept) {
  bool has_ended = false;
  for (int64_t n = 0; !has_ended; ++n) {
    Trained subject(0, true, true);
    const Image before(subject.table.get());
    SendBuffer buffer;
    CollectOptions options;
    options.ranks = 2;
    const auto collect = [&] { return CollectAllDeferred(subject.tables, options, &buffer); };
    const bool failed = FailsAt(n, collect, &has_ended);
    if (failed) {
      ASSERT_TRUE(before == Image(subject.table.get())) << "allocation " << n;
    }
    if (!failed) {
      EXPECT_EQ(buffer.keys.size(), before.deferred.keys.size());
    }
  }
}

TEST(OutOfMemory, ApplyingReceivedRowsIsAtomic) {
  SendBuffer buffer;
  buffer.keys = Range(40, 900);
  buffer.sizes = {static_cast<int64_t>(buffer.keys.size())};
  buffer.values.assign(buffer.keys.size() * kDim, 0.5f);
  const SendBufferView view = {1,
                               buffer.sizes.data(),
                               buffer.keys.data(),
                               static_cast<int64_t>(buffer.keys.size()),
                               buffer.values.data(),
                               static_cast<int64_t>(buffer.values.size())};
  const auto apply = [&](Trained* t) {
    return ApplyRows(t->tables, view, {0.1f, {1.f}, true}, kOneThread);
  };
  // Rows may have been created; none was changed.
  FailEach<Trained>(Made(), apply, Kept);
}

TEST(OutOfMemory, PullingAndStoringRowsIsAtomic) {
  std::vector<int64_t> keys = Range(40, 400);
  std::sort(keys.begin(), keys.end());
  const std::vector<int64_t> sizes = {static_cast<int64_t>(keys.size())};
  const SendBufferView view = {1, sizes.data(), keys.data(), sizes[0], nullptr, 0};
  SteadyLengths lengths;
  PulledRows pulled;
  PullOptions options;
  options.create_missing = true;
  const auto pull = [&](Trained* t) {
    return PullRows(t->tables, view, options, &lengths, &pulled);
  };
  FailEach<Trained>(Made(), pull, Kept, true);
  Trained owner;
  ASSERT_TRUE(pull(&owner).ok());
  const auto is_intact = [](const Image&, const Image&) { return true; };

  std::vector<FeatureView> views(1);
  views[0].batch = views[0].num_keys = sizes[0];
  views[0].keys = keys.data();
  std::vector<float> pooled(keys.size() * kDim);
  const auto look_up = [&](Trained* t) {
    LookupWorkspace workspace;
    SendBuffer requests;
    Status status =
        RouteKeys(t->tables, views, {Combiner::kSum}, 1, kOneThread, &workspace, &requests);
    if (!status.ok()) return status;
    // In the order of the requests.
    PulledRows rows;
    const SendBufferView wanted = {
        1, requests.sizes.data(), requests.keys.data(), requests.sizes[0], nullptr, 0};
    status = PullRows({owner.table.get()}, wanted, PullOptions(), &lengths, &rows);
    if (!status.ok()) return status;
    const PulledMessages came = {wanted, rows.messages.data(),
                                 static_cast<int64_t>(rows.messages.size())};
    return LookUpPulled(views, {Combiner::kSum}, {{pooled.data(), kDim}}, came, true, kOneThread,
                        &workspace);
  };
  FailEach<Trained>(Made(), look_up, is_intact, true);
}

TEST(OutOfMemory, ExportAndImportAreAtomic) {
  const auto export_all = [](Trained* t) {
    const TableContents contents = t->table->Export();
    const DeferredContents deferred = ExportDeferred(t->table.get());
    return OkStatus();
  };
  FailEach<Trained>(Made(0, true), export_all, Same);
  Trained other(0, true);
  Batch more(Range(500, 900));
  ASSERT_TRUE(other.Lookup(&more).ok());
  ASSERT_TRUE(other.Apply(more).ok());
  const Image image(other.table.get());
  const auto import_table = [&](Trained* t) { return t->table->Import(image.contents); };
  FailEach<Trained>(Made(), import_table, Same);
  FailEach<Trained>(Made(1000), import_table, Same);
  DeferredContents some = ExportDeferred(Trained(0, true).table.get());
  for (float& value : some.sums) value *= 2.f;
  const auto import_deferred = [&](Trained* t) { return ImportDeferred(t->table.get(), some); };
  FailEach<Trained>(Made(0, true), import_deferred, Same);
}

TEST(OutOfMemory, SettingFlagsAndPoliciesIsAtomic) {
  const std::vector<int64_t> keys = Range(10, 300);
  std::vector<uint8_t> flags(keys.size(), kSaturated);
  for (size_t i = 0; i < flags.size(); i += 3) flags[i] = 0;
  const auto set_flags = [&](Trained* t) {
    EXPECT_TRUE(t->table
                    ->SetFlags(keys.data(), flags.data(), static_cast<int64_t>(keys.size()),
                               Parallel(), true)
                    .ok());
    return OkStatus();
  };
  const auto is_intact = [](const Image& before, const Image& after) {
    const bool has_flags =
        std::any_of(after.flags.begin(), after.flags.end(), [](uint8_t m) { return m != 0; });
    return !has_flags && after.Contains(before);
  };
  FailEach<Trained>(Made(), set_flags, is_intact);
  // Change a part of the flags.
  const std::vector<int64_t> there = Range(0, 80), next = Range(5, 78);
  const std::vector<uint8_t> before(there.size(), kSaturated);
  const auto made = [&] {
    std::unique_ptr<Trained> trained = Made()();
    EXPECT_TRUE(trained->table->SetFlags(there.data(), before.data(), 80, Parallel()).ok());
    return trained;
  };
  const auto change = [&](Trained* t) {
    EXPECT_TRUE(
        t->table->SetFlags(next.data(), flags.data(), static_cast<int64_t>(next.size()), Parallel())
            .ok());
    return OkStatus();
  };
  FailEach<Trained>(made, change, Same);
  bool has_ended = false;
  for (int64_t n = 0; !has_ended; ++n) {
    Trained subject;
    const int64_t offered = subject.table->updates().counts().offered;
    const auto set = [&] {
      subject.table->updates().SetPolicy(Defer(false));
      return OkStatus();
    };
    const bool failed = FailsAt(n, set, &has_ended);
    EXPECT_EQ(subject.table->updates().counts().offered, offered);
    EXPECT_EQ(subject.table->updates().policy().mode == UpdatePolicy::Mode::kApply, failed);
    subject.table->updates().SetPolicy(Defer(false));
    EXPECT_EQ(subject.table->updates().counts().offered, offered);
  }
}

TEST(OutOfMemory, FlushAndEvictionAreAtomic) {
  const auto flush = [](Trained* t) {
    EXPECT_TRUE(FlushDeferred(t->table.get(), kOneThread).ok());
    return OkStatus();
  };
  FailEach<Trained>(Made(0, true), flush, Same);
  const auto make_room = [](Trained* t) {
    return EvictFor({{t->table.get(), Range(70, 130)}}, "a batch needs");
  };
  FailEach<Trained>(Made(100), make_room, Same);
}

TEST(OutOfMemory, ReleasedSlotIsReused) {
  EmbeddingTable table(Options(40));
  for (int64_t round = 0; round < 50; ++round) {
    const std::vector<int64_t> keys = Range(17 * round, 17 * round + 40);
    ASSERT_TRUE(EvictFor({{&table, keys}}, "a batch needs").ok());
    uint32_t index = 0;
    for (const int64_t key : keys) {
      table.rows().FindOrInsert(key, 1.f, &index);
      EXPECT_LT(index, 40u);
    }
  }
  EXPECT_EQ(table.rows().size(), 40);
}

TEST(OutOfMemory, ErrorNamesTableThatCannotGrow) {
  Trained subject;
  Batch batch(Range(200, 5000));
  allocations_left = 60;
  Status status = subject.Lookup(&batch);
  for (int64_t n = 60; status.ok() || status.message().find("cannot grow") == std::string::npos;
       ++n) {
    ASSERT_LT(n, 10000);
    allocations_left = n;
    status = subject.Lookup(&batch);
    allocations_left = -1;
    if (status.ok()) subject = Trained();
  }
  allocations_left = -1;
  EXPECT_NE(status.message().find("while looking up a batch: table 'item' ("), std::string::npos)
      << status.message();
}

}  // namespace
}  // namespace slipstream
