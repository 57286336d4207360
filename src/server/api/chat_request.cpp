// POST /v1/chat/completions and /v1/completions: bodies.
#include <fmt/format.h>

#include "server/api/content.h"
#include "server/api/shared_fields.h"
#include "server/api/turns.h"

namespace thermo {
namespace {

constexpr size_t kMaxAnswers = 1024;  // of /v1/completions

std::string arguments_text(const Json* arguments) {
  if (arguments == nullptr) return "{}";
  if (!arguments->is_string()) return arguments->dump(-1, ' ', false, Json::error_handler_t::replace);
  const auto& text = arguments->get_ref<const std::string&>();
  return text.empty() ? "{}" : text;
}

// The cache never changes an answer, so that nothing is done about it; a client that wants none is told.
void read_cache_prompt(Fields& fields, GenerationRequest& request) {
  if (fields.boolean("cache_prompt") == false) request.ignored_fields.push_back("cache_prompt");
}

// {"name", "arguments"}
ToolCall read_call(const Json& function, const std::string& path) {
  Fields fields(function, path);
  ToolCall call;
  const Json& name = fields.require("name");
  if (!name.is_string())
    throw invalid_value(fields.path("name"), fields.path("name") + ": a string was expected");
  call.name = name.get<std::string>();
  call.arguments = arguments_text(fields.find("arguments"));
  return call;
}

void read_tool_calls(const Json& calls, const std::string& path, Turn& turn) {
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string where = element_path(path, i);
    Fields fields(calls[i], where);
    const Json* function = fields.object("function");
    ToolCall call =
        function != nullptr ? read_call(*function, where + ".function") : read_call(calls[i], where);
    call.id = fields.string("id").value_or("");
    turn.tool_calls.push_back(std::move(call));
  }
}

std::string reasoning_of(Fields& fields) {
  for (const char* name : {"reasoning_content", "reasoning"}) {
    const Json* value = fields.find(name);
    if (value != nullptr && value->is_string() && !value->empty()) return value->get<std::string>();
  }
  std::string text;
  if (const Json* details = fields.array("reasoning_details"))
    for (const Json& one : *details)
      if (one.is_object() && one.contains("text") && one["text"].is_string())
        text += one["text"].get<std::string>();
  return text;
}

Turn read_message(const Json& message, const std::string& path, bool is_last, ImagePolicy images) {
  Fields fields(message, path);
  Turn turn;
  const Json& role = fields.require("role");
  if (!role.is_string()) throw invalid_value(path + ".role", path + ".role: a string was expected");
  turn.role = role.get<std::string>();
  if (turn.role == "function") turn.role = "tool";
  if (turn.role != "system" && turn.role != "developer" && turn.role != "user" && turn.role != "assistant" &&
      turn.role != "tool")
    throw invalid_value(path + ".role",
                        fmt::format("{}.role: '{}' is not known; system, developer, user, assistant or "
                                    "tool was expected",
                                    path, turn.role));
  const Place place = turn.role == "user" && is_last ? Place::Question : Place::Elsewhere;
  const Json* text = fields.find("content");
  if (!message.contains("content") && turn.role == "user") fields.require("content");
  Content content = read_content(text, path + ".content", place, images);
  turn.content = std::move(content.text);
  if (turn.role == "assistant") {
    turn.reasoning = reasoning_of(fields);
    if (turn.reasoning.empty()) turn.reasoning = std::move(content.reasoning);
    if (const Json* calls = fields.array("tool_calls")) read_tool_calls(*calls, path + ".tool_calls", turn);
    // The old form; its result is a turn of the role "function".
    if (const Json* call = fields.object("function_call"))
      turn.tool_calls.push_back(read_call(*call, path + ".function_call"));
    if (const auto refusal = fields.string("refusal"); refusal && turn.content.empty())
      turn.content = *refusal;
  }
  if (turn.role == "tool") turn.tool_call_id = fields.string("tool_call_id").value_or("");
  return turn;
}

void read_tools(Fields& fields, GenerationRequest& request) {
  fields.refuse("functions", "the old form is not supported; use tools");
  fields.refuse("function_call", "the old form is not supported; use tool_choice");
  const Json* tools = fields.array("tools");
  for (size_t i = 0; tools != nullptr && i < tools->size(); ++i) {
    const std::string path = element_path("tools", i);
    Fields tool((*tools)[i], path);
    const std::string type = tool.string("type").value_or("function");
    if (type != "function") {
      request.ignored_tools.push_back(type);
      continue;
    }
    const Json* function = tool.object("function");
    add_tool(request,
             function != nullptr ? read_function(*function, path + ".function", "parameters")
                                 : read_function((*tools)[i], path, "parameters"),
             function != nullptr ? path + ".function" : path);
  }
  if (const auto parallel = fields.boolean("parallel_tool_calls")) request.parallel_tools = *parallel;
}

CallChoice::Mode mode_of(const std::string& text, const std::string& path) {
  if (text == "auto") return CallChoice::Mode::Auto;
  if (text == "none") return CallChoice::Mode::None;
  if (text == "required" || text == "any") return CallChoice::Mode::Required;
  throw invalid_value(
      path, fmt::format("{}: '{}' is not known; auto, none, required or a tool was expected", path, text));
}

}  // namespace

// The forms of chat and of Responses differ in where the name stands.
std::string tool_name(const std::string& space, const std::string& name) {
  return space.empty() ? name : space + "__" + name;
}

void read_tool_choice(Fields& fields, GenerationRequest& request) {
  const Json* value = fields.find("tool_choice");
  if (value == nullptr) return;
  CallChoice& choice = request.tool_choice;
  if (value->is_string()) {
    choice.mode = mode_of(value->get<std::string>(), "tool_choice");
    return check_tool_choice(request);
  }
  Fields inner(*value, "tool_choice");
  const std::string type = inner.string("type").value_or("function");
  const auto name_in = [](const Json& object, const std::string& path) {
    const Json* holder = &object;
    if (object.is_object() && object.contains("function") && object["function"].is_object())
      holder = &object["function"];
    Fields named(*holder, path);
    const Json& name = named.require("name");
    if (!name.is_string()) throw invalid_value(path + ".name", path + ".name: a string was expected");
    return tool_name(named.string("namespace").value_or(""), name.get<std::string>());
  };
  if (type == "function" || type == "custom") {
    choice.mode = CallChoice::Mode::Required;
    choice.names = {name_in(*value, "tool_choice")};
  } else if (type == "allowed_tools") {
    const Json* nested = inner.object("allowed_tools");
    Fields allowed(nested != nullptr ? *nested : *value, "tool_choice");
    choice.mode = mode_of(allowed.string("mode").value_or("auto"), "tool_choice.mode");
    const Json& tools = allowed.require("tools");
    if (!tools.is_array() || tools.empty())
      throw invalid_value("tool_choice.tools", "tool_choice.tools: a list of one tool or more was expected");
    for (size_t i = 0; i < tools.size(); ++i)
      choice.names.push_back(name_in(tools[i], element_path("tool_choice.tools", i)));
  } else {
    throw unsupported("tool_choice",
                      fmt::format("tool_choice: a tool of type '{}' is not offered here", type));
  }
  check_tool_choice(request);
}

GenerationRequest read_chat_request(const Json& body, const RequestDefaults& defaults) {
  GenerationRequest request;
  request.dialect = Dialect::Chat;
  Fields fields(body);
  request.model = fields.string("model").value_or("");
  const Json& messages = fields.require("messages");
  if (!messages.is_array()) throw invalid_value("messages", "messages: a list was expected");
  for (size_t i = 0; i < messages.size(); ++i)
    request.turns.push_back(
        read_message(messages[i], element_path("messages", i), i + 1 == messages.size(), defaults.images));
  const std::optional<bool> proceed = fields.boolean("continue_final_message"),
                            prompted = fields.boolean("add_generation_prompt");
  if (proceed && prompted && *proceed == *prompted)
    throw invalid_value(
        "add_generation_prompt",
        "add_generation_prompt and continue_final_message contradict each other; give one of them");
  const bool last_is_answer = !request.turns.empty() && request.turns.back().role == "assistant";
  request.continue_last_turn =
      last_is_answer && (proceed.value_or(false) || !prompted.value_or(true) || defaults.prefill_assistant);
  normalise_turns(request, defaults);

  read_stream(fields, request);
  read_max_tokens(fields, {"max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict"}, request);
  read_stops(fields, "stop", defaults, request);
  read_sampling(fields, defaults, request);
  request.logprobs = fields.boolean("logprobs").value_or(false);
  const auto top = fields.integer("top_logprobs", 0, 20);
  if (top && *top > 0 && !request.logprobs)
    throw invalid_value("top_logprobs", "top_logprobs: logprobs has to be true for it");
  if (request.logprobs) request.sampling.n_probs = static_cast<int>(top.value_or(0));
  if (const auto scope = fields.string("logprobs_scope")) {
    if (*scope != "content" && *scope != "all")
      throw invalid_value(
          "logprobs_scope",
          fmt::format("logprobs_scope: '{}' is not known; content or all was expected", *scope));
    request.logprobs_of_all = *scope == "all";
  }
  read_tools(fields, request);
  read_tool_choice(fields, request);
  if (const Json* reasoning = fields.object("reasoning")) read_effort(*reasoning, defaults, request);
  if (const auto effort = fields.string("reasoning_effort"))
    set_effort(*effort, "reasoning_effort", defaults, request);
  read_reasoning(fields, defaults, request);
  if (const Json* format = fields.object("response_format")) read_format(*format, "response_format", request);
  read_format_extensions(fields, request);
  read_session(fields, request);

  fields.refuse("audio", "audio is not supported");
  if (const Json* modalities = fields.array("modalities"))
    for (const Json& one : *modalities)
      if (one != Json("text")) throw unsupported("modalities", "modalities: only text is written");
  fields.refuse("moderation", "not supported");
  fields.accept({"store", "metadata", "service_tier", "safety_identifier", "verbosity",
                 "prompt_cache_retention", "prompt_cache_options"});
  read_cache_prompt(fields, request);
  note_unknown(fields, request);
  return request;
}

GenerationRequest read_completions_request(const Json& body, const RequestDefaults& defaults) {
  GenerationRequest request;
  request.dialect = Dialect::Completions;
  request.reasoning_format = ReasoningFormat::InText;
  Fields fields(body);
  request.model = fields.string("model").value_or("");
  const Json& prompt = fields.require("prompt");
  if (prompt.is_string()) {
    request.prompts.emplace_back(prompt.get<std::string>());
  } else if (prompt.is_array() && !prompt.empty() && prompt[0].is_number()) {
    request.prompts.emplace_back(read_token_ids(prompt, "prompt", defaults.n_vocab));
  } else if (prompt.is_array() && !prompt.empty()) {
    for (size_t i = 0; i < prompt.size(); ++i) {
      const std::string path = element_path("prompt", i);
      if (prompt[i].is_string())
        request.prompts.emplace_back(prompt[i].get<std::string>());
      else if (prompt[i].is_array())
        request.prompts.emplace_back(read_token_ids(prompt[i], path, defaults.n_vocab));
      else
        throw invalid_value(path, path + ": a string or a list of token ids was expected");
    }
  } else {
    throw invalid_value("prompt", "prompt: a string, a list of strings or a list of token ids was expected");
  }
  request.echo = fields.boolean("echo").value_or(false);
  read_stream(fields, request);
  read_max_tokens(fields, {"max_tokens", "max_completion_tokens", "n_predict"}, request);
  if (!request.max_tokens) request.max_tokens = 16;
  read_stops(fields, "stop", defaults, request);
  read_sampling(fields, defaults, request);
  const size_t n_answers = request.prompts.size() * static_cast<size_t>(request.n);
  if (n_answers > kMaxAnswers)
    throw invalid_value(
        "prompt", fmt::format("prompt: {} answers were asked for, one request gets at most {}; send several",
                              n_answers, kMaxAnswers));
  if (const auto logprobs = fields.integer("logprobs", 0, 20)) {
    request.logprobs = true;
    request.sampling.n_probs = static_cast<int>(*logprobs);
  }
  request.suffix = fields.string("suffix").value_or("");
  if (request.echo && !request.suffix.empty())
    throw invalid_value("echo",
                        "echo: the prompt is not repeated where a suffix is given; leave one of them out");
  read_reasoning(fields, defaults, request);
  request.reasoning_format = ReasoningFormat::InText;
  if (const Json* format = fields.object("response_format")) read_format(*format, "response_format", request);
  read_format_extensions(fields, request);
  read_session(fields, request);
  read_cache_prompt(fields, request);
  note_unknown(fields, request);
  return request;
}

}  // namespace thermo
