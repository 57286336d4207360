// Options of llama.cpp's programs that have no meaning here. Ignoring them silently would be worse than
// refusing.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace thermo {

// "-ot": one sentence on what to use instead; nullopt when the option is none of those.
std::optional<std::string> refusal_advice(std::string_view argument);

}  // namespace thermo
