#include "cc_ops/core/table/out_of_memory.h"

#include <algorithm>
#include <cstddef>
#include <new>

namespace slipstream {
namespace {

constexpr size_t kMaxNamed = 3;

std::string Describe(const EmbeddingTable& table) {
  return "table '" + table.options().name + "' (" + std::to_string(table.rows().size()) +
         " rows, " + std::to_string(table.bytes()) + " bytes)";
}

std::string DescribeLargest(std::vector<EmbeddingTable*> tables) {
  std::stable_sort(tables.begin(), tables.end(),
                   [](EmbeddingTable* a, EmbeddingTable* b) { return a->bytes() > b->bytes(); });
  std::string text;
  for (size_t t = 0; t < std::min(tables.size(), kMaxNamed); ++t) {
    text += (t > 0 ? ", " : "") + Describe(*tables[t]);
  }
  if (tables.size() > kMaxNamed) {
    text += " and " + std::to_string(tables.size() - kMaxNamed) + " smaller tables";
  }
  return text;
}

}  // namespace

Status OutOfMemory(const std::string& doing, const std::vector<EmbeddingTable*>& tables) {
  std::string where;
  try {
    throw;
  } catch (const TableOutOfMemory& error) {
    const auto full = std::find_if(tables.begin(), tables.end(), [&](const EmbeddingTable* table) {
      return &table->rows() == error.rows();
    });
    where = (full == tables.end() ? "a table" : Describe(**full)) + " cannot grow";
  } catch (...) {
    where = "during work on " + DescribeLargest(tables);
  }
  return ResourceExhausted("out of memory while " + doing + ": " + where +
                           "; all rows are intact. Set or reduce `capacity` to limit the number "
                           "of rows, reduce the batch size, or free memory and continue");
}

}  // namespace slipstream
