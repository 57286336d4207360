#include "cli/options/serve_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <climits>
#include <thread>

#include "base/error.h"
#include "base/units.h"
#include "cli/input.h"
#include "cli/options/cache_options.h"
#include "cli/options/parallel_option.h"
#include "cli/user_folders.h"
#include "cli/version.h"

namespace thermo {
namespace {

// `may_be_zero`: no time is a meaning, too.
void add_duration(OptionSet& set, const char* names, std::string& target, const char* help,
                  bool may_be_zero = true) {
  set.custom(
         names, "TIME",
         [&target, may_be_zero](std::string_view text) {
           if (parse_duration(text).count() == 0 && !may_be_zero)
             throw ConfigError("a time above 0 was expected: without any, no request would be answered");
           target = text;
         },
         fmt::format("{} (default {})", help, target == "0" ? "none" : target))
      .advanced();
}

std::vector<std::string> split_keys(std::string_view text, char separator) {
  std::vector<std::string> keys;
  while (!text.empty()) {
    const size_t end = std::min(text.find(separator), text.size());
    std::string_view key = text.substr(0, end);
    while (!key.empty() && (key.back() == '\r' || key.back() == ' ')) key.remove_suffix(1);
    while (key.starts_with(' ')) key.remove_prefix(1);
    if (!key.empty() && !key.starts_with('#')) keys.emplace_back(key);
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return keys;
}

// Without the spaces around them; also empty ones.
std::vector<std::string> split_at_commas(std::string_view text) {
  std::vector<std::string> parts;
  for (;;) {
    const size_t end = std::min(text.find(','), text.size());
    const std::string_view part = text.substr(0, end);
    const size_t begin = std::min(part.find_first_not_of(' '), part.size());
    parts.emplace_back(part.substr(begin, part.find_last_not_of(' ') + 1 - begin));
    if (end == text.size()) return parts;
    text.remove_prefix(end + 1);
  }
}

// An empty key would open the server to everybody. The message has no key in it, as that of an option would.
void check_keys(const std::string& where, const std::vector<std::string>& keys) {
  for (const std::string& key : keys) {
    try {
      read_key(key);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("{}: {}", where, error.what()));
    }
  }
}

std::vector<std::string> keys_of_file(const std::string& path) {
  std::vector<std::string> keys = split_keys(read_text_file(path), '\n');
  if (keys.empty())
    throw ConfigError(fmt::format("there is no key in '{}'; one per line was expected", path));
  check_keys(path, keys);
  return keys;
}

// Names that go into a header, with commas.
void add_names(OptionSet& set, const char* names, std::string& target, const char* expected,
               const char* help) {
  set.custom(
         names, "LIST",
         [&target, expected](std::string_view text) {
           const std::vector<std::string> parts = split_keys(text, ',');
           const auto is_name = [](const std::string& part) {
             return std::all_of(part.begin(), part.end(), [](char c) {
               return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                      std::string_view("-_!$%&'*+.^`|~").find(c) != std::string_view::npos;
             });
           };
           if (parts.empty() || !std::all_of(parts.begin(), parts.end(), is_name))
             throw ConfigError(fmt::format("{} was expected", expected));
           target = fmt::format("{}", fmt::join(parts, ", "));
         },
         help)
      .advanced();
}

uint64_t parse_turn_store(std::string_view text) {
  if (text == "off") return 0;
  const std::optional<uint64_t> bytes = parse_bytes(text);
  if (!bytes) throw ConfigError("a size (64M) or off was expected");
  return *bytes;
}

}  // namespace

std::chrono::milliseconds parse_duration(std::string_view text) {
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const std::string_view unit(end, static_cast<size_t>(text.data() + text.size() - end));
  const double scale = unit == "ms"                  ? 1.0
                       : unit.empty() || unit == "s" ? 1e3
                       : unit == "m"                 ? 60e3
                       : unit == "h"                 ? 3600e3
                                                     : 0.0;
  if (error != std::errc() || scale == 0.0 || value < 0.0 || value * scale > 1e12)
    throw ConfigError("a time was expected: 500ms, 30s, 5m");
  return std::chrono::milliseconds(static_cast<int64_t>(value * scale));
}

void add_serve_options(OptionSet& set, ServeFlags& flags) {
  set.section("Server");
  set.value("--host", "ADDRESS", flags.host,
            "address to listen on; a path that ends in .sock is a unix socket (default 127.0.0.1)");
  set.value("--port", "N", flags.port, "port; 0: a free one (default 8080)").range(0, 65535);
  set.list(
         "--listen", "URL", flags.listen,
         "instead of --host and --port: http://HOST:PORT or unix:PATH; repeatable; sockets that a supervisor "
         "passes (LISTEN_PID) come before both")
      .advanced();
  set.flag("--stdio", flags.stdio, "answer requests from stdin, one per line, instead of listening");
  set.value("--port-file", "FILE", flags.port_file, "write the URL here once the server listens").advanced();
  for (const char* place : {"--host", "--port"}) set.contradict("--listen", place);
  for (const char* place : {"--listen", "--host", "--port"}) set.contradict("--stdio", place);
  set.value("--unix-socket-mode", "MODE", flags.unix_socket_mode,
            "permissions of a unix socket (default 0660)")
      .advanced();
  set.value("--api-prefix", "PATH", flags.api_prefix, "serve everything below this path").advanced();
  set.custom(
      "-a,--alias", "NAME",
      [&flags](std::string_view text) {
        flags.aliases = split_at_commas(text);
        if (std::find(flags.aliases.begin(), flags.aliases.end(), "") != flags.aliases.end())
          throw ConfigError("a name, or several with commas, was expected");
      },
      "name of the model in replies; requests may also use further names, separated by commas");
  set.flag("--metrics", flags.metrics, "/metrics for Prometheus (default on)")
      .llama_env("LLAMA_ARG_ENDPOINT_METRICS")
      .advanced();
  set.custom(
         "--metrics-compat", "LIST",
         [&flags](std::string_view text) {
           flags.metrics_compat = split_keys(text, ',');
           for (const std::string& name : flags.metrics_compat)
             if (name != "llamacpp" && name != "vllm")
               throw ConfigError("llamacpp, vllm or both with a comma were expected");
         },
         "also use the metric names of these servers, for their dashboards: llamacpp, vllm")
      .suggest({"llamacpp", "vllm", "llamacpp,vllm"})
      .advanced();
  set.flag("--metrics-per-key", flags.metrics_per_key,
           "count requests by the names of their keys (default off)")
      .advanced();
  set.flag("--metrics-per-layer", flags.metrics_per_layer,
           "also show for each layer how many uses of experts were hot (default off)")
      .advanced();
  set.flag("--slots", flags.slots, "/slots (default on)").llama_env("LLAMA_ARG_ENDPOINT_SLOTS").advanced();
  set.flag("--props", flags.props, "/props (default on)").llama_env("LLAMA_ARG_ENDPOINT_PROPS").advanced();
  set.custom_flag(
         "--ui,--webui",
         [](bool on) {
           if (on) throw ConfigError("there are no web pages here; use a client for the OpenAI API");
         },
         "only --no-ui is accepted: there are no web pages")
      .advanced();
  set.flag("--strict-model", flags.strict_model, "refuse requests that name another model (default off)")
      .advanced();

  set.section("Access");
  set.custom_list(
         "--api-key", "KEY",
         [&flags](std::string_view text) {
           // An empty one, as of an unset variable, would open the server to everybody.
           std::vector<std::string> keys = split_keys(text, ',');
           if (keys.empty()) throw ConfigError("a key was expected; --no-auth needs none");
           for (std::string& key : keys) flags.api_keys.push_back(std::move(key));
         },
         "key that requests need; NAME:KEY names it (needed for a key with a colon), admin:KEY may also shut "
         "down; repeatable")
      .secret()
      .llama_env("LLAMA_API_KEY");
  set.value("--api-key-file", "FILE", flags.api_key_file, "file with keys, one per line")
      .llama_env("LLAMA_ARG_API_KEY_FILE");
  set.flag("--no-auth", flags.no_auth, "need no key even if other machines can reach the server").advanced();
  for (const char* keys : {"--api-key", "--api-key-file"}) set.contradict("--no-auth", keys);
  set.flag("--unix-trusted", flags.unix_trusted,
           "need no key on a unix socket; its permissions control access (default off)")
      .advanced();
  set.list("--allowed-host", "NAME", flags.allowed_hosts,
           "another host name that requests may use for this machine")
      .advanced();
  set.value("--cors-origins", "LIST", flags.cors_origins,
            "origins whose pages may send requests: localhost, * or a list (default localhost)")
      .advanced();
  add_names(set, "--cors-methods", flags.cors_methods, "a list of methods (GET, POST) or *",
            "methods that these pages may use (default GET, POST, DELETE, OPTIONS)");
  add_names(set, "--cors-headers", flags.cors_headers, "a list of headers (Authorization, Content-Type) or *",
            "headers that their requests may have; *: any they ask for (default *)");
  set.flag("--cors-credentials", flags.cors_credentials,
           "let them send browser credentials, such as cookies (default off)")
      .advanced();
  set.contradict("--cors-credentials", "--cors-origins",
                 [](const std::string& credentials, const std::string& origins) {
                   return credentials == "on" && origins.find('*') != std::string::npos;
                 });
  set.value("--metrics-auth", "WHEN", flags.metrics_auth,
            "whether /metrics needs a key: auto (when there are keys), off")
      .choices({"auto", "off"})
      .advanced();

  set.section("Load");
  add_parallel_option(set, flags.parallel);
  set.custom_flag(
         "-cb,--cont-batching",
         [](bool on) {
           if (!on)
             throw ConfigError("requests are always computed together; --parallel 1 has one at a time");
         },
         "accepted: requests are always computed together")
      .advanced();
  set.value("--max-queue", "N", flags.max_queue,
            "requests that may wait in the queue; beyond that, 503 (default 64)")
      .range(0, 1 << 20);
  set.count("--max-queue-tokens", "N", flags.max_queue_tokens,
            "prompt tokens that may wait in the queue; 0: no limit")
      .range(0, INT_MAX)
      .advanced();
  set.value("--key-concurrency", "N", flags.key_concurrency, "requests per key at a time; 0: no limit")
      .range(0, 1 << 20)
      .advanced();
  set.value("--max-decode-stall-ms", "N", flags.max_decode_stall_ms,
            "how long other prompts may hold up an answer (default 300)")
      .range(1, 60000)
      .advanced();
  set.count("--quantum", "N", flags.quantum,
            "time slice: after N tokens of an answer, a waiting request gets its slot; 0: no time slices "
            "(default 256)")
      .range(0, INT_MAX)
      .advanced();
  set.value("--stream-coalesce-ms", "N", flags.stream_coalesce_ms,
            "hold back the tokens of a stream this long, to send several in one event; 0: send at once "
            "(default 0)")
      .range(0, 10000)
      .advanced();
  set.size("--max-body-size", "SIZE", flags.max_body_size, "largest request body (default 64M)").advanced();
  set.value("--max-connections", "N", flags.max_connections, "open connections at most (default 1024)")
      .range(1, 1 << 20)
      .advanced();
  set.value("--threads-http", "N", flags.threads_http,
            "threads that read requests; 0: by the number of cores")
      .range(0, 256)
      .advanced();
  add_duration(set, "-to,--timeout", flags.timeout, "time limit for a request");
  add_duration(set, "--queue-timeout", flags.queue_timeout, "time limit for waiting in the queue");
  add_duration(set, "--header-timeout", flags.header_timeout, "time limit for the headers of a request",
               false);
  add_duration(set, "--body-timeout", flags.body_timeout, "longest pause in the body of a request", false);
  add_duration(set, "--keepalive-timeout", flags.keepalive_timeout, "how long an idle connection stays open");
  add_duration(set, "--write-stall-timeout", flags.write_stall_timeout,
               "how long to wait for a client that does not read", false);
  add_duration(set, "--sse-ping-interval", flags.ping_interval,
               "send a ping after a stream has been silent this long");
  add_duration(set, "--heat-save-interval", flags.heat_save_interval, "how often the heat file is written");
  add_duration(set, "--shutdown-grace", flags.shutdown_grace,
               "how long running requests may continue after SIGTERM");

  set.section("Cache");
  add_cache_ram_option(set, flags.cache_ram);
  set.size(
         "--cache-disk", "SIZE", flags.cache_disk,
         "disk space for texts that no longer fit into the prefix cache; they survive a restart (default 0)")
      .advanced();
  set.value("--cache-dir", "FOLDER", flags.cache_dir,
            "folder for these texts (default: thermocline/texts in the user's state folder)")
      .advanced();
  const auto no_disk = [](const std::string& disk) { return parse_bytes(disk) == uint64_t{0}; };
  set.contradict("--cache-disk", "--cache-ram", [no_disk](const std::string& disk, const std::string& ram) {
    return !no_disk(disk) && (ram == "off" || no_disk(ram));
  });
  set.contradict("--cache-disk", "--cache-dir",
                 [no_disk](const std::string& disk, const std::string&) { return no_disk(disk); });
  set.count("--checkpoint-every", "N", flags.checkpoint_every,
            "tokens between checkpoints, which a changed prompt can go back to; 0: only between turns "
            "(default 4096)")
      .range(0, INT_MAX)
      .advanced();
  set.custom(
         "--turn-store", "SIZE",
         [&flags](std::string_view text) {
           parse_turn_store(text);
           flags.turn_store = text;
         },
         "main memory for the tokens of finished answers, which later prompts repeat; or off (default 64M)")
      .suggest({"off"})
      .advanced();

  set.section("Answers");
  set.count(
         "-n,--predict,--n-predict,--default-max-tokens", "N", flags.default_max_tokens,
         "limit for answers whose request sets none; -1: what the context holds (default: the model card's, "
         "else 32768)")
      .llama_env("LLAMA_ARG_N_PREDICT");
  set.flag("--parse-special-in-content", flags.special_in_content,
           "also read special tokens in the text of requests, which lets that text forge turns (default off)")
      .advanced();
  set.flag("--deterministic", flags.deterministic,
           "answers must not depend on other requests: always true on the CPU, refused on other devices")
      .advanced();
  set.value("--log-prompts", "FOLDER", flags.prompt_folder,
            "write prompts and answers to this folder, one file per request")
      .advanced();
  set.flag("--prefill-assistant", flags.prefill_assistant,
           "continue a conversation that ends with an answer (default off)")
      .advanced();
  set.flag("--keep-billing-header", flags.keep_billing_header,
           "leave Claude Code's billing header in the prompt (default off)")
      .advanced();
  set.value("--reasoning-preserve", "WHEN", flags.reasoning_preserve,
            "keep the reasoning of earlier answers in the prompt: on, off or auto (where the template can)")
      .choices({"on", "off", "auto"})
      .advanced();
  set.value("--reasoning-effort", "NAME", flags.reasoning_effort,
            "how much to reason if the request does not say: none, minimal, low, medium, high, xhigh, max")
      .choices({"none", "minimal", "low", "medium", "high", "xhigh", "max"})
      .advanced();
  set.value("--reasoning-budget-message", "TEXT", flags.budget_message,
            "text that ends the reasoning when it reaches its budget, before the closing marker")
      .advanced();
  set.value("--reasoning-format", "HOW", flags.reasoning_format,
            "where chat replies have the reasoning: auto or deepseek (a field of its own), none (in the "
            "content, with its tags), deepseek-legacy (both)")
      .choices({"auto", "deepseek", "none", "deepseek-legacy"})
      .advanced();
  set.value(
         "--reasoning-field", "NAME", flags.reasoning_field,
         "field for the reasoning in chat replies: reasoning_content, reasoning, both or none (default both)")
      .choices({"both", "reasoning_content", "reasoning", "none"})
      .advanced();
  set.value("--loop-guard", "WHEN", flags.loop_guard,
            "end reasoning that repeats a block of 16 to 256 tokens six times: on or off (default on)")
      .choices({"on", "off"})
      .advanced();
  set.value("--tool-grammar", "HOW", flags.tool_grammar,
            "what tool calls must follow: auto (names, parameters and JSON; the schemas of strict tools), "
            "strict (all schemas) or off (only the markers; damaged calls are repaired)")
      .choices({"auto", "strict", "off"})
      .advanced();
  set.value("--image-policy", "HOW", flags.image_policy,
            "images in requests: auto (refused in the question, left out elsewhere), error (refused) or "
            "placeholder (left out)")
      .choices({"auto", "error", "placeholder"})
      .advanced();
  set.value(
         "--anthropic-thinking", "WHEN", flags.anthropic_thinking,
         "reasoning for /v1/messages requests that do not mention it: off, or auto (the template's default)")
      .choices({"off", "auto"})
      .advanced();
}

ServerOptions server_options(const ServeFlags& flags) {
  if (flags.cache_disk == 0 && !flags.cache_dir.empty())
    throw ConfigError(
        "--cache-dir needs --cache-disk: say how much disk space to use, as in --cache-disk 20G");
  ServerOptions options;
  HttpOptions& http = options.http;
  http.listen = flags.listen;
  if (flags.stdio && !http.listen.empty())
    throw ConfigError("--stdio and --listen contradict each other: give one of them");
  const ServeFlags usual;
  const bool elsewhere = flags.host != usual.host || flags.port != usual.port;
  if (elsewhere && flags.stdio)
    throw ConfigError("--stdio does not listen anywhere: leave out --host and --port");
  if (elsewhere && !http.listen.empty())
    throw ConfigError("--listen says where to listen: leave out --host and --port, or give --listen again");
  if (http.listen.empty() && !flags.stdio) {
    const bool is_path = flags.host.ends_with(".sock") || flags.host.starts_with('/');
    const bool v6 = flags.host.find(':') != std::string::npos && !flags.host.starts_with('[');
    http.listen = {
        is_path ? "unix:" + flags.host
                : fmt::format("http://{}{}{}:{}", v6 ? "[" : "", flags.host, v6 ? "]" : "", flags.port)};
  }
  const auto [end, error] = std::from_chars(flags.unix_socket_mode.data(),
                                            flags.unix_socket_mode.data() + flags.unix_socket_mode.size(),
                                            http.unix_socket_mode, 8);
  if (error != std::errc() || *end != '\0' || http.unix_socket_mode < 0 || http.unix_socket_mode > 0777)
    throw ConfigError(
        fmt::format("--unix-socket-mode: '{}' cannot be used, an octal number was expected (0660)",
                    flags.unix_socket_mode));
  if (flags.max_body_size == 0)
    throw ConfigError("--max-body-size: 0 cannot be used, a size above 0 was expected: no request would fit");
  http.max_body_bytes = flags.max_body_size;
  http.max_connections = flags.max_connections;
  http.header_timeout = parse_duration(flags.header_timeout);
  http.body_timeout = parse_duration(flags.body_timeout);
  http.keepalive_timeout = parse_duration(flags.keepalive_timeout);
  http.write_stall_timeout = parse_duration(flags.write_stall_timeout);
  options.request_timeout = parse_duration(flags.timeout);
  options.queue_timeout = parse_duration(flags.queue_timeout);
  options.ping_interval = parse_duration(flags.ping_interval);
  options.shutdown_grace = parse_duration(flags.shutdown_grace);
  options.stream_coalesce = std::chrono::milliseconds(flags.stream_coalesce_ms);

  check_keys("--api-key", flags.api_keys);
  options.access.keys = flags.api_keys;
  if (!flags.api_key_file.empty())
    for (std::string& key : keys_of_file(flags.api_key_file)) options.access.keys.push_back(std::move(key));
  if (flags.no_auth && !options.access.keys.empty())
    throw ConfigError("--no-auth and --api-key contradict each other: give one of them");
  if (flags.unix_trusted && std::none_of(http.listen.begin(), http.listen.end(),
                                         [](const std::string& url) { return url.starts_with("unix:"); }))
    throw ConfigError("--unix-trusted: there is no unix socket to trust; add --listen unix:/path");
  options.access.trusts_unix_sockets = flags.unix_trusted;
  options.access.allowed_hosts = flags.allowed_hosts;
  options.access.origins = flags.cors_origins;
  options.access.methods = flags.cors_methods;
  options.access.headers = flags.cors_headers;
  options.access.credentials = flags.cors_credentials;
  if (flags.cors_credentials && flags.cors_origins.find('*') != std::string::npos)
    throw ConfigError(
        "--cors-credentials and --cors-origins * contradict each other: list the origins that may send them");
  options.metrics_need_key = flags.metrics_auth != "off";
  for (const std::string& name : flags.metrics_compat)
    (name == "vllm" ? options.metrics_as_vllm : options.metrics_as_llamacpp) = true;
  options.api_prefix = flags.api_prefix;
  if (!options.api_prefix.empty() &&
      (!options.api_prefix.starts_with('/') || options.api_prefix.ends_with('/')))
    throw ConfigError(fmt::format("--api-prefix: '{}' cannot be used, write /path", options.api_prefix));
  options.strict_model = flags.strict_model;
  options.metrics_per_key = flags.metrics_per_key;
  options.metrics_per_layer = flags.metrics_per_layer;
  options.prompt_folder = flags.prompt_folder;
  if (!flags.prompt_folder.empty() && !is_folder(flags.prompt_folder))
    throw ConfigError(fmt::format("--log-prompts: '{}' is no folder; make it first", flags.prompt_folder));
  options.max_waiting = flags.max_queue;
  options.max_decode_stall = std::chrono::milliseconds(flags.max_decode_stall_ms);
  if (flags.default_max_tokens == 0 ||
      (flags.default_max_tokens < -1 && flags.default_max_tokens != ServeFlags::kNotGiven))
    throw ConfigError(fmt::format("--predict: {} cannot be used, a positive number or -1 was expected",
                                  flags.default_max_tokens));
  if (flags.default_max_tokens != ServeFlags::kNotGiven)
    options.default_max_tokens = flags.default_max_tokens < 0 ? 1 << 30 : flags.default_max_tokens;
  options.keep_billing_header = flags.keep_billing_header;
  options.anthropic_thinking = flags.anthropic_thinking == "auto";
  options.loop_guard = flags.loop_guard == "on";
  options.reasoning_effort = flags.reasoning_effort;
  options.reasoning_format = *reasoning_format_from_name(flags.reasoning_format);
  options.budget_message = flags.budget_message;
  if (flags.reasoning_field == "none") options.reasoning_fields.clear();
  if (flags.reasoning_field.starts_with("reasoning")) options.reasoning_fields = {flags.reasoning_field};
  options.prefill_assistant = flags.prefill_assistant;
  options.images = flags.image_policy == "error"         ? ImagePolicy::Refuse
                   : flags.image_policy == "placeholder" ? ImagePolicy::Placeholder
                                                         : ImagePolicy::Auto;
  options.tool_grammar = flags.tool_grammar == "strict" ? ToolGrammar::Strict
                         : flags.tool_grammar == "off"  ? ToolGrammar::Off
                                                        : ToolGrammar::Auto;
  options.key_concurrency = flags.key_concurrency;
  options.serve_metrics = flags.metrics;
  options.serve_slots = flags.slots;
  options.serve_props = flags.props;
  options.turn_store_bytes = parse_turn_store(flags.turn_store);
  if (flags.reasoning_preserve != "auto") options.preserve_reasoning = flags.reasoning_preserve == "on";
  const int cores = static_cast<int>(std::thread::hardware_concurrency());
  options.n_workers = flags.threads_http > 0 ? flags.threads_http : std::clamp(cores / 4, 2, 4);
  options.version = version_facts();
  return options;
}

void apply_card(const ModelCard& card, const ServeFlags& flags, ServerOptions& options) {
  if (card.max_tokens && flags.default_max_tokens == ServeFlags::kNotGiven)
    options.default_max_tokens = *card.max_tokens;
  if (card.thinking_terminator && flags.budget_message.empty())
    options.budget_message = *card.thinking_terminator;
  if (card.reply_reserve) options.reply_reserve = *card.reply_reserve;
  for (const auto& [name, tokens] : card.reasoning_efforts) {
    const auto known = std::find_if(options.efforts.begin(), options.efforts.end(),
                                    [&](const ReasoningEffort& effort) { return effort.name == name; });
    if (known != options.efforts.end())
      known->tokens = tokens;
    else
      options.efforts.push_back({name, tokens});
  }
}

EngineThreadOptions engine_thread_options(const ServeFlags& flags, uint64_t cache_bytes) {
  if (flags.cache_disk > 0 && cache_bytes == 0)
    throw ConfigError("--cache-disk needs the prefix cache, which --cache-ram has turned off");
  return {.max_waiting = flags.max_queue,
          .max_waiting_tokens = flags.max_queue_tokens,
          .checkpoint_every = flags.checkpoint_every,
          .save_heat_every = parse_duration(flags.heat_save_interval),
          .cache_bytes = cache_bytes,
          .disk_folder = flags.cache_dir.empty()
                             ? in_state_folder("texts", in_user_state("thermocline/texts")).string()
                             : flags.cache_dir,
          .disk_bytes = flags.cache_disk,
          .quantum = flags.quantum,
          .max_decode_stall_ms = flags.max_decode_stall_ms};
}

}  // namespace thermo
