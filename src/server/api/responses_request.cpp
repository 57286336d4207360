// POST /v1/responses: the body. Consecutive items of the assistant's side (reasoning, message, calls) form
// one turn.
#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "server/api/content.h"
#include "server/api/sealed_reasoning.h"
#include "server/api/shared_fields.h"
#include "server/api/turns.h"

namespace thermo {
namespace {

class InputReader {
 public:
  InputReader(GenerationRequest& request, ImagePolicy images, const Json& items)
      : request_(request), images_(images) {
    for (const Json& item : items) {
      const std::string type = item.is_object() ? text_in(item, "type") : "";
      if (type.ends_with("_output")) answered_.insert(id_in(item));
      if (type.ends_with("_call")) called_.insert(id_in(item));
    }
  }

  void read(const Json& item, const std::string& path, bool is_last) {
    Fields fields(item, path);
    const std::string type = fields.string("type").value_or("message");
    if (type == "message") return read_message(fields, path, is_last);
    if (type == "reasoning") return read_reasoning_item(fields, path);
    if (type == "function_call" || type == "custom_tool_call")
      return read_call(fields, type == "custom_tool_call");
    if (type == "function_call_output" || type == "custom_tool_call_output") return read_output(fields, path);
    // Of hosted tools: shown where both sides are there.
    if (type.ends_with("_call_output") || type == "tool_search_output") {
      if (called_.contains(id_in(item))) read_output(fields, path);
      return;
    }
    if (type.ends_with("_call")) {
      if (answered_.contains(id_in(item))) read_hosted_call(fields, type);
      return;
    }
    if (type == "item_reference" || type == "compaction")
      throw unsupported(
          path + ".type",
          fmt::format("{}.type: items of type '{}' need stored responses, which this server does not have; "
                      "send the items themselves (many clients do with \"store\": false)",
                      path, type));
    if (type == "additional_tools") return;  // read with the tools
    request_.ignored_fields.push_back(path);
  }

  // Reasoning without an answer: the turn ends with it.
  void finish() {
    if (!reasoning_.empty()) assistant();
  }

 private:
  static std::string text_in(const Json& item, const char* name) {
    const auto found = item.find(name);
    return found != item.end() && found->is_string() ? found->get<std::string>() : "";
  }
  // The id of a call, or of the call that an output belongs to.
  static std::string id_in(const Json& item) {
    const std::string call_id = text_in(item, "call_id");
    return call_id.empty() ? text_in(item, "id") : call_id;
  }

  Turn& assistant() {
    if (request_.turns.empty() || request_.turns.back().role != "assistant" || !assistant_open_)
      request_.turns.push_back({"assistant", ""});
    assistant_open_ = true;
    Turn& turn = request_.turns.back();
    turn.reasoning += std::exchange(reasoning_, {});
    return turn;
  }

  void read_message(Fields& fields, const std::string& path, bool is_last) {
    const std::string role = fields.string("role").value_or("user");
    if (role != "user" && role != "system" && role != "developer" && role != "assistant")
      throw invalid_value(path + ".role", fmt::format("{}.role: '{}' is not known", path, role));
    const Place place = role == "user" && is_last ? Place::Question : Place::Elsewhere;
    Content content = read_content(fields.find("content"), path + ".content", place, images_);
    fields.accept({"id", "status", "phase"});
    if (role == "assistant") {
      assistant().content += content.text;
      return;
    }
    finish();
    assistant_open_ = false;
    request_.turns.push_back({role, std::move(content.text)});
  }

  void read_reasoning_item(Fields& fields, const std::string& path) {
    const auto gather = [&](const char* name) {
      const Json* list = fields.array(name);
      Content content;
      if (list != nullptr) content = read_content(list, path + "." + name, Place::Elsewhere, images_);
      return content.text + content.reasoning;
    };
    std::string text = gather("content");
    if (const Json* sealed = fields.find("encrypted_content"); text.empty() && sealed && sealed->is_string())
      text = open_reasoning(sealed->get_ref<const std::string&>()).value_or("");
    if (text.empty()) text = gather("summary");
    // Reasoning that follows the answer of the same turn begins another one.
    if (assistant_open_ && !request_.turns.empty() && !request_.turns.back().content.empty())
      assistant_open_ = false;
    reasoning_ += text;
  }

  void read_call(Fields& fields, bool custom) {
    ToolCall call;
    call.id = fields.string("call_id").value_or("");
    call.name = tool_name(fields.string("namespace").value_or(""), fields.string("name").value_or(""));
    if (custom)
      call.arguments = Json{{"input", fields.string("input").value_or("")}}.dump(
          -1, ' ', false, Json::error_handler_t::replace);
    else
      call.arguments = fields.string("arguments").value_or("{}");
    assistant().tool_calls.push_back(std::move(call));
  }

  void read_output(Fields& fields, const std::string& path) {
    Turn turn{"tool", ""};
    turn.tool_call_id = fields.string("call_id").value_or(fields.string("id").value_or(""));
    const Json* output = fields.find("output");
    // Text and parts of text, or (of hosted tools) whatever they say.
    const bool is_text =
        output == nullptr || output->is_string() ||
        (output->is_array() && std::all_of(output->begin(), output->end(), [](const Json& part) {
           return part.is_string() || (part.is_object() && part.contains("type"));
         }));
    if (!is_text && (output->is_object() || output->is_array()))
      turn.content = output->dump(-1, ' ', false, Json::error_handler_t::replace);
    else
      turn.content = read_content(output, path + ".output", Place::Elsewhere, images_).text;
    finish();
    assistant_open_ = false;
    request_.turns.push_back(std::move(turn));
  }

  void read_hosted_call(Fields& fields, const std::string& type) {
    const Json* action = fields.find("action");
    ToolCall call;
    call.id = fields.string("call_id").value_or(fields.string("id").value_or(""));
    call.name = type.substr(0, type.size() - 5);
    call.arguments = action != nullptr && action->is_object()
                         ? action->dump(-1, ' ', false, Json::error_handler_t::replace)
                         : "{}";
    assistant().tool_calls.push_back(std::move(call));
  }

  GenerationRequest& request_;
  ImagePolicy images_;
  std::set<std::string> answered_, called_;  // ids of calls that have an output; and of calls
  std::string reasoning_;                    // for the assistant's turn that follows
  bool assistant_open_ = false;
};

void read_tool(const Json& value, const std::string& path, const std::string& space,
               GenerationRequest& request) {
  Fields tool(value, path);
  const std::string type = tool.string("type").value_or("function");
  if (type == "function") {
    Tool read = read_function(value, path, "parameters");
    const std::string name = read.name;
    read.name = tool_name(space, name);
    if (!space.empty()) request.tool_origins[read.name] = {.space = space, .name = name};
    add_tool(request, std::move(read), path);
  } else if (type == "custom") {
    Tool read = read_function(value, path, "no schema");
    const std::string name = read.name;
    read.name = tool_name(space, name);
    read.parameters = {{"type", "object"},
                       {"properties", {{"input", {{"type", "string"}}}}},
                       {"required", Json::array({"input"})}};
    request.tool_origins[read.name] = {.space = space, .name = name, .custom = true};
    add_tool(request, std::move(read), path);
  } else if (type == "namespace") {
    const std::string name = tool.string("name").value_or("");
    if (const Json* inner = tool.array("tools"))
      for (size_t i = 0; i < inner->size(); ++i)
        read_tool((*inner)[i], element_path(path + ".tools", i), name, request);
  } else {
    request.ignored_tools.push_back(type);
  }
}

}  // namespace

GenerationRequest read_responses_request(const Json& body, const RequestDefaults& defaults) {
  GenerationRequest request;
  request.dialect = Dialect::Responses;
  Fields fields(body);
  request.model = fields.string("model").value_or("");
  for (const char* name : {"previous_response_id", "conversation"})
    fields.refuse(name, "this server keeps no responses; send the whole input");
  fields.refuse("background", "answers are not made in the background");
  fields.refuse("prompt", "stored prompts are not supported; send instructions and input");
  if (const auto truncation = fields.string("truncation"); truncation && *truncation != "disabled")
    throw unsupported("truncation", "truncation: prompts are never cut; use \"disabled\"");

  if (const Json* instructions = fields.find("instructions")) {
    if (!instructions->is_string())
      throw invalid_value("instructions", "instructions: a string was expected");
    if (!instructions->empty()) request.turns.push_back({"system", instructions->get<std::string>()});
  }
  const Json& input = fields.require("input");
  if (input.is_string()) {
    request.turns.push_back({"user", input.get<std::string>()});
  } else if (input.is_array()) {
    InputReader reader(request, defaults.images, input);
    for (size_t i = 0; i < input.size(); ++i)
      reader.read(input[i], element_path("input", i), i + 1 == input.size());
    reader.finish();
    if (request.turns.empty()) throw invalid_value("input", "input: there is nothing to answer");
  } else {
    throw invalid_value("input", "input: a string or a list of items was expected");
  }
  normalise_turns(request, defaults);

  read_stream(fields, request);
  read_max_tokens(fields, {"max_output_tokens", "max_tokens"}, request);
  read_stops(fields, "stop", defaults, request);
  read_sampling(fields, defaults, request);
  if (request.n != 1) throw unsupported("n", "n: a response has one answer");
  const auto top = fields.integer("top_logprobs", 0, 20);
  if (const Json* include = fields.array("include"))
    for (const Json& one : *include) {
      request.logprobs |= one == Json("message.output_text.logprobs");
      request.seal_reasoning |= one == Json("reasoning.encrypted_content");
    }
  if (request.logprobs) request.sampling.n_probs = static_cast<int>(top.value_or(0));

  const Json* tools = fields.array("tools");
  for (size_t i = 0; tools != nullptr && i < tools->size(); ++i)
    read_tool((*tools)[i], element_path("tools", i), "", request);
  if (input.is_array())
    for (size_t i = 0; i < input.size(); ++i)
      if (input[i].is_object() && input[i].value("type", Json()) == Json("additional_tools") &&
          input[i].contains("tools") && input[i]["tools"].is_array())
        for (size_t k = 0; k < input[i]["tools"].size(); ++k)
          read_tool(input[i]["tools"][k], element_path(element_path("input", i) + ".tools", k), "", request);
  read_tool_choice(fields, request);
  if (const auto parallel = fields.boolean("parallel_tool_calls")) request.parallel_tools = *parallel;
  if (const Json* reasoning = fields.object("reasoning")) read_effort(*reasoning, defaults, request);
  read_reasoning(fields, defaults, request);
  if (const Json* text = fields.object("text")) {
    Fields inner(*text, "text");
    if (const Json* format = inner.object("format")) read_format(*format, "text.format", request);
    inner.accept({"verbosity"});
  }
  read_format_extensions(fields, request);
  read_session(fields, request);
  fields.accept({"store", "metadata", "client_metadata", "service_tier", "safety_identifier",
                 "prompt_cache_retention", "context_management", "max_tool_calls"});
  note_unknown(fields, request);

  Json& echoed = request.echoed;
  const auto echo = [&](const char* name, Json otherwise) {
    const auto found = body.find(name);
    echoed[name] = found == body.end() || found->is_null() ? std::move(otherwise) : *found;
  };
  echo("instructions", nullptr);
  echo("max_output_tokens", nullptr);
  echo("metadata", Json::object());
  echo("parallel_tool_calls", true);
  echo("prompt_cache_key", nullptr);
  echo("reasoning", {{"effort", nullptr}, {"summary", nullptr}});
  echo("text", {{"format", {{"type", "text"}}}});
  echo("tool_choice", "auto");
  echo("tools", Json::array());
  echo("user", nullptr);
  return request;
}

}  // namespace thermo
