// Endpoints that count, cut and join tokens, without generating. On a worker's thread.
#pragma once

#include <functional>

#include "server/routes.h"
#include "server/server_state.h"

namespace thermo {

struct TokenReply {
  Json body;
  std::vector<TokenId>
      to_look_up;  // a prompt: the reply's n_cached is what the engine has of it; empty: none
};

// The reply to a body at such an endpoint. `owner`: the name of the API key; `look`: see prompt.h. Throws
// ApiError.
TokenReply token_reply(Endpoint endpoint, const Json& body, const ServerState& server,
                       const std::string& owner, const std::function<void()>& look);

}  // namespace thermo
