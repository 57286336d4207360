#include "cli/options/answer_options.h"

#include <fmt/format.h>

#include <climits>

#include "base/error.h"
#include "cli/input.h"

namespace thermo {
namespace {

constexpr int kDefaultMaxTokens = 32768;
constexpr size_t kMaxStops = 16, kMaxStopBytes = 256;

// nullopt: the model's own template.
std::optional<std::string> template_source(const TemplateFlags& flags) {
  if (!flags.chat_template.empty() && !flags.chat_template_file.empty())
    throw ConfigError("--chat-template and --chat-template-file exclude each other: give one of them");
  if (!flags.chat_template_file.empty()) {
    std::string source = read_text_file(flags.chat_template_file);
    if (source.empty()) throw ConfigError(fmt::format("{}: the template is empty", flags.chat_template_file));
    return source;
  }
  if (flags.chat_template.empty()) return std::nullopt;
  if (flags.chat_template == "chatml") return "";
  if (flags.chat_template.find("{%") == std::string::npos &&
      flags.chat_template.find("{{") == std::string::npos)
    throw ConfigError(
        fmt::format("--chat-template: '{}' is not known, use chatml, the text of a Jinja template, or "
                    "--chat-template-file",
                    flags.chat_template));
  return flags.chat_template;
}

}  // namespace

void add_template_options(OptionSet& set, TemplateFlags& flags) {
  set.section("Template");
  set.value("-rea,--reasoning", "WHEN", flags.reasoning,
            "let the model reason first: on, off or auto (the template's default)")
      .choices({"on", "off", "auto"});
  set.value("--reasoning-budget", "N", flags.reasoning_budget,
            "limit reasoning to N tokens, then start the answer; -1: no limit, 0: no reasoning")
      .range(-1, INT_MAX);
  set.value("--chat-template", "TEXT", flags.chat_template,
            "Jinja template instead of the model's own, or chatml")
      .advanced();
  set.value("--chat-template-file", "FILE", flags.chat_template_file, "file with the template").advanced();
  set.contradict("--chat-template", "--chat-template-file");
  set.contradict("--reasoning", "--reasoning-budget", [](const std::string& when, const std::string& budget) {
    return when == "on" && budget == "0";
  });
  set.value("--chat-template-kwargs", "JSON", flags.kwargs,
            "JSON object with extra variables for the template")
      .llama_env("LLAMA_CHAT_TEMPLATE_KWARGS")
      .advanced();
  set.custom_flag(
         "--jinja",
         [](bool on) {
           if (!on) throw ConfigError("templates are always rendered as Jinja: use --raw to have none");
         },
         "accepted; templates are always rendered as Jinja")
      .advanced();
}

TemplateOptions template_options(const TemplateFlags& flags) {
  TemplateOptions options;
  options.source = template_source(flags);
  if (!flags.kwargs.empty()) options.kwargs = Json::parse(flags.kwargs, nullptr, false);
  if (!options.kwargs.is_object())
    throw ConfigError(
        fmt::format("--chat-template-kwargs: '{}' cannot be used, a JSON object was expected "
                    "({{\"enable_thinking\": false}})",
                    flags.kwargs));
  if (flags.reasoning != "auto") options.thinking = flags.reasoning == "on";
  if (flags.reasoning_budget == 0) options.thinking = false;  // the template's own form of it
  return options;
}

void add_answer_options(OptionSet& set, AnswerFlags& flags) {
  set.section("Answer");
  set.count("-n,--predict,--n-predict", "N", flags.max_tokens,
            "limit the answer to N tokens; -1: what the context holds")
      .llama_env("LLAMA_ARG_N_PREDICT");
  set.value("-sys,--system-prompt", "TEXT", flags.system_prompt, "system prompt");
  set.value("-sysf,--system-prompt-file", "FILE", flags.system_prompt_file, "file with the system prompt")
      .advanced();
  set.contradict("--system-prompt", "--system-prompt-file");
  set.list("--stop", "TEXT", flags.stops, "end the answer before this text; repeatable");
  set.flag("--show-reasoning", flags.show_reasoning,
           "show the reasoning even when stdout is not a terminal (it then goes to stderr)");
  add_constraint_options(set, flags.constraint);
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

void check_limits(const AnswerFlags& flags) {
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
}

AnswerRequest answer_request(const AnswerFlags& flags, const TextModel& model, bool raw) {
  check_limits(flags);
  AnswerRequest request;
  request.sampling = sampling_params(flags.sampling, model);
  request.sampling.n_probs = flags.n_logprobs;
  const int standard =
      model.card() ? model.card()->max_tokens.value_or(kDefaultMaxTokens) : kDefaultMaxTokens;
  request.max_tokens = flags.max_tokens < 0 ? standard : flags.max_tokens;
  request.answer.stops = flags.stops;
  request.answer.split_reasoning = !raw;
  // No tools are offered, so a call would lead nowhere.
  if (std::optional<int32_t> call = model.tokenizer().vocab().find_special("<tool_call>"); call && !raw)
    request.sampling.logit_bias[*call] = kBanToken;
  const TemplateFlags& reasoning = flags.chat_template;
  request.rules =
      answer_rules(flags.constraint, model,
                   {.may_reason = !raw && reasoning.reasoning != "off" && reasoning.reasoning_budget != 0,
                    .budget = raw ? -1 : reasoning.reasoning_budget});
  return request;
}

}  // namespace thermo
