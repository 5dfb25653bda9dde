#include "cc_ops/core/table/eviction.h"

#include <algorithm>

#include "cc_ops/core/base/hash.h"

namespace slipstream {
namespace {

// Removes keys that have no row and would not be admitted after their repeats in the sorted list.
void ExcludeRare(const RowStore& rows, std::vector<int64_t>* keys) {
  if (!rows.admits()) return;
  auto kept = keys->begin();
  for (auto begin = keys->begin(); begin != keys->end();) {
    const auto end = std::find_if(begin, keys->end(), [&](int64_t key) { return key != *begin; });
    if (rows.Has(*begin) || rows.WouldAdmit(*begin, end - begin)) *kept++ = *begin;
    begin = end;
  }
  keys->erase(kept, keys->end());
}

}  // namespace

Status EvictFor(std::vector<WantedKeys> wanted, const std::string& who) {
  for (WantedKeys& of_table : wanted) {
    std::vector<int64_t>& keys = of_table.keys;
    std::sort(keys.begin(), keys.end());
    if (of_table.is_access) ExcludeRare(of_table.table->rows(), &keys);
    keys.erase(std::unique(keys.begin(), keys.end()), keys.end());
    const TableOptions& options = of_table.table->options();
    if (static_cast<int64_t>(keys.size()) > options.capacity) {
      return ResourceExhausted(who + " " + std::to_string(keys.size()) + " rows of table '" +
                               options.name + "' at once, but its capacity is " +
                               std::to_string(options.capacity) +
                               ". Increase `capacity` or reduce the batch size");
    }
  }
  for (WantedKeys& of_table : wanted) {
    std::vector<int64_t>& keys = of_table.keys;
    const size_t rows = keys.size();
    const auto is_absent = [&](int64_t key) { return !of_table.table->rows().Has(key); };
    keys.erase(std::remove_if(keys.begin(), keys.end(), is_absent), keys.end());
    of_table.table->Evict(static_cast<int64_t>(rows - keys.size()), keys);
  }
  return OkStatus();
}

}  // namespace slipstream
