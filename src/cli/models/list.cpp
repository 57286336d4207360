// `thermocline list`: the models on this machine.
#include <fmt/format.h>

#include <algorithm>

#include "base/json.h"
#include "base/units.h"
#include "base/utf8.h"
#include "cli/commands.h"
#include "cli/options/hub_options.h"
#include "cli/user_folders.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

// What the file says it is; empty when it cannot be read.
std::string architecture_of(const std::filesystem::path& path) {
  try {
    const GgufFile file(path.string());
    return std::string(file.find_string("general.architecture").value_or("unknown"));
  } catch (const LoadError&) {
    return "";
  }
}

class ListCommand : public Command {
 public:
  CommandText text() const override {
    return {"list", "list [options]", "the models on this machine",
            "Looks in the Hugging Face cache, the folders of Ollama and LM Studio, and a models folder.",
            "thermocline list\nthermocline list --models-dir ~/gguf --json\n"};
  }

  void declare(OptionSet& set) override {
    set.section("Folders");
    set.value("--models-dir", "DIR", models_dir_,
              "folder with GGUF files (default ~/.local/share/thermocline/models)");
    set.section("Output");
    set.flag("--json", json_, "print one JSON object");
    set.flag("--paths", paths_, "print only the paths, one per line");
  }

  ExitCode run(const Terminal& terminal) override {
    if (!models_dir_.empty() && !is_folder(models_dir_))
      throw ConfigError(fmt::format("--models-dir: '{}' is no folder", models_dir_));
    const std::vector<LocalModel> models = find_local_models(model_folders(models_dir_));
    if (json_)
      print_json(models);
    else if (paths_)
      for (const LocalModel& model : models) write_stdout(model.path.string() + "\n");
    else if (models.empty())
      terminal.note(
          "no models yet: `thermocline pull hf:owner/repo` downloads one, and the embedded one needs none");
    else
      print_table(models);
    return ExitCode::Ok;
  }

 private:
  static void print_json(const std::vector<LocalModel>& models) {
    Json out;
    out["models"] = Json::array();
    for (const LocalModel& model : models) {
      Json one;
      one["name"] = printable(model.name);
      one["source"] = model.source;
      one["path"] = printable(model.path.string());
      one["bytes"] = model.bytes;
      one["complete"] = model.complete;
      const std::string architecture = architecture_of(model.path);
      one["architecture"] = architecture.empty() ? Json() : Json(printable(architecture));
      out["models"].push_back(std::move(one));
    }
    write_stdout(out.dump() + "\n");
  }

  static void print_table(const std::vector<LocalModel>& models) {
    size_t width = 4;
    for (const LocalModel& model : models) width = std::max(width, model.name.size());
    width = std::min<size_t>(width, 60);
    write_stdout(fmt::format("{:<{}}  {:>10}  {:<12}  {:<12}  {}\n", "name", width, "size", "architecture",
                             "from", "path"));
    for (const LocalModel& model : models) {
      const std::string architecture = model.complete ? architecture_of(model.path) : "";
      write_stdout(fmt::format("{:<{}}  {:>10}  {:<12}  {:<12}  {}\n", printable(model.name), width,
                               format_bytes(model.bytes),
                               !model.complete        ? "incomplete"
                               : architecture.empty() ? "unreadable"
                                                      : printable(architecture),
                               model.source, printable(model.path.string())));
    }
  }

  std::string models_dir_;
  bool json_ = false, paths_ = false;
};

}  // namespace

std::unique_ptr<Command> make_list_command() {
  return std::make_unique<ListCommand>();
}

}  // namespace thermo
