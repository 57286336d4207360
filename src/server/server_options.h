// What a server is told when it starts, and what it serves once the model is loaded.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/json.h"
#include "chat/prompt_renderer.h"
#include "chat/tool_grammar.h"
#include "engine/token_service.h"
#include "grammar/grammar_cache.h"
#include "grammar/token_trie.h"
#include "server/api/generation_request.h"
#include "server/http/access.h"
#include "server/http/http_server.h"

namespace thermo {

struct ServerOptions {
  // Behaviour.
  HttpOptions http;
  AccessOptions access;
  std::string api_prefix;  // "/p": everything is below it
  std::string loading_id;  // of the model, while it is loaded; empty: not known yet
  bool metrics_need_key = true;
  bool metrics_as_llamacpp = false, metrics_as_vllm = false;  // these names, too; see compat_metrics.h
  bool strict_model = false;                                  // a request for another model is refused
  int default_max_tokens = 32768;
  std::string prompt_folder;       // see prompt_log.h; empty: prompts are not written anywhere
  bool metrics_per_key = false;    // requests are counted by the names of keys
  bool metrics_per_layer = false;  // hits of experts are told for each layer
  bool keep_billing_header = false;
  bool anthropic_thinking = false;
  bool prefill_assistant = false;
  ImagePolicy images = ImagePolicy::Auto;
  ToolGrammar tool_grammar = ToolGrammar::Auto;
  std::vector<std::string> reasoning_fields = {"reasoning_content", "reasoning"};  // of chat replies
  // Reasoning, where a request says nothing.
  int reasoning_budget = -1;     // tokens; -1: any number
  std::string reasoning_effort;  // "low"; empty: none is set
  ReasoningFormat reasoning_format = ReasoningFormat::Apart;
  std::vector<ReasoningEffort> efforts = usual_efforts();
  int reply_reserve = 4096;  // tokens for what follows it, at most a quarter of the answer
  std::vector<std::string> dry_breakers = usual_dry_breakers();  // where a request that uses DRY names none
  std::string budget_message;  // ends reasoning whose budget is used up; empty: the built-in one
  bool loop_guard = true;      // reasoning that repeats itself is ended
  int max_waiting = 64;        // as the engine's queue has it
  std::chrono::milliseconds max_decode_stall{300};  // as the engine keeps to it
  std::optional<bool> preserve_reasoning;           // of earlier answers; nullopt: where the template can
  int key_concurrency = 0;                          // requests of one key at a time; 0: any number
  bool serve_slots = true, serve_props = true, serve_metrics = true;
  Json version = Json::object();  // what /version says
  // Times; zero: none.
  std::chrono::milliseconds request_timeout{0}, queue_timeout{0};
  std::chrono::milliseconds ping_interval{10'000};
  std::chrono::milliseconds stream_coalesce{0};  // tokens may wait so long to share an event
  std::chrono::milliseconds shutdown_grace{30'000};
  // Performance.
  uint64_t turn_store_bytes = uint64_t{64} << 20;  // see turn_store.h; 0: none
  int n_workers = 2;                               // threads that read bodies and render prompts
};

// The facts of a model that is ready. Everything it points to outlives the server.
struct ServedModel {
  std::string id;
  std::vector<std::string> aliases;
  std::string fingerprint;
  const Tokenizer* tokenizer = nullptr;
  const PromptRenderer* renderer = nullptr;
  TokenService* service = nullptr;
  std::shared_ptr<const TokenTrie> trie;  // of the vocabulary
  std::shared_ptr<GrammarCache> grammars = std::make_shared<GrammarCache>();
  SamplingParams sampling;     // where a request says nothing
  Json meta = Json::object();  // arch, n_params, quant ...
  Json plan = Json::object();  // memory
  std::string chat_template;
  std::string file_name;
  Json card = nullptr;  // of the model, as its file has it; null: there is none
  std::string card_path;
  std::string heat_file;   // empty: heat is not kept
  std::string gpu_bus_id;  // of the card it runs on; empty: none
};

}  // namespace thermo
