// `thermocline chat`: a conversation in the terminal, or over a pipe: each line of stdin is a message.
#include <fmt/format.h>

#include "cli/answer_printer.h"
#include "cli/chat/conversation.h"
#include "cli/chat/local_partner.h"
#include "cli/chat/server_partner.h"
#include "cli/commands.h"
#include "cli/kept_heat.h"
#include "cli/options/draft_options.h"

namespace thermo {
namespace {

class ChatCommand : public Command {
 public:
  CommandText text() const override {
    return {"chat", "chat [MODEL] [options]", "a conversation in the terminal",
            "Type a message and press Enter; /help lists the commands. In a pipe, every line of stdin is a "
            "message. With --url a server answers, ours or any other with the OpenAI API: then options about "
            "the model, the engine and drafts are the server's matter and change nothing here.",
            "thermocline chat\nthermocline chat --url http://127.0.0.1:8080\nthermocline chat model.gguf "
            "-sys \"You are brief.\" -c 32K\n"
            "thermocline chat model.gguf -p \"Hello!\""};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    set.section("Conversation");
    set.value("--url", "URL", server_.url, "talk to the server at this URL instead of loading a model");
    set.value("--api-key", "KEY", server_.key, "key that this server needs (default none)")
        .secret()
        .not_in_file();
    set.value("-a,--alias", "NAME", server_.model, "model to ask this server for (default: what it has)")
        .not_in_file();
    for (const char* name : {"--api-key", "--alias"}) set.need(name, "--url");
    set.value("-p,--prompt", "TEXT", prompt_, "the first message").no_environment().once();
    set.flag("--history", history_, "remember typed lines for the arrow keys next time (default on)");
    add_answer_options(set, answer_);
    add_engine_options(set, engine_);
    add_draft_options(set, draft_);
    for (const char* model : {"--model", "--hf-repo", "--hf-file"}) set.contradict("--url", model);
    // What a server has itself, and what a request cannot bring.
    for (const char* name :
         {"--chat-template", "--chat-template-file", "--json-schema", "--json-schema-file", "--grammar",
          "--grammar-file", "--reasoning-budget-message", "--logit-bias", "--dry-sequence-breaker"})
      set.replace("--url", name);
  }

  ExitCode run(const Terminal& terminal) override {
    if (server_.url.empty()) return talk_to_model(terminal);
    if (!model_.empty())
      throw ConfigError("--url and a model contradict each other: the server has one; leave one of them out");
    ServerPartner partner(server_, answer_, terminal);
    if (terminal.stdin_is_terminal) terminal.note(fmt::format("{}; /help for help", server_.url));
    return Conversation(partner, conversation(), terminal).talk();
  }

 private:
  ConversationOptions conversation() const {
    return {.answer = answer_,
            .first_message = prompt_,
            .history_file = history_ ? default_history_file() : "",
            .context_shift = engine_.context_shift};
  }

  ExitCode talk_to_model(const Terminal& terminal) {
    EngineFlags flags = engine_;
    flags.context_shift = false;  // a matter of the conversation
    EngineOptions options = engine_options(flags);
    TextModel model(model_);
    set_expert_options(engine_.experts, model.config(), options);
    keep_heat(engine_.experts, model.config(), model.file(), options);
    set_draft_options(draft_, model_, model.config(), drafter_, options);
    load_model(model, options, flags, terminal);
    note_unused_cache(engine_.experts, model.engine(), terminal);
    if (model_.empty())
      terminal.note(
          "no model given: using the embedded one (Plankton, 35M parameters); -m FILE names another");
    if (terminal.stdin_is_terminal)
      terminal.note(fmt::format("{}, context {}; /help for help", model.id(), model.engine().n_ctx()));
    LocalPartner partner(model, answer_, engine_.context_shift, terminal);
    return Conversation(partner, conversation(), terminal).talk();
  }

  std::string model_;
  ServerAddress server_;
  std::optional<std::string> prompt_;
  bool history_ = true;
  AnswerFlags answer_;
  EngineFlags engine_;
  DraftFlags draft_;
  std::optional<GgufFile> drafter_;
};

}  // namespace

std::unique_ptr<Command> make_chat_command() {
  return std::make_unique<ChatCommand>();
}

}  // namespace thermo
