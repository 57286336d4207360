// Runs a function on a worker's thread while the coroutine waits.
#pragma once

#include <boost/asio/co_spawn.hpp>
#include <boost/asio/thread_pool.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <memory>

namespace thermo {

// What it throws is thrown here. `function` is kept until it has run.
template <class Function>
boost::asio::awaitable<std::unique_ptr<std::invoke_result_t<Function>>> on_worker(
    boost::asio::thread_pool& workers, Function function) {
  using Value = std::invoke_result_t<Function>;
  const auto kept = std::make_shared<Function>(std::move(function));
  co_return co_await boost::asio::co_spawn(
      workers.get_executor(),
      [kept]() -> boost::asio::awaitable<std::unique_ptr<Value>> {
        co_return std::make_unique<Value>((*kept)());
      },
      boost::asio::use_awaitable);
}

}  // namespace thermo
