// Reasoning that a client keeps for us: the text of `encrypted_content` in items of /v1/responses. Clients
// that drop the readable text send it back with the next turn. It has all of the reasoning inside, so nothing
// is kept here and it outlives the server. Its checksum tells our own from damaged and foreign ones; it is
// not secret, as the reasoning itself is not.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace thermo {

std::string seal_reasoning(std::string_view text);
// The text; nullopt: it is not one of ours, or it was changed.
std::optional<std::string> open_reasoning(std::string_view sealed);

}  // namespace thermo
