// Option values from the environment and from the configuration file, and --print-config. The only reader of
// LLAMA_ARG_*, and of THERMO_* but for the limits THERMO_MAX_ISA (kernels/isa.cpp) and THERMO_MAX_SM
// (device/device_info.cpp).
#pragma once

#include <span>
#include <string>
#include <vector>

#include "cli/options/options.h"

namespace thermo {

// The options of all commands, so that a name of another command is told from a misspelled one.
struct KnownOptions {
  std::vector<std::string> anywhere;  // also in the file and the environment
  std::vector<std::string> command_line_only;
  void add(const OptionSet& set);
};

// THERMO_<OPTION>; where that is not set, llama-server's variable.
void add_environment(const OptionSet& set, OptionValues& values);

// A line for the log for each value that came from one of llama-server's variables.
std::vector<std::string> used_llama_variables(const OptionValues& values);

// A sentence for each variable THERMO_* that says nothing: misspelled, or of an option that is taken from the
// command line only.
std::vector<std::string> unknown_variables(const KnownOptions& known);

// The file named by `--config` or $THERMO_CONFIG, else the first of the usual places that exists; empty:
// none.
std::string find_config_file(const OptionSet& set, const OptionValues& values);

// Adds the keys of a TOML file. Keys of other commands are skipped. Throws ConfigError: unreadable, no TOML,
// an unknown key (with its line and the nearest match), an option that two keys set.
void add_config_file(const std::string& path, const OptionSet& set, const KnownOptions& known,
                     OptionValues& values);

// The values that were given, as TOML with the source of each in a comment, in the order of declaration; what
// was not given is not listed, and of keys only that they were given.
std::string print_config(const OptionSet& set, const OptionValues& values);

}  // namespace thermo
