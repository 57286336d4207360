// `thermocline connect`: what to tell a client so that it talks to the server here.
#include <fmt/format.h>

#include "base/error.h"
#include "cli/commands.h"

namespace thermo {
namespace {

struct Client {
  const char* name;
  const char* text;  // {0}: the server's URL, {1}: its key, {2}: the model
};

constexpr Client kClients[] = {
    {"claude",
     "# Claude Code, before it is started. The context is that of the server: see /v1/models.\n"
     "export ANTHROPIC_BASE_URL={0}\n"
     "export ANTHROPIC_AUTH_TOKEN={1}\n"
     "export ANTHROPIC_MODEL={2}\n"
     "export ANTHROPIC_SMALL_FAST_MODEL={2}\n"},
    {"codex",
     "# ~/.codex/config.toml\n"
     "model = \"{2}\"\n"
     "model_provider = \"thermocline\"\n\n"
     "[model_providers.thermocline]\n"
     "name = \"thermocline\"\n"
     "base_url = \"{0}/v1\"\n"
     "wire_api = \"responses\"\n"},
    {"opencode",
     "{{\n"
     "  \"provider\": {{\n"
     "    \"thermocline\": {{\n"
     "      \"npm\": \"@ai-sdk/openai-compatible\",\n"
     "      \"options\": {{\"baseURL\": \"{0}/v1\", \"apiKey\": \"{1}\"}},\n"
     "      \"models\": {{\"{2}\": {{}}}}\n"
     "    }}\n"
     "  }}\n"
     "}}\n"},
    {"openwebui",
     "# Open WebUI, before it is started.\n"
     "export OPENAI_API_BASE_URL={0}/v1\n"
     "export OPENAI_API_KEY={1}\n"},
    {"env",
     "export OPENAI_BASE_URL={0}/v1\n"
     "export OPENAI_API_KEY={1}\n"
     "export ANTHROPIC_BASE_URL={0}\n"
     "export ANTHROPIC_AUTH_TOKEN={1}\n"},
};

class ConnectCommand : public Command {
 public:
  CommandText text() const override {
    return {"connect", "connect CLIENT [options]", "settings that a client needs to talk to the server",
            "CLIENT is claude, codex, opencode, openwebui, or env for variables that most programs read. "
            "Nothing is changed: the settings are printed.",
            "thermocline connect codex >> ~/.codex/config.toml\neval \"$(thermocline connect claude)\""};
  }

  void declare(OptionSet& set) override {
    set.positional("CLIENT", client_, "claude, codex, opencode, openwebui or env");
    set.section("Server");
    set.value("--url", "URL", url_, "URL of the server (default http://127.0.0.1:8080)");
    set.value("--api-key", "KEY", key_, "key that the server needs (default none)");
    set.value("-a,--alias", "NAME", model_,
              "name of the model on the server (default plankton, the embedded one)");
  }

  ExitCode run(const Terminal&) override {
    while (url_.ends_with('/')) url_.pop_back();
    for (const Client& client : kClients)
      if (client_ == client.name) {
        write_stdout(fmt::format(fmt::runtime(client.text), url_, key_, model_));
        return ExitCode::Ok;
      }
    throw ConfigError(
        fmt::format("connect: '{}' is not known, use claude, codex, opencode, openwebui or env", client_));
  }

 private:
  std::string client_, url_ = "http://127.0.0.1:8080", key_ = "none", model_ = "plankton";
};

}  // namespace

std::unique_ptr<Command> make_connect_command() {
  return std::make_unique<ConnectCommand>();
}

}  // namespace thermo
