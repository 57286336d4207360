#include "cli/options/hub_options.h"

#include <fmt/format.h>

#include <fstream>
#include <memory>

#include "base/units.h"
#include "base/utf8.h"
#include "cli/interrupt.h"
#include "cli/progress.h"
#include "cli/user_folders.h"

namespace thermo {

namespace fs = std::filesystem;

namespace {

fs::path hugging_face_home() {
  if (const std::string home = environment_variable("HF_HOME"); !home.empty()) return home;
  return in_user_cache("huggingface");
}

fs::path hub_cache_folder() {
  for (const char* name : {"HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"})
    if (const std::string folder = environment_variable(name); !folder.empty()) return folder;
  const fs::path home = hugging_face_home();
  return home.empty() ? home : home / "hub";
}

std::string saved_token() {
  for (const char* name : {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"})
    if (const std::string token = environment_variable(name); !token.empty()) return token;
  const std::string path = environment_variable("HF_TOKEN_PATH");
  std::ifstream in(path.empty() ? hugging_face_home() / "token" : fs::path(path));
  std::string token;
  std::getline(in, token);
  return token;
}

// A repository that is named like a file, as other programs have it.
void refuse_repository_without_prefix(const std::string& model) {
  std::error_code error;
  if (model.ends_with(".gguf") || fs::exists(model, error) ||
      fs::exists(fs::path(model).parent_path(), error))
    return;
  std::string reference;
  try {
    reference = parse_hub_reference(model).describe();
  } catch (const ConfigError&) {
    return;  // a path
  }
  throw LoadError(
      fmt::format("{}: there is no such file; the repository of this name is {}", model, reference));
}

// A hub reference becomes a path; anything else stays.
void make_local(std::string& model, const HubFlags& flags, const Terminal& terminal) {
  if (!is_hub_reference(model)) {
    if (is_hub_address(model)) parse_hub_reference(model);  // says how it is written
    return refuse_repository_without_prefix(model);
  }
  const HubReference reference = parse_hub_reference(model);
  const HubOptions options = hub_options(flags);
  if (const std::optional<CachedModel> cached = HubCache(options.cache).find(reference)) {
    model = cached->path.string();
    return;
  }
  if (flags.offline)
    throw DownloadError(fmt::format(
        "{} is not in {}, and --offline forbids downloading it; `thermocline list` shows what there is",
        reference.describe(), options.cache.string()));
  model = fetch_model(reference, options, terminal);
}

void add_repository_options(OptionSet& set, HubFlags& flags) {
  set.custom(
         "-hf,-hfr,--hf-repo", "REPO",
         [&flags](std::string_view text) { flags.repo = parse_hub_reference(text).describe(); },
         "Hugging Face repository, owner/repo or owner/repo:Q4_K_M; downloaded once, then used from the "
         "cache")
      .llama_env("LLAMA_ARG_HF_REPO");
  set.value("-hff,--hf-file", "FILE", flags.file, "which file of that repository")
      .llama_env("LLAMA_ARG_HF_FILE")
      .advanced();
  set.contradict("--model", "--hf-repo");
  set.contradict("--model", "--hf-file");
  add_hub_connection_options(set, flags);
}

// What -hf and -hff say; empty: nothing.
std::string repository_model(const HubFlags& flags, bool has_model) {
  if (flags.repo.empty() && !flags.file.empty()) throw ConfigError("--hf-file needs --hf-repo OWNER/REPO");
  if (flags.repo.empty()) return "";
  if (has_model) throw ConfigError("--model and --hf-repo both name a model: leave one of them out");
  HubReference reference = parse_hub_reference(flags.repo);
  if (!flags.file.empty()) reference.quant = flags.file;
  return parse_hub_reference(reference.describe()).describe();
}

}  // namespace

void add_hub_connection_options(OptionSet& set, HubFlags& flags) {
  set.value("-hft,--hf-token", "TOKEN", flags.token,
            "token for private and gated repositories (default: HF_TOKEN, or the one that `hf auth login` "
            "saved)")
      .no_environment()
      .secret()
      .advanced();
  set.flag("--offline", flags.offline, "use only what is in the cache, download nothing").advanced();
}

void add_hub_options(OptionSet& set, std::string& model) {
  const auto flags = std::make_shared<HubFlags>();
  add_repository_options(set, *flags);
  set.before_run([flags, &model](const Terminal& terminal) {
    if (const std::string named = repository_model(*flags, !model.empty()); !named.empty()) model = named;
    make_local(model, *flags, terminal);
  });
}

void add_hub_options(OptionSet& set, std::vector<std::string>& models) {
  const auto flags = std::make_shared<HubFlags>();
  add_repository_options(set, *flags);
  set.before_run([flags, &models](const Terminal& terminal) {
    if (const std::string named = repository_model(*flags, !models.empty()); !named.empty())
      models.push_back(named);
    for (std::string& model : models) make_local(model, *flags, terminal);
  });
}

HubOptions hub_options(const HubFlags& flags) {
  HubOptions options;
  if (std::string endpoint = environment_variable("HF_ENDPOINT"); !endpoint.empty()) {
    while (endpoint.ends_with('/')) endpoint.pop_back();
    if (!endpoint.starts_with("http://") && !endpoint.starts_with("https://"))
      throw ConfigError(fmt::format(
          "HF_ENDPOINT: '{}' cannot be used, an address like https://huggingface.co was expected", endpoint));
    options.endpoint = endpoint;
  }
  options.token = flags.token.empty() ? saved_token() : flags.token;
  options.cache = hub_cache_folder();
  if (options.cache.empty())
    throw ConfigError("there is no home folder to keep models in: set HOME or HF_HOME");
  return options;
}

ModelFolders model_folders(const std::string& models_dir) {
  ModelFolders folders;
  folders.hub_cache = hub_cache_folder();
  folders.plain = {models_dir.empty() ? in_user_data("thermocline/models") : fs::path(models_dir)};
  folders.lm_studio = {in_home(".lmstudio/models"), in_home(".cache/lm-studio/models")};
  if (const std::string ollama = environment_variable("OLLAMA_MODELS"); !ollama.empty())
    folders.ollama = {ollama};
  else
    folders.ollama = {in_home(".ollama/models"), "/usr/share/ollama/.ollama/models"};
  return folders;
}

std::string fetch_model(const HubReference& reference, const HubOptions& options, const Terminal& terminal) {
  const InterruptScope scope;
  ProgressLine line(terminal);
  std::string last;
  DownloadObserver observer;
  observer.on_progress = [&](const std::string& file, uint64_t done, uint64_t total) {
    if (file != last) {
      line.clear();
      terminal.note(fmt::format("downloading {} from {}", printable(file), host_of(options.endpoint)));
      last = file;
    }
    line.update({.stage = "download", .done_bytes = done, .total_bytes = total});
  };
  observer.cancelled = [] { return InterruptScope::interrupted(); };
  const std::optional<fs::path> path = download_model(reference, options, observer);
  line.clear();
  if (!path)
    throw ThermoError(InterruptScope::exit_code(),
                      "the download was interrupted; the same command resumes it");
  return path->string();
}

}  // namespace thermo
