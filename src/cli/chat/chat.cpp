// `thermocline chat`: a conversation in the terminal, or over a pipe: each line of stdin is a message.
#include <fmt/format.h>

#include "cli/answer_printer.h"
#include "cli/chat/conversation.h"
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
            "message.",
            "thermocline chat\nthermocline chat model.gguf -sys \"You are brief.\" -c 32K\n"
            "thermocline chat model.gguf -p \"Hello!\""};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    set.section("Conversation");
    set.value("-p,--prompt", "TEXT", prompt_, "the first message").no_environment();
    set.flag("--history", history_, "remember typed lines for the arrow keys next time (default on)");
    add_answer_options(set, answer_);
    add_engine_options(set, engine_);
    add_draft_options(set, draft_);
  }

  ExitCode run(const Terminal& terminal) override {
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
    ConversationOptions conversation{.answer = answer_,
                                     .first_message = prompt_,
                                     .context_shift = engine_.context_shift,
                                     .history_file = history_ ? default_history_file() : ""};
    return Conversation(model, std::move(conversation), terminal).talk();
  }

 private:
  std::string model_;
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
