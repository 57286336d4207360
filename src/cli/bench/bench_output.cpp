#include "cli/bench/bench_output.h"

#include <cstdlib>
#include <mutex>
#include <utility>

#include "cli/interrupt.h"
#include "cli/interrupt_watch.h"

namespace thermo {
namespace {

constexpr std::chrono::milliseconds kPatience{500};  // with a step that runs when an interrupt comes

}  // namespace

std::optional<ExitCode> print_rows(
    const Terminal& terminal, const std::vector<std::unique_ptr<BenchPrinter>>& printers,
    const std::function<void(const std::function<void(const Json&)>&)>& tests) {
  std::mutex printing;
  bool finished = false;
  // False: somebody else did.
  const auto finish = [&] {
    const std::lock_guard lock(printing);
    if (std::exchange(finished, true)) return false;
    for (const auto& printer : printers) printer->finish();
    return true;
  };
  const auto interrupted = [&] {
    terminal.note("interrupted: the test that was running is left out");
    return InterruptScope::exit_code();
  };
  const InterruptScope scope;
  for (const auto& printer : printers) printer->begin();
  {
    const InterruptWatch watch(kPatience, [&] {
      bool is_ours = true;
      try {
        is_ours = finish();
      } catch (...) {  // nobody reads it any more
      }
      if (is_ours) std::_Exit(static_cast<int>(interrupted()));
    });
    try {
      tests([&](const Json& fields) {
        const std::lock_guard lock(printing);
        for (const auto& printer : printers) printer->row(fields);
      });
    } catch (...) {
      finish();  // a JSON array is closed whatever happens: what was measured stays readable
      throw;
    }
    finish();
  }
  return InterruptScope::interrupted() ? std::optional(interrupted()) : std::nullopt;
}

}  // namespace thermo
