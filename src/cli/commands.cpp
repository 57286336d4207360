#include "cli/commands.h"

namespace thermo {

std::vector<std::unique_ptr<Command>> make_commands() {
  std::vector<std::unique_ptr<Command>> commands;
  commands.push_back(make_run_command());
  commands.push_back(make_chat_command());
  commands.push_back(make_serve_command());
  commands.push_back(make_tokenize_command());
  commands.push_back(make_inspect_command());
  commands.push_back(make_plan_command());
  commands.push_back(make_verify_command());
  commands.push_back(make_perplexity_command());
  commands.push_back(make_bench_command());
  commands.push_back(make_experts_command());
  commands.push_back(make_synth_command());
  commands.push_back(make_pull_command());
  commands.push_back(make_list_command());
  commands.push_back(make_rm_command());
  commands.push_back(make_doctor_command());
  commands.push_back(make_connect_command());
  commands.push_back(make_completion_command());
  commands.push_back(make_manual_command());
  commands.push_back(make_version_command());
  return commands;
}

}  // namespace thermo
