#include "cc_ops/core/exchange/merged_rows.h"

#include <algorithm>
#include <string>

#include "cc_ops/core/update/update_loop.h"

namespace slipstream {
namespace {

// A row and the owner of its sum. Rows of a part keep their order in memory.
struct GivenRow {
  int owner;
  int64_t key;
  const float* row;
  bool operator<(const GivenRow& other) const {
    if (owner != other.owner) return owner < other.owner;
    return key != other.key ? key < other.key : row < other.row;
  }
  bool IsOfSameKey(const GivenRow& other) const { return key == other.key; }
};

}  // namespace

Status MergeRows(const SendBufferView& rows, const std::vector<int64_t>& row_floats, int ranks,
                 SendBuffer* merged) {
  const Status status =
      CheckSendBuffer(rows, row_floats, [](size_t table) { return std::to_string(table); });
  if (!status.ok()) return status;
  const size_t tables = row_floats.size();
  std::vector<std::vector<GivenRow>> given(tables);
  const int64_t *keys = rows.keys, *size = rows.sizes;
  const float* row = rows.values;
  for (int part = 0; part < rows.ranks; ++part) {
    for (size_t t = 0; t < tables; ++t, ++size) {
      for (int64_t i = 0; i < *size; ++i, row += row_floats[t]) {
        given[t].push_back({OwnerOf(keys[i], ranks), keys[i], row});
      }
      keys += *size;
    }
  }
  for (std::vector<GivenRow>& of_table : given) std::sort(of_table.begin(), of_table.end());
  merged->ranks = ranks;
  merged->sizes.assign(static_cast<size_t>(ranks) * tables, 0);
  merged->squares.assign(merged->sizes.size(), 0.f);
  merged->keys.clear();
  merged->values.clear();
  std::vector<size_t> next(tables, 0);
  for (int owner = 0; owner < ranks; ++owner) {
    for (size_t t = 0; t < tables; ++t) {
      const std::vector<GivenRow>& of_table = given[t];
      const int64_t dim = row_floats[t];
      const size_t part = static_cast<size_t>(owner) * tables + t, begin = merged->values.size();
      size_t at = next[t];
      while (at < of_table.size() && of_table[at].owner == owner) {
        const GivenRow& first = of_table[at];
        merged->keys.push_back(first.key);
        merged->values.insert(merged->values.end(), first.row, first.row + dim);
        float* const sum = merged->values.data() + merged->values.size() - dim;
        for (++at; at < of_table.size() && of_table[at].IsOfSameKey(first); ++at) {
          AddTo(sum, of_table[at].row, dim);
        }
        ++merged->sizes[part];
      }
      next[t] = at;
      merged->squares[part] = SumOfSquares(merged->values.data() + begin,
                                           static_cast<int64_t>(merged->values.size() - begin));
    }
  }
  return OkStatus();
}

}  // namespace slipstream
