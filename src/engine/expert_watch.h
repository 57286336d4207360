// The experts of a running engine, for threads other than its own: their heat, copied on request, and the
// heat file, written every minute.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>

#include "engine/token_service.h"

namespace thermo {

class ExpertWatch {
 public:
  using Clock = std::chrono::steady_clock;

  explicit ExpertWatch(std::chrono::milliseconds save_every) : save_every_(save_every) {}

  // The engine's thread, between steps: does what is due. `stepped`: there was one since the last call.
  void look(Engine& engine, bool stepped);
  // The same thread, before it waits for work: something to do although there is none, and when there is.
  bool wanted() const { return order_ != HeatOrder::None || Clock::now() >= due(); }
  Clock::time_point due() const {
    constexpr Clock::time_point kNever = Clock::time_point::max();
    return std::min(saved_ ? kNever : last_save_ + save_every_, asked_ ? last_copy_ + kCopyEvery : kNever);
  }

  // Any thread. The last copy; nullptr before the first. Asks for the next one.
  std::shared_ptr<const ExpertHeat> heat();
  void order(HeatOrder order, const std::string& name) {
    const std::lock_guard lock(mutex_);
    name_ = name;
    order_ = order;
  }

 private:
  static constexpr auto kCopyEvery = std::chrono::milliseconds(200);  // viewers draw five times a second

  const std::chrono::milliseconds save_every_;
  // The engine's thread.
  Clock::time_point last_save_ = Clock::now(), last_copy_ = {};
  bool saved_ = true;  // nothing was counted since

  std::atomic<bool> asked_{false};
  std::atomic<HeatOrder> order_{HeatOrder::None};
  std::mutex mutex_;  // for what follows
  std::string name_;  // of the order's file
  std::shared_ptr<const ExpertHeat> copy_;
};

}  // namespace thermo
