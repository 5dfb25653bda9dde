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

int64_t GivenRowBytes(const EmbeddingTable& table, RowFormat format) {
  return SummaryBytes(table, format) + EncodedBytes(format.dtype, table.dim());
}

int64_t NumBitBytes(int64_t rows) { return (rows + 7) / 8; }

bool IsSet(const uint8_t* bits, int64_t index) {
  return (bits[index / 8] >> (index % 8) & 1u) != 0;
}

void Set(uint8_t* bits, int64_t index) {
  bits[index / 8] |= static_cast<uint8_t>(1u << (index % 8));
}

int64_t CountGiven(const uint8_t* given, int64_t rows) {
  int64_t count = 0;
  for (int64_t i = 0; i < rows; ++i) count += IsSet(given, i);
  return count;
}

// Returns InvalidArgument with the first row of a part that is not finite.
Status CheckFiniteRows(const EmbeddingTable& table, RowFormat format, const int64_t* keys,
                       int64_t rows, const uint8_t* bytes) {
  const uint8_t* row = bytes + NumBitBytes(rows);
  for (int64_t i = 0; i < rows; ++i) {
    if (!IsSet(bytes, i)) continue;
    if (!EncodedIsFinite(row + SummaryBytes(table, format), table.dim(), format.dtype)) {
      return InvalidArgument(
          "the row of key " + std::to_string(keys[i]) + " of table '" + table.options().name +
          "' from its owner rank is not finite; expected finite values. No replica was changed");
    }
    row += GivenRowBytes(table, format);
  }
  return OkStatus();
}

// Returns the error for part i with too few bytes.
Status TooShort(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer, size_t i,
                int64_t wanted, int64_t left) {
  return InvalidArgument("the message from rank " + std::to_string(i / tables.size()) + " has " +
                         std::to_string(left) + " bytes left for " +
                         std::to_string(buffer.sizes[i]) + " rows of table '" +
                         tables[i % tables.size()]->options().name + "'; expected at least " +
                         std::to_string(wanted));
}

// Checks the rows of one rank. Advances `*part` and `*key` past them.
Status CheckRowsOfRank(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                       const RowsView& view, size_t* part, const int64_t** key) {
  int64_t at = 0;
  for (EmbeddingTable* table : tables) {
    const int64_t rows = buffer.sizes[*part], left = view.num_bytes - at;
    int64_t wanted = NumBitBytes(rows);
    if (wanted <= left) {
      wanted += CountGiven(view.bytes + at, rows) * GivenRowBytes(*table, view.format);
    }
    if (wanted > left) return TooShort(tables, buffer, *part, wanted, left);
    const Status status = CheckFiniteRows(*table, view.format, *key, rows, view.bytes + at);
    if (!status.ok()) return status;
    at += wanted;
    *key += rows;
    ++*part;
  }
  if (at == view.num_bytes) return OkStatus();
  return InvalidArgument("the message from rank " + std::to_string(*part / tables.size() - 1) +
                         " has " + std::to_string(view.num_bytes) + " bytes of rows; expected " +
                         std::to_string(at));
}

}  // namespace

RowMessage::RowMessage(RowFormat format, std::vector<uint8_t>* bytes)
    : format_(format), begin_(bytes->size()), bytes_(bytes) {
  bytes->resize(begin_ + sizeof(RowsHead));
}

int64_t RowMessage::row_bytes() const {
  return static_cast<int64_t>(bytes_->size() - begin_ - sizeof(RowsHead));
}

int64_t RowMessage::End(size_t rank, SteadyLengths* lengths) {
  const auto whole = static_cast<int64_t>(bytes_->size() - begin_);
  const RowsHead head = {lengths->Of(rank, whole), row_bytes(), static_cast<int64_t>(format_.dtype),
                         format_.with_summary};
  std::memcpy(bytes_->data() + begin_, &head, sizeof(head));
  bytes_->resize(begin_ + static_cast<size_t>(head.length));
  return head.length;
}

Status SplitRowMessages(const uint8_t* messages, int64_t num_bytes, int ranks,
                        std::vector<RowsView>* rows) {
  constexpr auto kHead = static_cast<int64_t>(sizeof(RowsHead));
  rows->clear();
  int64_t left = num_bytes;
  for (int rank = 0; rank < ranks; ++rank) {
    RowsHead head = {};
    if (left >= kHead) std::memcpy(&head, messages, sizeof(head));
    const bool is_head = head.length >= kHead && head.length <= left && head.bytes >= 0 &&
                         head.bytes <= head.length - kHead && head.dtype >= 0 &&
                         head.dtype < kRowDtypes && (head.with_summary | 1) == 1;
    if (!is_head) {
      return InvalidArgument("the message from rank " + std::to_string(rank) +
                             " has a header with length " + std::to_string(head.length) + ", " +
                             std::to_string(head.bytes) + " bytes of rows and dtype number " +
                             std::to_string(head.dtype) +
                             "; expected a valid message in the remaining " + std::to_string(left) +
                             " of " + std::to_string(num_bytes) + " bytes");
    }
    const RowFormat format = {head.with_summary == 1, static_cast<RowDtype>(head.dtype)};
    rows->push_back({format, messages + kHead, head.bytes});
    messages += head.length;
    left -= head.length;
  }
  if (left == 0) return OkStatus();
  return InvalidArgument(std::to_string(left) + " of " + std::to_string(num_bytes) +
                         " bytes remain after the messages of " + std::to_string(ranks) +
                         " ranks; expected 0");
}

RowPacker::RowPacker(const EmbeddingTable& table, RowFormat format, int64_t rows,
                     std::vector<uint8_t>* bytes)
    : table_(table),
      format_(format),
      given_(bytes->size()),
      new_row_(static_cast<size_t>(table.rows().layout().floats())),
      row_(new_row_.size()),
      bytes_(bytes) {
  // The slots of all new rows are equal.
  table.rows().MakeNewRow(0, new_row_.data());
  bytes->resize(given_ + static_cast<size_t>(NumBitBytes(rows)));
}

void RowPacker::Add(int64_t key, const StoredRow* stored) {
  const RowLayout& layout = table_.rows().layout();
  const int64_t index = next_++, dim = layout.dim;
  if (stored == nullptr) return;
  const float* row = row_.data();
  if (layout.is_floats() && table_.rows().scale() == 1.f) {
    row = RowLayout::Floats(stored);
  } else {
    layout.ReadSlots(stored, row_.data() + dim);
    table_.rows().CopyRow(key, stored, row_.data());
  }
  // Compare slots first: a row that was ever updated differs there, without computing initial
  // values.
  if (std::equal(row + dim, row + layout.floats(), new_row_.data() + dim)) {
    table_.rows().CopyRow(key, nullptr, new_row_.data());
    if (std::memcmp(row, new_row_.data(), static_cast<size_t>(dim) * sizeof(float)) == 0) return;
  }
  Set(bytes_->data() + given_, index);
  const size_t end = bytes_->size();
  bytes_->resize(end + static_cast<size_t>(GivenRowBytes(table_, format_)));
  uint8_t* to = bytes_->data() + end;
  if (HasSummary(table_, format_)) {
    const auto upper =
        static_cast<uint16_t>(BitsOf(table_.options().rule.SlotSummary(dim, row)) >> 16);
    std::memcpy(to, &upper, sizeof(upper));
    to += kSummaryBytes;
  }
  EncodeRows(row, nullptr, 1, dim, format_.dtype, RowRounding::kNearest, to);
}

RowUnpacker::RowUnpacker(const EmbeddingTable& table, RowFormat format, int64_t rows,
                         const uint8_t* bytes)
    : table_(table),
      format_(format),
      given_(bytes),
      bytes_(bytes + NumBitBytes(rows)),
      row_bytes_(GivenRowBytes(table, format)),
      copy_(static_cast<size_t>(table.rows().layout().floats())) {}

void RowUnpacker::Next(int64_t key, StoredRow* stored) {
  const RowLayout& layout = table_.rows().layout();
  const int64_t dim = layout.dim;
  const UpdateRule& rule = table_.options().rule;
  float* const row = layout.is_floats() ? RowLayout::Floats(stored) : copy_.data();
  float summary = 0.f;
  if (!IsSet(given_, next_++)) {
    table_.rows().MakeNewRow(key, row);
    if (HasSummary(table_, format_)) summary = rule.SlotSummary(dim, row);
  } else {
    const uint8_t* from = bytes_;
    if (HasSummary(table_, format_)) {
      summary = FromUpperHalf(from);
      from += kSummaryBytes;
    }
    DecodeRows(from, 1, dim, format_.dtype, row);
    bytes_ += row_bytes_;
  }
  rule.FillSlots(dim, summary, row);
  if (layout.is_floats()) return;
  layout.WriteValues(row, stored);
  layout.WriteSlots(row + dim, stored);
}

Status CheckPulledRows(const std::vector<EmbeddingTable*>& tables, const SendBufferView& buffer,
                       const std::vector<RowsView>& rows) {
  Status status = CheckSendBuffer(tables, buffer, std::vector<int64_t>(tables.size(), 0));
  size_t part = 0;
  const int64_t* key = buffer.keys;
  for (size_t rank = 0; rank < rows.size() && status.ok(); ++rank) {
    status = CheckRowsOfRank(tables, buffer, rows[rank], &part, &key);
  }
  return status;
}

}  // namespace slipstream
