#include "cc_ops/core/exchange/pulled_rows.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "cc_ops/core/base/bfloat16.h"

namespace slipstream {
namespace {

float FromUpperHalf(const uint8_t* bytes) {
  uint16_t upper;
  std::memcpy(&upper, bytes, sizeof(upper));
  return FromBfloat16(upper);
}

constexpr int64_t kSummaryBytes = 2;

bool HasSummary(const EmbeddingTable& table, RowFormat format) {
  return format.with_summary && table.slots_per_row() > 0;
}

int64_t SummaryBytes(const EmbeddingTable& table, RowFormat format) {
  return HasSummary(table, format) ? kSummaryBytes : 0;
}

int64_t ValueBytes(const EmbeddingTable& table, RowFormat format) {
  return table.dim() * (format.rounds ? 2 : 4);
}

int64_t GivenRowBytes(const EmbeddingTable& table, RowFormat format) {
  return SummaryBytes(table, format) + ValueBytes(table, format);
}

int64_t NumBitBytes(int64_t rows) { return (rows + 7) / 8; }

// The bits of so many rows that stand before them.
int64_t NumHeadBytes(int64_t rows, RowFormat format) {
  return NumBitBytes(rows) * (format.refreshed ? 2 : 1);
}

bool IsSet(const uint8_t* bits, int64_t index) {
  return (bits[index / 8] >> (index % 8) & 1u) != 0;
}

void Set(uint8_t* bits, int64_t index) {
  bits[index / 8] |= static_cast<uint8_t>(1u << (index % 8));
}

int64_t CountGiven(const uint8_t* given, int64_t begin, int64_t end) {
  int64_t count = 0;
  for (int64_t i = begin; i < end; ++i) count += IsSet(given, i);
  return count;
}

// row: values, then slots.
void MakeNewRow(const EmbeddingTable& table, int64_t key, float* row) {
  table.options().initializer.Fill(key, table.dim(), row);
  table.options().rule.InitSlots(table.dim(), row + table.dim());
}

// Whether the values of a given row are finite.
bool IsFinite(const EmbeddingTable& table, RowFormat format, const uint8_t* row) {
  row += SummaryBytes(table, format);
  for (int64_t j = 0; j < table.dim(); ++j) {
    uint32_t bits = 0;
    if (format.rounds) {
      std::memcpy(&bits, row + 2 * j, 2);
      bits <<= 16;
    } else {
      std::memcpy(&bits, row + 4 * j, 4);
    }
    if ((bits & 0x7f800000u) == 0x7f800000u) return false;
  }
  return true;
}

// InvalidArgument that names the first of a part's given rows that is not finite.
Status CheckFiniteRows(const EmbeddingTable& table, RowFormat format, const int64_t* keys,
                       int64_t rows, const uint8_t* bytes) {
  const uint8_t* row = bytes + NumHeadBytes(rows, format);
  for (int64_t i = 0; i < rows; ++i) {
    if (!IsSet(bytes, i)) continue;
    if (!IsFinite(table, format, row)) {
      return InvalidArgument("the row of key " + std::to_string(keys[i]) + " of table '" +
                             table.options().name +
                             "' that came from its owner is not finite; allowed: finite values. "
                             "No replica was changed");
    }
    row += GivenRowBytes(table, format);
  }
  return OkStatus();
}

// What is wrong with the bytes of part i.
Status TooShort(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer, size_t i,
                int64_t wanted, int64_t left) {
  return InvalidArgument("the " + std::to_string(buffer.sizes[i]) + " rows of table '" +
                         tables[i % tables.size()]->options().name + "' from rank " +
                         std::to_string(i / tables.size()) + " take at least " +
                         std::to_string(wanted) + " bytes; left are " + std::to_string(left));
}

Status CheckEnd(int64_t at, int64_t num_bytes) {
  if (at == num_bytes) return OkStatus();
  return InvalidArgument("the rows take " + std::to_string(at) + " bytes; there are " +
                         std::to_string(num_bytes));
}

template <class T>
void Append(T value, std::vector<uint8_t>* bytes) {
  const size_t end = bytes->size();
  bytes->resize(end + sizeof(value));
  std::memcpy(bytes->data() + end, &value, sizeof(value));
}

}  // namespace

RowPacker::RowPacker(const EmbeddingTable& table, RowFormat format, int64_t rows,
                     std::vector<uint8_t>* bytes)
    : table_(table),
      format_(format),
      given_(bytes->size()),
      refreshed_(given_ + static_cast<size_t>(NumBitBytes(rows))),
      new_row_(static_cast<size_t>(table.dim() + table.slots_per_row())),
      bytes_(bytes) {
  table.options().rule.InitSlots(table.dim(), new_row_.data() + table.dim());
  bytes->resize(given_ + static_cast<size_t>(NumHeadBytes(rows, format)));
}

void RowPacker::Add(int64_t key, const float* row, bool is_refreshed, bool is_given) {
  const int64_t index = next_++, dim = table_.dim();
  const size_t slot_bytes = static_cast<size_t>(table_.slots_per_row()) * sizeof(float);
  if (is_refreshed) Set(bytes_->data() + refreshed_, index);
  if (row == nullptr && !is_given) return;
  if (row != nullptr && table_.rows().scale() != 1.f) {
    unpacked_.assign(row, row + dim + table_.slots_per_row());
    table_.rows().CopyRow(key, row, unpacked_.data());
    row = unpacked_.data();
  }
  // Slots first: those of a row that was ever updated tell without its initial values.
  const bool may_be_new =
      row == nullptr ||
      (!is_given && std::memcmp(row + dim, new_row_.data() + dim, slot_bytes) == 0);
  if (may_be_new) {
    table_.options().initializer.Fill(key, dim, new_row_.data());
    const size_t value_bytes = static_cast<size_t>(dim) * sizeof(float);
    if (row == nullptr) {
      row = new_row_.data();
    } else if (std::memcmp(row, new_row_.data(), value_bytes) == 0) {
      return;
    }
  }
  Set(bytes_->data() + given_, index);
  if (HasSummary(table_, format_)) {
    const uint32_t bits = BitsOf(table_.options().rule.SlotSummary(dim, row));
    Append(static_cast<uint16_t>(bits >> 16), bytes_);
  }
  for (int64_t j = 0; j < dim; ++j) {
    if (format_.rounds) {
      Append(RoundToBfloat16(row[j]), bytes_);
    } else {
      Append(row[j], bytes_);
    }
  }
}

void RowPacker::AddUnchanged() { Set(bytes_->data() + refreshed_, next_++); }

RowUnpacker::RowUnpacker(const EmbeddingTable& table, RowFormat format, int64_t rows,
                         const uint8_t* bytes)
    : table_(table),
      format_(format),
      given_(bytes),
      bytes_(bytes + NumHeadBytes(rows, format)),
      rows_(rows),
      row_bytes_(GivenRowBytes(table, format)) {}

bool RowUnpacker::IsNextGiven() const { return IsSet(given_, next_); }

bool RowUnpacker::IsNextRefreshed() const {
  return format_.refreshed && IsSet(given_ + NumBitBytes(rows_), next_);
}

void RowUnpacker::Next(int64_t key, float* row) {
  const int64_t dim = table_.dim();
  const UpdateRule& rule = table_.options().rule;
  float summary = 0.f;
  if (!IsSet(given_, next_++)) {
    MakeNewRow(table_, key, row);
    if (HasSummary(table_, format_)) summary = rule.SlotSummary(dim, row);
  } else {
    const uint8_t* from = bytes_;
    if (HasSummary(table_, format_)) {
      summary = FromUpperHalf(from);
      from += 2;
    }
    if (format_.rounds) {
      for (int64_t j = 0; j < dim; ++j) row[j] = FromUpperHalf(from + 2 * j);
    } else {
      std::memcpy(row, from, static_cast<size_t>(dim) * sizeof(float));
    }
    bytes_ += row_bytes_;
  }
  rule.FillSlots(dim, summary, row);
}

const uint8_t* RowUnpacker::End() {
  bytes_ += CountGiven(given_, next_, rows_) * row_bytes_;
  next_ = rows_;
  return bytes_;
}

Status CheckPulledRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                       RowFormat format, const uint8_t* bytes, int64_t num_bytes) {
  Status status = CheckSendBuffer(tables, buffer, std::vector<int64_t>(tables.size(), 0));
  if (!status.ok()) return status;
  int64_t at = 0, key = 0;
  for (size_t i = 0; i < static_cast<size_t>(buffer.ranks) * tables.size(); ++i) {
    const int64_t rows = buffer.sizes[i];
    int64_t wanted = NumHeadBytes(rows, format);
    if (wanted <= num_bytes - at) {
      const int64_t given = CountGiven(bytes + at, 0, rows);
      wanted += given * GivenRowBytes(*tables[i % tables.size()], format);
    }
    if (wanted > num_bytes - at) return TooShort(tables, buffer, i, wanted, num_bytes - at);
    status =
        CheckFiniteRows(*tables[i % tables.size()], format, buffer.keys + key, rows, bytes + at);
    if (!status.ok()) return status;
    at += wanted;
    key += rows;
  }
  return CheckEnd(at, num_bytes);
}

}  // namespace slipstream
