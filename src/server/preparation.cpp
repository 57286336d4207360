#include "server/preparation.h"

#include <malloc.h>

#include "server/request_body.h"
#include "server/wanted_work.h"

namespace thermo {
namespace {

constexpr size_t kLargeBody = 1024 * 1024;

// Gives back to the system what reading a large body took: the allocator would keep it.
struct TrimAtEnd {
  const bool is_large;
  ~TrimAtEnd() {
    if (is_large) malloc_trim(0);
  }
};

}  // namespace

asio::awaitable<Preparation> prepare_on_worker(ServerState& server, HttpExchange& exchange, Dialect dialect,
                                               const std::string& owner, const Continuation* continuation) {
  Preparation made;
  made.request.dialect = dialect;
  const KnownTurns turns{*server.turns, owner};
  const auto work = [&](const std::function<void()>& look) {
    const TrimAtEnd trim{exchange.request().body.size() > kLargeBody};
    const Json body = body_json(exchange.request(), server.options.http.max_body_bytes);
    look();
    GenerationRequest request = read_request(dialect, body, server, look);
    if (continuation != nullptr) {
      if (continuation->max_tokens) request.max_tokens = continuation->max_tokens;
      request.n_written = static_cast<int>(continuation->written.size());
    }
    made.request = request;
    look();
    return prepare(std::move(request), *server.model, server.options, turns, look);
  };
  try {
    made.prepared = co_await on_worker_while_wanted(server, exchange, work);
  } catch (const ApiError& error) {
    // Codex recognises a full context only in this form.
    if (error.code != "context_length_exceeded" || dialect != Dialect::Responses || !made.request.stream)
      throw;
    made.overflow = error;
  }
  co_return std::move(made);
}

}  // namespace thermo
