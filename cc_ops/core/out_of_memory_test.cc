// Every allocation of every operation on tables fails once: what remains is checked, and the
// operation then succeeds.
#include "cc_ops/core/out_of_memory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "cc_ops/core/batch_lookup.h"
#include "cc_ops/core/held_sums.h"
#include "cc_ops/core/input_classifier.h"
#include "cc_ops/core/key_map.h"
#include "cc_ops/core/pending_updates.h"
#include "cc_ops/core/policy_update.h"
#include "cc_ops/core/row_exchange.h"
#include "cc_ops/core/row_serving.h"
#include "cc_ops/core/table_room.h"
#include "cc_ops/core/test_threads.h"

namespace {

// Allocations of this thread until one fails; negative: none does.
thread_local int64_t allocations_left = -1;

void* Take(std::size_t size, std::size_t alignment) {
  if (allocations_left >= 0 && allocations_left-- == 0) throw std::bad_alloc();
  const std::size_t whole =
      (std::max<std::size_t>(size, 1) + alignment - 1) / alignment * alignment;
  void* memory = std::aligned_alloc(alignment, whole);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

// Of its own, so that compilers do not take it for a mistake.
__attribute__((noinline)) void GiveBack(void* memory) { std::free(memory); }

}  // namespace

// All forms: sanitizers have their own of each.
void* operator new(std::size_t size) { return Take(size, alignof(std::max_align_t)); }
void* operator new[](std::size_t size) { return Take(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return Take(size, static_cast<std::size_t>(alignment));
}
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
  try {
    return Take(size, alignof(std::max_align_t));
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}
void operator delete(void* memory) noexcept { GiveBack(memory); }
void operator delete[](void* memory) noexcept { GiveBack(memory); }
void operator delete(void* memory, std::size_t) noexcept { GiveBack(memory); }
void operator delete[](void* memory, std::size_t) noexcept { GiveBack(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { GiveBack(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { GiveBack(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { GiveBack(memory); }

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
  options.rule.kind = UpdateRule::Kind::kAdagrad;
  options.rule.b = 1e-8f;
  return options;
}

// Keys of one feature, one an example, and the gradients of their rows.
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

// A table that has been trained for some steps, with sums that it holds back.
struct Trained {
  explicit Trained(int64_t capacity = 0, bool defers = false, bool is_exchanged = false)
      : table(std::make_unique<EmbeddingTable>(Options(capacity))), tables({table.get()}) {
    if (defers) table->SetPolicy(Defer(is_exchanged));
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

// All that can be told of a table.
struct Image {
  explicit Image(EmbeddingTable* table)
      : contents(table->Export()), pending(ExportPending(table)), generation(table->generation()) {
    marks.resize(contents.keys.size());
    const int64_t n = static_cast<int64_t>(marks.size());
    table->Marks(contents.keys.data(), n, marks.data());
  }
  bool operator==(const Image& other) const {
    return contents.keys == other.contents.keys && contents.rows == other.contents.rows &&
           contents.slots == other.contents.slots && contents.counts == other.contents.counts &&
           contents.last_used == other.contents.last_used &&
           contents.update_step == other.contents.update_step &&
           contents.lookup_step == other.contents.lookup_step && generation == other.generation &&
           pending.keys == other.pending.keys && pending.ages == other.pending.ages &&
           pending.sums == other.pending.sums && marks == other.marks;
  }
  // Whether all rows of another image are here, as they were.
  bool Holds(const Image& other) const {
    for (size_t i = 0; i < other.contents.keys.size(); ++i) {
      const auto at =
          std::lower_bound(contents.keys.begin(), contents.keys.end(), other.contents.keys[i]);
      if (at == contents.keys.end() || *at != other.contents.keys[i]) return false;
      const size_t place = static_cast<size_t>(at - contents.keys.begin());
      const size_t slots = contents.slots.size() / contents.keys.size();
      const auto same = [&](const std::vector<float>& a, const std::vector<float>& b,
                            size_t width) {
        return std::equal(a.begin() + place * width, a.begin() + (place + 1) * width,
                          b.begin() + i * width);
      };
      if (!same(contents.rows, other.contents.rows, kDim) ||
          !same(contents.slots, other.contents.slots, slots)) {
        return false;
      }
    }
    return pending.keys == other.pending.keys && pending.sums == other.pending.sums;
  }
  TableContents contents;
  PendingUpdates pending;
  std::vector<uint8_t> marks;
  int64_t generation;
};

// Whether an operation ran out of memory at its n-th allocation; `has_ended`: it has fewer.
bool FailsAt(int64_t n, const std::function<Status()>& operation, bool* has_ended) {
  Status status;
  bool has_thrown = false;
  allocations_left = n;
  try {
    status = operation();
  } catch (const std::bad_alloc&) {
    has_thrown = true;
  }
  *has_ended = allocations_left >= 0;
  allocations_left = -1;
  if (*has_ended) {
    EXPECT_TRUE(!has_thrown && status.ok()) << status.message();
  }
  if (!status.ok()) {
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
    EXPECT_NE(status.message().find("table 'item' ("), std::string::npos) << status.message();
    EXPECT_NE(status.message().find(" rows, "), std::string::npos) << status.message();
  }
  return has_thrown || !status.ok();
}

// Fails each allocation of an operation on a table made anew by `make`. is_intact: of the table
// before and after a failure. Afterwards the operation must leave what it leaves undisturbed, but
// for access counts, steps and times, which may count a batch twice, if `counts_twice`.
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
        ASSERT_TRUE(after.Holds(expected)) << "allocation " << n;
      } else {
        ASSERT_TRUE(after == expected) << "allocation " << n;
      }
    }
  }
  EXPECT_GT(failures, 0);
}

bool Same(const Image& before, const Image& after) { return before == after; }
bool Held(const Image& before, const Image& after) { return after.Holds(before); }

std::function<std::unique_ptr<Trained>()> Made(int64_t capacity = 0, bool defers = false,
                                               bool is_exchanged = false) {
  return [=] { return std::make_unique<Trained>(capacity, defers, is_exchanged); };
}

TEST(OutOfMemory, ALookupWithNewKeysLeavesAllRows) {
  for (const int64_t capacity : {0, 1200}) {
    Batch batch(Range(30, 900));
    FailEach<Trained>(Made(capacity), [&](Trained* t) { return t->Lookup(&batch); }, Held, true);
  }
}

TEST(OutOfMemory, ALookupThatEvictsLeavesRowsThatAreWhole) {
  Batch batch(Range(60, 120));
  const auto is_intact = [](const Image& before, const Image& after) {
    // A row that left is gone, or has come back as it started.
    const std::vector<int64_t>& keys = after.contents.keys;
    return before.contents.keys.size() <= 100 && keys.size() <= 100 &&
           std::is_sorted(keys.begin(), keys.end());
  };
  FailEach<Trained>(Made(100), [&](Trained* t) { return t->Lookup(&batch); }, is_intact, true);
}

TEST(OutOfMemory, AnEvaluationAppliesWhatIsHeldOrLeavesIt) {
  Batch batch(Range(0, 100));
  const auto operation = [&](Trained* t) {
    return LookupForEvaluation(t->tables, batch.features, batch.combiners, batch.outputs,
                               kOneThread);
  };
  const auto is_intact = [](const Image& before, const Image& after) {
    return before == after || after.pending.keys.empty();
  };
  FailEach<Trained>(Made(0, true), operation, is_intact);
}

// Trained, with a lookup whose gradients are to come.
struct LookedUp : Trained {
  LookedUp(bool defers, bool is_exchanged)
      : Trained(0, defers, is_exchanged), batch(Range(30, 90)) {
    EXPECT_TRUE(Lookup(&batch).ok());
  }
  Batch batch;
};

TEST(OutOfMemory, AnUpdateIsDoneOrNotDone) {
  const auto apply = [](LookedUp* t) { return t->Apply(t->batch); };
  const auto make = [](bool defers) {
    return [=] { return std::make_unique<LookedUp>(defers, false); };
  };
  FailEach<LookedUp>(make(false), apply, Same);
}

TEST(OutOfMemory, ASumThatCannotBeHeldIsApplied) {
  // What cannot be held is applied at once: nothing is lost, and no step fails for it.
  bool has_ended = false;
  int64_t refused = 0;
  for (int64_t n = 0; !has_ended; ++n) {
    LookedUp subject(true, false);
    const Image before(subject.table.get());
    const bool failed = FailsAt(n, [&] { return subject.Apply(subject.batch); }, &has_ended);
    if (failed) {
      ASSERT_TRUE(before == Image(subject.table.get())) << "allocation " << n;
    }
    refused += subject.table->update_counts().refused;
    FlushDeferred(subject.table.get(), kOneThread);
    EXPECT_EQ(subject.table->num_deferred(), 0);
  }
  EXPECT_GT(refused, 0);
}

TEST(OutOfMemory, GradientsAreCollectedOrStay) {
  bool has_ended = false;
  int64_t failures = 0;
  const auto collect = [](LookedUp* t, RowParcels* parcels) {
    return CollectGradients(t->workspace.plan, t->batch.gradients, 0.1f, 2, true, kOneThread,
                            parcels);
  };
  for (int64_t n = 0; !has_ended; ++n) {
    LookedUp subject(true, true);
    const Image before(subject.table.get());
    RowParcels parcels;
    const bool failed = FailsAt(n, [&] { return collect(&subject, &parcels); }, &has_ended);
    failures += failed;
    if (failed) {
      ASSERT_TRUE(before == Image(subject.table.get())) << "allocation " << n;
    }
  }
  EXPECT_GT(failures, 0);
}

TEST(OutOfMemory, HeldSumsAreCollectedOrStay) {
  bool has_ended = false;
  for (int64_t n = 0; !has_ended; ++n) {
    Trained subject(0, true, true);
    const Image before(subject.table.get());
    RowParcels parcels;
    const auto collect = [&] {
      CollectHeld(subject.tables, 2, &parcels);
      return OkStatus();
    };
    const bool failed = FailsAt(n, collect, &has_ended);
    if (failed) {
      ASSERT_TRUE(before == Image(subject.table.get())) << "allocation " << n;
    }
    if (!failed) {
      EXPECT_EQ(parcels.keys.size(), before.pending.keys.size());
    }
  }
}

TEST(OutOfMemory, RowsFromOtherRanksAreAppliedOrNot) {
  RowParcels parcels;
  parcels.keys = Range(40, 900);
  parcels.sizes = {static_cast<int64_t>(parcels.keys.size())};
  parcels.values.assign(parcels.keys.size() * kDim, 0.5f);
  const RowParcelsView view = {1,
                               parcels.sizes.data(),
                               parcels.keys.data(),
                               static_cast<int64_t>(parcels.keys.size()),
                               parcels.values.data(),
                               static_cast<int64_t>(parcels.values.size())};
  const auto apply = [&](Trained* t) {
    return ApplyRows(t->tables, view, 0.1f, 1.f, true, kOneThread);
  };
  // Rows may have been made; none was changed.
  FailEach<Trained>(Made(), apply, Held);
}

TEST(OutOfMemory, RowsAreServedAndCopied) {
  std::vector<int64_t> keys = Range(40, 400);
  std::sort(keys.begin(), keys.end());
  const std::vector<int64_t> sizes = {static_cast<int64_t>(keys.size())};
  const RowParcelsView view = {1, sizes.data(), keys.data(), sizes[0], nullptr, 0};
  std::vector<uint8_t> bytes;
  std::vector<int64_t> rank_bytes;
  ServeOptions options;
  options.makes_rows = options.gives_all = true;
  const auto serve = [&](Trained* t) {
    return ServeRows(t->tables, view, options, &bytes, &rank_bytes);
  };
  FailEach<Trained>(Made(), serve, Held, true);
  Trained owner;
  ASSERT_TRUE(serve(&owner).ok());
  CopyOptions copied;
  copied.format = options.format;
  copied.frozen = true;
  const auto copy = [&](Trained* t) {
    return StoreCopies(t->tables, view, bytes.data(), static_cast<int64_t>(bytes.size()), copied);
  };
  const auto is_intact = [](const Image&, const Image&) { return true; };
  FailEach<Trained>(Made(), copy, is_intact);
}

TEST(OutOfMemory, ExportsAndImportsAreWholeOrNothing) {
  const auto export_all = [](Trained* t) {
    const TableContents contents = t->table->Export();
    const PendingUpdates pending = ExportPending(t->table.get());
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
  PendingUpdates some = ExportPending(Trained(0, true).table.get());
  for (float& value : some.sums) value *= 2.f;
  const auto import_pending = [&](Trained* t) { return ImportPending(t->table.get(), some); };
  FailEach<Trained>(Made(0, true), import_pending, Same);
}

TEST(OutOfMemory, MarksAndPoliciesAreSetOrNot) {
  const std::vector<int64_t> keys = Range(10, 300);
  std::vector<uint8_t> marks(keys.size(), kWatched);
  for (size_t i = 0; i < marks.size(); i += 3) marks[i] = kSaturated;
  const auto mark = [&](Trained* t) {
    t->table->MarkRows(keys.data(), marks.data(), static_cast<int64_t>(keys.size()), Parallel(),
                       true);
    return OkStatus();
  };
  const auto is_intact = [](const Image& before, const Image& after) {
    const bool has_marks =
        std::any_of(after.marks.begin(), after.marks.end(), [](uint8_t m) { return m != 0; });
    return !has_marks && after.Holds(before);
  };
  FailEach<Trained>(Made(), mark, is_intact);
  // Of rows that have marks, some change.
  const std::vector<int64_t> there = Range(0, 80), next = Range(5, 78);
  const std::vector<uint8_t> before(there.size(), kWatched);
  const auto made = [&] {
    std::unique_ptr<Trained> trained = Made()();
    trained->table->MarkRows(there.data(), before.data(), 80, Parallel());
    return trained;
  };
  const auto change = [&](Trained* t) {
    t->table->MarkRows(next.data(), marks.data(), static_cast<int64_t>(next.size()), Parallel());
    return OkStatus();
  };
  FailEach<Trained>(made, change, Same);
  bool has_ended = false;
  for (int64_t n = 0; !has_ended; ++n) {
    Trained subject;
    const int64_t offered = subject.table->update_counts().offered;
    const auto set = [&] {
      subject.table->SetPolicy(Defer(false));
      return OkStatus();
    };
    const bool failed = FailsAt(n, set, &has_ended);
    EXPECT_EQ(subject.table->update_counts().offered, offered);
    EXPECT_EQ(subject.table->policy().mode == UpdatePolicy::Mode::kApply, failed);
    subject.table->SetPolicy(Defer(false));
    EXPECT_EQ(subject.table->update_counts().offered, offered);
  }
}

TEST(OutOfMemory, FlushesAndRoomAreMadeOrNot) {
  const auto flush = [](Trained* t) {
    FlushDeferred(t->table.get(), kOneThread);
    return OkStatus();
  };
  FailEach<Trained>(Made(0, true), flush, Same);
  const auto make_room = [](Trained* t) {
    return MakeRoomFor({{t->table.get(), Range(70, 130)}}, "a batch needs");
  };
  FailEach<Trained>(Made(100), make_room, Same);
}

TEST(OutOfMemory, AReleasedSlotIsUsedAgain) {
  EmbeddingTable table(Options(40));
  for (int64_t round = 0; round < 50; ++round) {
    const std::vector<int64_t> keys = Range(17 * round, 17 * round + 40);
    ASSERT_TRUE(MakeRoomFor({{&table, keys}}, "a batch needs").ok());
    uint32_t slot = 0;
    for (const int64_t key : keys) {
      table.FindOrInsert(key, HashKey(key), 1.f, &slot);
      EXPECT_LT(slot, 40u);
    }
  }
  EXPECT_EQ(table.size(), 40);
}

TEST(OutOfMemory, AnIndexThatCannotGetReadyGrowsLater) {
  // Memory is refused for 300 keys in 600, or all the time.
  for (const bool comes_back : {false, true}) {
    IndexMemory memory(1);
    HashIndex index(&memory);
    size_t refused = 0, last_refused = 0, grown = 0;
    for (int64_t key = 0; key < 150'000; ++key) {
      const size_t before = index.entries().size();
      if (!comes_back || key / 300 % 2 == 0) allocations_left = 0;
      try {
        index.Insert(key, HashKey(key), static_cast<uint32_t>(key));
      } catch (const std::bad_alloc&) {
        ++refused;
        ASSERT_EQ(index.size(), key);
        index.Insert(key, HashKey(key), static_cast<uint32_t>(key));
      }
      allocations_left = -1;
      const bool has_grown = index.entries().size() != before;
      grown += has_grown;
      // What is ready needs no memory to grow.
      ASSERT_FALSE(has_grown && comes_back && before >= 1 << 16 && refused > last_refused);
      last_refused = refused;
    }
    if (!comes_back) EXPECT_EQ(refused, grown);
    EXPECT_GT(index.entries().size(), 150'000u);
    for (int64_t key = 0; key < 150'000; ++key) {
      ASSERT_EQ(index.Find(key, HashKey(key))->slot, static_cast<uint32_t>(key));
    }
  }
}

TEST(OutOfMemory, WhatCannotGrowIsNamed) {
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

TEST(OutOfMemory, HeldSumsOfAVariableStay) {
  std::vector<int64_t> held_keys(8, HeldSums::kFree), since(8, 0);
  std::vector<float> held_sums(8 * kDim, 0.f);
  held_keys[2] = 5;
  held_keys[4] = 9;
  const HoldRule rule = {7, 3, 8, true, false, true};
  const std::vector<int64_t> keys = {5, 6, 7}, places = {2, -1, -1};
  const std::vector<float> sums(3 * kDim, 1.f);
  const bool may_wait[] = {false, true, true};
  bool has_ended = false;
  for (int64_t n = 0; !has_ended; ++n) {
    const HeldSums held = {held_keys.data(), since.data(), held_sums.data(), 8, kDim};
    DuePlan plan;
    LeavingRows leaving;
    HeldCounts counts;
    FailsAt(
        n,
        [&] {
          return FindDue(held, rule, keys.data(), 3, places.data(), sums.data(), may_wait, {},
                         &plan, &leaving, &counts);
        },
        &has_ended);
    EXPECT_EQ(held_keys[2], 5);
    EXPECT_EQ(held_keys[4], 9);
    EXPECT_EQ(std::count(held_keys.begin(), held_keys.end(), HeldSums::kFree), 6);
  }
}

TEST(OutOfMemory, AClassifierGoesOn) {
  ClassifierOptions options;
  options.reservoir_size = 40;
  options.loss_memory_bytes = 1 << 14;
  const Batch batch(Range(0, 30));
  std::vector<int64_t> ids = Range(0, 30);
  const std::vector<float> losses(30, 0.5f), labels(30, 1.f);
  std::unique_ptr<bool[]> skippable(new bool[30]());
  std::vector<float> scores(30), weights(30);
  const Classified result = {skippable.get(), scores.data(), weights.data()};
  ClassifierWindow window;
  std::vector<float> sampled_scores;
  const auto step = [&](InputClassifier* classifier) {
    const Status status = classifier->Classify(batch.features, 30, ids.data(), true, result);
    if (!status.ok()) return status;
    classifier->RecordLosses(ids.data(), losses.data(), labels.data(), skippable.get(), nullptr,
                             30);
    window = classifier->ExportWindow();
    const std::vector<int32_t> tables(30, 0);
    Status set = classifier->SetDrift(tables.data(), batch.keys.data(), losses.data(), 30);
    if (!set.ok()) return set;
    set = classifier->ReservoirScores(tables.data(), batch.keys.data(), losses.data(), 30,
                                      &sampled_scores);
    return set.ok() ? classifier->ImportWindow(window) : set;
  };
  bool has_ended = false;
  for (int64_t n = 0; !has_ended; ++n) {
    InputClassifier classifier(options);
    FailsAt(n, [&] { return step(&classifier); }, &has_ended);
    // The sample and the memory are whole: the sanitizers watch.
    for (int again = 0; again < 3; ++again) ASSERT_TRUE(step(&classifier).ok());
    EXPECT_EQ(sampled_scores.size(), 40u);
    EXPECT_EQ(classifier.ReservoirLosses().size() <= 40u, true);
  }
}

TEST(OutOfMemory, WhatATaskThrowsReachesTheCaller) {
  const Parallel parallel = Threads(3);
  EXPECT_THROW(parallel.run(3,
                            [](int task) {
                              if (task == 1) throw std::bad_alloc();
                            }),
               std::bad_alloc);
  int done = 0;
  parallel.run(1, [&](int) { ++done; });
  EXPECT_EQ(done, 1);
}

}  // namespace
}  // namespace slipstream
