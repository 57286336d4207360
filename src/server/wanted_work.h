// Work on a worker's thread for a client that may go away, and for a server that may end.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <utility>

#include "server/http/http_server.h"
#include "server/on_worker.h"
#include "server/operations.h"
#include "server/server_state.h"

namespace thermo {

// Calls function(look) on a worker; `look` is a const std::function<void()>&. The function calls it now and
// then, and lets through what it throws once nobody waits for the result: ApiError 503 where the server ends,
// or something that ends here. nullptr: the client is gone. Throws what the function throws.
template <class Function>
auto on_worker_while_wanted(ServerState& server, HttpExchange& exchange, Function function)
    -> asio::awaitable<std::unique_ptr<std::invoke_result_t<const Function&, const std::function<void()>&>>> {
  struct ClientGone {};
  // The worker cannot ask the exchange, which belongs to this thread.
  std::atomic<bool> is_gone = exchange.gone();
  exchange.notify([&exchange, &is_gone] { is_gone = exchange.gone(); });
  ++server.n_preparing;
  struct AtEnd {
    ServerState& server;
    HttpExchange& exchange;
    ~AtEnd() {
      exchange.notify(nullptr);
      --server.n_preparing;
    }
  } const at_end{server, exchange};
  const std::function<void()> look = [&server, &is_gone] {
    if (is_gone) throw ClientGone{};
    if (server.cancelling) throw shutting_down();
  };
  const auto work = [&function, &look] {
    look();
    return function(look);
  };
  try {
    co_return co_await on_worker(server.workers, work);
  } catch (const ClientGone&) {
    co_return nullptr;
  }
}

}  // namespace thermo
