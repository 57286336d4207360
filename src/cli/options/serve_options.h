// Options of `serve`, and what they become.
#pragma once

#include <climits>
#include <string>
#include <vector>

#include "chat/model_card.h"
#include "cli/options/options.h"
#include "engine/engine_thread.h"
#include "server/server_options.h"

namespace thermo {

struct ServeFlags {
  static constexpr int kNotGiven = INT_MIN;

  bool stdio = false;  // instead of listening
  std::string host = "127.0.0.1";
  int port = 8080;
  std::vector<std::string> listen;
  std::string port_file, unix_socket_mode = "0660";
  std::string api_prefix;
  std::vector<std::string> aliases;  // names of the model; the first one is in replies
  std::vector<std::string> api_keys;
  std::string api_key_file;
  bool no_auth = false, unix_trusted = false;
  std::vector<std::string> allowed_hosts;
  std::string cors_origins = "localhost", cors_methods = "GET, POST, DELETE, OPTIONS", cors_headers = "*";
  bool cors_credentials = false;
  std::string metrics_auth = "auto";
  std::vector<std::string> metrics_compat;
  bool metrics = true, slots = true, props = true;
  std::string parallel = "auto";
  int max_queue = 64, max_queue_tokens = 0, key_concurrency = 0, max_decode_stall_ms = 300,
      checkpoint_every = 4096, quantum = 256, stream_coalesce_ms = 0;
  std::string cache_ram = "auto", cache_dir, turn_store = "64M";
  uint64_t cache_disk = 0;
  uint64_t max_body_size = 64 << 20;
  int max_connections = 1024, threads_http = 0;
  std::string header_timeout = "10s", body_timeout = "30s", keepalive_timeout = "75s",
              write_stall_timeout = "60s", timeout = "0", queue_timeout = "0", ping_interval = "10s",
              shutdown_grace = "30s", heat_save_interval = "60s";
  int default_max_tokens = kNotGiven;
  std::string prompt_folder;
  bool metrics_per_key = false, metrics_per_layer = false, special_in_content = false, deterministic = false;
  bool strict_model = false, keep_billing_header = false, prefill_assistant = false;
  std::string anthropic_thinking = "off", reasoning_preserve = "auto", loop_guard = "on",
              reasoning_field = "both", image_policy = "auto", tool_grammar = "auto", reasoning_effort,
              reasoning_format = "auto", budget_message;
};

void add_serve_options(OptionSet& set, ServeFlags& flags);

// Throw ConfigError. The first reads the file of keys.
ServerOptions server_options(const ServeFlags& flags);
// What the flags leave open.
void apply_card(const ModelCard& card, const ServeFlags& flags, ServerOptions& options);
EngineThreadOptions engine_thread_options(const ServeFlags& flags, uint64_t cache_bytes);
// "500ms", "30s", "5m", "2h"; a plain number is seconds.
std::chrono::milliseconds parse_duration(std::string_view text);

}  // namespace thermo
