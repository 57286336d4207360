#include "cli/declared_commands.h"

namespace thermo {

std::vector<std::unique_ptr<DeclaredCommand>> declare_commands() {
  std::vector<std::unique_ptr<DeclaredCommand>> all;
  for (std::unique_ptr<Command>& command : make_commands()) {
    auto declared = std::make_unique<DeclaredCommand>();
    declared->command = std::move(command);
    declared->general.verbosity = declared->command->default_verbosity();
    declared->command->declare(declared->set);
    add_general_options(declared->set, declared->general);
    all.push_back(std::move(declared));
  }
  return all;
}

}  // namespace thermo
