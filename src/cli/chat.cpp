// `thermocline chat`: a conversation in the terminal, or over a pipe: each line of stdin is a message.
//
// The session keeps its tokens between turns; only what is new is evaluated. Ctrl-C stops an answer, a second
// one (or two at the prompt) leaves.
#include <fmt/format.h>

#include <cstdio>
#include <fstream>

#include "cli/answer_printer.h"
#include "cli/commands.h"
#include "cli/input.h"
#include "cli/interrupt.h"
#include "cli/options/answer_options.h"
#include "experts/telemetry.h"

namespace thermo {
namespace {

constexpr const char* kHelp =
    "  /help            this list\n"
    "  /reset           forget the conversation, keep the system prompt\n"
    "  /system [TEXT]   set the system prompt and start over; without TEXT: show it\n"
    "  /think on|off    let the model reason first, or not\n"
    "  /stats           tokens and speed so far\n"
    "  /save FILE       write the conversation as text\n"
    "  /exit            leave (also Ctrl-D)\n"
    "  A line that ends in \\ goes on in the next one. Ctrl-C stops an answer, twice leaves.\n";

class Conversation {
 public:
  Conversation(TextModel& model, const AnswerFlags& flags, const Terminal& terminal)
      : model_(model),
        flags_(flags),
        terminal_(terminal),
        prompt_(model.tokenizer(), template_options(flags.chat_template)),
        request_(answer_request(flags, model, false)),
        session_(model.open_session()),
        system_(system_prompt(flags)) {}

  // Runs until the end of the input, /exit or the second interrupt.
  ExitCode talk() {
    // Leaving in an orderly way writes the heat file; a third interrupt does not wait for that.
    const InterruptScope interrupts(2);
    while (true) {
      if (InterruptScope::must_leave(2)) return InterruptScope::exit_code();
      std::string text;
      switch (read_message(text)) {
        case LineReader::Event::End:
          if (terminal_.stdin_is_terminal) say("");
          // Over a pipe nobody sees that a message was not answered.
          return failed_ && !terminal_.stdin_is_terminal ? ExitCode::Usage : ExitCode::Ok;
        case LineReader::Event::Interrupted:
          if (!InterruptScope::must_leave(2)) say("(Ctrl-C again or /exit to leave)");
          continue;
        case LineReader::Event::Line:
          break;
      }
      InterruptScope::reset();
      if (text.find_first_not_of(" \t") == std::string::npos) continue;
      if (text.starts_with('/')) {
        if (!obey(text)) return ExitCode::Ok;
        continue;
      }
      answer(text);
      if (!InterruptScope::must_leave(2)) InterruptScope::reset();
    }
  }

 private:
  // What is said by the program and not by the model.
  void say(const std::string& line) const { std::fprintf(stderr, "%s\n", line.c_str()); }

  LineReader::Event read_message(std::string& text) {
    const bool prompts = terminal_.stdin_is_terminal;
    if (prompts) std::fputs(terminal_.on_stderr(Style::Bold, "> ").c_str(), stderr);
    while (true) {
      std::string line;
      const LineReader::Event event = lines_.next(line);
      if (event != LineReader::Event::Line) {
        if (event == LineReader::Event::End && !text.empty()) return LineReader::Event::Line;
        return event;
      }
      text += line;
      if (!text.ends_with('\\')) return LineReader::Event::Line;
      text.back() = '\n';
      if (prompts) std::fputs("  ", stderr);
    }
  }

  void answer(const std::string& text) {
    try {
      require_utf8(text, "the message");
    } catch (const ConfigError& error) {
      say(error.what());
      failed_ = true;
      return;
    }
    turns_.push_back({"user", text});
    std::vector<Turn> all;
    if (!system_.empty()) all.push_back({"system", system_});
    all.insert(all.end(), turns_.begin(), turns_.end());
    RenderedPrompt rendered = prompt_.render(all, {.thinking = thinking_});
    const int n_ctx = model_.engine().n_ctx();
    if (rendered.ids.size() >= static_cast<size_t>(n_ctx)) {
      turns_.pop_back();
      failed_ = true;
      say(fmt::format(
          "the conversation has {} tokens and the context holds {}: use /reset, or start with a larger -c",
          rendered.ids.size(), n_ctx));
      return;
    }
    request_.prompt = std::move(rendered.ids);
    request_.answer.starts_in_reasoning = rendered.in_reasoning;
    AnswerPrinter printer(terminal_, flags_.show_reasoning);
    const Answer answer = print_answer(model_, session_, request_, terminal_, &printer);
    if (answer.interrupted && answer.content.empty()) {
      turns_.pop_back();  // nothing was answered: as if it had not been asked
      say("(stopped)");
      return;
    }
    turns_.push_back({"assistant", answer.content, answer.reasoning});
    last_ = answer.stats;
    n_prompt_tokens_ += answer.stats.n_prompt - answer.stats.n_cached;
    n_answer_tokens_ += answer.stats.n_completion;
    if (answer.interrupted) say("(stopped)");
    if (answer.context_full) {
      say("(the context is full: /reset starts over)");
    } else if (answer.finish_reason == "length") {
      say(fmt::format("(cut after {} tokens: a larger -n allows more)", answer.stats.n_completion));
    }
    if (terminal_.stderr_is_terminal) terminal_.note(last_.describe());
  }

  // A command of the user; false: leave.
  bool obey(const std::string& line) {
    const size_t space = line.find(' ');
    const std::string name = line.substr(0, space);
    const std::string rest = space == std::string::npos
                                 ? ""
                                 : line.substr(line.find_first_not_of(' ', space) == std::string::npos
                                                   ? line.size()
                                                   : line.find_first_not_of(' ', space));
    if (name == "/exit" || name == "/quit" || name == "/bye") return false;
    if (name == "/help") {
      std::fputs(kHelp, stderr);
    } else if (name == "/reset" || name == "/clear") {
      turns_.clear();
      say("(the conversation was forgotten)");
    } else if (name == "/system") {
      if (rest.empty()) {
        say(system_.empty() ? "(no system prompt)" : system_);
      } else {
        system_ = rest;
        turns_.clear();
        say("(new system prompt, the conversation starts over)");
      }
    } else if (name == "/think") {
      if (rest != "on" && rest != "off") {
        say("/think takes on or off");
      } else {
        thinking_ = rest == "on";
        say(fmt::format("(reasoning is {})", rest));
      }
    } else if (name == "/stats") {
      say(fmt::format("{} messages, {} prompt tokens read, {} tokens answered, {} of {} in the context",
                      turns_.size(), n_prompt_tokens_, n_answer_tokens_, session_.n_past(),
                      model_.engine().n_ctx()));
      if (last_.n_completion > 0) say("last: " + last_.describe());
      if (const std::string experts = describe(model_.engine().expert_telemetry()); !experts.empty())
        say(experts);
    } else if (name == "/save") {
      save(rest);
    } else {
      const std::vector<std::string> known = {"/help",  "/reset", "/system", "/think",
                                              "/stats", "/save",  "/exit"};
      const std::string nearest = nearest_match(name, known);
      say(fmt::format("unknown command {}: {}", name,
                      nearest.empty() ? "/help lists them" : fmt::format("did you mean {}?", nearest)));
    }
    return true;
  }

  void save(const std::string& path) const {
    if (path.empty()) {
      say("/save needs a file name");
      return;
    }
    std::ofstream file(path);
    if (!system_.empty()) file << "system: " << system_ << "\n\n";
    for (const Turn& turn : turns_) file << turn.role << ": " << turn.content << "\n\n";
    file.close();
    say(file ? fmt::format("(saved {} messages to {})", turns_.size(), path)
             : fmt::format("{} cannot be written: choose another file", path));
  }

  TextModel& model_;
  const AnswerFlags& flags_;
  const Terminal& terminal_;
  PromptRenderer prompt_;
  AnswerRequest request_;
  Session session_;
  std::string system_;
  std::optional<bool> thinking_;
  std::vector<Turn> turns_;
  LineReader lines_;
  bool failed_ = false;  // a message could not be answered
  AnswerStats last_;
  int64_t n_prompt_tokens_ = 0, n_answer_tokens_ = 0;
};

class ChatCommand : public Command {
 public:
  CommandText text() const override {
    return {"chat", "chat [MODEL] [options]", "a conversation in the terminal",
            "Type a message and press Enter; /help lists the commands. With a pipe every line of stdin is a "
            "message.",
            "thermocline chat\nthermocline chat model.gguf -sys \"You are brief.\" -c 32K"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    add_answer_options(set, answer_);
    add_engine_options(set, engine_);
  }

  ExitCode run(const Terminal& terminal) override {
    EngineOptions options = engine_options(engine_);
    TextModel model(model_);
    set_expert_options(engine_.experts, model.config(), options);
    load_model(model, options, engine_, terminal);
    note_unused_cache(engine_.experts, model.engine(), terminal);
    if (model_.empty())
      terminal.note(
          "no model given: using the embedded one (Plankton, 35M parameters); -m FILE names another");
    if (terminal.stdin_is_terminal)
      terminal.note(fmt::format("{}, context {}; /help for help", model.id(), model.engine().n_ctx()));
    return Conversation(model, answer_, terminal).talk();
  }

 private:
  std::string model_;
  AnswerFlags answer_;
  EngineFlags engine_;
};

}  // namespace

std::unique_ptr<Command> make_chat_command() {
  return std::make_unique<ChatCommand>();
}

}  // namespace thermo
