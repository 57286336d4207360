// Options that every command has: help, configuration, logs, colour.
#pragma once

#include <string>

#include "base/log.h"
#include "cli/options/options.h"
#include "cli/terminal.h"

namespace thermo {

struct GeneralOptions {
  bool help = false;
  bool help_all = false;
  bool version = false;
  bool print_config = false;
  bool list_devices = false, completion_bash = false;
  int verbosity = 2;
  std::string state_dir;
  std::string log_file;
  std::string log_format = "auto";
  bool log_prefix = true, log_timestamps = true;
  std::string color = "auto";
  std::string progress = "auto";
  bool quiet = false;

  TerminalOptions terminal_options() const;
  LogOptions log_options(bool color_stderr) const;
};

void add_general_options(OptionSet& set, GeneralOptions& options);

}  // namespace thermo
