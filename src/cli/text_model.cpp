#include "cli/text_model.h"

#include <fmt/format.h>

#include "base/error.h"
#include "cli/input.h"
#include "cli/model_source.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

constexpr int kDefaultMaxTokens = 32768;
constexpr size_t kMaxStops = 16, kMaxStopBytes = 256;

VocabData require_vocab(const GgufFile& file) {
  std::optional<VocabData> data = read_vocab(file);
  if (!data)
    throw LoadError(
        fmt::format("{}: the file has no vocabulary, so there is no text; `bench` and `verify` work with "
                    "it, `run` and `chat` need a model with one",
                    file.path()));
  return std::move(*data);
}

}  // namespace

void add_answer_options(OptionSet& set, AnswerFlags& flags) {
  set.section("Answer");
  set.count("-n,--predict,--n-predict", "N", flags.max_tokens,
            "tokens of the answer at most; -1: what the context holds")
      .llama_env("LLAMA_ARG_N_PREDICT");
  set.value("-sys,--system-prompt", "TEXT", flags.system_prompt, "system prompt").no_environment();
  set.value("-sysf,--system-prompt-file", "FILE", flags.system_prompt_file, "file with the system prompt")
      .advanced();
  set.list("--stop", "TEXT", flags.stops, "end the answer before this text; repeatable").no_environment();
  set.flag("--show-reasoning", flags.show_reasoning,
           "show the reasoning also when stdout is no terminal (it then goes to stderr)");
  add_sampling_options(set, flags.sampling);
  add_template_options(set, flags.chat_template);
}

std::string system_prompt(const AnswerFlags& flags) {
  if (!flags.system_prompt.empty() && !flags.system_prompt_file.empty())
    throw ConfigError("--system-prompt and --system-prompt-file exclude each other: give one of them");
  const std::string text =
      flags.system_prompt_file.empty() ? flags.system_prompt : read_text_file(flags.system_prompt_file);
  require_utf8(text, "the system prompt");
  return text;
}

TextModel::TextModel(const std::string& model)
    : file_(open_model(model)),
      id_(model_display_name(model)),
      config_(read_model_config(file_)),
      tokenizer_(require_vocab(file_)) {}

void TextModel::load(const EngineOptions& options, const Terminal& terminal) {
  ProgressLine progress(terminal);
  EngineOptions with_progress = options;
  with_progress.progress = progress.callback();
  engine_ = std::make_unique<Engine>(file_, with_progress);
  progress.clear();
  terminal.note_unless_empty(engine_->plan().note);
}

AnswerRequest TextModel::make_request(const AnswerFlags& flags, bool raw) const {
  if (flags.max_tokens < -1 || flags.max_tokens == 0)
    throw ConfigError(
        fmt::format("--predict: {} cannot be used, a positive number or -1 was expected", flags.max_tokens));
  if (flags.stops.size() > kMaxStops)
    throw ConfigError(fmt::format("--stop was given {} times; at most {} texts can end an answer",
                                  flags.stops.size(), kMaxStops));
  for (const std::string& stop : flags.stops)
    if (stop.empty() || stop.size() > kMaxStopBytes)
      throw ConfigError(fmt::format("--stop: a text of {} bytes cannot be used, 1 to {} were expected",
                                    stop.size(), kMaxStopBytes));
  AnswerRequest request;
  request.sampling = sampling_params(flags.sampling, file_, tokenizer_.vocab().n_tokens());
  request.sampling.n_probs = flags.n_logprobs;
  request.max_tokens = flags.max_tokens < 0 ? kDefaultMaxTokens : flags.max_tokens;
  request.answer.stops = flags.stops;
  request.answer.split_reasoning = !raw;
  // No tools are offered, so a call would lead nowhere.
  if (std::optional<int32_t> call = tokenizer_.vocab().find_special("<tool_call>"); call && !raw)
    request.sampling.logit_bias[*call] = kBanToken;
  return request;
}

AnswerPrinter::Reasoning reasoning_place(const Terminal& terminal, bool show_reasoning) {
  if (terminal.stdout_is_terminal) return AnswerPrinter::Reasoning::Stdout;
  return show_reasoning ? AnswerPrinter::Reasoning::Stderr : AnswerPrinter::Reasoning::Hide;
}

}  // namespace thermo
