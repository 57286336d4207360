// All commands with their options, for those who need the declarations: the program itself, the completion
// scripts, the manual.
#pragma once

#include <memory>
#include <vector>

#include "cli/commands.h"
#include "cli/options/general_options.h"
#include "cli/options/options.h"

namespace thermo {

struct DeclaredCommand {
  std::unique_ptr<Command> command;  // holds the targets of the options
  GeneralOptions general;
  OptionSet set;
};

std::vector<std::unique_ptr<DeclaredCommand>> declare_commands();

}  // namespace thermo
