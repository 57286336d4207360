#include "cli/interrupt.h"

#include <unistd.h>

#include <csignal>

#include "base/error.h"

namespace thermo {
namespace {

// Signal handlers have no arguments of ours: this state has to be global.
volatile std::sig_atomic_t g_interrupts = 0;
volatile std::sig_atomic_t g_scopes = 0;

void on_interrupt(int) {
  g_interrupts = g_interrupts + 1;
  if (g_scopes > 0 && g_interrupts < 2) return;
  // Leaves the progress line behind; only async-signal-safe calls are allowed here.
  [[maybe_unused]] ssize_t n = write(STDERR_FILENO, "\n", 1);
  _exit(static_cast<int>(ExitCode::Interrupted));
}

}  // namespace

void install_signal_handlers() {
  struct sigaction action {};
  action.sa_handler = on_interrupt;
  sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: a read from the terminal has to end
  sigaction(SIGINT, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
}

InterruptScope::InterruptScope() {
  g_interrupts = 0;
  g_scopes = g_scopes + 1;
}
InterruptScope::~InterruptScope() {
  g_scopes = g_scopes - 1;
}

bool InterruptScope::interrupted() noexcept {
  return g_interrupts > 0;
}
void InterruptScope::reset() noexcept {
  g_interrupts = 0;
}

}  // namespace thermo
