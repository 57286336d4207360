// Log lines for people and machines: a thin layer over spdlog. Everything goes to stderr (or a file); stdout
// belongs to results. Any thread may log.
//
//   log_info("model", "loaded {} tensors in {:.1f} s", n, seconds);
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

namespace thermo {

enum class LogLevel : int { None = 0, Error = 1, Warning = 2, Info = 3, Trace = 4, Debug = 5 };
enum class LogFormat { Text, JsonLines };

struct LogOptions {
  LogLevel level = LogLevel::Warning;
  LogFormat format = LogFormat::Text;
  bool color = false;
  bool prefix = true;      // of text: level and component
  bool timestamps = true;  // of text
  std::string file;        // empty: stderr
};

// Called once by cli/ before anything logs; without it warnings and errors go to stderr as text.
void configure_log(const LogOptions& options);
bool log_enabled(LogLevel level) noexcept;
void log_message(LogLevel level, std::string_view component, std::string_view message) noexcept;

template <class... Args>
void log_error(std::string_view component, fmt::format_string<Args...> format, Args&&... args) {
  log_message(LogLevel::Error, component, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_warning(std::string_view component, fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(LogLevel::Warning))
    log_message(LogLevel::Warning, component, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_info(std::string_view component, fmt::format_string<Args...> format, Args&&... args) {
  if (log_enabled(LogLevel::Info))
    log_message(LogLevel::Info, component, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace thermo
