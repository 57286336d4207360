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
  Internal = 1,       // unexpected internal error
  Usage = 2,          // wrong usage or configuration
  Model = 3,          // model missing, unreadable, unsupported or damaged
  Memory = 4,         // does not fit into memory
  Listen = 5,         // cannot listen
  Device = 6,         // required device or driver missing
  DeviceFault = 7,    // device fault while running
  Download = 8,       // download failed
  BelowTarget = 9,    // a comparison was not met: bench --fail-below, verify
  HungUp = 129,       // SIGHUP
  Interrupted = 130,  // Ctrl-C
  Terminated = 143    // SIGTERM
};

// What would help, for a caller that knows how its user asks for it: the command line adds the option's name.
enum class Remedy {
  None,
  LargerContext,
  SmallerContext,
  LessMemory,  // in any way that there is
  LargerBatch,
  MoreSequences,
  MoreExpertMemory,
  Processor,       // compute there instead
  FileMapping,     // read weights where the file is mapped, instead of repacking them
  ChatTemplate,    // give one, or go without
  NoChatTemplate,  // go without
  SmallerCache,    // keys and values as q8_0, or a smaller context
  RopeFactor,      // say by how much the rotation is scaled
  Yarn,            // scale it with YaRN
};

class ThermoError : public std::runtime_error {
 public:
  ThermoError(ExitCode code, const std::string& message, Remedy remedy = Remedy::None)
      : std::runtime_error(message), code_(code), remedy_(remedy) {}
  ExitCode exit_code() const noexcept { return code_; }
  Remedy remedy() const noexcept { return remedy_; }

 private:
  ExitCode code_;
  Remedy remedy_;
};

// A model file that is missing, unreadable, unsupported or damaged.
class LoadError : public ThermoError {
 public:
  explicit LoadError(const std::string& message, Remedy remedy = Remedy::None)
      : ThermoError(ExitCode::Model, message, remedy) {}
};

// An option, a configuration file or a combination of options that makes no sense.
class ConfigError : public ThermoError {
 public:
  explicit ConfigError(const std::string& message, Remedy remedy = Remedy::None)
      : ThermoError(ExitCode::Usage, message, remedy) {}
};

// The plan needs more memory than there is.
class MemoryError : public ThermoError {
 public:
  explicit MemoryError(const std::string& message, Remedy remedy = Remedy::None)
      : ThermoError(ExitCode::Memory, message, remedy) {}
};

}  // namespace thermo
