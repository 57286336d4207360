#include "cli/supervisor.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <charconv>
#include <cstddef>
#include <cstdlib>
#include <cstring>

namespace thermo {

void tell_supervisor(std::string_view message) {
  const char* const path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || (path[0] != '/' && path[0] != '@')) return;
  sockaddr_un address{};
  const size_t n = std::strlen(path);
  if (n >= sizeof(address.sun_path)) return;
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path, n);
  if (path[0] == '@') address.sun_path[0] = '\0';  // a name without a file
  const int socket = ::socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  if (socket < 0) return;
  // A refusal changes nothing for the server.
  [[maybe_unused]] const ssize_t sent = sendto(socket, message.data(), message.size(), MSG_NOSIGNAL,
                                               reinterpret_cast<const sockaddr*>(&address),
                                               static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + n));
  close(socket);
}

std::vector<std::string> passed_listeners() {
  constexpr int kFirst = 3;
  const auto number = [](const char* name) {
    const char* const text = std::getenv(name);
    int value = 0;
    if (text != nullptr) std::from_chars(text, text + std::strlen(text), value);
    return value;
  };
  std::vector<std::string> listeners;
  if (number("LISTEN_PID") != getpid()) return listeners;
  for (int i = 0; i < number("LISTEN_FDS"); ++i) {
    fcntl(kFirst + i, F_SETFD, FD_CLOEXEC);
    listeners.push_back("fd:" + std::to_string(kFirst + i));
  }
  return listeners;
}

Watchdog::Watchdog() {
  const char* const text = std::getenv("WATCHDOG_USEC");
  if (text == nullptr) return;
  uint64_t limit = 0;
  std::from_chars(text, text + std::strlen(text), limit);
  every_ = std::chrono::microseconds(limit / 2);
}

void Watchdog::feed() {
  const auto now = std::chrono::steady_clock::now();
  if (every_.count() == 0 || now < next_) return;
  next_ = now + every_;
  tell_supervisor("WATCHDOG=1");
}

}  // namespace thermo
