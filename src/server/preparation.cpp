#include "server/preparation.h"

#include <malloc.h>

#include <atomic>

#include "server/on_worker.h"
#include "server/request_body.h"

namespace thermo {
namespace {

constexpr size_t kLargeBody = 1024 * 1024;

// Thrown where nobody waits any more for what is made.
struct ClientGone {};

// Gives back to the system what reading a large body took: the allocator would keep it.
struct TrimAtEnd {
  const bool is_large;
  ~TrimAtEnd() {
    if (is_large) malloc_trim(0);
  }
};

}  // namespace

asio::awaitable<Preparation> prepare_on_worker(ServerState& server, HttpExchange& exchange, Dialect dialect,
                                               const std::string& owner, std::optional<int> max_tokens) {
  Preparation made;
  made.request.dialect = dialect;
  // The worker cannot ask the exchange, which belongs to this thread.
  std::atomic<bool> is_gone = exchange.gone();
  exchange.notify([&exchange, &is_gone] { is_gone = exchange.gone(); });
  const auto look = [&is_gone] {
    if (is_gone) throw ClientGone{};
  };
  const KnownTurns turns{*server.turns, owner};
  const auto work = [&] {
    look();
    const TrimAtEnd trim{exchange.request().body.size() > kLargeBody};
    const Json body = body_json(exchange.request(), server.options.http.max_body_bytes);
    look();
    GenerationRequest request = read_request(dialect, body, server);
    if (max_tokens) request.max_tokens = max_tokens;
    made.request = request;
    look();
    return prepare(std::move(request), *server.model, server.options, turns, look);
  };
  std::exception_ptr failure;
  try {
    made.prepared = co_await on_worker(server.workers, work);
  } catch (const ClientGone&) {
    made.prepared = nullptr;
  } catch (const ApiError& error) {
    // Codex recognises a full context only in this form.
    if (error.code == "context_length_exceeded" && dialect == Dialect::Responses && made.request.stream)
      made.overflow = error;
    else
      failure = std::current_exception();
  } catch (...) {
    failure = std::current_exception();
  }
  exchange.notify(nullptr);
  if (failure) std::rethrow_exception(failure);
  co_return std::move(made);
}

}  // namespace thermo
