// A line of JSON on standard output, which the Python program reads.
#ifndef SLIPSTREAM_BENCHMARKS_GPU_RECORD_H_
#define SLIPSTREAM_BENCHMARKS_GPU_RECORD_H_

#include <cstdint>
#include <string>
#include <vector>

namespace slipstream {

class Record {
 public:
  explicit Record(const std::string& kind) { Add("record", kind); }

  Record& Add(const std::string& name, const std::string& value);
  Record& Add(const std::string& name, const char* value) { return Add(name, std::string(value)); }
  Record& Add(const std::string& name, bool value);
  Record& Add(const std::string& name, int64_t value);
  Record& Add(const std::string& name, double value);
  Record& Add(const std::string& name, const std::vector<double>& values);

  // Prints the line and flushes standard output.
  void Print() const;

 private:
  Record& AddJson(const std::string& name, const std::string& json);

  std::string fields_;
};

}  // namespace slipstream

#endif  // SLIPSTREAM_BENCHMARKS_GPU_RECORD_H_
