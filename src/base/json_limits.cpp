#include "base/json_limits.h"

#include <fmt/format.h>

#include <vector>

namespace thermo {

std::string beyond_limits(std::string_view text, const JsonLimits& limits) {
  struct Open {
    bool is_object;
    size_t n_commas = 0;
  };
  std::vector<Open> open;
  uint64_t work = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      open.push_back({.is_object = c == '{'});
      if (open.size() > limits.depth) return fmt::format("it is nested deeper than {} levels", limits.depth);
    } else if ((c == ']' || c == '}') && !open.empty()) {
      open.pop_back();
    } else if (c == ',' && !open.empty()) {
      const size_t n = ++open.back().n_commas;
      if (!open.back().is_object) {
        if (n >= limits.elements)
          return fmt::format("it has a list of more than {} elements", limits.elements);
        continue;
      }
      if (n >= limits.members) return fmt::format("it has an object of more than {} members", limits.members);
      work += 2 * n + 1;
      if (work > limits.work) return "it has too many large objects";
    }
  }
  return {};
}

}  // namespace thermo
