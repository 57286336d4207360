// A step of a large model takes seconds and cannot be stopped. Who is interrupted then should not wait for
// it: another thread ends the program in good order.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>

namespace thermo {

class InterruptWatch {
 public:
  // `leave` is called on a thread of this object, once, when an interrupt came and the work still went on
  // after `patience`. It closes what is open and ends the process, or returns where the work has ended after
  // all. REQUIRES: an InterruptScope that lives as long.
  InterruptWatch(std::chrono::milliseconds patience, std::function<void()> leave);
  // The work has ended.
  ~InterruptWatch();
  InterruptWatch(const InterruptWatch&) = delete;
  InterruptWatch& operator=(const InterruptWatch&) = delete;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;
  std::thread thread_;  // uses all of the above
};

}  // namespace thermo
