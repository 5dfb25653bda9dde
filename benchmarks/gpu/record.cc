#include "benchmarks/gpu/record.h"

#include <cstdio>

namespace slipstream {
namespace {

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
  }
  return quoted + '"';
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof(text), "%.9g", value);
  return text;
}

}  // namespace

Record& Record::AddJson(const std::string& name, const std::string& json) {
  fields_ += (fields_.empty() ? "" : ", ") + Quoted(name) + ": " + json;
  return *this;
}

Record& Record::Add(const std::string& name, const std::string& value) {
  return AddJson(name, Quoted(value));
}
Record& Record::Add(const std::string& name, bool value) {
  return AddJson(name, value ? "true" : "false");
}
Record& Record::Add(const std::string& name, int64_t value) {
  return AddJson(name, std::to_string(value));
}
Record& Record::Add(const std::string& name, double value) { return AddJson(name, Number(value)); }
Record& Record::Add(const std::string& name, const std::vector<double>& values) {
  std::string list;
  for (const double value : values) list += (list.empty() ? "" : ", ") + Number(value);
  return AddJson(name, "[" + list + "]");
}

void Record::Print() const {
  std::printf("{%s}\n", fields_.c_str());
  std::fflush(stdout);
}

}  // namespace slipstream
