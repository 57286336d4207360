#include "server/api/shared_fields.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <climits>

namespace thermo {
namespace {

constexpr size_t kMaxStops = 16, kMaxStopBytes = 256, kMaxTools = 4096;
constexpr int kMaxChoices = 16;
constexpr double kLeastPing = 0.1;  // seconds; more often than that is load and no sign of life

void set(std::optional<double> value, float& target) {
  if (value) target = static_cast<float>(*value);
}

// An id, or else a text: then the tokens that it has.
std::vector<int32_t> tokens_of_key(const std::string& key, const std::string& path,
                                   const RequestDefaults& defaults) {
  int32_t id = -1;
  const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
  const bool is_number = error != std::errc::invalid_argument && end == key.data() + key.size();
  if (!is_number && !key.empty() && defaults.tokens_of) return defaults.tokens_of(key);
  if (!is_number || error != std::errc() || id < 0 || id >= defaults.n_vocab)
    throw invalid_value(
        path, fmt::format("{}: a token id of 0..{} or a text was expected", path, defaults.n_vocab - 1));
  return {id};
}

void read_logit_bias(Fields& fields, const RequestDefaults& defaults, SamplingParams& sampling) {
  const Json* bias = fields.object("logit_bias");
  if (bias == nullptr) return;
  for (const auto& [key, value] : bias->items()) {
    const std::string path = fields.path("logit_bias") + "." + key;
    const bool banned = value == Json(false);
    if (!banned && (!value.is_number() || value.get<double>() < -100.0 || value.get<double>() > 100.0))
      throw invalid_value(path, path + ": a number of -100..100 or false was expected");
    for (const int32_t id : tokens_of_key(key, path, defaults))
      sampling.logit_bias[id] = banned ? kBanToken : value.get<float>();
  }
}

// Texts at which a repeated run ends. They are looked up only where DRY is on.
void read_dry_breakers(Fields& fields, const RequestDefaults& defaults, SamplingParams& sampling) {
  std::vector<std::string> texts = defaults.dry_breakers;
  if (const Json* list = fields.array("dry_sequence_breakers")) {
    const std::string path = fields.path("dry_sequence_breakers");
    if (list->size() > kMaxDryBreakers)
      throw invalid_value(path, fmt::format("{}: {} texts were given, at most {} can end a run", path,
                                            list->size(), kMaxDryBreakers));
    texts.clear();
    for (size_t i = 0; i < list->size(); ++i) {
      const Json& text = (*list)[i];
      const size_t n = text.is_string() ? text.get_ref<const std::string&>().size() : 0;
      if (n == 0 || n > kMaxDryBreakerBytes)
        throw invalid_value(element_path(path, i), fmt::format("{}: a text of 1 to {} bytes was expected",
                                                               element_path(path, i), kMaxDryBreakerBytes));
      texts.push_back(text.get<std::string>());
    }
  }
  if (sampling.dry_multiplier > 0.0f && defaults.breakers_of)
    sampling.dry_breakers = defaults.breakers_of(texts);
}

}  // namespace

void read_sampling(Fields& fields, const RequestDefaults& defaults, GenerationRequest& request) {
  SamplingParams& s = request.sampling = defaults.sampling;
  set(fields.number("temperature", 0.0, 5.0), s.temperature);
  set(fields.number("top_p", 0.0, 1.0), s.top_p);
  set(fields.number("min_p", 0.0, 1.0), s.min_p);
  set(fields.number("typical_p", 0.0, 1.0), s.typical_p);
  set(fields.number("top_n_sigma", -1.0, 100.0), s.top_n_sigma);
  set(fields.number("xtc_probability", 0.0, 1.0), s.xtc_probability);
  set(fields.number("xtc_threshold", 0.0, 1.0), s.xtc_threshold);
  set(fields.number("presence_penalty", -2.0, 2.0), s.presence_penalty);
  set(fields.number("frequency_penalty", -2.0, 2.0), s.frequency_penalty);
  set(fields.number("repeat_penalty", 0.1, 10.0), s.repetition_penalty);
  set(fields.number("repetition_penalty", 0.1, 10.0), s.repetition_penalty);
  set(fields.number("dry_multiplier", 0.0, 100.0), s.dry_multiplier);
  set(fields.number("dry_base", 1.0, 10.0), s.dry_base);
  if (const auto value = fields.integer("top_k", -1, defaults.n_vocab)) s.top_k = static_cast<int>(*value);
  if (const auto value = fields.integer("repeat_last_n", -1, defaults.n_ctx))
    s.repeat_last_n = static_cast<int>(*value);
  if (const auto value = fields.integer("dry_allowed_length", 1, 1 << 20))
    s.dry_allowed_length = static_cast<int>(*value);
  if (const auto value = fields.integer("dry_penalty_last_n", -1, defaults.n_ctx))
    s.dry_penalty_last_n = static_cast<int>(*value);
  if (const auto value = fields.integer("min_tokens", 0, 1 << 30)) s.min_tokens = static_cast<int>(*value);
  if (const auto value = fields.boolean("ignore_eos")) s.ignore_eos = *value;
  if (const Json* seed = fields.find("seed")) {
    if (seed->is_number_unsigned())
      s.seed = seed->get<uint64_t>();
    else if (*seed != Json(-1))
      throw invalid_value(fields.path("seed"), "seed: a whole number of 0..2^64-1, or -1 was expected");
  }
  read_logit_bias(fields, defaults, s);
  read_dry_breakers(fields, defaults, s);
  for (const char* name : {"mirostat", "samplers"}) fields.refuse(name, "this sampler is not supported");
  fields.accept({"mirostat_tau", "mirostat_eta"});
  if (const auto n = fields.integer("n", 1, kMaxChoices)) {
    request.n = static_cast<int>(*n);
    if (request.n > defaults.max_choices)
      throw invalid_value(fields.path("n"),
                          fmt::format("n: {} answers were asked for, at most {} are written at once",
                                      request.n, defaults.max_choices));
  }
  if (const auto best_of = fields.integer("best_of", 1, kMaxChoices); best_of && *best_of > request.n)
    throw unsupported(fields.path("best_of"), "best_of: more answers than n are not made");
}

void read_max_tokens(Fields& fields, std::initializer_list<const char*> names, GenerationRequest& request) {
  for (const char* name : names) {
    const auto value = fields.integer(name, -1, INT64_MAX);
    if (!value || request.max_tokens) continue;
    if (*value >= 0) request.max_tokens = static_cast<int>(std::min<int64_t>(*value, 1 << 30));
  }
}

std::vector<int32_t> read_token_ids(const Json& list, const std::string& path, int n_vocab) {
  std::vector<int32_t> ids;
  for (const Json& id : list) {
    const bool is_id = id.is_number_unsigned() && id.get<uint64_t>() < static_cast<uint64_t>(n_vocab);
    if (!is_id)
      throw invalid_value(path, fmt::format("{}: token ids of 0..{} were expected", path, n_vocab - 1));
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

void read_stops(Fields& fields, const std::string& name, const RequestDefaults& defaults,
                GenerationRequest& request) {
  const Json* value = fields.find(name);
  const std::string path = fields.path(name);
  const auto add = [&](const Json& stop) {
    if (!stop.is_string()) throw invalid_value(path, path + ": a string or a list of strings was expected");
    const auto& text = stop.get_ref<const std::string&>();
    if (text.empty() || text.size() > kMaxStopBytes)
      throw invalid_value(
          path, fmt::format("{}: a text of {} bytes cannot end an answer, 1 to {} were expected", path,
                            text.size(), kMaxStopBytes));
    request.stops.push_back(text);
  };
  if (value != nullptr && value->is_array()) {
    if (value->size() > kMaxStops)
      throw invalid_value(path, fmt::format("{}: {} texts were given, at most {} can end an answer", path,
                                            value->size(), kMaxStops));
    for (const Json& stop : *value) add(stop);
  } else if (value != nullptr) {
    add(*value);
  }
  if (const Json* ids = fields.array("stop_token_ids"))
    request.stop_token_ids = read_token_ids(*ids, fields.path("stop_token_ids"), defaults.n_vocab);
  if (const auto scope = fields.string("stop_scope")) {
    if (*scope != "content" && *scope != "all")
      throw invalid_value(fields.path("stop_scope"),
                          fmt::format("{}: '{}' is not known; content or all was expected",
                                      fields.path("stop_scope"), *scope));
    request.stop_everywhere = *scope == "all";
  }
}

void read_stream(Fields& fields, GenerationRequest& request) {
  request.stream = fields.boolean("stream").value_or(false);
  if (const Json* options = fields.object("stream_options")) {
    Fields inner(*options, "stream_options");
    request.include_usage = inner.boolean("include_usage").value_or(false);
    inner.accept({"include_obfuscation"});
    note_unknown(inner, request);
  }
  request.return_progress = fields.boolean("return_progress").value_or(false);
  request.timings_per_token = fields.boolean("timings_per_token").value_or(false);
  request.ping_seconds = fields.number("sse_ping_interval", -1.0, 3600.0);
  if (const double seconds = request.ping_seconds.value_or(0.0); seconds > 0.0 && seconds < kLeastPing)
    throw invalid_value(
        fields.path("sse_ping_interval"),
        fmt::format("sse_ping_interval: {} is less than {} s; 0 or -1: none", seconds, kLeastPing));
}

std::vector<ReasoningEffort> usual_efforts() {
  return {{"none", 0},     {"minimal", 1024}, {"low", 4032}, {"medium", 16128},
          {"high", 32256}, {"xhigh", 56832},  {"max", 81408}};
}

void set_effort(const std::string& effort, const std::string& path, const RequestDefaults& defaults,
                GenerationRequest& request) {
  const auto tokens_of = [&](const std::string& name) -> std::optional<int> {
    for (const ReasoningEffort& one : defaults.efforts)
      if (one.name == name) return one.tokens;
    return std::nullopt;
  };
  request.effort = effort;
  std::optional<int> tokens = tokens_of(effort == "x-high" ? "xhigh" : effort);
  if (!tokens) {
    // Clients know new names before servers do.
    request.effort = "high";
    request.ignored_fields.push_back(path);
    tokens = tokens_of("high");
  }
  request.thinking = *tokens > 0;
  if (*tokens > 0) request.thinking_budget = *tokens;
}

void read_effort(const Json& reasoning, const RequestDefaults& defaults, GenerationRequest& request) {
  Fields fields(reasoning, "reasoning");
  if (const auto effort = fields.string("effort"))
    set_effort(*effort, fields.path("effort"), defaults, request);
  if (const auto enabled = fields.boolean("enabled")) request.thinking = *enabled;
  fields.accept({"summary", "generate_summary", "context"});
  note_unknown(fields, request);
}

std::optional<ReasoningFormat> reasoning_format_from_name(std::string_view name) {
  if (name == "auto" || name == "deepseek") return ReasoningFormat::Apart;
  if (name == "none") return ReasoningFormat::InText;
  if (name == "deepseek-legacy") return ReasoningFormat::Both;
  return std::nullopt;
}

void read_reasoning(Fields& fields, const RequestDefaults& defaults, GenerationRequest& request) {
  if (const Json* kwargs = fields.object("chat_template_kwargs")) {
    request.template_kwargs = *kwargs;
    if (const auto thinking = Fields(*kwargs, "chat_template_kwargs").boolean("enable_thinking"))
      request.thinking = *thinking;
    else
      request.template_kwargs.erase("enable_thinking");  // null: as if it were not there
  }
  for (const char* name : {"thinking_budget_tokens", "reasoning_budget_tokens"})
    if (const auto tokens = fields.integer(name, -1, 1 << 30)) {
      request.thinking_budget = *tokens < 0 ? std::nullopt : std::optional<int>(static_cast<int>(*tokens));
      if (*tokens == 0) request.thinking = false;
    }
  if (!request.thinking && !defaults.effort.empty())
    set_effort(defaults.effort, "reasoning_effort", defaults, request);
  // Other replies have a place of their own for it.
  if (request.dialect == Dialect::Chat) request.reasoning_format = defaults.reasoning_format;
  if (const auto name = fields.string("reasoning_format")) {
    const auto format = reasoning_format_from_name(*name);
    if (!format)
      throw unsupported(
          fields.path("reasoning_format"),
          fmt::format("reasoning_format: '{}' is not offered; auto, deepseek, deepseek-legacy or none was "
                      "expected",
                      *name));
    request.reasoning_format = *format;
  }
}

void read_format(const Json& value, const std::string& path, GenerationRequest& request) {
  Fields fields(value, path);
  const std::string type = fields.require("type").is_string() ? *fields.string("type") : "";
  OutputFormat& format = request.format;
  if (type == "text") return;
  format.path = path;
  if (type == "json_object") {
    format.kind = OutputFormat::Kind::JsonObject;
    if (const Json* schema = fields.object("schema")) format.schema = *schema;
    return;
  }
  if (type != "json_schema")
    throw invalid_value(
        fields.path("type"),
        fmt::format("{}.type: '{}' is not known; text, json_object or json_schema was expected", path, type));
  format.kind = OutputFormat::Kind::JsonSchema;
  const Json* nested = fields.object("json_schema");
  Fields inner(nested != nullptr ? *nested : value, nested != nullptr ? fields.path("json_schema") : path);
  format.schema = inner.require("schema");
  if (!format.schema.is_object() && !format.schema.is_boolean())
    throw ApiError(400, "invalid_json_schema", inner.path("schema") + ": a schema is an object",
                   inner.path("schema"));
  format.strict = inner.boolean("strict").value_or(false);
  format.path = inner.path("schema");
}

void read_format_extensions(Fields& fields, GenerationRequest& request) {
  OutputFormat& format = request.format;
  const auto take = [&](const char* name) {
    if (format.kind != OutputFormat::Kind::Text)
      throw invalid_value(fields.path(name),
                          fmt::format("{}: the answer has another format already, give one", name));
    format.path = fields.path(name);
  };
  if (const Json* schema = fields.object("json_schema")) {
    take("json_schema");
    format.kind = OutputFormat::Kind::JsonSchema;
    format.schema = *schema;
  }
  if (const auto grammar = fields.string("grammar"); grammar && !grammar->empty()) {
    take("grammar");
    format.kind = OutputFormat::Kind::Grammar;
    format.grammar = *grammar;
  }
  for (const char* name : {"structured_outputs", "guided_json", "guided_regex", "guided_choice"})
    fields.refuse(name, "not supported; use json_schema or grammar");
}

void read_session(Fields& fields, GenerationRequest& request) {
  const auto read = [&](const char* name, std::string& target) {
    const Json* value = fields.find(name);
    if (value != nullptr && value->is_string() && target.empty()) target = value->get<std::string>();
  };
  for (const char* name : {"prompt_cache_key", "session_id", "conversation"}) read(name, request.session_key);
  read("user", request.user);
  request.side_request = fields.boolean("side_request").value_or(false);
}

Tool read_function(const Json& function, const std::string& path, const char* schema_name) {
  Fields fields(function, path);
  Tool tool;
  const Json& name = fields.require("name");
  if (!name.is_string())
    throw invalid_value(fields.path("name"), fields.path("name") + ": a string was expected");
  tool.name = name.get<std::string>();
  tool.description = fields.string("description").value_or("");
  tool.strict = fields.boolean("strict").value_or(false);
  if (const Json* schema = fields.find(schema_name)) {
    if (!schema->is_object())
      throw ApiError(400, "invalid_tool_schema", fields.path(schema_name) + ": a schema is an object",
                     fields.path(schema_name));
    tool.parameters = *schema;
  }
  return tool;
}

void add_tool(GenerationRequest& request, Tool tool, const std::string& path) {
  const auto allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '.' || c == '-';
  };
  if (tool.name.empty() || tool.name.size() > 128 ||
      !std::all_of(tool.name.begin(), tool.name.end(), allowed))
    throw invalid_value(path + ".name",
                        path + ".name: 1 to 128 letters, digits, '_', '.' or '-' were expected");
  if (request.tools.size() >= kMaxTools)
    throw invalid_value("tools", fmt::format("tools: more than {} cannot be offered at once", kMaxTools));
  for (const Tool& other : request.tools)
    if (other.name == tool.name)
      throw invalid_value(path + ".name",
                          fmt::format("{}.name: there are two tools called '{}'", path, tool.name));
  request.tools.push_back(std::move(tool));
}

void check_tool_choice(const GenerationRequest& request) {
  const CallChoice& choice = request.tool_choice;
  if (choice.mode == CallChoice::Mode::Required && request.tools.empty())
    throw invalid_value("tool_choice", "tool_choice: a tool has to be called and none is offered");
  if (choice.names.size() > kMaxTools)
    throw invalid_value("tool_choice", fmt::format("tool_choice: more than {} tools are named", kMaxTools));
  for (const std::string& name : choice.names)
    if (std::none_of(request.tools.begin(), request.tools.end(),
                     [&](const Tool& t) { return t.name == name; }))
      throw invalid_value("tool_choice", fmt::format("tool_choice: there is no tool called '{}'", name));
}

void note_unknown(const Fields& fields, GenerationRequest& request) {
  for (std::string& name : fields.unknown()) request.ignored_fields.push_back(std::move(name));
}

}  // namespace thermo
