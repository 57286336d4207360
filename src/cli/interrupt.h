// Ctrl-C. The first interrupt asks a running answer to stop, the next one ends the program with 130. Where
// nothing could stop gracefully, the first one ends it.
#pragma once

namespace thermo {

// Installs the handler and ignores SIGPIPE, so that writing to a closed pipe is an error and no death.
void install_signal_handlers();

// While one of these lives, the first interrupt only sets a flag.
class InterruptScope {
 public:
  InterruptScope();
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  static bool interrupted() noexcept;
  // The next interrupt counts as the first one again.
  static void reset() noexcept;
};

}  // namespace thermo
