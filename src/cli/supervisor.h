// What a supervisor such as systemd is told (Type=notify): a datagram to the socket it names in
// NOTIFY_SOCKET.
#pragma once

#include <chrono>
#include <string_view>

namespace thermo {

// "READY=1" and the like. Nobody listens: no effect.
void tell_supervisor(std::string_view message);

// "WATCHDOG=1" in time, where the supervisor wants to hear it.
class Watchdog {
 public:
  Watchdog();
  // Often; it tells when it is due.
  void feed();

 private:
  std::chrono::microseconds every_{0};  // 0: never
  std::chrono::steady_clock::time_point next_ = {};
};

}  // namespace thermo
