// Buffers of keys and rows that ranks exchange, ordered by rank and table.
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

// Returns the rank, in [0, ranks), that owns a key of a sharded table. The rank does not depend on
// ShardOf(key), so that the keys of a rank are spread over all shards of its table.
inline int OwnerOf(int64_t key, int ranks) {
  if (ranks == 1) return 0;
  return static_cast<int>(Mix64(HashKey(key)) % static_cast<uint64_t>(ranks));
}

// Keys with rows of values, by rank, then by table. The part of a rank and table is contiguous.
struct SendBuffer {
  int ranks = 1;
  std::vector<int64_t> sizes;  // [ranks, tables]; number of keys of each part.
  std::vector<int64_t> keys;   // [n]
  std::vector<float> values;   // Rows in the order of keys, each with the dim of its table.
  std::vector<float> squares;  // [ranks, tables]; sum of squares of the collected values.
};

// View of the caller's memory with the contents of a SendBuffer, except squares. `values` is null
// for keys without values.
struct SendBufferView {
  int ranks = 1;
  const int64_t* sizes = nullptr;
  const int64_t* keys = nullptr;
  int64_t num_keys = 0;
  const float* values = nullptr;
  int64_t num_values = 0;
};

// Returns InvalidArgument, with the index, if sizes, keys and values do not match. row_floats:
// [tables], floats per row; 0 for keys without values.
Status CheckSendBuffer(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                       const std::vector<int64_t>& row_floats);
// Same without tables. name_of(t) returns the name of table number t for errors.
Status CheckSendBuffer(const SendBufferView& buffer, const std::vector<int64_t>& row_floats,
                       const std::function<std::string(size_t)>& name_of);

// Returns the sum of squares, added in a fixed order that vectorizes.
float SumOfSquares(const float* values, int64_t n);

// Destination of keys and values.
struct SendTarget {
  int64_t* keys = nullptr;
  float* values = nullptr;
};
// Allocates memory for at most `rows` rows with `values` values in all. If it leaves the target
// null, the memory of the SendBuffer is used.
using ReserveRows = std::function<Status(int64_t rows, int64_t values, SendTarget* target)>;

// Collects rows of multiple tasks, and writes them to the parts of their owners in a buffer, in the
// order of the tasks. Call Expect for all tasks, then Reserve, then add rows to Collected, then
// Pack. After Reserve no memory is allocated, because collected rows exist nowhere else and must
// not be lost.
class SendBufferWriter {
 public:
  // With ranks = 1 all rows are for all ranks.
  SendBufferWriter(const std::vector<EmbeddingTable*>& tables, int ranks, int tasks,
                   SendBuffer* buffer);

  // Sets the maximum number of rows of a table that a task collects. Call it before Reserve.
  void Expect(int task, size_t table, int64_t rows);
  // Allocates memory for the expected rows. Returns the errors of `reserve`. Throws std::bad_alloc.
  Status Reserve(const ReserveRows& reserve);
  // Returns the destination for the rows of a table that a task collects.
  CollectedRows* Collected(int task, size_t table) { return &tasks_[task].rows[table]; }
  // Writes the collected rows, their numbers and their squares to the buffer.
  void Pack(const Parallel& parallel);
  // Overwrites all packed values with `value`.
  void Fill(float value);

 private:
  struct Task {
    std::vector<CollectedRows> rows;  // [tables]
    std::vector<int64_t> next;  // [ranks * tables]; position of the task's next row in a part.
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
  std::vector<int64_t> begin_;         // [ranks * tables + 1]; first row of a part.
  std::vector<int64_t> begin_values_;  // [ranks * tables + 1]; first value of a part.
};

}  // namespace slipstream

#endif  // SLIPSTREAM_CC_OPS_CORE_EXCHANGE_SEND_BUFFER_H_
