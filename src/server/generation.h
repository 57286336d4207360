// One request for text, from its body to its last byte.
//
//     body -> (worker) read, render, tokens -> submit -> events -> parser -> writer -> client
//
// A coroutine on the thread of the sockets; the engine's events wake it.
#pragma once

#include "server/api/reply_writer.h"
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

// An answer that can go on where it ended: what was written so far, and how it ended.
struct Continuation {
  std::vector<TokenId> written = {};   // by all runs
  size_t n_shown = 0;                  // bytes of text that were sent
  std::optional<uint64_t> seed = {};   // of the first run
  std::string finish_reason = {};      // of the last run; "cancelled", "error"
  bool single = true;                  // one answer, without calls of tools
  std::optional<int> max_tokens = {};  // of the next run, instead of the request's own

  bool can_continue() const {
    return single && (finish_reason == "length" || (finish_reason == "cancelled" && !written.empty()));
  }
};

// Answers the exchange. `headers`: of every reply to it. Throws ApiError as long as nothing was sent.
// `continuation`: goes on after what was written before, and is told what is written now; nullptr: an answer
// that is not continued.
asio::awaitable<void> generate(ServerState& server, HttpExchange& exchange, Dialect dialect,
                               CallerInfo caller, std::vector<std::pair<std::string, std::string>> headers,
                               Continuation* continuation);

}  // namespace thermo
