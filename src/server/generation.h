// One request for text, from its body to its last byte.
//
//     body -> (worker) read, render, tokens -> submit -> events -> parser -> writer -> client
//
// A coroutine on the thread of the sockets; the engine's events wake it.
#pragma once

#include "server/api/reply_writer.h"
#include "server/continuation.h"
#include "server/http/http_server.h"
#include "server/prompt.h"
#include "server/routes.h"
#include "server/server_state.h"

namespace thermo {

// Who asks, as far as the answer depends on it.
struct CallerInfo {
  std::string key_name;
  std::string session_hint;  // of the headers
};

// Answers the exchange. `headers`: of every reply to it. Throws ApiError as long as nothing was sent.
// `continuation`: goes on after what was written before, and is told what is written now; nullptr: an answer
// that is not continued.
asio::awaitable<void> generate(ServerState& server, HttpExchange& exchange, Dialect dialect,
                               CallerInfo caller, std::vector<std::pair<std::string, std::string>> headers,
                               Continuation* continuation);

}  // namespace thermo
