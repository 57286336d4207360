// `thermocline rm`: deletes a downloaded model.
#include <fmt/format.h>

#include <cstdio>
#include <iostream>

#include "base/units.h"
#include "base/utf8.h"
#include "cli/commands.h"
#include "cli/options/hub_options.h"

namespace thermo {
namespace {

class RmCommand : public Command {
 public:
  CommandText text() const override {
    return {"rm", "rm hf:OWNER/REPO[:QUANT] [-y]", "delete a downloaded model",
            "Without a quantisation, all models of the repository are deleted. Only the Hugging Face cache "
            "is touched; files of other programs are left alone.",
            "thermocline rm hf:unsloth/Qwen3.5-35B-A3B-GGUF:Q4_K_M\n"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    set.positional("REPO", repo_, "hf:owner/repo or hf:owner/repo:Q4_K_M, as `list` shows it");
    set.flag("-y,--yes", yes_, "do not ask").no_environment();
  }

  ExitCode run(const Terminal& terminal) override {
    if (repo_.empty()) throw ConfigError("which model? `thermocline list` shows what there is");
    const HubReference reference = parse_hub_reference(repo_);
    const HubCache cache(hub_options({}).cache);
    if (terminal.stdin_is_terminal && terminal.stderr_is_terminal && !yes_ && !confirmed(reference)) {
      terminal.note("nothing was deleted");
      return ExitCode::Ok;
    }
    uint64_t bytes = 0;
    const std::vector<CachedModel> gone = cache.remove(reference);
    for (const CachedModel& model : gone) {
      bytes += model.bytes;
      terminal.note(fmt::format("deleted {}", printable(model.path.string())));
    }
    terminal.note(fmt::format("{} freed", format_bytes(bytes)));
    return ExitCode::Ok;
  }

 private:
  static bool confirmed(const HubReference& reference) {
    std::fputs(fmt::format("delete {}{}? [y/N] ", reference.describe(),
                           reference.quant.empty() ? " with all its models" : "")
                   .c_str(),
               stderr);
    std::string answer;
    std::getline(std::cin, answer);
    return answer == "y" || answer == "Y" || answer == "yes";
  }

  std::string repo_;
  bool yes_ = false;
};

}  // namespace

std::unique_ptr<Command> make_rm_command() {
  return std::make_unique<RmCommand>();
}

}  // namespace thermo
