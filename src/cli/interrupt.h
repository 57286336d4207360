// Ctrl-C, SIGTERM and SIGHUP. The first one asks what is running to stop, so that files are written and
// output is closed; one more ends the program with 130. Where nothing could stop gracefully, the first one
// ends it with 128 and its number.
#pragma once

#include "base/error.h"

namespace thermo {

// Installs the handlers and ignores SIGPIPE, so that writing to a closed pipe is an error and no death.
void install_signal_handlers();

// While one of these lives, the first interrupt only sets a flag.
class InterruptScope {
 public:
  // `n_gentle`: so many interrupts only set a flag; the next one ends the program.
  explicit InterruptScope(int n_gentle = 1);
  ~InterruptScope();
  InterruptScope(const InterruptScope&) = delete;
  InterruptScope& operator=(const InterruptScope&) = delete;

  static bool interrupted() noexcept;
  static int n_interrupts() noexcept;  // since the last reset()
  // SIGTERM or SIGHUP came, or so many interrupts since the last reset(): time to go.
  static bool must_leave(int n_interrupts) noexcept;
  // What the program returns then: 130, or 128 and the number of the signal.
  static ExitCode exit_code() noexcept;
  // The next interrupt counts as the first one again.
  static void reset() noexcept;
  // From now on SIGHUP asks to read files again instead.
  static void reload_on_hangup() noexcept;
  static bool take_reload() noexcept;  // whether it asked since the last call
};

}  // namespace thermo
