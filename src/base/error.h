// Exceptions of loading, configuration and construction. Thrown anywhere below cli/, caught once in
// cli/main.cpp, which prints what() as the last line on stderr and exits with exit_code().
//
// A message is one sentence: what was seen, what was expected, and what to try.
#pragma once

#include <stdexcept>
#include <string>

namespace thermo {

// The exit codes of the program. Scripts rely on them; never renumber.
enum class ExitCode : int {
  Ok = 0,
  Internal = 1,      // unexpected internal error
  Usage = 2,         // wrong usage or configuration
  Model = 3,         // model missing, unreadable, unsupported or damaged
  Memory = 4,        // does not fit into memory
  Listen = 5,        // cannot listen
  Device = 6,        // required device or driver missing
  DeviceFault = 7,   // device fault while running
  Download = 8,      // download failed
  BelowTarget = 9,   // a comparison was not met: bench --fail-below, verify
  Interrupted = 130  // second interrupt
};

class ThermoError : public std::runtime_error {
 public:
  ThermoError(ExitCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ExitCode exit_code() const noexcept { return code_; }

 private:
  ExitCode code_;
};

// A model file that is missing, unreadable, unsupported or damaged.
class LoadError : public ThermoError {
 public:
  explicit LoadError(const std::string& message) : ThermoError(ExitCode::Model, message) {}
};

// A flag, a configuration file or a combination of options that makes no sense.
class ConfigError : public ThermoError {
 public:
  explicit ConfigError(const std::string& message) : ThermoError(ExitCode::Usage, message) {}
};

// The plan needs more memory than there is.
class MemoryError : public ThermoError {
 public:
  explicit MemoryError(const std::string& message) : ThermoError(ExitCode::Memory, message) {}
};

}  // namespace thermo
