// Runs the steps of larger_than_memory_case.py directly on RocksDB.
//
//   program KEYS DIM CACHE_BYTES FOLDER WARMUP_STEPS STEPS SEED THREADS
//
// A step reads the rows of the distinct keys of a batch with MultiGet, updates them with Adagrad,
// and writes them as one batch per thread. Keys follow the power law of larger_than_memory_case.py.
// Prints JSON.
#include <rocksdb/cache.h>
#include <rocksdb/db.h>
#include <rocksdb/filter_policy.h>
#include <rocksdb/options.h>
#include <rocksdb/table.h>
#include <rocksdb/write_batch.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kFeatures = 26, kBatch = 2048;
constexpr double kZipf = 1.05;
constexpr int64_t kFillAtOnce = 10000;

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Returns a key in big-endian order, because RocksDB orders keys by their bytes.
std::string KeyOf(int64_t key) {
  const uint64_t swapped = __builtin_bswap64(static_cast<uint64_t>(key));
  return std::string(reinterpret_cast<const char*>(&swapped), sizeof(swapped));
}

void Check(const rocksdb::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.ToString().c_str());
  std::exit(1);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 9) return 2;
  const int64_t keys = std::atoll(argv[1]), dim = std::atoll(argv[2]);
  const auto cache_bytes = static_cast<size_t>(std::atoll(argv[3]));
  const int before = std::atoi(argv[5]), steps = std::atoi(argv[6]);
  const int threads = std::atoi(argv[8]);
  rocksdb::Options options;
  options.create_if_missing = true;
  options.error_if_exists = true;
  options.IncreaseParallelism(threads);
  options.use_direct_reads = true;
  options.use_direct_io_for_flush_and_compaction = true;
  options.compression = rocksdb::kNoCompression;
  options.write_buffer_size = 64 << 20;
  rocksdb::BlockBasedTableOptions table;
  table.block_cache = rocksdb::NewLRUCache(cache_bytes);
  table.filter_policy.reset(rocksdb::NewBloomFilterPolicy(10));
  table.cache_index_and_filter_blocks = true;
  options.table_factory.reset(rocksdb::NewBlockBasedTableFactory(table));
  rocksdb::DB* db = nullptr;
  Check(rocksdb::DB::Open(options, argv[4], &db));

  const size_t row_bytes = static_cast<size_t>(2 * dim) * sizeof(float);
  std::vector<float> row(static_cast<size_t>(2 * dim), .01f);
  rocksdb::WriteOptions without_log;
  without_log.disableWAL = true;
  double start = Now();
  for (int64_t begin = 0; begin < keys; begin += kFillAtOnce) {
    rocksdb::WriteBatch batch;
    for (int64_t key = begin; key < std::min(keys, begin + kFillAtOnce); ++key) {
      batch.Put(KeyOf(key), rocksdb::Slice(reinterpret_cast<const char*>(row.data()), row_bytes));
    }
    Check(db->Write(without_log, &batch));
  }
  Check(db->Flush(rocksdb::FlushOptions()));
  Check(db->CompactRange(rocksdb::CompactRangeOptions(), nullptr, nullptr));
  const double filled = Now() - start;

  std::mt19937_64 random(static_cast<uint64_t>(std::atoll(argv[7])));
  std::uniform_real_distribution<double> uniform;
  const double maximum = std::pow(static_cast<double>(keys) + 1, 1 - kZipf) - 1;
  std::vector<double> ms;
  for (int step = 0; step < before + steps; ++step) {
    std::vector<int64_t> drawn(kFeatures * kBatch);
    for (int64_t& key : drawn) {
      const double rank = std::pow(1 + uniform(random) * maximum, 1 / (1 - kZipf)) - 1;
      key = std::min(static_cast<int64_t>(rank), keys - 1);
    }
    start = Now();
    std::sort(drawn.begin(), drawn.end());
    drawn.erase(std::unique(drawn.begin(), drawn.end()), drawn.end());
    std::vector<rocksdb::WriteBatch> written(static_cast<size_t>(threads));
    std::vector<std::thread> workers;
    for (int t = 0; t < threads; ++t) {
      workers.emplace_back([&, t] {
        const size_t begin = drawn.size() * static_cast<size_t>(t) / static_cast<size_t>(threads);
        const size_t end = drawn.size() * static_cast<size_t>(t + 1) / static_cast<size_t>(threads);
        std::vector<std::string> texts;
        for (size_t i = begin; i < end; ++i) texts.push_back(KeyOf(drawn[i]));
        const std::vector<rocksdb::Slice> slices(texts.begin(), texts.end());
        std::vector<rocksdb::PinnableSlice> values(slices.size());
        std::vector<rocksdb::Status> statuses(slices.size());
        rocksdb::ReadOptions reading;
        reading.async_io = true;
        db->MultiGet(reading, db->DefaultColumnFamily(), slices.size(), slices.data(),
                     values.data(), statuses.data(), /*sorted_input=*/true);
        std::vector<float> values_of(static_cast<size_t>(2 * dim));
        for (size_t i = 0; i < slices.size(); ++i) {
          Check(statuses[i]);
          std::memcpy(values_of.data(), values[i].data(), row_bytes);
          for (int64_t j = 0; j < dim; ++j) {
            const float gradient = .001f * static_cast<float>(j % 7 - 3);
            values_of[dim + j] += gradient * gradient;
            values_of[j] -= .01f * gradient / std::sqrt(values_of[dim + j] + 1e-10f);
          }
          written[t].Put(slices[i], rocksdb::Slice(reinterpret_cast<const char*>(values_of.data()),
                                                   row_bytes));
        }
      });
    }
    for (std::thread& worker : workers) worker.join();
    for (rocksdb::WriteBatch& batch : written) Check(db->Write(without_log, &batch));
    if (step >= before) ms.push_back((Now() - start) * 1e3);
  }
  std::sort(ms.begin(), ms.end());
  double sum = 0;
  for (const double one : ms) sum += one;
  std::printf("{\"fill_seconds\": %.1f, \"median_ms\": %.2f, \"mean_ms\": %.2f}\n", filled,
              ms[ms.size() / 2], sum / static_cast<double>(ms.size()));
  delete db;
  return 0;
}
