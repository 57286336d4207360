// Special tokens are read in what the template writes and never in what the user wrote: a message cannot
// forge a role marker, and may talk about <think>.
#include "chat/prompt_renderer.h"

#include <fmt/format.h>

#include "base/error.h"
#include "tokenizer/chat_template.h"

namespace thermo {
namespace {

// Jinja text; empty for ChatML, which ChatTemplate falls back to.
std::string template_source(const Tokenizer& tokenizer, const TemplateOptions& options) {
  if (options.source) return *options.source;
  if (tokenizer.vocab().chat_template().empty() && !tokenizer.vocab().find_special("<|im_start|>"))
    throw ConfigError("the model file has no chat template: give one, or continue a text without one",
                      Remedy::ChatTemplate);
  return tokenizer.vocab().chat_template();
}

ChatTemplate make_template(const Tokenizer& tokenizer, const TemplateOptions& options) {
  const Vocab& vocab = tokenizer.vocab();
  const auto text_of = [&vocab](std::optional<int32_t> id) {
    return id ? std::string(vocab.token_text(*id)) : std::string();
  };
  try {
    return ChatTemplate(template_source(tokenizer, options), text_of(vocab.bos()), text_of(vocab.eos()));
  } catch (const LoadError& error) {
    // The user's template is no fault of the model.
    const std::string message = error.what();
    if (options.source)
      throw ConfigError(
          "the chat template that was given cannot be used, " + message.substr(message.find(": ") + 2),
          Remedy::ChatTemplate);
    throw;
  }
}

// Takes the switch for reasoning out of the names for the template. That is the more specific place for it,
// so it wins.
std::optional<bool> take_thinking(Json& kwargs, std::optional<bool> otherwise) {
  if (!kwargs.is_object())
    throw ConfigError("the names for the chat template are no JSON object: write {\"name\": value}");
  const auto found = kwargs.find("enable_thinking");
  if (found == kwargs.end()) return otherwise;
  if (!found->is_boolean())
    throw ConfigError(
        "the names for the chat template: enable_thinking is neither true nor false; write one of them");
  const bool thinking = found->get<bool>();
  kwargs.erase(found);
  return thinking;
}

Json message_of(const Turn& turn) {
  Json message = {{"role", turn.role}, {"content", turn.content}};
  if (!turn.reasoning.empty()) message["reasoning_content"] = turn.reasoning;
  if (!turn.tool_call_id.empty()) message["tool_call_id"] = turn.tool_call_id;
  for (const ToolCall& call : turn.tool_calls) {
    // Arguments that are no object are shown as they are.
    Json arguments = Json::parse(call.arguments, nullptr, false);
    if (!arguments.is_object()) arguments = Json{{"arguments", call.arguments}};
    Json entry;
    if (!call.id.empty()) entry["id"] = call.id;
    entry["type"] = "function";
    entry["function"] = {{"name", call.name}, {"arguments", std::move(arguments)}};
    message["tool_calls"].push_back(std::move(entry));
  }
  return message;
}

Json tool_json(const Tool& tool) {
  Json function = {{"name", tool.name}};
  if (!tool.description.empty()) function["description"] = tool.description;
  if (!tool.parameters.is_null()) function["parameters"] = tool.parameters;
  return {{"type", "function"}, {"function", std::move(function)}};
}

// Whether the prompt ends inside an open <think>: by its token, or by its letters where the vocabulary has
// none.
bool ends_in_reasoning(const Tokenizer& tokenizer, std::span<const int32_t> ids, std::string_view text) {
  const std::optional<int32_t> open = tokenizer.vocab().find_special("<think>");
  const std::optional<int32_t> close = tokenizer.vocab().find_special("</think>");
  if (!open) return text.substr(0, text.find_last_not_of(" \n") + 1).ends_with("<think>");
  for (size_t i = ids.size(); i-- > 0;) {
    if (close && ids[i] == *close) return false;
    if (ids[i] == *open) return true;
  }
  return false;
}

}  // namespace

struct PromptRenderer::Impl {
  const Tokenizer& tokenizer;
  ChatTemplate chat_template;
  Json kwargs;
  std::optional<bool> thinking;
};

PromptRenderer::PromptRenderer(const Tokenizer& tokenizer, const TemplateOptions& options)
    : impl_(new Impl{tokenizer, make_template(tokenizer, options), options.kwargs, std::nullopt}) {
  impl_->thinking = take_thinking(impl_->kwargs, options.thinking);
}

PromptRenderer::~PromptRenderer() = default;

const std::string& PromptRenderer::source() const {
  return impl_->chat_template.source();
}

RenderedPrompt PromptRenderer::render(std::span<const Turn> turns, const RenderOptions& options) const {
  ChatTemplateInputs inputs;
  for (const Turn& turn : turns) inputs.messages.push_back(message_of(turn));
  for (const Tool& tool : options.tools) inputs.tools.push_back(tool_json(tool));
  inputs.add_generation_prompt = options.add_generation_prompt;
  Json kwargs = options.kwargs;
  inputs.enable_thinking = take_thinking(kwargs, options.thinking ? options.thinking : impl_->thinking);
  inputs.extra = impl_->kwargs;
  inputs.extra.update(kwargs);
  Result<ChatPrompt> rendered = impl_->chat_template.render_prompt(inputs);
  if (!rendered)
    throw ConfigError(fmt::format("{}; change the messages, or continue a text without a template",
                                  rendered.error().message),
                      Remedy::NoChatTemplate);
  RenderedPrompt prompt;
  prompt.ids = impl_->tokenizer.encode_segments(rendered->text, rendered->untrusted);
  prompt.in_reasoning = ends_in_reasoning(impl_->tokenizer, prompt.ids, rendered->text);
  return prompt;
}

}  // namespace thermo
