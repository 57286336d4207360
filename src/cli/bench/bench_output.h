// Rows of a benchmark as they come, closed properly however it ends.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/error.h"
#include "cli/bench/bench_report.h"
#include "cli/terminal.h"

namespace thermo {

// Runs the tests, which give a row for each result. What an interrupt asks the program to return, or nullopt:
// there was none. The tests look for interrupts themselves; a step that does not end soon after one is left
// alone, and the program ends here. Rows that were given are never lost.
std::optional<ExitCode> print_rows(const Terminal& terminal,
                                   const std::vector<std::unique_ptr<BenchPrinter>>& printers,
                                   const std::function<void(const std::function<void(const Json&)>&)>& tests);

}  // namespace thermo
