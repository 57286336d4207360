// Runs a function on a worker's thread while the coroutine waits. The coroutine itself stays on its own
// thread: only the function travels.
#pragma once

#include <boost/asio/post.hpp>
#include <boost/asio/this_coro.hpp>
#include <boost/asio/thread_pool.hpp>
#include <exception>
#include <memory>

#include "server/http/signal.h"

namespace thermo {

// What it throws is thrown here.
template <class Function>
asio::awaitable<std::unique_ptr<std::invoke_result_t<Function>>> on_worker(asio::thread_pool& workers,
                                                                           Function function) {
  struct Work {
    Work(asio::any_io_executor executor, Function f) : done(std::move(executor)), run(std::move(f)) {}
    Signal done;
    Function run;
    std::unique_ptr<std::invoke_result_t<Function>> value;
    std::exception_ptr failure;
  };
  const asio::any_io_executor here = co_await asio::this_coro::executor;
  const auto work = std::make_shared<Work>(here, std::move(function));
  asio::post(workers, [task = work, here]() mutable {
    try {
      task->value = std::make_unique<std::invoke_result_t<Function>>(task->run());
    } catch (...) {
      task->failure = std::current_exception();
    }
    asio::post(here, [task = std::move(task)] { task->done.raise(); });
  });
  co_await work->done.wait();
  if (work->failure) std::rethrow_exception(work->failure);
  co_return std::move(work->value);
}

}  // namespace thermo
