#include "server/stdio/line_pipe.h"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <system_error>
#include <utility>

namespace thermo {
namespace {

constexpr int kLastWriteMs = 1000;  // when it is told to end

}  // namespace

LinePipe::LinePipe(int in, int out, size_t max_line, Callbacks callbacks)
    : in_(in), out_(out), max_line_(max_line), callbacks_(std::move(callbacks)) {}

void LinePipe::start() {
  if (pipe(wake_) != 0) throw std::system_error(errno, std::generic_category(), "pipe");
  writer_ = std::thread([this] { write_lines(); });
  reader_ = std::thread([this] { read_lines(); });
}

void LinePipe::stop() {
  if (!reader_.joinable()) return;
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  changed_.notify_all();
  [[maybe_unused]] const ssize_t n = ::write(wake_[1], "x", 1);
  reader_.join();
  writer_.join();
  close(wake_[0]);
  close(wake_[1]);
}

void LinePipe::send(std::string_view bytes) {
  if (bytes.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    queued_ += bytes;
    n_unsent_ += bytes.size();
  }
  changed_.notify_all();
}

void LinePipe::read_lines() {
  LineSplitter lines(max_line_);
  std::string buffer(1 << 16, '\0');
  for (;;) {
    pollfd wait[2] = {{in_, POLLIN, 0}, {wake_[0], POLLIN, 0}};
    if (poll(wait, 2, -1) < 0 && errno != EINTR) break;
    if (wait[1].revents != 0) return;
    if (wait[0].revents == 0) continue;
    const ssize_t n = ::read(in_, buffer.data(), buffer.size());
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n <= 0) break;
    for (LineSplitter::Line& line : lines.push({buffer.data(), static_cast<size_t>(n)}))
      callbacks_.on_line(std::move(line));
  }
  if (std::optional<LineSplitter::Line> line = lines.finish()) callbacks_.on_line(std::move(*line));
  callbacks_.on_end();
}

void LinePipe::write_lines() {
  using Clock = std::chrono::steady_clock;
  std::string sending;
  Clock::time_point must_end = Clock::time_point::max();
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return leaving_ || !queued_.empty(); });
      if (queued_.empty()) return;
      sending = std::exchange(queued_, {});
    }
    for (std::string_view rest = sending; !rest.empty();) {
      // A wake-up stays in the pipe: from then on there is little time left.
      pollfd wait[2] = {{out_, POLLOUT, 0}, {wake_[0], POLLIN, 0}};
      const bool ends = must_end != Clock::time_point::max();
      const int n_ready = poll(wait, ends ? 1 : 2, ends ? 10 : -1);
      if (!ends && wait[1].revents != 0) must_end = Clock::now() + std::chrono::milliseconds(kLastWriteMs);
      if (Clock::now() >= must_end) return;
      if (n_ready <= 0 || wait[0].revents == 0) continue;
      // At most what a pipe takes without waiting.
      const ssize_t n = ::write(out_, rest.data(), std::min<size_t>(rest.size(), 4096));
      if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
      if (n < 0) return callbacks_.on_broken();
      rest.remove_prefix(static_cast<size_t>(n));
      n_unsent_ -= static_cast<size_t>(n);
    }
    if (n_unsent_ == 0) callbacks_.on_drained();
  }
}

}  // namespace thermo
