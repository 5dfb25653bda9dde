// Keys per second of the key probes beside HierarchicalKV's find, on the same keys.
#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "benchmarks/gpu/bench.h"
#include "benchmarks/gpu/device.h"
#include "benchmarks/gpu/hierarchical_kv.h"
#include "benchmarks/gpu/probed_keys.h"
#include "benchmarks/gpu/record.h"

namespace slipstream {
namespace {

constexpr int64_t kDim = 16;
constexpr int kCalls = 6;  // of a run, each with keys of its own

// The row of a key holds its place, in every value; exact up to 2^24.
void InsertAll(const ProbedMap& map, Bench* bench, HierarchicalKv* table) {
  const cudaStream_t stream = bench->stopwatch().stream();
  const int64_t most = std::min<int64_t>(map.size(), 1 << 20);
  for (int64_t begin = 0; begin < map.size(); begin += most) {
    const int64_t end = std::min(begin + most, map.size());
    std::vector<float> rows;
    for (int64_t i = begin; i < end; ++i) rows.insert(rows.end(), kDim, static_cast<float>(i));
    const OnDevice<int64_t> keys(
        std::vector<int64_t>(map.keys().begin() + begin, map.keys().begin() + end));
    const OnDevice<float> rows_on_device(rows);
    table->Insert(stream, keys.data(), rows_on_device.data(), end - begin);
    bench->stopwatch().Wait();
  }
  const int64_t size = table->Size(stream);
  const int64_t expected = map.size();
  ExpectEqual(&size, &expected, 1, "rows in HierarchicalKV's table");
}

// Where HierarchicalKV writes.
struct Found {
  explicit Found(int64_t n)
      : rows(n * kDim), addresses(n), found(n), one_address(1), one_found(1) {}
  bool* flags() const { return reinterpret_cast<bool*>(found.data()); }

  OnDevice<float> rows;
  OnDevice<float*> addresses;
  OnDevice<uint8_t> found;
  OnDevice<float*> one_address;
  OnDevice<uint8_t> one_found;
};

// Rows of keys that are not there are left as they were.
void ExpectRows(const Found& found, const std::vector<int64_t>& keys, const ProbedMap& map,
                const std::string& what) {
  const std::vector<uint8_t> flags = found.found.ToHost();
  const std::vector<float> rows = found.rows.ToHost();
  for (size_t i = 0; i < keys.size(); ++i) {
    const int64_t place = map.PlaceOf(keys[i]);
    const uint8_t is_found = place != KeyMapEntry::kNowhere ? 1 : 0;
    ExpectEqual(&flags[i], &is_found, 1, what + ", found of key " + std::to_string(i) + ", ");
    const std::vector<float> expected(kDim, static_cast<float>(place));
    if (is_found) {
      ExpectEqual(&rows[i * kDim], expected.data(), kDim,
                  what + ", row of key " + std::to_string(i) + ", ");
    }
  }
}

void MeasureOne(Bench* bench, const ProbedMap& map, const HierarchicalKv& table, int hits_percent,
                int64_t batch) {
  const cudaStream_t stream = bench->stopwatch().stream();
  std::vector<int64_t> keys;
  for (int call = 0; call < kCalls; ++call) {
    const std::vector<int64_t> more = map.Batch(batch, hits_percent, 100 + call);
    keys.insert(keys.end(), more.begin(), more.end());
  }
  const OnDevice<int64_t> keys_on_device(keys);
  const auto keys_of = [&](int call) { return keys_on_device.data() + call * batch; };
  const StateLookup lookup(batch);
  const MapProbe probe(batch);
  Found found(batch);
  const auto choose = [&](cudaStream_t on) {
    table.ChooseKernel(on, keys_of(0), found.one_address.data(),
                       reinterpret_cast<bool*>(found.one_found.data()));
  };
  const std::vector<Contender> contenders = {
      {"state lookup", nullptr,
       [&](cudaStream_t on, int call) { lookup.Launch(on, keys_of(call), map.on_device()); }},
      {"map probe", nullptr,
       [&](cudaStream_t on, int call) { probe.Launch(on, keys_of(call), map.on_device()); }},
      {"HierarchicalKV find, addresses", choose,
       [&](cudaStream_t on, int call) {
         table.FindAddresses(on, keys_of(call), batch, found.addresses.data(), found.flags());
       }},
      {"HierarchicalKV find, rows", nullptr,
       [&](cudaStream_t on, int call) {
         table.FindRows(on, keys_of(call), batch, found.rows.data(), found.flags());
       }},
  };

  // Of the last batch, so that one that reads another's keys is seen.
  const int last = kCalls - 1;
  const std::vector<int64_t> checked(keys.end() - batch, keys.end());
  contenders[0].call(stream, last);
  contenders[1].call(stream, last);
  bench->stopwatch().Wait();
  lookup.ExpectResults(checked, map);
  probe.ExpectResults(checked, map);
  choose(stream);
  contenders[2].call(stream, last);
  Check(LaunchGather(stream, found.addresses.data(), found.flags(), batch, kDim, found.rows.data()),
        "LaunchGather");
  bench->stopwatch().Wait();
  ExpectRows(found, checked, map, contenders[2].name);
  found.rows.Poison();
  found.found.Poison();
  contenders[3].call(stream, last);
  bench->stopwatch().Wait();
  ExpectRows(found, checked, map, contenders[3].name);

  const std::vector<std::vector<double>> seconds =
      bench->stopwatch().TakeTurns(contenders, bench->runs(), kCalls);
  for (size_t c = 0; c < contenders.size(); ++c) {
    Record("probe")
        .Add("keys_in_table", map.size())
        .Add("map_bytes", map.bytes_on_device())
        .Add("hits_percent", static_cast<int64_t>(hits_percent))
        .Add("batch", batch)
        .Add("calls", static_cast<int64_t>(kCalls))
        .Add("name", contenders[c].name)
        .Add("seconds", seconds[c])
        .Print();
  }
}

}  // namespace

void MeasureProbeTurns(Bench* bench) {
  for (const int64_t size : {bench->Size(1 << 20, 1 << 12), bench->Size(1 << 24, 1 << 13)}) {
    const ProbedMap map(size);
    // Half full, as the map is: no bucket runs over.
    HierarchicalKv table(2 * size, kDim);
    InsertAll(map, bench, &table);
    for (const int hits_percent : {100, 50}) {
      for (const int64_t batch : {bench->Size(1 << 16, 1 << 8), bench->Size(1 << 20, 1 << 10)}) {
        MeasureOne(bench, map, table, hits_percent, batch);
      }
    }
  }
}

}  // namespace slipstream
