// Log lines with members that machines can read.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "base/log.h"

namespace thermo {

// Named as metrics name it: "code", "dialect"; "req" is the id of a request.
struct LogField {
  const char* name;
  std::variant<std::string, int64_t, double> value;
};
using LogFields = std::vector<LogField>;

// JSON lines have the fields as members after the message; text has the message alone, which says it all.
void log_with_fields(LogLevel level, std::string_view component, std::string_view message,
                     const LogFields& fields) noexcept;

}  // namespace thermo
