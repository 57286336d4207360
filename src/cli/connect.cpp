// `thermocline connect`: what to tell a client so that it talks to the server here.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "base/error.h"
#include "base/json.h"
#include "base/log.h"
#include "cli/bench/stream_client.h"
#include "cli/commands.h"
#include "cli/json_text.h"
#include "hub/http_client.h"

namespace thermo {
namespace {

struct Settings {
  std::string url;
  std::string key;  // empty: the server needs none
  std::string model;
  int n_ctx = 0;  // tokens; 0: not known

  // Clients that need some key get this one.
  std::string any_key() const { return key.empty() ? "none" : key; }
  // Tokens that a client may plan for an answer: it takes them off the context before it compacts.
  int n_answer() const { return std::min(32000, n_ctx / 4); }
};

// As one word of a shell.
std::string word(const std::string& text) {
  const auto plain = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           std::string_view("_-./:@%+,=").find(c) != std::string_view::npos;
  };
  if (!text.empty() && std::all_of(text.begin(), text.end(), plain)) return text;
  std::string quoted = "'";
  for (const char c : text) quoted += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return quoted + "'";
}

std::string exported(const char* name, const std::string& value) {
  return fmt::format("export {}={}\n", name, word(value));
}

std::string of_claude(const Settings& s) {
  std::string text = "# Claude Code, before it is started.\n";
  text += exported("ANTHROPIC_BASE_URL", s.url) + exported("ANTHROPIC_AUTH_TOKEN", s.any_key());
  text += exported("ANTHROPIC_MODEL", s.model) + exported("ANTHROPIC_SMALL_FAST_MODEL", s.model);
  if (s.n_ctx == 0) return text;
  const std::string n_ctx = std::to_string(s.n_ctx);
  text += exported("CLAUDE_CODE_MAX_CONTEXT_TOKENS", n_ctx);
  text += exported("CLAUDE_CODE_AUTO_COMPACT_WINDOW", n_ctx);
  return text + exported("CLAUDE_CODE_MAX_OUTPUT_TOKENS", std::to_string(s.n_answer()));
}

// Texts of TOML are written as those of JSON.
std::string toml_text(const std::string& text) {
  return Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
}

std::string of_codex(const Settings& s) {
  std::string text = "# ~/.codex/config.toml. These lines stand before the first [table] of the file:\n";
  text += fmt::format("model = {}\nmodel_provider = \"thermocline\"\n", toml_text(s.model));
  if (s.n_ctx > 0) text += fmt::format("model_context_window = {}\n", s.n_ctx);
  text += fmt::format(
      "\n# These anywhere after them:\n[model_providers.thermocline]\nname = \"thermocline\"\nbase_url = {}\n"
      "wire_api = \"responses\"\n",
      toml_text(s.url + "/v1"));
  if (s.key.empty()) return text;
  return text + "env_key = \"THERMOCLINE_API_KEY\"\n\n# And before Codex is started:\n# " +
         exported("THERMOCLINE_API_KEY", s.key);
}

std::string of_opencode(const Settings& s) {
  Json model = Json::object();
  if (s.n_ctx > 0) model["limit"] = {{"context", s.n_ctx}, {"output", s.n_answer()}};
  Json provider = {{"npm", "@ai-sdk/openai-compatible"}, {"name", "thermocline"}};
  provider["options"] = {{"baseURL", s.url + "/v1"}, {"apiKey", s.any_key()}};
  provider["models"] = {{s.model, std::move(model)}};
  return json_text({{"provider", {{"thermocline", std::move(provider)}}}});
}

std::string of_open_webui(const Settings& s) {
  return "# Open WebUI, before it is started.\n" + exported("OPENAI_API_BASE_URL", s.url + "/v1") +
         exported("OPENAI_API_KEY", s.any_key());
}

std::string of_others(const Settings& s) {
  return exported("OPENAI_BASE_URL", s.url + "/v1") + exported("OPENAI_API_KEY", s.any_key()) +
         exported("ANTHROPIC_BASE_URL", s.url) + exported("ANTHROPIC_AUTH_TOKEN", s.any_key());
}

constexpr std::pair<const char*, std::string (*)(const Settings&)> kClients[] = {
    {"claude", of_claude},        {"codex", of_codex}, {"opencode", of_opencode},
    {"openwebui", of_open_webui}, {"env", of_others},
};

// The first model of the server's list; null with a line in the log: it told of none.
Json ask_server(const Settings& s) {
  constexpr auto kPatience = std::chrono::seconds(3);
  constexpr size_t kMost = 1 << 20;
  const auto end = std::chrono::steady_clock::now() + kPatience;
  std::string body;
  GetRequest request{.url = s.url + "/v1/models", .token = s.key};
  request.on_body = [&](std::span<const std::byte> piece) {
    body.append(reinterpret_cast<const char*>(piece.data()), piece.size());
    return body.size() <= kMost;
  };
  request.cancelled = [end] { return std::chrono::steady_clock::now() > end; };
  const GetReply reply = HttpClient().get(request);
  const Json list = reply.is_ok() ? Json::parse(body, nullptr, false) : Json();
  if (list.is_object() && list.contains("data") && list["data"].is_array() && !list["data"].empty() &&
      list["data"][0].is_object())
    return list["data"][0];
  if (reply.status == 401)
    log_warning("connect", "{} wants a key to tell its model and context: give it with --api-key", s.url);
  else
    log_warning("connect", "{} does not say what it serves, so its context is left out: start it first",
                s.url);
  return nullptr;
}

class ConnectCommand : public Command {
 public:
  CommandText text() const override {
    return {"connect", "connect CLIENT [options]", "settings that a client needs to talk to the server",
            "CLIENT is claude, codex, opencode, openwebui, or env for variables that most programs read. "
            "Nothing is changed: the settings are printed. A server that runs is asked for its model and "
            "its context, which clients need to know when to compact.",
            "thermocline connect codex\neval \"$(thermocline connect claude)\""};
  }

  void declare(OptionSet& set) override {
    set.positional("CLIENT", client_, "claude, codex, opencode, openwebui or env");
    set.section("Server");
    set.value("--url", "URL", settings_.url, "URL of the server (default http://127.0.0.1:8080)");
    set.value("--api-key", "KEY", settings_.key, "key that the server needs (default none)")
        .secret()
        .not_in_file();
    set.value("-a,--alias", "NAME", settings_.model, "name of the model (default what the server says)")
        .not_in_file();
  }

  ExitCode run(const Terminal&) override {
    for (const auto& [name, text_of] : kClients)
      if (client_ == name) {
        complete();
        write_stdout(text_of(settings_));
        return ExitCode::Ok;
      }
    throw ConfigError(fmt::format("connect: {}, use claude, codex, opencode, openwebui or env",
                                  client_.empty() ? "no client is named" : "'" + client_ + "' is not known"));
  }

 private:
  void complete() {
    settings_.url = server_root(settings_.url);
    if (client_ == "openwebui" || client_ == "env") return;  // they name no model
    const Json model = ask_server(settings_);
    if (settings_.model.empty() && model.is_object() && model.contains("id") && model["id"].is_string())
      settings_.model = model["id"].get<std::string>();
    if (settings_.model.empty()) settings_.model = "plankton";
    if (!model.is_object()) return;
    if (model.contains("context_length") && model["context_length"].is_number_integer())
      settings_.n_ctx = model["context_length"].get<int>();
    else
      log_warning("connect", "{} does not say how long its context is; ask again when its model is loaded",
                  settings_.url);
  }

  std::string client_;
  Settings settings_{.url = "http://127.0.0.1:8080", .key = {}, .model = {}};
};

}  // namespace

std::unique_ptr<Command> make_connect_command() {
  return std::make_unique<ConnectCommand>();
}

}  // namespace thermo
