// Values as JSON text, byte for byte as Python's json.dumps writes it.
#pragma once

#include <optional>
#include <string>

#include "jinja/value.h"

namespace thermo::jinja {

struct JsonStyle {
  bool ensure_ascii = false;
  bool sort_keys = false;
  std::optional<std::string> indent;  // one level
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};

// Fails for values that JSON has no form for.
Text to_json(Heap& heap, const Value& v, const JsonStyle& style);

}  // namespace thermo::jinja
