// `/thermo/live`: what the engine does, as a stream of events for a page or a script that watches.
//
//     hello  once: the model
//     tick   `hz` times a second (0.2 to 5, 2 by default): speeds, requests, slots, memory, experts
//     heat   once a second with `heat=1`: how hot every expert is
//     request  when the state of a request changes
//     log      a warning or an error, for administrators
#pragma once

#include "server/http/http_server.h"
#include "server/server_state.h"

namespace thermo {

// Until the viewer goes, does not read, or the server ends. Throws ApiError: too many viewers.
asio::awaitable<void> show_live(ServerState& server, HttpExchange& exchange, bool with_log,
                                std::vector<std::pair<std::string, std::string>> headers);

// The newest numbers of the engine for rates of a window; called every second.
void sample_load(ServerState& server);

// Of ticks: one element, or none where nothing is known about a card.
Json gpu_json(const std::optional<GpuReading>& gpu);

}  // namespace thermo
