#include "cli/options/general_options.h"

#include <algorithm>

#include "base/error.h"

namespace thermo {
namespace {

When when_from_name(const std::string& name) {
  if (name == "always" || name == "on") return When::Always;
  if (name == "never" || name == "off") return When::Never;
  return When::Auto;
}

}  // namespace

TerminalOptions GeneralOptions::terminal_options() const {
  return {.color = when_from_name(color), .progress = when_from_name(progress), .quiet = quiet};
}

LogOptions GeneralOptions::log_options(bool color_stderr) const {
  bool json = log_format == "json" || (log_format == "auto" && log_file.ends_with(".json"));
  return {.level = static_cast<LogLevel>(std::clamp(verbosity, 0, 5)),
          .format = json ? LogFormat::JsonLines : LogFormat::Text,
          .color = color_stderr && log_file.empty() && !json,
          .prefix = log_prefix,
          .timestamps = log_timestamps,
          .file = log_file};
}

void add_general_options(OptionSet& set, GeneralOptions& options) {
  set.section("General");
  set.flag("-h,--help", options.help, "show the common options").no_environment();
  set.flag("--help-all", options.help_all, "show every option").no_environment();
  set.flag("-q,--quiet", options.quiet, "no notes, no statistics, no progress");
  set.custom_flag(
         "-v,--verbose", [&options](bool on) { options.verbosity = on ? 5 : 2; }, "log everything")
      .no_environment();
  set.value("-lv,--verbosity,--log-verbosity", "N", options.verbosity,
            "log level: 0 none, 1 errors, 2 warnings, 3 info, 4 trace, 5 debug (default 2; serve: 3)")
      .range(0, 5)
      .llama_env("LLAMA_LOG_VERBOSITY")
      .advanced();
  set.value("--log-file", "FILE", options.log_file, "write the log to a file instead of stderr")
      .llama_env("LLAMA_LOG_FILE")
      .advanced();
  set.value("--log-format", "FORMAT", options.log_format,
            "text or json (default: json when the log file ends in .json)")
      .choices({"auto", "text", "json"})
      .advanced();
  set.flag("--log-prefix", options.log_prefix, "level and part of the program in log lines (default on)")
      .llama_env("LLAMA_LOG_PREFIX")
      .advanced();
  set.flag("--log-timestamps", options.log_timestamps, "the time in log lines (default on)")
      .llama_env("LLAMA_LOG_TIMESTAMPS")
      .advanced();
  set.value("--color,--log-colors", "WHEN", options.color, "auto, always or never; auto: on terminals only")
      .choices({"auto", "always", "never", "on", "off"})
      .llama_env("LLAMA_LOG_COLORS")
      .advanced();
  set.value("--progress", "WHEN", options.progress, "progress line while loading: auto, on or off")
      .choices({"auto", "on", "off"})
      .bare("on")
      .advanced();
  set.custom(
         "--config", "FILE",
         [](std::string_view text) {  // find_config_file() has read it
           if (text.empty()) throw ConfigError("a file was expected; leave it out for the usual places");
         },
         "TOML file with options by their long names (default: ~/.config/thermocline/config.toml)")
      .advanced();
  set.value(
         "--state-dir", "FOLDER", options.state_dir,
         "keep heat, the texts of --cache-disk, measured speeds and the history of chat here (default: the "
         "user's cache and state folders)")
      .advanced();
  set.flag("--print-config", options.print_config,
           "print the options that are set, and where each was set, then stop")
      .no_environment()
      .advanced();
  set.flag("--list-devices", options.list_devices, "print what --device can name, then stop")
      .no_environment()
      .advanced();
  set.flag("--completion-bash", options.completion_bash, "the same as `completion bash`")
      .no_environment()
      .advanced();
  set.flag("--version", options.version, "print the version, then stop").no_environment().advanced();
}

}  // namespace thermo
