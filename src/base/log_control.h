// What whoever runs a program for long asks of its log.
#pragma once

#include <cstdint>

#include "base/log.h"

namespace thermo {

// Lines of a level that were written so far. Any thread.
uint64_t n_log_lines(LogLevel level) noexcept;
bool logs_to_file();
// Opens the file again, after somebody has renamed it; nothing where there is none. Throws when it cannot be
// opened: then lines go on to the old one.
void reopen_log();

}  // namespace thermo
