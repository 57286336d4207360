// Wakes a coroutine. One thread: that of its executor.
#pragma once

#include <boost/asio/awaitable.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>

namespace thermo {

namespace asio = boost::asio;

class Signal {
 public:
  explicit Signal(asio::any_io_executor executor) : timer_(std::move(executor)) {}

  void raise() {
    raised_ = true;
    timer_.cancel();
  }
  // True: it was raised (which is taken back); false: the time has come.
  asio::awaitable<bool> wait_until(std::chrono::steady_clock::time_point when) {
    if (!raised_) {
      timer_.expires_at(when);
      boost::system::error_code ignored;
      co_await timer_.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    }
    co_return std::exchange(raised_, false);
  }
  asio::awaitable<void> wait() {
    for (;;) {  // GCC 12 miscompiles co_await in the condition of a loop
      const bool raised = co_await wait_until(std::chrono::steady_clock::now() + std::chrono::hours(1));
      if (raised) co_return;
    }
  }

 private:
  asio::steady_timer timer_;
  bool raised_ = false;
};

}  // namespace thermo
