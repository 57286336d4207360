// Special tokens are read in what the template writes and never in what the user wrote: a message cannot
// forge a role marker, and may talk about <think>.
#include "cli/prompt_renderer.h"

#include <fmt/format.h>

#include "base/error.h"
#include "base/json.h"
#include "cli/input.h"
#include "tokenizer/chat_template.h"

namespace thermo {
namespace {

// Jinja text; empty for ChatML, which ChatTemplate falls back to.
std::string template_source(const Tokenizer& tokenizer, const TemplateFlags& flags) {
  if (!flags.chat_template.empty() && !flags.chat_template_file.empty())
    throw ConfigError("--chat-template and --chat-template-file exclude each other: give one of them");
  if (!flags.chat_template_file.empty()) {
    std::string source = read_text_file(flags.chat_template_file);
    if (source.empty()) throw ConfigError(fmt::format("{}: the template is empty", flags.chat_template_file));
    return source;
  }
  if (flags.chat_template == "chatml") return "";
  if (flags.chat_template.find("{%") != std::string::npos ||
      flags.chat_template.find("{{") != std::string::npos)
    return flags.chat_template;
  if (!flags.chat_template.empty())
    throw ConfigError(
        fmt::format("--chat-template: '{}' is not known, use chatml, the text of a Jinja template, or "
                    "--chat-template-file",
                    flags.chat_template));
  if (tokenizer.vocab().chat_template().empty() && !tokenizer.vocab().find_special("<|im_start|>"))
    throw ConfigError(
        "the model file has no chat template: use --raw to continue a text, or give one with "
        "--chat-template-file");
  return tokenizer.vocab().chat_template();
}

ChatTemplate make_template(const Tokenizer& tokenizer, const TemplateFlags& flags) {
  const Vocab& vocab = tokenizer.vocab();
  const auto text_of = [&vocab](std::optional<int32_t> id) {
    return id ? std::string(vocab.token_text(*id)) : std::string();
  };
  const bool given = !flags.chat_template.empty() || !flags.chat_template_file.empty();
  try {
    return ChatTemplate(template_source(tokenizer, flags), text_of(vocab.bos()), text_of(vocab.eos()));
  } catch (const LoadError& error) {
    // The user's template is no fault of the model.
    const std::string message = error.what();
    if (given)
      throw ConfigError("--chat-template: the template cannot be used, " +
                        message.substr(message.find(": ") + 2));
    throw;
  }
}

Json parse_kwargs(const std::string& text) {
  if (text.empty()) return Json::object();
  Json kwargs = Json::parse(text, nullptr, false);
  if (!kwargs.is_object())
    throw ConfigError(
        fmt::format("--chat-template-kwargs: '{}' cannot be used, a JSON object was expected "
                    "({{\"enable_thinking\": false}})",
                    text));
  return kwargs;
}

}  // namespace

void add_template_options(OptionSet& set, TemplateFlags& flags) {
  set.section("Template");
  set.value("-rea,--reasoning", "WHEN", flags.reasoning,
            "let the model reason first: on, off or auto (the template's default)")
      .choices({"on", "off", "auto"});
  set.value("--chat-template", "TEXT", flags.chat_template,
            "Jinja template instead of the model's own, or chatml")
      .advanced();
  set.value("--chat-template-file", "FILE", flags.chat_template_file, "file with the template").advanced();
  set.value("--chat-template-kwargs", "JSON", flags.kwargs, "object with more names for the template")
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

struct PromptRenderer::Impl {
  const Tokenizer& tokenizer;
  ChatTemplate chat_template;
  Json kwargs;
  std::optional<bool> thinking;
};

PromptRenderer::PromptRenderer(const Tokenizer& tokenizer, const TemplateFlags& flags)
    : impl_(new Impl{tokenizer, make_template(tokenizer, flags), parse_kwargs(flags.kwargs), std::nullopt}) {
  if (flags.reasoning != "auto") impl_->thinking = flags.reasoning == "on";
  // The template's own name for the switch is the more specific one, so it wins.
  if (const auto found = impl_->kwargs.find("enable_thinking"); found != impl_->kwargs.end()) {
    if (!found->is_boolean())
      throw ConfigError(
          "--chat-template-kwargs: enable_thinking is neither true nor false; write one of them");
    impl_->thinking = found->get<bool>();
    impl_->kwargs.erase(found);
  }
}

PromptRenderer::~PromptRenderer() = default;

RenderedPrompt PromptRenderer::render(std::span<const Turn> turns, std::optional<bool> thinking) const {
  ChatTemplateInputs inputs;
  for (const Turn& turn : turns) {
    Json message = {{"role", turn.role}, {"content", turn.content}};
    if (!turn.reasoning.empty()) message["reasoning_content"] = turn.reasoning;
    inputs.messages.push_back(std::move(message));
  }
  inputs.enable_thinking = thinking ? thinking : impl_->thinking;
  inputs.extra = impl_->kwargs;
  Result<ChatPrompt> rendered = impl_->chat_template.render_prompt(inputs);
  if (!rendered)
    throw ConfigError(fmt::format("{}; change the messages, or use --raw", rendered.error().message));
  RenderedPrompt prompt;
  prompt.ids = impl_->tokenizer.encode_segments(rendered->text, rendered->untrusted);
  prompt.in_reasoning = ends_in_reasoning(impl_->tokenizer, prompt.ids);
  return prompt;
}

bool ends_in_reasoning(const Tokenizer& tokenizer, std::span<const int32_t> ids) {
  const std::optional<int32_t> open = tokenizer.vocab().find_special("<think>");
  const std::optional<int32_t> close = tokenizer.vocab().find_special("</think>");
  for (size_t i = ids.size(); i-- > 0;) {
    if (close && ids[i] == *close) return false;
    if (open && ids[i] == *open) return true;
  }
  return false;
}

}  // namespace thermo
