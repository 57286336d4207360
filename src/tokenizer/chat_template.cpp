#include "tokenizer/chat_template.h"

#include <algorithm>

#include "base/error.h"

namespace thermo {

namespace {

constexpr const char* kChatMl =
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

Error invalid(std::string message) {
  return {ErrorCode::InvalidArgument, std::move(message)};
}

jinja::Template parse_or_throw(const std::string& source) {
  Result<jinja::Template> parsed = jinja::Template::parse(source);
  if (!parsed) throw LoadError("the chat template of the model cannot be used: " + parsed.error().message);
  return std::move(parsed).value();
}

// An array of text parts becomes their text; anything else stays, for templates that read parts.
void join_text_parts(Json& content) {
  if (!content.is_array()) return;
  std::string text;
  for (const Json& part : content) {
    if (part.is_string()) {
      text += part.get_ref<const std::string&>();
      continue;
    }
    const bool is_text = part.is_object() && part.contains("text") && part["text"].is_string() &&
                         (!part.contains("type") || part["type"] == "text");
    if (!is_text) return;
    text += part["text"].get_ref<const std::string&>();
  }
  content = std::move(text);
}

// Arguments as an object: what was a string is parsed, what is absent or blank is empty.
Status parse_arguments(Json& function, const std::string& where) {
  Json& arguments = function["arguments"];
  if (arguments.is_null()) arguments = Json::object();
  if (arguments.is_object()) return {};
  if (!arguments.is_string()) {
    return invalid(where + ".arguments is of type " + arguments.type_name() +
                   ", expected an object or its JSON text");
  }
  const std::string text = arguments.get<std::string>();
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
    arguments = Json::object();
    return {};
  }
  Json parsed = Json::parse(text, nullptr, false);
  if (!parsed.is_object())
    return invalid(where + ".arguments is not the JSON text of an object: " + text.substr(0, 80));
  arguments = std::move(parsed);
  return {};
}

Status prepare_call(Json& call, const std::string& where) {
  if (!call.is_object()) return invalid(where + " is of type " + call.type_name() + ", expected an object");
  if (!call.contains("function")) {
    Json function = Json::object();
    for (const char* key : {"name", "arguments"}) {
      if (!call.contains(key)) continue;
      function[key] = std::move(call[key]);
      call.erase(key);
    }
    call["function"] = std::move(function);
  }
  Json& function = call["function"];
  if (!function.is_object() || !function.contains("name") || !function["name"].is_string()) {
    return invalid(where + ".function has no name, expected an object with a string \"name\"");
  }
  return parse_arguments(function, where + ".function");
}

Status prepare_message(Json& message, const std::string& where) {
  if (!message.is_object())
    return invalid(where + " is of type " + message.type_name() + ", expected an object");
  if (message.contains("content")) join_text_parts(message["content"]);
  if (!message.contains("tool_calls") || message["tool_calls"].is_null()) return {};
  Json& calls = message["tool_calls"];
  if (!calls.is_array())
    return invalid(where + ".tool_calls is of type " + calls.type_name() + ", expected an array");
  for (size_t i = 0; i < calls.size(); ++i) {
    const Status status = prepare_call(calls[i], where + ".tool_calls[" + std::to_string(i) + "]");
    if (!status) return status;
  }
  return {};
}

}  // namespace

Result<Json> prepare_messages(const Json& messages) {
  if (!messages.is_array()) {
    return invalid(std::string("messages is of type ") + messages.type_name() + ", expected an array");
  }
  Json prepared = messages;
  for (size_t i = 0; i < prepared.size(); ++i) {
    const Status status = prepare_message(prepared[i], "messages[" + std::to_string(i) + "]");
    if (!status) return status.error();
  }
  return prepared;
}

ChatTemplate::ChatTemplate(std::string source, std::string bos, std::string eos)
    : is_fallback_(source.empty()),
      source_(is_fallback_ ? kChatMl : std::move(source)),
      bos_(std::move(bos)),
      eos_(std::move(eos)),
      template_(parse_or_throw(source_)) {}

std::string_view ChatTemplate::note() const noexcept {
  return is_fallback_
             ? "the model file has no chat template; ChatML is used, which may not be what the model learned"
             : "";
}

Result<ChatPrompt> ChatTemplate::render_prompt(const ChatTemplateInputs& inputs) const {
  Result<Json> messages = prepare_messages(inputs.messages);
  if (!messages) return messages.error();
  if (!inputs.tools.is_null() && !inputs.tools.is_array()) {
    return invalid(std::string("tools is of type ") + inputs.tools.type_name() + ", expected an array");
  }
  if (!inputs.extra.is_null() && !inputs.extra.is_object()) {
    return invalid(std::string("the extra names for the template are of type ") + inputs.extra.type_name() +
                   ", expected an object");
  }
  jinja::RenderOptions options;
  Json context = Json::object();
  // What is not given stays undefined: templates ask with "is defined".
  for (const auto& [name, value] : inputs.extra.items()) {
    context[name] = value;
    options.untrusted_names.push_back(name);
  }
  context.erase("tools");
  context["messages"] = std::move(messages).value();
  context["add_generation_prompt"] = inputs.add_generation_prompt;
  options.untrusted_names.push_back("messages");
  if (!inputs.tools.is_null() && !inputs.tools.empty()) {
    context["tools"] = inputs.tools;
    options.untrusted_names.push_back("tools");
  }
  if (inputs.enable_thinking) context["enable_thinking"] = *inputs.enable_thinking;
  for (const auto& [name, text] : {std::pair("bos_token", &bos_), std::pair("eos_token", &eos_)}) {
    context[name] = *text;
    std::erase(options.untrusted_names, name);
  }

  Result<jinja::Rendered> rendered = template_.render(context, options);
  if (!rendered)
    return Error{rendered.error().code,
                 "the chat template refused the messages: " + rendered.error().message};
  ChatPrompt prompt;
  prompt.text = std::move(rendered->text);
  prompt.untrusted = std::move(rendered->marked);
  return prompt;
}

Result<std::string> ChatTemplate::render(const ChatTemplateInputs& inputs) const {
  Result<ChatPrompt> prompt = render_prompt(inputs);
  if (!prompt) return prompt.error();
  return std::move(prompt->text);
}

}  // namespace thermo
