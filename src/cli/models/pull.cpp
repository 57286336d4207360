// `thermocline pull`: downloads a model into the cache that the Hugging Face tools share.
#include <fmt/format.h>

#include "base/json.h"
#include "base/units.h"
#include "cli/commands.h"
#include "cli/options/hub_options.h"

namespace thermo {
namespace {

class PullCommand : public Command {
 public:
  CommandText text() const override {
    return {"pull", "pull hf:OWNER/REPO[:QUANT] [options]", "download a model",
            "Resumes interrupted downloads, and checks size and SHA-256. Prints the path of the file. "
            "HF_ENDPOINT names another "
            "server, HF_HUB_CACHE another folder.",
            "thermocline pull hf:unsloth/Qwen3.5-35B-A3B-GGUF:Q4_K_M\n"
            "thermocline run -hf unsloth/Qwen3.5-35B-A3B-GGUF:Q4_K_M -p \"Hello\"\n"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    set.positional("REPO", repo_, "hf:owner/repo, with :Q4_K_M or :FILE.gguf to choose one of its models");
    add_hub_connection_options(set, flags_);
    set.section("Output");
    set.flag("--json", json_, "print one JSON object");
  }

  ExitCode run(const Terminal& terminal) override {
    if (repo_.empty()) throw ConfigError("which model? `thermocline pull hf:owner/repo:Q4_K_M`");
    const HubReference reference = parse_hub_reference(repo_);
    const HubOptions options = hub_options(flags_);
    const std::optional<CachedModel> before = HubCache(options.cache).find(reference);
    std::string path;
    if (flags_.offline) {
      if (!before)
        throw DownloadError(fmt::format("{} is not in {}, and --offline forbids downloading it",
                                        reference.describe(), options.cache.string()));
      path = before->path.string();
    } else {
      path = fetch_model(reference, options, terminal);
    }
    const uint64_t bytes = HubCache(options.cache).find(reference).value_or(CachedModel{}).bytes;
    if (json_) {
      Json out;
      out["model"] = reference.describe();
      out["path"] = path;
      out["bytes"] = bytes;
      out["downloaded"] = !before || before->path != path;
      write_stdout(out.dump() + "\n");
    } else {
      if (before && before->path == path) terminal.note("it was here already");
      write_stdout(path + "\n");
    }
    return ExitCode::Ok;
  }

 private:
  std::string repo_;
  HubFlags flags_;
  bool json_ = false;
};

}  // namespace

std::unique_ptr<Command> make_pull_command() {
  return std::make_unique<PullCommand>();
}

}  // namespace thermo
