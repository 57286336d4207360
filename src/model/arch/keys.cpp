#include "model/arch/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "gguf/gguf_file.h"

namespace thermo {

Keys::Keys(const GgufFile& file, std::string prefix, std::span<const std::string_view> assumed)
    : file_(file), prefix_(std::move(prefix)), assumed_(assumed) {}

std::string Keys::key(std::string_view name) const {
  return fmt::format("{}.{}", prefix_, name);
}

int Keys::positive(std::string_view name, uint64_t max) const {
  return in_range(name, file_.require_uint(key(name)), max);
}

int Keys::positive_or(std::string_view name, uint64_t max, int fallback) const {
  const auto value = file_.find_uint(key(name));
  return value ? in_range(name, *value, max) : fallback;
}

int Keys::count_or(std::string_view name, uint64_t max, int fallback) const {
  const auto value = file_.find_uint(key(name));
  if (!value) return fallback;
  if (*value > max) fail(name, fmt::format("is {}, expected at most {}", *value, max));
  return static_cast<int>(*value);
}

double Keys::number(std::string_view name) const {
  return finite(name, file_.require_float(key(name)));
}

double Keys::number_or(std::string_view name, double fallback) const {
  const auto value = file_.find_float(key(name));
  return value ? finite(name, *value) : fallback;
}

double Keys::positive_number(std::string_view name) const {
  const double value = number(name);
  if (value <= 0.0) fail(name, fmt::format("is {}, expected more than 0", value));
  return value;
}

std::vector<int> Keys::positive_each(std::string_view name, size_t n, uint64_t max) const {
  std::vector<int> values;
  for (uint64_t value : file_.require_uint_each(key(name), n)) values.push_back(in_range(name, value, max));
  return values;
}

int Keys::rope_dims(std::string_view name, int dims, int head_dim) const {
  if (dims % 2 != 0 || dims > head_dim)
    fail(name, fmt::format("is {}, expected an even number up to the head's {}", dims, head_dim));
  return dims;
}

void Keys::read_scaling(RopeConfig& rope) const {
  const auto type = file_.find_string(key("rope.scaling.type"));
  if (!type || *type == "none") return;
  if (*type != "yarn" && *type != "linear")
    fail("rope.scaling.type", fmt::format("is '{}', expected yarn, linear or none", escape_text(*type)));
  rope.scaling = *type == "yarn" ? RopeScaling::Yarn : RopeScaling::Linear;
  rope.factor = number("rope.scaling.factor");
  constexpr double kLeastFactor = 1e-3;  // far below any; rotations by less would be no numbers
  if (rope.factor != 0.0 && rope.factor < kLeastFactor)
    fail("rope.scaling.factor",
         fmt::format("is {}, expected {} or more, or 0 for none", rope.factor, kLeastFactor));
  if (rope.scaling == RopeScaling::Linear) return;
  rope.original_context = positive("rope.scaling.original_context_length", kMaxContext);
  // Converters spell these keys in two ways, and write what is not set as 0 or leave it out.
  const auto beta = [&](const char* end, double usual) {
    const double value = number_or(fmt::format("rope.scaling.yarn_beta_{}", end),
                                   number_or(fmt::format("rope.scaling.beta_{}", end), usual));
    return value > 0.0 ? value : usual;
  };
  rope.beta_fast = beta("fast", rope.beta_fast);
  rope.beta_slow = beta("slow", rope.beta_slow);
  // rope.scaling.yarn_attn_factor is ignored: converters disagree about its meaning, the magnitude is 1 + 0.1
  // ln s.
}

const GgufTensor* Keys::find_tensor(const std::string& name) const {
  return file_.find_tensor(name);
}

bool Keys::has_tensor(const std::string& name) const {
  return find_tensor(name) != nullptr || std::find(assumed_.begin(), assumed_.end(), name) != assumed_.end();
}

void Keys::fail(std::string_view name, const std::string& what) const {
  throw LoadError(
      fmt::format("{}: {} {}; was this file made by another converter?", file_.path(), key(name), what));
}

void Keys::not_supported(std::string_view name, const std::string& what) const {
  throw LoadError(fmt::format("{}: {} {}; models of this shape are not supported: give another one",
                              file_.path(), key(name), what));
}

int Keys::in_range(std::string_view name, uint64_t value, uint64_t max) const {
  if (value < 1 || value > max) fail(name, fmt::format("is {}, expected 1 to {}", value, max));
  return static_cast<int>(value);
}

double Keys::finite(std::string_view name, double value) const {
  if (!std::isfinite(value)) fail(name, "is not a finite number");
  return value;
}

}  // namespace thermo
