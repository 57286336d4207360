// How commands print JSON.
#pragma once

#include <string>

#include "base/json.h"

namespace thermo {

// Indented, with a line end; bytes that are no UTF-8 are replaced.
inline std::string json_text(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

}  // namespace thermo
