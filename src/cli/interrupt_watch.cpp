#include "cli/interrupt_watch.h"

#include <csignal>

#include "cli/interrupt.h"

namespace thermo {
namespace {

constexpr std::chrono::milliseconds kLookEvery{50};  // a handler of signals can wake nobody

// Signals are for the thread that works: its reads and writes have to end.
void block_signals() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace

InterruptWatch::InterruptWatch(std::chrono::milliseconds patience, std::function<void()> leave)
    : thread_([this, patience, leave = std::move(leave)] {
        block_signals();
        std::unique_lock lock(mutex_);
        const auto is_over = [this] { return over_; };
        while (!InterruptScope::interrupted())
          if (changed_.wait_for(lock, kLookEvery, is_over)) return;
        if (changed_.wait_for(lock, patience, is_over)) return;
        lock.unlock();
        leave();
      }) {}

InterruptWatch::~InterruptWatch() {
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

}  // namespace thermo
