#include "base/log.h"

#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/basic_file_sink.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>

#include "base/json.h"
#include "base/log_control.h"
#include "base/log_fields.h"
#include "base/utf8.h"

namespace thermo {
namespace {

struct LogState {
  std::atomic<std::shared_ptr<spdlog::logger>> logger;  // replaced when the file is opened again
  std::atomic<LogLevel> level{LogLevel::Warning};
  LogFormat format = LogFormat::Text;
  LogOptions options;
  std::array<std::atomic<uint64_t>, static_cast<size_t>(LogLevel::Debug) + 1> n_lines{};
  std::mutex mutex;  // of the rest
  std::deque<LogLine> warnings;
  uint64_t n_warnings = 0;
  bool warned_last = false;  // no other line was written after the last one
  uint64_t n_repeats = 0;    // of the last one, since then
};

void set_sink(LogState& state, const LogOptions& options) {
  spdlog::sink_ptr sink;
  if (!options.file.empty()) {
    sink = std::make_shared<spdlog::sinks::basic_file_sink_mt>(options.file);
  } else if (options.color) {
    sink = std::make_shared<spdlog::sinks::stderr_color_sink_mt>();
  } else {
    sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  }
  const auto logger = std::make_shared<spdlog::logger>("thermocline", sink);
  logger->set_level(spdlog::level::trace);
  logger->flush_on(spdlog::level::trace);
  logger->set_error_handler([told = std::make_shared<std::atomic<bool>>(false)](const std::string& why) {
    if (!told->exchange(true))
      std::fprintf(stderr, "the log cannot be written (%s); the program goes on without it\n", why.c_str());
  });
  const std::string head =
      std::string(options.timestamps ? "%H:%M:%S.%e " : "") + (options.prefix ? "%^%L%$ " : "");
  logger->set_pattern(options.format == LogFormat::JsonLines ? "%v" : head + "%v");
  state.logger = logger;
  state.format = options.format;
  state.level = options.level;
}

LogState& log_state() {
  static LogState* state = [] {
    auto* fresh = new LogState;  // never destroyed: threads may log while the process ends
    set_sink(*fresh, LogOptions{});
    return fresh;
  }();
  return *state;
}

spdlog::level::level_enum spdlog_level(LogLevel level) {
  switch (level) {
    case LogLevel::Error:
      return spdlog::level::err;
    case LogLevel::Warning:
      return spdlog::level::warn;
    case LogLevel::Info:
      return spdlog::level::info;
    case LogLevel::Trace:
      return spdlog::level::debug;
    default:
      return spdlog::level::trace;
  }
}

std::string rfc3339_now() {
  const auto now = std::chrono::system_clock::now();
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(now.time_since_epoch()).count();
  const std::time_t seconds = static_cast<std::time_t>(ms / 1000);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  return fmt::format("{:04}-{:02}-{:02}T{:02}:{:02}:{:02}.{:03}Z", utc.tm_year + 1900, utc.tm_mon + 1,
                     utc.tm_mday, utc.tm_hour, utc.tm_min, utc.tm_sec, ms % 1000);
}

// Under the mutex.
bool repeats_the_last(const LogState& state, LogLevel level, std::string_view component,
                      std::string_view message) {
  if (level > LogLevel::Warning || !state.warned_last) return false;
  const LogLine& last = state.warnings.back();
  return last.level == level && last.component == component && last.message == message;
}

// Under the mutex.
void keep_warning(LogState& state, LogLevel level, std::string_view component, std::string_view message) {
  constexpr size_t kMost = 64;
  state.warnings.push_back(
      {++state.n_warnings, level, rfc3339_now(), std::string(component), std::string(message)});
  if (state.warnings.size() > kMost) state.warnings.pop_front();
}

void write_line(LogState& state, LogLevel level, std::string_view component, std::string_view message,
                const LogFields& fields) {
  const std::shared_ptr<spdlog::logger> logger = state.logger;
  if (state.format == LogFormat::JsonLines) {
    Json line = {
        {"ts", rfc3339_now()}, {"level", level_name(level)}, {"component", component}, {"msg", message}};
    for (const LogField& field : fields)
      std::visit([&](const auto& value) { line[field.name] = value; }, field.value);
    logger->log(spdlog_level(level), line.dump(-1, ' ', false, Json::error_handler_t::replace));
  } else if (!state.options.prefix) {
    logger->log(spdlog_level(level), "{}", printable(message));
  } else {
    logger->log(spdlog_level(level), "{:<8} {}", component, printable(message));
  }
}

}  // namespace

const char* level_name(LogLevel level) {
  switch (level) {
    case LogLevel::Error:
      return "error";
    case LogLevel::Warning:
      return "warning";
    case LogLevel::Info:
      return "info";
    case LogLevel::Trace:
      return "trace";
    default:
      return "debug";
  }
}

std::vector<LogLine> recent_warnings(uint64_t after) {
  LogState& state = log_state();
  const std::lock_guard lock(state.mutex);
  std::vector<LogLine> lines;
  for (const LogLine& line : state.warnings)
    if (line.number > after) lines.push_back(line);
  return lines;
}

uint64_t n_recent_warnings() {
  LogState& state = log_state();
  const std::lock_guard lock(state.mutex);
  return state.n_warnings;
}

void configure_log(const LogOptions& options) {
  log_state().options = options;
  set_sink(log_state(), options);
}

bool logs_to_file() {
  return !log_state().options.file.empty();
}

void reopen_log() {
  LogState& state = log_state();
  if (!state.options.file.empty()) set_sink(state, state.options);
}

uint64_t n_log_lines(LogLevel level) noexcept {
  return log_state().n_lines[static_cast<size_t>(level)].load(std::memory_order_relaxed);
}

bool log_enabled(LogLevel level) noexcept {
  return level <= log_state().level.load(std::memory_order_relaxed);
}

void log_message(LogLevel level, std::string_view component, std::string_view message) noexcept {
  log_with_fields(level, component, message, {});
}

void log_with_fields(LogLevel level, std::string_view component, std::string_view message,
                     const LogFields& fields) noexcept {
  LogState& state = log_state();
  if (level > state.level.load(std::memory_order_relaxed)) return;
  state.n_lines[static_cast<size_t>(level)].fetch_add(1, std::memory_order_relaxed);
  try {
    const std::lock_guard lock(state.mutex);
    if (repeats_the_last(state, level, component, message)) {
      ++state.n_repeats;
      return;
    }
    if (const uint64_t n = std::exchange(state.n_repeats, 0); n > 0) {
      const LogLine& last = state.warnings.back();
      write_line(state, last.level, last.component, fmt::format("{} (x {})", last.message, n + 1), {});
    }
    state.warned_last = level <= LogLevel::Warning;
    if (state.warned_last) keep_warning(state, level, component, message);
    write_line(state, level, component, message, fields);
  } catch (...) {
    // A log line that cannot be written must not end the program.
  }
}

}  // namespace thermo
