// What a program that runs for days needs of its log.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/log.h"

namespace thermo {

// Lines of a level that were written so far. Any thread.
uint64_t n_log_lines(LogLevel level) noexcept;
const char* level_name(LogLevel level);

// Warnings and errors, for those who watch a program. Any thread.
struct LogLine {
  uint64_t number;  // from 1 on
  LogLevel level;
  std::string time;  // RFC 3339
  std::string component, message;
};
// Of the last 64, those whose number is higher.
std::vector<LogLine> recent_warnings(uint64_t after);
uint64_t n_recent_warnings();  // the highest number so far

bool logs_to_file();
// Opens the file again, after somebody has renamed it; nothing where there is none. Throws when it cannot be
// opened: then lines go on to the old one.
void reopen_log();

}  // namespace thermo
