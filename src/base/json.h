// The one place that includes the JSON library. Objects keep the order of insertion: prompts and reports
// are compared byte for byte.
#pragma once

#include <nlohmann/json.hpp>

namespace thermo {

using Json = nlohmann::ordered_json;

}  // namespace thermo
