// POST /v1/messages: the body.
#include <fmt/format.h>

#include <algorithm>

#include "server/api/content.h"
#include "server/api/shared_fields.h"
#include "server/api/turns.h"

namespace thermo {
namespace {

constexpr const char* kEffort = "output_config.effort";

std::string string_of(const Json& block, const char* name, const std::string& path) {
  const auto found = block.find(name);
  if (found == block.end() || !found->is_string())
    throw invalid_value(path + "." + name, fmt::format("{}.{}: a string was expected", path, name));
  return found->get<std::string>();
}

bool has_cache_mark(const Json& block) {
  return block.is_object() && block.contains("cache_control") && block["cache_control"].is_object();
}

bool is_hosted_result(const std::string& type) {
  return type == "server_tool_use" || type == "mcp_tool_use" || type == "mcp_tool_result" ||
         type == "container_upload" || (type.ends_with("_tool_result") && type != "tool_result");
}

// The blocks of one message become one or more turns, in their order.
class MessageReader {
 public:
  MessageReader(GenerationRequest& request, std::string role, std::string path, bool is_last,
                ImagePolicy images)
      : request_(request),
        role_(std::move(role)),
        path_(std::move(path)),
        place_(role_ == "user" && is_last ? Place::Question : Place::Elsewhere),
        images_(images) {}

  void read(const Json& content) {
    if (content.is_string()) {
      turn().content = content.get<std::string>();
      return;
    }
    if (!content.is_array())
      throw invalid_value(path_, path_ + ": a string or a list of blocks was expected");
    for (size_t i = 0; i < content.size(); ++i) {
      read_block(content[i], element_path(path_, i));
      if (has_cache_mark(content[i])) mark();
    }
    if (content.empty()) turn();
  }

 private:
  // The turn that text goes to.
  Turn& turn() {
    if (!open_) request_.turns.push_back({role_, ""});
    open_ = true;
    return request_.turns.back();
  }

  // What was read so far is likely to come again.
  void mark() {
    if (request_.turns.empty()) return;
    Turn& last = request_.turns.back();
    last.marks.push_back(last.content.size());
  }

  void read_block(const Json& block, const std::string& path) {
    Fields fields(block, path);
    const std::string type = fields.string("type").value_or("text");
    if (type == "text") {
      turn().content += string_of(block, "text", path);
    } else if (type == "image") {
      turn().content += read_image(block, path, place_, images_);
    } else if (type == "document" || type == "search_result") {
      turn().content += inner_text(block, path);
    } else if (type == "thinking") {
      turn().reasoning += string_of(block, "thinking", path);
    } else if (type == "redacted_thinking" || is_hosted_result(type)) {
      return;
    } else if (type == "tool_use") {
      ToolCall call;
      call.id = fields.string("id").value_or("");
      call.name = string_of(block, "name", path);
      const Json* input = fields.find("input");
      call.arguments = input == nullptr ? "{}" : input->dump(-1, ' ', false, Json::error_handler_t::replace);
      turn().tool_calls.push_back(std::move(call));
    } else if (type == "tool_result") {
      Turn result{"tool", inner_text(block, path)};
      result.tool_call_id = fields.string("tool_use_id").value_or("");
      if (fields.boolean("is_error").value_or(false) && !result.content.starts_with("Error: "))
        result.content = "Error: " + result.content;
      request_.turns.push_back(std::move(result));
      open_ = false;
    } else {
      throw unsupported(path + ".type",
                        fmt::format("{}.type: blocks of type '{}' cannot be read", path, type));
    }
  }

  // The text of a block that has content of its own: blocks, documents among them.
  std::string inner_text(const Json& block, const std::string& path) {
    Fields fields(block, path);
    const std::string kind = fields.string("type").value_or("");
    if (kind == "document" || kind == "search_result") {
      const Json* citations = fields.object("citations");
      if (citations != nullptr && citations->value("enabled", Json()) == Json(true))
        request_.ignored_fields.push_back(fields.path("citations"));
      fields.accept({kind == "document" ? "source" : "content", "cache_control"});
      note_unknown(fields, request_);
    }
    if (kind == "document") {
      const Json* source = fields.object("source");
      const Json type = source != nullptr ? source->value("type", Json()) : Json();
      if (type == Json("content")) return inner_text(*source, path + ".source");
      if (type != Json("text"))
        throw unsupported(path + ".source", path + ".source: only documents that are text can be read");
      return string_of(*source, "data", path + ".source");
    }
    const Json* content = fields.find("content");
    if (content == nullptr || !content->is_array())
      return read_content(content, path + ".content", Place::Elsewhere, images_).text;
    std::string text;
    for (size_t i = 0; i < content->size(); ++i) {
      const Json& inner = (*content)[i];
      const std::string where = element_path(path + ".content", i);
      const std::string type =
          inner.is_object() ? Fields(inner, where).string("type").value_or("text") : "text";
      if (type == "document" || type == "search_result") {
        text += inner_text(inner, where);
      } else if (type == "tool_reference") {
        text += string_of(inner, "tool_name", where);
      } else {
        const Json one = Json::array({inner});
        text += read_content(&one, path + ".content", Place::Elsewhere, images_).text;
      }
    }
    return text;
  }

  GenerationRequest& request_;
  std::string role_, path_;
  Place place_;
  ImagePolicy images_;
  bool open_ = false;
};

void read_system(const Json& system, const RequestDefaults& defaults, GenerationRequest& request) {
  if (system.is_string()) {
    request.turns.push_back({"system", system.get<std::string>()});
    return;
  }
  if (!system.is_array()) throw invalid_value("system", "system: a string or a list of blocks was expected");
  std::string text;
  std::vector<size_t> marks;
  for (size_t i = 0; i < system.size(); ++i) {
    const std::string block = string_of(system[i], "text", element_path("system", i));
    if (i == 0 && block.starts_with("x-anthropic-billing-header:") && !defaults.keep_billing_header) continue;
    if (!text.empty()) text += "\n\n";
    text += block;
    if (has_cache_mark(system[i])) marks.push_back(text.size());
  }
  request.turns.push_back({"system", text});
  request.turns.back().marks = std::move(marks);
}

void read_tools(Fields& fields, GenerationRequest& request) {
  const Json* tools = fields.array("tools");
  for (size_t i = 0; tools != nullptr && i < tools->size(); ++i) {
    const std::string path = element_path("tools", i);
    Fields tool((*tools)[i], path);
    const std::string type = tool.string("type").value_or("custom");
    if (type != "custom" || !tool.has("input_schema")) {
      request.ignored_tools.push_back(type != "custom" ? type : tool.string("name").value_or("?"));
      continue;
    }
    add_tool(request, read_function((*tools)[i], path, "input_schema"), path);
  }
  const Json* choice = fields.object("tool_choice");
  if (choice == nullptr) return;
  Fields inner(*choice, "tool_choice");
  const std::string type = inner.string("type").value_or("auto");
  if (inner.boolean("disable_parallel_tool_use").value_or(false)) request.parallel_tools = false;
  if (type == "any" || type == "tool")
    request.tool_choice.mode = CallChoice::Mode::Required;
  else if (type == "none")
    request.tool_choice.mode = CallChoice::Mode::None;
  else if (type != "auto")
    throw invalid_value("tool_choice.type",
                        fmt::format("tool_choice.type: '{}' is not known; auto, any, tool or none "
                                    "was expected",
                                    type));
  if (type == "tool") request.tool_choice.names = {string_of(*choice, "name", "tool_choice")};
  check_tool_choice(request);
}

// Returns the effort that is asked for.
std::optional<std::string> read_thinking(Fields& fields, const RequestDefaults& defaults,
                                         GenerationRequest& request) {
  std::optional<std::string> effort;
  if (const Json* output = fields.object("output_config")) {
    Fields inner(*output, "output_config");
    effort = inner.string("effort");
    if (const Json* format = inner.object("format")) read_format(*format, "output_config.format", request);
    note_unknown(inner, request);
  }
  const Json* thinking = fields.object("thinking");
  if (thinking == nullptr) {
    if (effort) set_effort(*effort, kEffort, defaults, request);
    if (!defaults.anthropic_thinking) request.thinking = false;
    return effort;
  }
  Fields inner(*thinking, "thinking");
  const std::string type = inner.string("type").value_or("enabled");
  inner.accept({"display"});
  if (type == "disabled") {
    request.thinking = false;
  } else if (type == "adaptive" || type == "enabled") {
    set_effort(effort.value_or("high"), kEffort, defaults, request);
    request.thinking = true;
    if (const auto budget = inner.integer("budget_tokens", 0, 1 << 30)) {
      request.thinking_budget = static_cast<int>(*budget);
      request.thinking = *budget > 0;
    }
  } else {
    throw invalid_value("thinking.type",
                        fmt::format("thinking.type: '{}' is not known; enabled, adaptive or disabled "
                                    "was expected",
                                    type));
  }
  return effort;
}

}  // namespace

GenerationRequest read_messages_request(const Json& body, const RequestDefaults& defaults) {
  GenerationRequest request;
  request.dialect = Dialect::Messages;
  Fields fields(body);
  request.model = fields.string("model").value_or("");
  if (const Json* system = fields.find("system")) read_system(*system, defaults, request);
  const Json& messages = fields.require("messages");
  if (!messages.is_array()) throw invalid_value("messages", "messages: a list was expected");
  if (messages.empty()) throw invalid_value("messages", "messages: there are none; at least one is needed");
  for (size_t i = 0; i < messages.size(); ++i) {
    const std::string path = element_path("messages", i);
    Fields message(messages[i], path);
    const std::string role = message.string("role").value_or("");
    if (role != "user" && role != "assistant" && role != "system")
      throw invalid_value(
          path + ".role",
          fmt::format("{}.role: '{}' is not known; user or assistant was expected", path, role));
    if (!messages[i].contains("content")) message.require("content");
    const Json* content = message.find("content");
    MessageReader(request, role, path + ".content", i + 1 == messages.size(), defaults.images)
        .read(content != nullptr ? *content : Json::array());
  }
  if (request.turns.empty())
    throw invalid_value("messages", "messages: no block in them can be read; at least one text is needed");
  request.continue_last_turn = request.turns.back().role == "assistant";
  normalise_turns(request, defaults);

  read_max_tokens(fields, {"max_tokens"}, request);
  read_stream(fields, request);
  read_stops(fields, "stop_sequences", defaults, request);
  read_sampling(fields, defaults, request);
  if (request.n != 1)
    throw unsupported("n", "n: a message has one answer; send the request again for another");
  read_tools(fields, request);
  const std::optional<std::string> effort = read_thinking(fields, defaults, request);
  read_reasoning(fields, defaults, request);
  if (effort && *effort != "none" && request.thinking == false) {
    if (std::find(request.ignored_fields.begin(), request.ignored_fields.end(), kEffort) ==
        request.ignored_fields.end())
      request.ignored_fields.push_back(kEffort);  // of no thinking
    request.effort.clear();
  }
  read_format_extensions(fields, request);
  read_session(fields, request);
  if (const Json* metadata = fields.object("metadata")) {
    const auto user = metadata->find("user_id");
    if (user != metadata->end() && user->is_string()) request.user = user->get<std::string>();
  }
  fields.accept(
      {"service_tier", "container", "context_management", "inference_geo", "cache_control", "betas"});
  note_unknown(fields, request);
  return request;
}

}  // namespace thermo
