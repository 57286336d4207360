// What a server is and does at the moment, as /props, /slots and /thermo/requests tell it.
#include <algorithm>
#include <cmath>
#include <span>

#include "base/sha256.h"
#include "server/api/plain_number.h"
#include "server/operations.h"
#include "server/routes.h"

namespace thermo {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Json sampling_json(const SamplingParams& s) {
  return {{"temperature", plain_number(s.temperature)},
          {"top_k", s.top_k},
          {"top_p", plain_number(s.top_p)},
          {"min_p", plain_number(s.min_p)},
          {"typical_p", plain_number(s.typical_p)},
          {"top_n_sigma", plain_number(s.top_n_sigma)},
          {"xtc_probability", plain_number(s.xtc_probability)},
          {"xtc_threshold", plain_number(s.xtc_threshold)},
          {"presence_penalty", plain_number(s.presence_penalty)},
          {"frequency_penalty", plain_number(s.frequency_penalty)},
          {"repeat_penalty", plain_number(s.repetition_penalty)},
          {"repeat_last_n", s.repeat_last_n},
          {"dry_multiplier", plain_number(s.dry_multiplier)},
          {"dry_base", plain_number(s.dry_base)},
          {"dry_allowed_length", s.dry_allowed_length},
          {"dry_penalty_last_n", s.dry_penalty_last_n.value_or(s.repeat_last_n)},
          {"seed", s.seed ? Json(*s.seed) : Json(-1)}};
}

const char* syntax_name(ToolDialect dialect) {
  return dialect == ToolDialect::Qwen ? "qwen" : dialect == ToolDialect::Laguna ? "laguna" : "hermes";
}

// Those that are enforced; see grammar/json_schema.h.
Json schema_keywords() {
  return {"type",
          "properties",
          "required",
          "additionalProperties",
          "items",
          "prefixItems",
          "minItems",
          "maxItems",
          "enum",
          "const",
          "anyOf",
          "oneOf",
          "allOf",
          "$ref",
          "$defs",
          "definitions",
          "nullable",
          "minLength",
          "maxLength",
          "pattern",
          "format",
          "minimum",
          "maximum",
          "exclusiveMinimum",
          "exclusiveMaximum"};
}

// The one that has this slot; nullptr: none.
const LiveRequest* owner_of(const ServerState& server, const SlotState& slot) {
  const auto has_it = [&](const auto& live) {
    return std::find(live->handles.begin(), live->handles.end(), RequestHandle{slot.epoch}) !=
           live->handles.end();
  };
  const auto found = std::find_if(server.live.begin(), server.live.end(), has_it);
  return slot.busy && found != server.live.end() ? found->get() : nullptr;
}

// A request has as many answers to each of its prompts, in order.
const std::vector<TokenId>& prompt_in(const LiveRequest& live, const SlotState& slot) {
  const auto found = std::find(live.handles.begin(), live.handles.end(), RequestHandle{slot.epoch});
  const size_t per_prompt = live.handles.size() / live.prompts->size();
  return (*live.prompts)[static_cast<size_t>(found - live.handles.begin()) / per_prompt];
}

}  // namespace

Json props_json(const ServerState& server, bool admin) {
  require_model(server);
  const ServedModel& model = *server.model;
  const Vocab& vocab = model.tokenizer->vocab();
  const auto text_of = [&](std::optional<int32_t> id) {
    return id ? std::string(vocab.token_text(*id)) : "";
  };
  const TokenServiceState state = model.service->state();
  Json params = sampling_json(model.sampling);
  params["max_tokens"] = server.options.default_max_tokens;
  Json props;
  props["default_generation_settings"] = {{"n_ctx", model.service->n_ctx()}, {"params", std::move(params)}};
  props["total_slots"] = model.service->n_slots();
  props["model_alias"] = model.id;
  const auto shown_path = [&](const std::string& path) {
    return admin ? path : path.substr(path.rfind('/') + 1);
  };
  props["model_path"] = shown_path(model.file_name);
  props["chat_template"] = model.chat_template;
  const auto writes = [&](const char* name) { return model.chat_template.find(name) != std::string::npos; };
  props["chat_template_caps"] = {{"supports_tools", writes("tools")},
                                 {"supports_tool_calls", writes("tool_calls")},
                                 {"supports_system_role", true},
                                 {"supports_parallel_tool_calls", writes("tool_calls")},
                                 {"supports_thinking", writes("enable_thinking") || writes("<think>")},
                                 {"supports_preserve_reasoning", writes("preserve_thinking")}};
  props["modalities"] = {{"vision", false}, {"audio", false}};
  props["build_info"] = server.server_name();
  props["bos_token"] = text_of(vocab.bos());
  props["eos_token"] = text_of(vocab.eos());
  props["api"] = {{"endpoints", endpoint_names()},
                  {"dialects", Json::array({"chat", "completions", "responses", "messages"})}};
  props["server"] = {
      {"name", "thermocline"}, {"version", server.options.version.value("version", "")}, {"props_schema", 1}};
  props["model"] = model.meta;
  props["model_card"] = nullptr;
  if (!model.card.is_null())
    props["model_card"] = {{"source", shown_path(model.card_path)}, {"values", model.card}};
  const ServerOptions& options = server.options;
  Json efforts = Json::object();
  for (const ReasoningEffort& effort : options.efforts) efforts[effort.name] = effort.tokens;
  props["reasoning"] = {
      {"supported", vocab.find_special("<think>").has_value()},
      {"default", options.reasoning_effort.empty() ? Json("auto") : Json(options.reasoning_effort)},
      {"budget", options.reasoning_budget},
      {"preserve", writes("preserve_thinking") && options.preserve_reasoning.value_or(true)},
      {"efforts", std::move(efforts)}};
  props["cache"] = {{"hits", state.n_prompt_cached},
                    {"misses", state.n_prompt_computed},
                    {"ram_bytes_used", state.cache.bytes},
                    {"ram_bytes_max", state.cache.limit_bytes},
                    {"turn_store_bytes_used", server.turns->bytes()},
                    {"turn_store_bytes_max", server.turns->limit_bytes()},
                    {"tokens", state.cache.n_tokens},
                    {"checkpoints", state.cache.n_points},
                    {"evicted", state.cache.n_evicted},
                    {"disk_bytes_used", state.cache.disk_bytes},
                    {"disk_bytes_max", state.cache.disk_limit_bytes},
                    {"disk_texts", state.cache.n_disk_texts}};
  props["speculation"] = {
      {"drafters", state.draft.drafter.empty() ? Json::array() : Json::array({state.draft.drafter})},
      {"policy", state.draft.state}};
  props["tools"] = {{"choice", Json::array({"auto", "none", "required", "named", "allowed"})},
                    {"parallel", true},
                    {"grammar", options.tool_grammar == ToolGrammar::Strict ? "strict"
                                : options.tool_grammar == ToolGrammar::Off  ? "off"
                                                                            : "auto"},
                    {"syntax", syntax_name(tool_dialect(model.chat_template))}};
  props["structured"] = {{"formats", Json::array({"json_object", "json_schema", "grammar"})},
                         {"keywords", schema_keywords()}};
  Json names = Json::array();
  const Json defaults = sampling_json(model.sampling);
  for (const auto& [name, value] : defaults.items()) names.push_back(name);
  names.push_back("dry_sequence_breakers");
  props["sampling"] = {{"supported", std::move(names)}};
  props["plan"] = model.plan;
  const auto seconds = [](std::chrono::milliseconds time) {
    return std::chrono::duration<double>(time).count();
  };
  props["limits"] = {{"header_timeout_s", seconds(options.http.header_timeout)},
                     {"body_timeout_s", seconds(options.http.body_timeout)},
                     {"keepalive_timeout_s", seconds(options.http.keepalive_timeout)},
                     {"write_stall_timeout_s", seconds(options.http.write_stall_timeout)},
                     {"timeout_s", seconds(options.request_timeout)},
                     {"queue_timeout_s", seconds(options.queue_timeout)},
                     {"body_bytes", server.options.http.max_body_bytes},
                     {"connections", server.options.http.max_connections},
                     {"queue", server.options.max_waiting},
                     {"choices", std::min(16, model.service->n_slots())},
                     {"stop_texts", 16},
                     {"top_logprobs", 20}};
  return props;
}

Json slots_json(const ServerState& server, bool with_prompts) {
  require_model(server);
  Json list = Json::array();
  const TokenServiceState state = server.model->service->state();
  for (size_t i = 0; i < state.slots.size(); ++i) {
    const SlotState& slot = state.slots[i];
    list.push_back({{"id", i},
                    {"id_task", slot.epoch},
                    {"n_ctx", state.n_ctx},
                    {"is_processing", slot.busy},
                    {"speculative", !state.draft.drafter.empty()},
                    {"params", nullptr},
                    {"next_token",
                     {{"n_decoded", slot.n_written}, {"n_remain", nullptr}, {"has_next_token", slot.busy}}},
                    {"prompt_n", slot.n_prompt},
                    {"cache_n", slot.n_cached},
                    {"tps", nullptr},
                    {"n_held", slot.n_held}});
    if (with_prompts) list.back()["prompt"] = nullptr;
    const LiveRequest* live = owner_of(server, slot);
    if (live == nullptr) continue;
    Json& shown = list.back();
    if (with_prompts)
      shown["prompt"] = server.model->tokenizer->decode(prompt_in(*live, slot), {.special = true});
    shown["params"] = sampling_json(live->sampling);
    shown["params"]["max_tokens"] = live->max_tokens;
    const int limit = live->max_tokens < 0 ? state.n_ctx - slot.n_prompt : live->max_tokens;
    shown["next_token"]["n_remain"] = std::max(0, limit - slot.n_written);
    if (slot.n_written > 1 && live->n_written > 1)
      shown["tps"] = (slot.n_written - 1) / seconds_since(live->first_token);
  }
  return list;
}

Json request_json(const ServerState& server, const LiveRequest& live) {
  const std::string hashed =
      live.session.empty()
          ? ""
          : sha256_hex(std::as_bytes(std::span(live.session.data(), live.session.size()))).substr(0, 12);
  const double writing = live.n_written > 1 ? seconds_since(live.first_token) : 0.0;
  const TokenServiceState state = server.model->service->state();
  uint64_t n_rounds = 0, n_accepted = 0;
  for (const SlotState& slot : state.slots)
    if (owner_of(server, slot) == &live) {
      n_rounds += slot.n_draft_rounds;
      n_accepted += slot.n_draft_accepted;
    }
  Json accept_len = nullptr;  // tokens for each step that verified drafts
  if (n_rounds > 0) accept_len = 1.0 + static_cast<double>(n_accepted) / static_cast<double>(n_rounds);
  const std::string& drafter = state.draft.drafter;
  return {{"id", live.id},
          {"reply_id", live.reply_id},
          {"key_name", live.key_name},
          {"dialect", live.dialect},
          {"session", hashed},
          {"state", live.shown_state()},
          {"age_ms", std::lround(seconds_since(live.since) * 1e3)},
          {"prompt_tokens", live.n_prompt},
          {"cached_tokens", live.n_cached},
          {"prefill_done", live.n_prompt_done},
          {"generated", live.n_written},
          {"tps", writing > 0.0 ? Json((live.n_written - 1) / writing) : Json(nullptr)},
          {"drafter", drafter.empty() ? Json(nullptr) : Json(drafter)},
          {"accept_len", std::move(accept_len)}};
}

Json requests_json(const ServerState& server) {
  Json list = Json::array();
  int n_queued = 0;
  for (const auto& live : server.live) {
    Json one = request_json(server, *live);
    one["queue_position"] = live->state == "queued" ? ++n_queued : 0;
    list.push_back(std::move(one));
  }
  return list;
}

}  // namespace thermo
