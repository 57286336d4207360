// Endpoints that count, cut and join tokens, without generating. On a worker's thread.
#pragma once

#include "server/routes.h"
#include "server/server_state.h"

namespace thermo {

// The reply to a body at such an endpoint. `owner`: the name of the API key. Throws ApiError.
Json token_reply(Endpoint endpoint, const Json& body, const ServerState& server, const std::string& owner);

}  // namespace thermo
