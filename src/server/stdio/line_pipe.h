// Lines in from one descriptor, lines out to another, on two threads of its own: neither a caller that sends
// nothing nor one that does not read stops anybody else.
#pragma once

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "server/stdio/pipe_message.h"

namespace thermo {

class LinePipe {
 public:
  struct Callbacks {
    std::function<void(LineSplitter::Line)> on_line;  // on the reader's thread
    std::function<void()> on_end;                     // there: the input ended
    std::function<void()> on_drained;                 // on the writer's thread: everything was written
    std::function<void()> on_broken;                  // there: nobody reads any more
  };
  // The descriptors stay the caller's. `max_line` bytes are the longest line.
  LinePipe(int in, int out, size_t max_line, Callbacks callbacks);
  ~LinePipe() { stop(); }
  LinePipe(const LinePipe&) = delete;
  LinePipe& operator=(const LinePipe&) = delete;

  // Begins to read and write. Until then callbacks do not come, so that they find what they need.
  void start();
  // Writes what was sent, unless nobody reads it, for at most a second; a read that waits is given up. What
  // is sent later goes nowhere.
  void stop();
  // Any thread; never waits.
  void send(std::string_view bytes);
  size_t unsent_bytes() const { return n_unsent_; }

 private:
  void read_lines();
  void write_lines();

  const int in_, out_;
  const size_t max_line_;
  const Callbacks callbacks_;
  int wake_[2] = {-1, -1};  // ends both threads
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string queued_;
  bool leaving_ = false;
  std::atomic<size_t> n_unsent_{0};
  std::thread reader_, writer_;
};

}  // namespace thermo
