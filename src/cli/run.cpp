// `thermocline run`: one answer to stdout, nothing else there.
#include <fmt/format.h>

#include "chat/reply_json.h"
#include "cli/answer_printer.h"
#include "cli/commands.h"
#include "cli/input.h"
#include "cli/interrupt.h"
#include "cli/kept_heat.h"
#include "cli/options/answer_options.h"
#include "cli/options/draft_options.h"
#include "cli/version.h"
#include "engine/engine_thread.h"
#include "experts/telemetry.h"

namespace thermo {
namespace {

// Why an answer is not whole, and what helps; empty: it is.
std::string why_cut(const Answer& answer, int n_ctx, int n_ctx_train) {
  const bool in_reasoning = !answer.reasoning.empty() && answer.content.empty();
  if (answer.context_full)
    return fmt::format("the context of {} tokens is full: the {} ends here{}", n_ctx,
                       in_reasoning ? "reasoning" : "answer", n_ctx < n_ctx_train ? "; raise -c" : "");
  if (answer.interrupted || answer.finish_reason != "length") return "";
  if (in_reasoning) return "the limit was reached inside the reasoning: raise -n, or use --reasoning off";
  return fmt::format("the answer was cut after {} tokens: raise -n", answer.stats.n_completion);
}

class RunCommand : public Command {
 public:
  CommandText text() const override {
    return {"run", "run [MODEL] [-p TEXT] [-f FILE] [options]", "one answer to stdout",
            "The text is sent as a user message through the chat template of the model. Piped input, or a "
            "file named with -f, is appended to the text of -p. Statistics and notes go to stderr.",
            "thermocline run -p \"What is 17 + 25?\" --temp 0\n"
            "thermocline run model.gguf -f question.txt -n 200 --json\n"
            "cat notes.txt | thermocline run model.gguf -p \"Summarise:\"\n"
            "git diff | thermocline run model.gguf -sys \"Write a commit message.\"\n"
            "thermocline run model.gguf --raw -p \"def fib(n):\""};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    set.section("Prompt");
    set.value("-p,--prompt", "TEXT", prompt_, "the text").no_environment().once();
    set.value("-f,--file", "FILE", file_, "file with the text, appended to that of -p; - is stdin")
        .no_environment()
        .once();
    set.flag("--raw,--no-chat-template", raw_, "continue the text itself, without a chat template");
    set.flag("-e,--escape", escape_, "read \\n, \\t and \\\\ in -p as llama.cpp does (default off)")
        .advanced();
    set.custom_flag(
           "-st,--single-turn",
           [](bool on) {
             if (!on) throw ConfigError("run gives one answer; use `thermocline chat` for a conversation");
           },
           "accepted: run gives one answer")
        .advanced();
    set.section("Output");
    set.flag("--json", json_, "print the reply object of the OpenAI API");
    set.value("--logprobs", "N", answer_.n_logprobs,
              "with --json: the N most likely tokens at each position, 0 to 20")
        .range(0, 20);
    add_answer_options(set, answer_);
    for (const char* prompt : {"--system-prompt", "--system-prompt-file"}) set.contradict("--raw", prompt);
    add_engine_options(set, engine_);
    add_draft_options(set, draft_);
  }

  ExitCode run(const Terminal& terminal) override {
    if (answer_.n_logprobs && !json_) throw ConfigError("--logprobs is printed with --json only: add --json");
    if (raw_ && !(answer_.system_prompt.empty() && answer_.system_prompt_file.empty()))
      throw ConfigError("--raw has no place for a system prompt: write it into the text, or leave --raw out");
    EngineOptions options = engine_options(engine_);
    const std::string prompt = read_prompt();
    TextModel model(model_);
    if (model_.empty())
      terminal.note(
          "no model given: using the embedded one (Plankton, 35M parameters); -m FILE names another");

    AnswerRequest request = answer_request(answer_, model, raw_);
    encode_prompt(model, prompt, request);
    if (options.n_ctx > 0) check_prompt_fits(request.prompt.size(), options.n_ctx, model.n_ctx_train());
    set_expert_options(engine_.experts, model.config(), options);
    keep_heat(engine_.experts, model.config(), model.file(), options);
    set_draft_options(draft_, model_, model.config(), drafter_, options);
    load_model(model, options, engine_, terminal);
    note_unused_cache(engine_.experts, model.engine(), terminal);
    const int n_ctx = model.engine().n_ctx();
    check_prompt_fits(request.prompt.size(), n_ctx, model.n_ctx_train());

    EngineThread service(model.engine(), EngineThreadOptions::for_one_user());
    InterruptScope interrupts;
    AnswerPrinter printer(terminal, answer_.show_reasoning);
    const Answer answer =
        print_answer(service, model.tokenizer(), request, terminal, json_ ? nullptr : &printer);
    if (json_) write_stdout(reply_json(answer, model.tokenizer(), {model.id(), build_fingerprint()}, raw_));
    terminal.note_unless_empty(why_cut(answer, n_ctx, model.n_ctx_train()));
    terminal.note(answer.stats.describe());
    terminal.note_unless_empty(describe(answer.stats.draft));
    if (const std::string experts = describe(model.engine()); !experts.empty()) terminal.note(experts);
    return answer.interrupted ? InterruptScope::exit_code() : ExitCode::Ok;
  }

 private:
  std::string read_prompt() const {
    std::string text = !prompt_ ? "" : escape_ ? unescape(*prompt_) : *prompt_;
    // The question, then what it is about: a file, or what a pipe brings.
    std::string document;
    if (!file_.empty()) {
      document = read_text_file(file_, kLargestPrompt);
    } else if (!prompt_ || (stdin_brings_text() && !is_stdin(model_))) {
      document = read_stdin(kLargestPrompt);
    }
    if (document.ends_with('\n'))
      document.pop_back();  // the line end of a file or of echo, as llama.cpp does
    if (!text.empty() && !document.empty()) text += text.ends_with('\n') ? "" : "\n\n";
    text += document;
    if (text.empty()) throw ConfigError("the prompt is empty: give a text with -p, -f or a pipe");
    require_utf8(text, "the prompt");
    return text;
  }

  void encode_prompt(const TextModel& model, const std::string& prompt, AnswerRequest& request) const {
    if (raw_) {
      request.prompt = model.tokenizer().encode(prompt, {.parse_special = true, .add_bos_eos = true});
      const Vocab& vocab = model.tokenizer().vocab();
      // An end token at the end would be answered by nothing.
      if (vocab.add_eos() && request.prompt.size() > 1 && vocab.eos() &&
          request.prompt.back() == *vocab.eos())
        request.prompt.pop_back();
      return;
    }
    std::vector<Turn> turns;
    if (std::string system = system_prompt(answer_); !system.empty()) turns.push_back({"system", system});
    turns.push_back({"user", prompt});
    RenderedPrompt rendered =
        PromptRenderer(model.tokenizer(), template_options(answer_.chat_template)).render(turns);
    request.prompt = std::move(rendered.ids);
    request.answer.starts_in_reasoning = rendered.in_reasoning;
  }

  std::string model_;
  std::optional<std::string> prompt_;
  std::string file_;
  bool raw_ = false, escape_ = false, json_ = false;
  AnswerFlags answer_;
  EngineFlags engine_;
  DraftFlags draft_;
  std::optional<GgufFile> drafter_;
};

}  // namespace

std::unique_ptr<Command> make_run_command() {
  return std::make_unique<RunCommand>();
}

}  // namespace thermo
