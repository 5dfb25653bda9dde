// No update stores a value that is not finite.
#include "cc_ops/core/update/checked_update.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cc_ops/core/exchange/push.h"
#include "cc_ops/core/lookup/batch_lookup.h"
#include "cc_ops/core/testing/test_rules.h"
#include "cc_ops/core/testing/test_threads.h"
#include "cc_ops/core/update/policy_update.h"

namespace slipstream {
namespace {

constexpr float kMax = std::numeric_limits<float>::max();
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// Random numbers of all magnitudes.
class Extremes {
 public:
  explicit Extremes(uint64_t seed) : random_(seed) {}
  int64_t Below(int64_t n) { return static_cast<int64_t>(random_() % static_cast<uint64_t>(n)); }
  bool Chance(int64_t n) { return Below(n) == 0; }
  float Magnitude(float maximum) {
    constexpr float kUsual[] = {0.f,  1e-45f, 1e-38f, 1e-30f, 1e-19f, 1e-3f, 1.f,   10.f,
                                1e4f, 6e4f,   1e9f,   1e15f,  1e19f,  3e19f, 1e30f, kMax};
    const float usual = kUsual[Below(16)] * (1.f - 0.1f * static_cast<float>(Below(3)));
    const float any = std::ldexp(1.f, static_cast<int>(Below(276)) - 149);
    return std::min(Chance(3) ? maximum : Chance(2) ? usual : any, maximum);
  }
  float Signed(float maximum = kMax) { return Magnitude(maximum) * (Chance(2) ? 1.f : -1.f); }
  // Mostly numbers with which updates succeed.
  float Common() { return Chance(4) ? Signed() : static_cast<float>(Below(2001)) / 1000.f - 1.f; }

 private:
  std::mt19937_64 random_;
};

bool AllFinite(const std::vector<float>& values) {
  return RowIsFinite(values.data(), static_cast<int64_t>(values.size()));
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TableOptions Options(const std::string& rule, int64_t dim = 3) {
  TableOptions options;
  options.name = "t";
  options.dim = dim;
  options.rule = RuleNamed(rule);
  options.initializer.kind = RowInitializer::Kind::kConstant;
  options.initializer.a = 1.f;
  return options;
}

// A table and a batch of weighted bags.
struct Batch {
  explicit Batch(const TableOptions& options) : table(std::make_unique<EmbeddingTable>(options)) {
    EXPECT_TRUE(ValidateTableOptions(options).ok()) << ValidateTableOptions(options).message();
  }

  void Lookup(std::vector<int64_t> keys, std::vector<float> weights, std::vector<float> gradient,
              int64_t width = 1) {
    upstream = std::move(gradient);
    FeatureView view;
    view.width = view.stride = width;
    view.num_keys = static_cast<int64_t>(keys.size());
    view.batch = view.num_keys / width;
    view.keys = keys.data();
    if (!weights.empty()) view.weights = weights.data();
    std::vector<float> pooled(static_cast<size_t>(view.batch * table->dim()));
    ASSERT_TRUE(LookupForTraining({table.get()}, {view}, {Combiner::kSum},
                                  {{pooled.data(), table->dim()}}, parallel, &workspace)
                    .ok());
    ASSERT_EQ(upstream.size(), pooled.size());
  }

  std::vector<PooledGradient> Gradients() const { return {{upstream.data(), table->dim()}}; }
  Status Apply(float rate = 0.1f) {
    return ApplyGradients(workspace.plan, Gradients(), rate, parallel);
  }
  // Collects and applies, as between processes.
  Status Exchange(float rate = 0.1f) {
    SendBuffer buffer;
    const Status status = CollectGradients(workspace.plan, Gradients(), {rate}, parallel, &buffer);
    return status.ok() ? ApplyBuffer(buffer, rate) : status;
  }
  Status ApplyBuffer(const SendBuffer& buffer, float rate) {
    const SendBufferView view = {buffer.ranks,         buffer.sizes.data(),
                                 buffer.keys.data(),   static_cast<int64_t>(buffer.keys.size()),
                                 buffer.values.data(), static_cast<int64_t>(buffer.values.size())};
    return ApplyRows({table.get()}, view, {rate}, parallel);
  }

  // Everything that an update may change. with_counts: whether with the counts of gradients.
  std::vector<float> State(bool with_counts = true) const {
    const TableContents contents = table->Export();
    std::vector<float> state = contents.rows;
    state.insert(state.end(), contents.slots.begin(), contents.slots.end());
    const UpdateCounts counts = with_counts ? table->updates().counts() : UpdateCounts();
    state.push_back(static_cast<float>(contents.update_step));
    state.push_back(static_cast<float>(counts.offered + 7 * counts.deferred + 49 * counts.masked));
    state.push_back(static_cast<float>(table->updates().num_deferred()));
    state.push_back(table->updates().last_learning_rate());
    state.push_back(table->rows().scale());
    for (int64_t s = 0; s < kNumShards; ++s) {
      for (DeferredGradients& sums : table->updates().shard(s)->deferred) {
        for (uint32_t at = sums.oldest(); at != DeferredGradients::kNone; at = sums.next(at)) {
          state.insert(state.end(), sums.Sum(at), sums.Sum(at) + table->dim());
        }
      }
    }
    return state;
  }

  std::unique_ptr<EmbeddingTable> table;
  Parallel parallel;
  LookupWorkspace workspace;
  std::vector<float> upstream;
};

// A row in range with random values and slots.
std::vector<float> RowInRange(const UpdateRule& rule, int64_t dim, float max_value, Extremes* of) {
  std::vector<float> row(static_cast<size_t>(dim + rule.SlotsPerRow(dim)));
  for (int tries = 0; tries < 1000; ++tries) {
    rule.InitSlots(dim, row.data() + dim);
    for (int64_t j = 0; j < dim; ++j) row[j] = of->Signed(max_value);
    for (size_t j = dim; j < row.size(); ++j) {
      const float slot = of->Signed(of->Chance(2) ? kMaxSquares : of->Chance(2) ? kMaxMoment : 1.f);
      if (!of->Chance(4)) continue;
      const float initial = row[j];
      row[j] = slot;
      if (!rule.IsInRange(dim, max_value, row.data())) row[j] = std::fabs(slot);
      if (!rule.IsInRange(dim, max_value, row.data())) row[j] = initial;
    }
    if (rule.IsInRange(dim, max_value, row.data())) return row;
  }
  ADD_FAILURE() << "no row in range for " << rule.name();
  return row;
}

TEST(Fits, OneUpdateOfAnyRowInRangeIsFinite) {
  Extremes of(1);
  int fitting = 0;
  for (const std::string& name : AllRuleNames()) {
    for (int trial = 0; trial < 20000; ++trial) {
      UpdateRule rule = RuleNamed(name);
      if (name == "momentum" && of.Chance(2)) rule.parameters[0] = 1.f - of.Magnitude(1e-3f);
      if (name.find("adam") != std::string::npos && of.Chance(3)) {
        for (int i = 0; i < 2; ++i) rule.parameters[i] = 1.f - of.Magnitude(1.f);
      }
      const bool is_plain = of.Chance(2);
      if (!is_plain) {
        if (of.Chance(2)) rule.transforms.l2 = of.Magnitude(10.f);
        if (of.Chance(3)) rule.transforms.decay = of.Magnitude(10.f);
        if (of.Chance(3)) rule.transforms.clip_norm = of.Magnitude(kMax);
        if (of.Chance(3)) rule.transforms.clip_value = of.Magnitude(kMax);
        if (of.Chance(3)) rule.transforms.max_norm = of.Magnitude(kMax);
      }
      RowLayout layout;
      const bool only_shrinks = rule.transforms.OnlyShrink();
      layout.dtype = !only_shrinks && of.Chance(3) ? RowDtype::kFloat16 : RowDtype::kFloat32;
      const ValueRange range = rule.RangeOf(layout.dtype);
      const int64_t dim = 1 + of.Below(20);
      const float gradient = of.Magnitude(kMax);
      const StepRates rates =
          rule.RatesOf(of.Magnitude(of.Chance(2) ? 1.f : 1e9f), 1 + of.Below(9));
      const bool fits = rule.Fits(rates, dim, gradient, range, only_shrinks);
      fitting += fits;
      for (int rows = 0; fits && rows < 3; ++rows) {
        std::vector<float> row = RowInRange(rule, dim, range.max_value, &of);
        std::vector<float> own(static_cast<size_t>(dim));
        for (float& g : own) g = of.Signed(gradient);
        rule.Update(rates, dim, own.data(), row.data());
        ASSERT_TRUE(AllFinite(row)) << name << " " << trial << " gradient " << gradient;
        for (int64_t j = 0; j < dim; ++j) ASSERT_LE(std::fabs(row[j]), range.max_result) << name;
        if (only_shrinks && name != "ftrl") {
          ASSERT_TRUE(rule.IsInRange(dim, range.max_value, row.data())) << name << " " << trial;
        }
      }
    }
  }
  EXPECT_GT(fitting, 20000);
}

// Checked updates are slower.
void ExpectCommonTrainingFits(UpdateRule rule) {
  for (const float l2 : {0.f, 1e-4f}) {
    rule.transforms.l2 = l2;
    const ValueRange range = rule.RangeOf(RowDtype::kFloat32);
    for (const int64_t dim : {1, 16, 256}) {
      std::vector<float> row(static_cast<size_t>(dim + rule.SlotsPerRow(dim)), 0.05f);
      rule.InitSlots(dim, row.data() + dim);
      EXPECT_TRUE(rule.IsInRange(dim, range.max_value, row.data())) << rule.name();
      for (const float rate : {0.f, 1e-5f, 1e-3f, 0.1f, 1.f}) {
        for (const int64_t step : {1, 1000000}) {
          EXPECT_TRUE(rule.Fits(rule.RatesOf(rate, step), dim, 1e8, range, l2 == 0.f))
              << rule.name() << " " << rate << " " << l2;
        }
      }
    }
  }
}

TEST(Fits, CommonTrainingFits) {
  for (const std::string& name : AllRuleNames()) ExpectCommonTrainingFits(RuleNamed(name));
  ExpectCommonTrainingFits(RuleNamed("ftrl", {-.5f, 1e-10f}));
  ExpectCommonTrainingFits(RuleNamed("ftrl", {-.5f, 1e-10f, 0.1f, 0.1f, 0.1f, 1.f}));
  for (const std::string name : {"adam", "adam_per_row", "rowwise_adam"}) {
    ExpectCommonTrainingFits(RuleNamed(name, {0.f, 0.99f, 1e-10f}));
  }
  for (const float momentum : {0.f, 0.999f}) {
    ExpectCommonTrainingFits(RuleNamed("momentum", {momentum, 1.f}));
  }
}

struct Setting {
  std::string rule;
  RowDtype dtype, slot_dtype;
  int transform;  // 0: none.
  UpdatePolicy::Mode mode;
  bool spills, removes;  // Rows move to disk, or are removed between lookup and update.
};

// Trains two tables with equal batches of extreme numbers, one by ApplyGradients, the other by
// CollectGradients and ApplyRows.
void TrainAtTheEdge(const Setting& setting, uint64_t seed, int* succeeded, int* failed) {
  Extremes of(seed);
  TableOptions options = Options(setting.rule);
  options.dtype = setting.dtype;
  options.slot_dtype = setting.slot_dtype;
  RowTransforms& transforms = options.rule.transforms;
  if (setting.transform == 1) transforms.l2 = 0.01f;
  if (setting.transform == 2) transforms.clip_norm = 1e3f;
  if (setting.transform == 3) transforms.max_norm = 1e3f;
  transforms.decay = setting.transform == 4 ? 0.5f : 0.f;
  if (setting.transform == 5) transforms.l2 = 0.01f;
  transforms.of_all_rows = setting.transform >= 4;
  if (transforms.DecaysAll() && setting.dtype == RowDtype::kFloat16) return;
  if (setting.spills) {
    options.spill = testing::TempDir();
    options.memory = 128 * options.layout().bytes();
  }
  Batch applied(options), exchanged(options);
  if (seed % 16 == 0) applied.parallel = Threads(2);
  ASSERT_TRUE(applied.table->Open().ok());
  ASSERT_TRUE(exchanged.table->Open().ok());
  const bool defers = setting.mode == UpdatePolicy::Mode::kDefer;
  UpdatePolicy policy;
  policy.mode = setting.mode;
  policy.movement = 1e-3f;
  policy.max_age = 3;
  policy.max_rows = 1000;
  policy.decay_skipped = true;
  applied.table->updates().SetPolicy(policy);
  const int64_t dim = options.dim;
  for (int step = 0; step < 12; ++step) {
    std::vector<int64_t> keys;
    std::vector<float> weights, gradient;
    const bool is_extreme = of.Chance(2);
    const auto number = [&] { return is_extreme ? of.Common() : of.Common() > 0.f ? .5f : -.25f; };
    for (int i = 0; i < 8; ++i) keys.push_back(of.Below(setting.spills ? 1000 : 6));
    for (int i = 0; i < 8; ++i) weights.push_back(of.Chance(50) ? kNan : number());
    for (int64_t i = 0; i < 4 * dim; ++i) gradient.push_back(number());
    if (of.Chance(3)) weights.clear();
    const float rate = of.Chance(4) ? of.Magnitude(1.f) : 0.1f;
    const std::vector<uint8_t> flags = {kSaturated};
    applied.Lookup(keys, weights, gradient, 2);
    exchanged.Lookup(keys, weights, gradient, 2);
    ASSERT_TRUE(applied.table->SetFlags(keys.data(), flags.data(), 1, Parallel()).ok());
    if (setting.removes) applied.table->Remove(keys.data(), 1);
    const std::vector<float> before = applied.State(), other_before = exchanged.State(false);
    const Status status = applied.Apply(rate);
    const std::vector<float> after = applied.State();
    ASSERT_TRUE(AllFinite(after)) << setting.rule << " " << setting.transform;
    if (!status.ok()) {
      ASSERT_TRUE(SameBits(before, after))
          << setting.rule << " " << setting.transform << ": " << status.message();
      ASSERT_NE(status.message().find("table 't'"), std::string::npos) << status.message();
    }
    ++*(status.ok() ? succeeded : failed);
    if (setting.mode != UpdatePolicy::Mode::kApply || setting.removes) {
      if (!defers || !of.Chance(4)) continue;
      const std::vector<float> unflushed = applied.State();
      const Status flushed = FlushDeferred(applied.table.get(), Parallel());
      ASSERT_TRUE(AllFinite(applied.State())) << setting.rule;
      if (!flushed.ok() && !setting.spills) {
        ASSERT_TRUE(SameBits(unflushed, applied.State())) << setting.rule;
      }
      continue;
    }
    const Status other = exchanged.Exchange(rate);
    ASSERT_EQ(other.message(), status.message()) << setting.rule << " " << setting.transform;
    ASSERT_TRUE(SameBits(status.ok() ? applied.State(false) : other_before, exchanged.State(false)))
        << setting.rule;
  }
}

TEST(CheckedUpdate, RowsStayFiniteOrUnchanged) {
  int succeeded = 0, failed = 0;
  uint64_t seed = 1;
  for (const std::string& rule : AllRuleNames()) {
    for (const RowDtype dtype : {RowDtype::kFloat32, RowDtype::kBfloat16, RowDtype::kFloat16}) {
      for (const RowDtype slot_dtype : {RowDtype::kFloat32, RowDtype::kBfloat16}) {
        for (const auto mode :
             {UpdatePolicy::Mode::kApply, UpdatePolicy::Mode::kMask, UpdatePolicy::Mode::kDefer}) {
          for (int transform = 0; transform < 6; ++transform) {
            for (int i = 0; i < 2; ++i) {
              ++seed;
              const bool spills = transform < 4 && seed % 32 == 0, removes = seed % 8 == 1;
              TrainAtTheEdge({rule, dtype, slot_dtype, transform, mode, spills, removes}, seed,
                             &succeeded, &failed);
              if (testing::Test::HasFatalFailure()) return;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(succeeded, 5000);
  EXPECT_GT(failed, 5000);
}

struct Overflow {
  const char* rule;
  std::vector<float> weights;
  float gradient, rate;
  const char* cause;
};

TEST(CheckedUpdate, ErrorNamesKeyTableAndCause) {
  const std::vector<Overflow> cases = {
      {"sgd", {kNan, 1.f}, 0.f, 0.1f, "is nan"},
      {"sgd", {-kInfinity, 1.f}, 1.f, 0.1f, "is -inf"},
      {"adagrad", {1e30f, 1.f}, 1e10f, 0.1f, "times the gradient 10000000000.000000 overflows"},
      {"sgd", {}, 3e38f, 0.1f, "the sum of the gradients of its 2 uses"},
      {"sgd", {}, 1e38f, 10.f, "value 0 becomes -inf"},
      {"adagrad", {}, 1e20f, 0.1f, "optimizer slot 0 becomes inf"},
      {"rowwise_adagrad", {}, 1e20f, 0.1f, "optimizer slot 0 becomes inf"},
      {"adam", {}, 1e20f, 0.1f, "optimizer slot 3 becomes inf"},
      {"momentum", {}, 1e38f, 10.f, "value 0 becomes nan"},
      {"ftrl", {}, 1e20f, 0.1f, "becomes"},
  };
  for (const Overflow& overflow : cases) {
    Batch batch(Options(overflow.rule)), exchanged(Options(overflow.rule));
    for (Batch* own : {&batch, &exchanged}) {
      own->Lookup({7, 7}, overflow.weights, std::vector<float>(6, overflow.gradient));
      const std::vector<float> before = own->State(own == &batch);
      const Status status =
          own == &batch ? own->Apply(overflow.rate) : own->Exchange(overflow.rate);
      EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
      EXPECT_NE(status.message().find("key 7 of table 't'"), std::string::npos) << status.message();
      EXPECT_NE(status.message().find(overflow.cause), std::string::npos) << status.message();
      EXPECT_TRUE(SameBits(before, own->State(own == &batch))) << overflow.rule;
    }
  }
}

// A table that fails is undone before other tables are updated.
TEST(CheckedUpdate, ErrorInOneTableKeepsAllTables) {
  TableOptions options = Options("sgd", 1);
  std::vector<std::unique_ptr<EmbeddingTable>> owned;
  for (const char* rule : {"sgd", "adagrad"}) {
    options.rule = RuleNamed(rule);
    owned.push_back(std::make_unique<EmbeddingTable>(options));
  }
  const std::vector<EmbeddingTable*> tables = {owned[0].get(), owned[1].get()};
  const int64_t key = 3;
  std::vector<FeatureView> views(2);
  std::vector<float> pooled(2), gradient = {1.f, 1e20f};
  for (int f = 0; f < 2; ++f) {
    views[f].table = f;
    views[f].batch = views[f].num_keys = 1;
    views[f].keys = &key;
  }
  LookupWorkspace workspace;
  ASSERT_TRUE(LookupForTraining(tables, views, {Combiner::kSum, Combiner::kSum},
                                {{pooled.data(), 1}, {pooled.data() + 1, 1}}, Parallel(),
                                &workspace)
                  .ok());
  const std::vector<PooledGradient> gradients = {{gradient.data(), 1}, {gradient.data() + 1, 1}};
  EXPECT_FALSE(ApplyGradients(workspace.plan, gradients, 1.f, Parallel()).ok());
  for (EmbeddingTable* table : tables) {
    EXPECT_EQ(table->Export().rows, std::vector<float>{1.f});
    EXPECT_EQ(table->updates().step(), 0);
  }
  gradient[1] = 1e10f;
  EXPECT_TRUE(ApplyGradients(workspace.plan, gradients, 1.f, Parallel()).ok());
  EXPECT_EQ(tables[0]->Export().rows, std::vector<float>{0.f});
  EXPECT_EQ(tables[1]->Export().rows, std::vector<float>{0.f});
}

TEST(CheckedUpdate, RowsThatAnUpdateCreatedAreRemovedOnError) {
  Batch batch(Options("adagrad", 1));
  SendBuffer buffer;
  buffer.sizes = {2};
  buffer.keys = {4, 5};
  buffer.values = {1.f, 1e20f};
  EXPECT_NE(batch.ApplyBuffer(buffer, 0.1f).message().find("key 5 of table 't'"),
            std::string::npos);
  EXPECT_EQ(batch.table->rows().size(), 0);
  buffer.values = {1.f, 1e10f};
  EXPECT_TRUE(batch.ApplyBuffer(buffer, 0.1f).ok());
  EXPECT_EQ(batch.table->rows().size(), 2);
}

// The error of the update repeats the cause that was found when gradients were collected.
TEST(CheckedUpdate, CauseOfLostGradientsReachesTheUpdate) {
  Batch batch(Options("sgd"));
  batch.Lookup({7, 7}, {kNan, 1.f}, std::vector<float>(6, 1.f));
  SendBuffer buffer;
  CollectOptions options;
  options.passes_non_finite = true;
  ASSERT_TRUE(
      CollectGradients(batch.workspace.plan, batch.Gradients(), options, Parallel(), &buffer).ok());
  EXPECT_TRUE(std::isnan(buffer.values[0]));
  const Status status = batch.ApplyBuffer(buffer, 0.1f);
  EXPECT_EQ(status.message(), batch.Apply().message());
  EXPECT_NE(status.message().find("is nan"), std::string::npos) << status.message();
}

TEST(CheckedUpdate, DeferredGradientsThatOverflowAreReported) {
  Batch batch(Options("sgd"));
  UpdatePolicy policy;
  policy.mode = UpdatePolicy::Mode::kDefer;
  policy.trigger = UpdatePolicy::Trigger::kInterval;
  policy.max_age = 100;
  policy.max_rows = 1000;
  batch.table->updates().SetPolicy(policy);
  const int64_t key = 7;
  const uint8_t flag = kSaturated;
  ASSERT_TRUE(batch.table->SetFlags(&key, &flag, 1, Parallel(), /*create_missing=*/true).ok());
  for (int step = 0; step < 3; ++step) {
    batch.Lookup({key}, {}, std::vector<float>(3, 1e38f));
    ASSERT_TRUE(batch.Apply(1e-9f).ok());
  }
  EXPECT_EQ(batch.table->updates().num_deferred(), 1);
  batch.Lookup({key}, {}, std::vector<float>(3, 1e38f));
  const std::vector<float> before = batch.State();
  EXPECT_NE(batch.Apply(1e-9f).message().find("with deferred gradients"), std::string::npos);
  EXPECT_TRUE(SameBits(before, batch.State()));
  const auto flush = [&](float rate) {
    batch.table->updates().set_last_learning_rate(rate);
    return FlushBeforeReading({batch.table.get()}, Parallel());
  };
  EXPECT_NE(flush(10.f).message().find("value 0 becomes -inf"), std::string::npos);
  EXPECT_TRUE(flush(1e-9f).ok());
  EXPECT_EQ(batch.table->updates().num_deferred(), 0);
}

// Otherwise, long training with deferred gradients would end with slow updates.
TEST(CheckedUpdate, BoundOfDeferredGradientsDoesNotGrowForever) {
  Batch batch(Options("sgd", 1));
  UpdatePolicy policy;
  policy.mode = UpdatePolicy::Mode::kDefer;
  policy.movement = 1e30f;
  policy.max_age = 1;
  policy.max_rows = 1000;
  batch.table->updates().SetPolicy(policy);
  for (int64_t step = 0; step < 200; ++step) {
    batch.Lookup({step}, {}, {1e8f});
    ASSERT_TRUE(batch.Apply().ok());
  }
  EXPECT_GT(batch.table->updates().num_deferred(), 0);
  EXPECT_GE(batch.table->updates().DeferredBound(0.), 1e8);
  EXPECT_LT(batch.table->updates().DeferredBound(0.), 2e9);
}

TEST(CheckedUpdate, InitialRowsAreFiniteInTheirType) {
  using Kind = RowInitializer::Kind;
  struct Case {
    Kind kind;
    float a, b;
    RowDtype dtype;
    bool is_valid;
  };
  for (const Case& own :
       std::vector<Case>{{Kind::kConstant, 7e4f, 0.f, RowDtype::kFloat16, false},
                         {Kind::kConstant, 6e4f, 0.f, RowDtype::kFloat16, true},
                         {Kind::kConstant, 3.4e38f, 0.f, RowDtype::kBfloat16, false},
                         {Kind::kConstant, 3.4e38f, 0.f, RowDtype::kFloat32, true},
                         {Kind::kUniform, -2e38f, 2e38f, RowDtype::kFloat32, false},
                         {Kind::kUniform, -1e38f, 1e38f, RowDtype::kFloat32, true},
                         {Kind::kNormal, 0.f, 1e38f, RowDtype::kFloat32, false},
                         {Kind::kNormal, 0.f, 1e4f, RowDtype::kFloat16, true},
                         {Kind::kNormal, 0.f, 2e4f, RowDtype::kFloat16, false}}) {
    TableOptions options = Options("sgd");
    options.initializer = {own.kind, own.a, own.b, 1};
    options.dtype = own.dtype;
    EXPECT_EQ(ValidateTableOptions(options).ok(), own.is_valid) << own.a << " " << own.b;
  }
  TableOptions options = Options("adagrad");
  options.rule.parameters[0] = 3.4e38f;
  EXPECT_TRUE(ValidateTableOptions(options).ok());
  options.slot_dtype = RowDtype::kBfloat16;
  EXPECT_NE(ValidateTableOptions(options).message().find("initial slot"), std::string::npos);
  options = Options("sgd");
  options.rule.transforms.decay = 0.1f;
  options.rule.transforms.of_all_rows = true;
  options.initializer.a = 1e10f;
  EXPECT_NE(ValidateTableOptions(options).message().find("if all rows decay"), std::string::npos);
}

// While all rows decay, the stored values are larger than the values.
TEST(CheckedUpdate, WrittenRowsAreFiniteAsStored) {
  TableOptions options = Options("sgd", 1);
  options.rule.transforms.decay = 1.f;
  options.rule.transforms.of_all_rows = true;
  Batch batch(options);
  for (int step = 0; step < 10; ++step) {
    batch.Lookup({1}, {}, {0.f});
    ASSERT_TRUE(batch.Apply(0.9f).ok());
  }
  const int64_t key = 2;
  float value = 1e35f;
  EXPECT_FALSE(batch.table->Write(&key, &value, 1).ok());
  EXPECT_FALSE(batch.table->rows().Has(key));
  value = 1e20f;
  EXPECT_TRUE(batch.table->Write(&key, &value, 1).ok());
}

TEST(RowTransforms, NormsOfLargeValuesDoNotOverflow) {
  RowTransforms transforms;
  transforms.clip_norm = 5.f;
  std::vector<float> gradient = {3e30f, -4e30f}, row = {0.f, 0.f};
  transforms.BeforeRule(StepRates(), 2, gradient.data(), row.data());
  EXPECT_FLOAT_EQ(gradient[0], 3.f);
  EXPECT_FLOAT_EQ(gradient[1], -4.f);
  transforms = RowTransforms();
  transforms.max_norm = 1e30f;
  row = {3e19f, 4e19f};
  transforms.AfterRule(StepRates(), 2, row.data());
  EXPECT_EQ(row, (std::vector<float>{3e19f, 4e19f}));
  row = {kMax, kMax};
  transforms.AfterRule(StepRates(), 2, row.data());
  EXPECT_FLOAT_EQ(row[0], 1e30f / std::sqrt(2.f));
}

}  // namespace
}  // namespace slipstream
