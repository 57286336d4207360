// A body becomes what the engine gets, on a worker; the thread of the sockets waits without stopping.
#pragma once

#include <memory>
#include <optional>

#include "server/continuation.h"
#include "server/http/http_server.h"
#include "server/prompt.h"
#include "server/server_state.h"

namespace thermo {

struct Preparation {
  std::unique_ptr<PreparedRequest> prepared;  // nullptr: the client is gone, or the prompt does not fit
  GenerationRequest request;                  // what is known of it without
  std::optional<ApiError> overflow;           // to be told in a stream that begins
};

// Throws ApiError. The worker looks now and then whether the client is gone.
// `owner`: the name of the API key; `continuation`: of an answer that goes on, or nullptr.
asio::awaitable<Preparation> prepare_on_worker(ServerState& server, HttpExchange& exchange, Dialect dialect,
                                               const std::string& owner, const Continuation* continuation);

}  // namespace thermo
