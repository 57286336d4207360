// The experts of the model one by one: how hot each is, how often it was used and where it is. For
// /thermo/experts and the `heat` events of /thermo/live.
#pragma once

#include "server/http/http_message.h"
#include "server/server_state.h"

namespace thermo {

// `format`: json, csv or bin; `window`: 1s, 60s or all, of which uses are counted. Throws ApiError.
HttpReply experts_reply(const ServerState& server, const std::string& format, const std::string& window);

Json heat_event(const ServerState& server, const ExpertHeat& heat);

const char* tier_name(ExpertTier tier);
// Heat on a logarithmic scale from 0 to 255; the hottest is 255. `max`: its heat.
std::vector<uint8_t> heat_bytes(std::span<const float> heat, float* max);
// Tiers as two bits each, the first in the lowest ones.
std::vector<uint8_t> tier_bits(std::span<const ExpertPlace> places);

}  // namespace thermo
