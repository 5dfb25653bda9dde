#include "cc_ops/core/exchange/send_buffer.h"

#include <algorithm>
#include <string>

#include "cc_ops/core/base/simd_clones.h"

namespace slipstream {

SLIPSTREAM_SIMD_CLONES float SumOfSquares(const float* values, int64_t n) {
  constexpr int64_t kLanes = 16, kBlock = 4096;
  double sum = 0;
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, n);
    float lanes[kLanes] = {};
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) {
        lanes[lane] += values[i + lane] * values[i + lane];
      }
    }
    for (; i < end; ++i) lanes[i % kLanes] += values[i] * values[i];
    for (const float lane : lanes) sum += static_cast<double>(lane);
  }
  return static_cast<float>(sum);
}

Status CheckSendBuffer(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                       const std::vector<int64_t>& row_floats) {
  return CheckSendBuffer(buffer, row_floats,
                         [&tables](size_t t) { return tables[t]->options().name; });
}

Status CheckSendBuffer(const SendBufferView& buffer, const std::vector<int64_t>& row_floats,
                       const std::function<std::string(size_t)>& name_of) {
  const size_t tables = row_floats.size();
  if (buffer.ranks < 1) {
    return InvalidArgument("sizes has entries for " + std::to_string(buffer.ranks) +
                           " ranks; expected at least 1 rank");
  }
  int64_t keys = 0, values = 0;
  for (int rank = 0; rank < buffer.ranks; ++rank) {
    for (size_t t = 0; t < tables; ++t) {
      const int64_t size = buffer.sizes[static_cast<size_t>(rank) * tables + t];
      const int64_t floats = row_floats[t];
      const int64_t keys_left = buffer.num_keys - keys, values_left = buffer.num_values - values;
      if (size < 0 || size > keys_left || size * floats > values_left) {
        return InvalidArgument("sizes[" + std::to_string(rank) + ", " + std::to_string(t) +
                               "] is " + std::to_string(size) + " rows of table '" + name_of(t) +
                               "' with " + std::to_string(floats) +
                               " values each; expected at least 0 rows and at most the remaining " +
                               std::to_string(keys_left) + " keys and " +
                               std::to_string(values_left) + " values");
      }
      keys += size;
      values += size * floats;
    }
  }
  if (keys != buffer.num_keys || values != buffer.num_values) {
    return InvalidArgument("sizes adds up to " + std::to_string(keys) + " keys and " +
                           std::to_string(values) + " values; expected " +
                           std::to_string(buffer.num_keys) + " keys and " +
                           std::to_string(buffer.num_values) + " values, as in the buffer");
  }
  return OkStatus();
}

SendBufferWriter::SendBufferWriter(const std::vector<EmbeddingTable*>& tables, int ranks, int tasks,
                                   SendBuffer* buffer)
    : tables_(tables), ranks_(ranks), buffer_(buffer), tasks_(static_cast<size_t>(tasks)) {
  const size_t parts = static_cast<size_t>(ranks) * tables.size();
  buffer->ranks = ranks;
  buffer->sizes.assign(parts, 0);
  buffer->squares.assign(parts, 0.f);
  buffer->keys.clear();
  buffer->values.clear();
  for (Task& task : tasks_) {
    task.rows.resize(tables.size());
    task.next.assign(parts, 0);
  }
  begin_.assign(parts + 1, 0);
  begin_values_.assign(parts + 1, 0);
}

void SendBufferWriter::Expect(int task, size_t table, int64_t rows) {
  const int64_t values = rows * tables_[table]->dim();
  tasks_[task].rows[table].keys.reserve(static_cast<size_t>(rows));
  tasks_[task].rows[table].rows.reserve(static_cast<size_t>(values));
  num_rows_ += rows;
  num_values_ += values;
}

Status SendBufferWriter::Reserve(const ReserveRows& reserve) {
  const Status status = reserve(num_rows_, num_values_, &target_);
  if (!status.ok() || target_.keys != nullptr) return status;
  buffer_->keys.resize(static_cast<size_t>(num_rows_));
  buffer_->values.resize(static_cast<size_t>(num_values_));
  target_ = {buffer_->keys.data(), buffer_->values.data()};
  return OkStatus();
}

void SendBufferWriter::Pack(const Parallel& parallel) {
  const int tasks = static_cast<int>(tasks_.size());
  // So small that no memory is allocated.
  parallel.run(tasks, [this](int task) { CountRows(task); });
  for (size_t part = 0; part < buffer_->sizes.size(); ++part) {
    int64_t end = begin_[part];
    for (Task& task : tasks_) {
      const int64_t count = task.next[part];
      task.next[part] = end;
      end += count;
    }
    buffer_->sizes[part] = end - begin_[part];
    begin_[part + 1] = end;
    begin_values_[part + 1] = begin_values_[part] + buffer_->sizes[part] * DimOf(part);
  }
  parallel.run(tasks, [this](int task) { CopyRows(task); });
  parallel.run(tasks, [this](int task) { AddSquares(task); });
  if (target_.keys != buffer_->keys.data()) return;
  buffer_->keys.resize(static_cast<size_t>(begin_.back()));
  buffer_->values.resize(static_cast<size_t>(begin_values_.back()));
}

void SendBufferWriter::CountRows(int task) {
  Task& own = tasks_[task];
  for (size_t t = 0; t < tables_.size(); ++t) {
    for (const int64_t key : own.rows[t].keys) ++own.next[PartOf(key, t)];
  }
}

void SendBufferWriter::CopyRows(int task) {
  Task& own = tasks_[task];
  for (size_t t = 0; t < tables_.size(); ++t) {
    const int64_t dim = tables_[t]->dim();
    const float* row = own.rows[t].rows.data();
    for (const int64_t key : own.rows[t].keys) {
      const size_t part = PartOf(key, t);
      const int64_t at = own.next[part]++;
      target_.keys[at] = key;
      std::copy_n(row, dim, target_.values + begin_values_[part] + (at - begin_[part]) * dim);
      row += dim;
    }
  }
}

void SendBufferWriter::AddSquares(int task) {
  const auto parts = static_cast<int64_t>(buffer_->sizes.size());
  const TaskRange own = RangeOf(task, static_cast<int>(tasks_.size()), parts);
  for (int64_t part = own.begin; part < own.end; ++part) {
    buffer_->squares[part] = SumOfSquares(target_.values + begin_values_[part],
                                          begin_values_[part + 1] - begin_values_[part]);
  }
}

void SendBufferWriter::Fill(float value) {
  std::fill_n(target_.values, begin_values_.back(), value);
  std::fill(buffer_->squares.begin(), buffer_->squares.end(), value * value);
}

}  // namespace slipstream
