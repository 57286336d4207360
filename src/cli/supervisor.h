// What a supervisor such as systemd is told (Type=notify), by a datagram to the socket it names in
// NOTIFY_SOCKET; and the sockets it passes to the program (LISTEN_PID, LISTEN_FDS).
#pragma once

#include <chrono>
#include <string>
#include <string_view>
#include <vector>

namespace thermo {

// "READY=1" and the like. Nobody listens: no effect.
void tell_supervisor(std::string_view message);

// Listeners that it opened for this process, as "fd:3"; empty: none. They are meant for no child of it.
std::vector<std::string> passed_listeners();

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
