// Keys and rows of several tables for several ranks, or from them: by rank, then by table.
#ifndef SLIPSTREAM_CC_OPS_CORE_EXCHANGE_SEND_BUFFER_H_
#define SLIPSTREAM_CC_OPS_CORE_EXCHANGE_SEND_BUFFER_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cc_ops/core/base/hash.h"
#include "cc_ops/core/base/parallel.h"
#include "cc_ops/core/base/status.h"
#include "cc_ops/core/update/policy_update.h"

namespace slipstream {

// The rank that owns a key of a sharded table. Independent of the shard within a table.
inline int OwnerOf(int64_t key, int ranks) {
  if (ranks == 1) return 0;
  return static_cast<int>(Mix64(HashKey(key)) % static_cast<uint64_t>(ranks));
}

struct SendBuffer {
  int ranks = 1;
  std::vector<int64_t> sizes;  // [ranks, tables], rows
  std::vector<int64_t> keys;   // [n]
  std::vector<float> values;   // the rows behind each other, each as wide as its table
  std::vector<float> squares;  // [ranks, tables], of collected rows: the sum of values squared
};

// The same in memory of others.
struct SendBufferView {
  int ranks = 1;
  const int64_t* sizes = nullptr;
  const int64_t* keys = nullptr;
  int64_t num_keys = 0;
  const float* values = nullptr;
  int64_t num_values = 0;
};

// InvalidArgument, naming the index, if sizes, keys and values do not fit together.
// row_floats: [tables], of a row; 0 where keys come without values.
Status CheckSendBuffer(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                       const std::vector<int64_t>& row_floats);
// The same without the tables, whose names errors ask for by index.
Status CheckSendBuffer(const SendBufferView& buffer, const std::vector<int64_t>& row_floats,
                       const std::function<std::string(size_t)>& name_of);

// In an order that vectors need, and that does not depend on the processor.
float SumOfSquares(const float* values, int64_t n);

// Where keys and values go.
struct SendTarget {
  int64_t* keys = nullptr;
  float* values = nullptr;
};
// Takes memory for at most so many rows, of so many values in all; the target stays null where the
// buffer's own is to be used.
using ReserveRows = std::function<Status(int64_t rows, int64_t values, SendTarget* target)>;

// Puts rows that tasks collect into their owners' parts of a buffer, in the tasks' order: first
// Expect all, then Reserve; what comes after needs no memory, since rows that were collected are
// nowhere else.
class SendBufferWriter {
 public:
  // With ranks = 1 all rows are for everybody.
  SendBufferWriter(const std::vector<EmbeddingTable*>& tables, int ranks, int tasks,
                   SendBuffer* buffer);

  // A task will collect at most so many rows of a table.
  void Expect(int task, size_t table, int64_t rows);
  Status Reserve(const ReserveRows& reserve);
  // What a task collected of a table.
  CollectedRows* Collected(int task, size_t table) { return &tasks_[task].rows[table]; }
  void Pack(const Parallel& parallel);
  // Overwrites all values that were packed.
  void Fill(float value);

 private:
  struct Task {
    std::vector<CollectedRows> rows;  // [tables]
    std::vector<int64_t> next;        // [ranks * tables], where its next row of a part goes
  };

  size_t PartOf(int64_t key, size_t table) const {
    return static_cast<size_t>(OwnerOf(key, ranks_)) * tables_.size() + table;
  }
  int64_t DimOf(size_t part) const { return tables_[part % tables_.size()]->dim(); }
  void CountRows(int task);
  void CopyRows(int task);
  void AddSquares(int task);

  const std::vector<EmbeddingTable*>& tables_;
  const int ranks_;
  SendBuffer* buffer_;
  SendTarget target_;
  int64_t num_rows_ = 0, num_values_ = 0;
  std::vector<Task> tasks_;
  std::vector<int64_t> begin_;         // [ranks * tables + 1], first row of a part
  std::vector<int64_t> begin_values_;  // [ranks * tables + 1], first value of a part
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_SEND_BUFFER_H_
