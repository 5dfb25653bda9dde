#include "cc_ops/tf/base/shapes.h"

#include <cctype>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace slipstream {
namespace {

using tensorflow::shape_inference::DimensionHandle;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;
using Shape = std::vector<std::string>;  // the name or number of each dimension

std::vector<Shape> Parse(const std::string& text) {
  std::vector<Shape> shapes;
  std::string name;
  for (const char c : text) {
    if (c == '[') shapes.emplace_back();
    if (std::isalnum(c) || c == '_' || c == '?' || c == '*') {
      name += c;
    } else if (!name.empty()) {
      shapes.back().push_back(std::move(name));
      name.clear();
    }
  }
  return shapes;
}

// Returns the dimension with this name, as far as it is known.
DimensionHandle Find(InferenceContext* c, const std::string& name,
                     const std::map<std::string, DimensionHandle>& known) {
  if (std::isdigit(name[0])) return c->MakeDim(std::stoll(name));
  const auto found = known.find(name);
  if (name != "?" && found != known.end()) return found->second;
  int64_t value = 0;
  return c->GetAttr(name, &value).ok() ? c->MakeDim(value) : c->UnknownDim();
}

}  // namespace

tensorflow::OpShapeInferenceFn Shapes(const char* text) {
  const std::string all(text);
  const size_t arrow = all.find("->");
  return [inputs = Parse(all.substr(0, arrow)),
          outputs = arrow == std::string::npos ? std::vector<Shape>() : Parse(all.substr(arrow))](
             InferenceContext* c) -> absl::Status {
    std::map<std::string, DimensionHandle> known;
    int input = c->num_inputs() - static_cast<int>(inputs.size());
    for (const Shape& shape : inputs) {
      ShapeHandle given;
      if (shape == Shape{"*"}) {
        TF_RETURN_IF_ERROR(c->WithRankAtMost(c->input(input++), 1, &given));
        continue;
      }
      TF_RETURN_IF_ERROR(c->WithRank(c->input(input++), static_cast<int>(shape.size()), &given));
      for (size_t d = 0; d < shape.size(); ++d) {
        DimensionHandle dim = Find(c, shape[d], known);
        TF_RETURN_IF_ERROR(c->Merge(dim, c->Dim(given, static_cast<int>(d)), &dim));
        known[shape[d]] = dim;
      }
    }
    for (size_t i = 0; i < outputs.size(); ++i) {
      std::vector<DimensionHandle> dims;
      for (const std::string& name : outputs[i]) {
        dims.push_back(known[name] = Find(c, name, known));
      }
      c->set_output(static_cast<int>(i), c->MakeShape(dims));
    }
    return absl::OkStatus();
  };
}

}  // namespace slipstream
