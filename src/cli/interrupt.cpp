#include "cli/interrupt.h"

#include <unistd.h>

#include <csignal>

namespace thermo {
namespace {

// Signal handlers have no arguments of ours: this state has to be global.
volatile std::sig_atomic_t g_interrupts = 0;
volatile std::sig_atomic_t g_gentle = 0;      // signals that only set a flag
volatile std::sig_atomic_t g_terminated = 0;  // the signal that asked to end
volatile std::sig_atomic_t g_reload = 0;      // SIGHUP came, and asks for that

void on_signal(int signal) {
  g_interrupts = g_interrupts + 1;
  const bool again = signal != SIGINT && g_terminated != 0;
  if (signal != SIGINT) g_terminated = signal;
  if (g_gentle > 0 && g_interrupts <= g_gentle && !again) return;
  // Leaves the progress line behind; only async-signal-safe calls are allowed here.
  [[maybe_unused]] ssize_t n = write(STDERR_FILENO, "\n", 1);
  _exit(g_gentle > 0 ? static_cast<int>(ExitCode::Interrupted) : 128 + signal);
}

}  // namespace

void install_signal_handlers() {
  struct sigaction action {};
  action.sa_handler = on_signal;
  sigemptyset(&action.sa_mask);
  action.sa_flags = 0;  // no SA_RESTART: a read from the terminal has to end
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction before {};
    sigaction(signal, nullptr, &before);
    if (before.sa_handler != SIG_IGN) sigaction(signal, &action, nullptr);  // nohup stays nohup
  }
  for (const int signal : {SIGPIPE, SIGXFSZ}) std::signal(signal, SIG_IGN);  // the write says what is wrong
}

InterruptScope::InterruptScope(int n_gentle) {
  g_interrupts = 0;
  g_gentle = n_gentle;
}
InterruptScope::~InterruptScope() {
  g_gentle = 0;
}

bool InterruptScope::interrupted() noexcept {
  return g_interrupts > 0;
}
int InterruptScope::n_interrupts() noexcept {
  return g_interrupts;
}
bool InterruptScope::must_leave(int n_interrupts) noexcept {
  return g_terminated != 0 || g_interrupts >= n_interrupts;
}
ExitCode InterruptScope::exit_code() noexcept {
  return g_terminated != 0 ? static_cast<ExitCode>(128 + g_terminated) : ExitCode::Interrupted;
}
void InterruptScope::reset() noexcept {
  if (g_terminated == 0) g_interrupts = 0;
}

void InterruptScope::reload_on_hangup() noexcept {
  struct sigaction action {};
  action.sa_handler = [](int) { g_reload = 1; };
  sigemptyset(&action.sa_mask);
  sigaction(SIGHUP, &action, nullptr);
}
bool InterruptScope::take_reload() noexcept {
  const bool asked = g_reload != 0;
  g_reload = 0;
  return asked;
}

}  // namespace thermo
