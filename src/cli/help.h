// The help texts, made from the declarations of the options.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "cli/commands.h"
#include "cli/options/options.h"
#include "cli/terminal.h"

namespace thermo {

// What `thermocline help` prints: every command with its summary.
std::string program_help(std::span<const std::unique_ptr<Command>> commands, const Terminal& terminal);

// Usage, options by section, examples; 80 columns. `all`: advanced options too.
std::string command_help(const CommandText& text, const OptionSet& set, bool all, const Terminal& terminal);

}  // namespace thermo
