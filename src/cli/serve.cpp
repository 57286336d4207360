// `thermocline serve`: the APIs over HTTP.
#include <fmt/format.h>

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <functional>
#include <span>
#include <thread>
#include <utility>

#include "base/log_control.h"
#include "base/sha256.h"
#include "base/units.h"
#include "chat/text_model.h"
#include "cli/answer_printer.h"
#include "cli/commands.h"
#include "cli/expected_speed.h"
#include "cli/inspect_facts.h"
#include "cli/interrupt.h"
#include "cli/interrupt_watch.h"
#include "cli/kept_heat.h"
#include "cli/options/answer_options.h"
#include "cli/options/cache_options.h"
#include "cli/options/draft_options.h"
#include "cli/options/parallel_option.h"
#include "cli/options/serve_options.h"
#include "cli/plan_json.h"
#include "cli/supervisor.h"
#include "cli/version.h"
#include "engine/memory_plan.h"
#include "model/model_fingerprint.h"
#include "server/server.h"

namespace thermo {
namespace {

std::string lower_case(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

class ServeCommand : public Command {
 public:
  CommandText text() const override {
    return {"serve", "serve [MODEL] [options]", "the OpenAI, Anthropic and Responses APIs over HTTP",
            "Listens on this machine only, unless told otherwise. If other machines can reach the server, "
            "requests need a key: one you give, or one that is generated and shown at the start. Requests "
            "are computed together, and a continued conversation reads only what is new.",
            "thermocline serve\n"
            "thermocline serve model.gguf -c 32K --parallel 4\n"
            "thermocline serve model.gguf --stdio\n"
            "thermocline serve model.gguf --host 0.0.0.0 --api-key SECRET\n"
            "curl http://127.0.0.1:8080/v1/chat/completions -H 'Content-Type: application/json' -d "
            "'{\"messages\": [{\"role\": \"user\", "
            "\"content\": "
            "\"What is 17 + 25?\"}]}'"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    add_model_option(set, model_);
    add_serve_options(set, serve_);
    add_sampling_options(set, sampling_);
    add_template_options(set, template_);
    add_engine_options(set, engine_);
    add_draft_options(set, draft_);
  }

  int default_verbosity() const override { return 3; }

  ExitCode run(const Terminal& terminal) override {
    EngineOptions options = engine_options(engine_);
    ServerOptions server_flags = server_options(serve_);
    TextModel model(model_);
    TemplateOptions chat_template = template_options(template_);
    chat_template.special_in_content = serve_.special_in_content;
    const PromptRenderer renderer(model.tokenizer(), chat_template);
    const SamplingParams sampling = sampling_params(sampling_, model);
    if (model.card()) apply_card(*model.card(), serve_, server_flags);
    server_flags.dry_breakers = dry_breaker_texts(sampling_);
    set_expert_options(engine_.experts, model.config(), options);
    keep_heat(engine_.experts, model.config(), model.file(), options);
    set_draft_options(draft_, model_, model.config(), drafter_, options);
    server_flags.reasoning_budget = template_.reasoning_budget;
    server_flags.loading_id = model_id(model);
    if (std::vector<std::string> passed = passed_listeners(); !passed.empty() && !serve_.stdio)
      server_flags.http.listen = std::move(passed);
    const std::string key = made_key(server_flags);

    const InterruptScope interrupts;
    if (may_reload(terminal)) InterruptScope::reload_on_hangup();
    log_start(server_flags);
    Server server(std::move(server_flags));
    write_port_file(server);
    if (!key.empty()) show_key(key, server.urls().front(), terminal);
    for (const std::string& url : server.urls()) log_info("server", "listening on {}", url);
    if (model_.empty())
      terminal.note(
          "no model given: serving the embedded one (Plankton, 35M parameters); -m FILE names another");
    options.progress = [&server, told = std::string()](const LoadProgress& progress) mutable {
      const double ratio = progress.total_bytes == 0 ? 0.0
                                                     : static_cast<double>(progress.done_bytes) /
                                                           static_cast<double>(progress.total_bytes);
      server.set_progress(progress.stage, ratio);
      const std::string status = fmt::format("STATUS=loading the model: {}, {:.0f} %", progress.stage,
                                             10.0 * std::floor(10.0 * ratio));
      if (std::exchange(told, status) != status) tell_supervisor(status);
    };
    options.n_sequences = n_parallel(serve_.parallel, model.file(), options);
    options.cache_bytes = cache_ram_bytes(serve_.cache_ram, model.file(), options);
    tell_supervisor("STATUS=loading the model");
    load_or_leave(server, [&] { load_model(model, options, engine_, terminal); });
    log_plan(model);
    note_unused_cache(engine_.experts, model.engine(), terminal);
    if (serve_.deterministic && model.engine().info().device != "cpu")
      throw ConfigError(
          "--deterministic: on this device an answer may depend on other requests; add --device cpu");
    if (!serve_.prompt_folder.empty())
      log_warning("server", "prompts and answers are written to {}", serve_.prompt_folder);
    if (engine_.warm_up) {
      tell_supervisor("STATUS=warming up");
      server.set_progress("warm up", 1.0);
    }
    EngineThreadOptions thread_options = engine_thread_options(serve_, options.cache_bytes);
    thread_options.warm_up = engine_.warm_up;
    EngineThread service(model.engine(), thread_options);
    const StopAtEnd stop{server};  // before the service goes
    server.set_ready(served_model(model, renderer, service, sampling, options));
    log_info("server", "{} is ready: {} requests at a time, {} tokens each", model_id(model),
             options.n_sequences, service.n_ctx());
    if (serve_.stdio) server.serve_pipe(STDIN_FILENO, STDOUT_FILENO);
    terminal.note(serve_.stdio ? "ready: one request per line"
                               : fmt::format("ready: {}", server.urls().front()));
    tell_supervisor("READY=1\nSTATUS=ready");

    Watchdog watchdog;
    LoadStatus status;
    while (!InterruptScope::interrupted() && !server.shutdown_requested() && server.fault().empty() &&
           !server.pipe_ended()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      watchdog.feed();
      status.tell(service);
      if (InterruptScope::take_reload()) reload(server);
    }
    const std::string fault = server.fault();
    tell_supervisor("STOPPING=1");
    if (fault.empty()) log_info("server", "shutting down");
    server.shut_down();
    log_totals(service.state());
    if (!fault.empty()) throw ThermoError(ExitCode::DeviceFault, fault);
    return ExitCode::Ok;
  }

 private:
  struct StopAtEnd {
    Server& server;
    ~StopAtEnd() {
      const ExitCode code = server.fault().empty() ? ExitCode::Ok : ExitCode::DeviceFault;
      if (!server.stop()) std::_Exit(static_cast<int>(code));
    }
  };

  // For the supervisor: how many requests there are, when that has changed.
  class LoadStatus {
   public:
    void tell(const TokenService& service) {
      const TokenServiceState state = service.state();
      const std::string status =
          fmt::format("STATUS=ready, {} running, {} waiting", state.n_running, state.n_waiting);
      if (std::exchange(told_, status) != status) tell_supervisor(status);
    }

   private:
    std::string told_;
  };

  // A hangup of the terminal that it was started from ends it like any program, unless there are files that
  // somebody may want it to read again.
  bool may_reload(const Terminal& terminal) const {
    return !serve_.api_key_file.empty() || logs_to_file() || !terminal.stdin_is_terminal;
  }

  // Loading cannot stop half way, but nobody waits for it: who is interrupted then leaves in good order.
  static void load_or_leave(Server& server, const std::function<void()>& load) {
    const InterruptWatch watch(std::chrono::milliseconds(0), [&server] {
      tell_supervisor("STOPPING=1");
      log_info("server", "shutting down before the model is loaded");
      server.stop();
      std::_Exit(static_cast<int>(ExitCode::Ok));
    });
    load();
  }

  void log_start(const ServerOptions& options) const {
    log_info("server", "{}, model {}", version_line(), options.loading_id);
    if (serve_.stdio) return;
    const size_t n_keys = options.access.keys.size();
    log_info("server", "{}",
             n_keys == 0 ? "requests need no key"
                         : fmt::format("requests need one of {} key{}", n_keys, n_keys == 1 ? "" : "s"));
  }

  // One line for each place.
  static void log_plan(TextModel& model) {
    const MemoryPlan& plan = model.engine().plan();
    const auto tier = [](const std::string& name, const std::vector<MemoryPlanItem>& items, uint64_t total,
                         uint64_t available) {
      std::vector<std::string> parts;
      for (const MemoryPlanItem& item : items)
        parts.push_back(fmt::format("{} {}", item.name, format_bytes(item.bytes)));
      log_info("server", "plan: {} of {} in {}: {}", format_bytes(total), format_bytes(available), name,
               fmt::join(parts, " | "));
    };
    if (!plan.device_items.empty())
      tier(plan.device_name, plan.device_items, plan.device_total_bytes, plan.device_available_bytes);
    tier("main memory", plan.items, plan.total_bytes, plan.available_bytes);
  }

  static void log_totals(const TokenServiceState& state) {
    const ExpertCounts& experts = state.experts;
    log_info("server", "in all: {} prompt tokens computed, {} found in memory, {} written{}",
             state.n_prompt_computed, state.n_prompt_cached, state.n_written,
             experts.n_uses == 0
                 ? ""
                 : fmt::format(", {:.1f} % of the uses of experts hot", 100.0 * experts.hot_ratio()));
  }

  // A server that others reach needs a key: the one that was made for it, or empty.
  std::string made_key(ServerOptions& options) const {
    bool local = true;
    for (const std::string& url : options.http.listen) local &= is_local_listener(url);
    if (local || !options.access.keys.empty()) return {};
    if (serve_.no_auth) {
      log_warning("server", "other machines can reach this server, and it needs no key");
      return {};
    }
    options.access.keys = {generate_key()};
    return options.access.keys.front();
  }

  void reload(Server& server) const {
    if (!serve_.api_key_file.empty()) reload_keys(server);
    try {
      reopen_log();
    } catch (const std::exception& error) {
      log_warning("server", "the log stays where it is: {}", error.what());
    }
  }

  // What the file of keys says now. A file that cannot be read or has none leaves them as they are: nobody
  // opens a server by mistake.
  void reload_keys(Server& server) const {
    try {
      const AccessOptions access = server_options(serve_).access;
      server.set_access(access);
      log_info("server", "keys were read again: {}", access.keys.size());
    } catch (const std::exception& error) {
      log_warning("server", "keys stay as they are: {}", error.what());
    }
  }

  // Once, and not to the log.
  static void show_key(const std::string& key, const std::string& url, const Terminal& terminal) {
    const std::string line = fmt::format(
        "other machines can reach this server, so it needs a key. This one was generated for this run:\n  "
        "{}\n"
        "  curl -H \"Authorization: Bearer {}\" {}/v1/models",
        key, key, url);
    std::fprintf(stderr, "%s\n", terminal.on_stderr(Style::Yellow, line).c_str());
  }

  std::string model_id(const TextModel& model) const {
    return serve_.aliases.empty() ? lower_case(model.id()) : serve_.aliases.front();
  }

  ServedModel served_model(TextModel& model, const PromptRenderer& renderer, TokenService& service,
                           const SamplingParams& sampling, const EngineOptions& options) const {
    const int n_parallel = options.n_sequences;
    ServedModel served;
    served.heat_file = options.heat_file;
    served.gpu_bus_id = model.engine().info().bus_id;
    served.id = model_id(model);
    if (!serve_.aliases.empty()) served.aliases.assign(serve_.aliases.begin() + 1, serve_.aliases.end());
    served.fingerprint = fingerprint_of(model, renderer);
    served.tokenizer = &model.tokenizer();
    served.renderer = &renderer;
    served.service = &service;
    served.trie = std::make_shared<const TokenTrie>(model.tokenizer().vocab());
    served.sampling = sampling;
    if (model.card()) {
      served.card = model.card()->values;
      served.card_path = model.card()->path;
    }
    const ModelConfig& config = model.config();
    served.meta = {{"arch", config.arch_name},
                   {"device", model.engine().info().device},
                   {"n_layer", config.n_layer},
                   {"n_params", model.engine().info().n_params},
                   {"n_params_active", active_params(model.file(), config)},
                   {"n_expert", config.route.n_expert},
                   {"n_expert_used", config.route.n_expert_used},
                   {"quant", quantisation_name(model.file())},
                   {"size_bytes", model.engine().info().file_bytes},
                   {"n_ctx_train", model.n_ctx_train()},
                   {"n_vocab", config.n_vocab}};
    served.plan = {{"context", model.engine().n_ctx()},
                   {"parallel", n_parallel},
                   {"tiers", memory_tiers_json(model.engine().plan(), &model.engine().info())},
                   {"expert_slots_per_layer", nullptr},  // slots belong to no layer
                   {"expected", expected_json(model, options)},
                   {"decisions", decisions(model, n_parallel)}};
    served.chat_template = renderer.source();
    served.file_name = model.file().path();
    return served;
  }

  // As far as `plan` has measured the machine: nothing is measured while it serves.
  static Json expected_json(TextModel& model, const EngineOptions& options) {
    const auto speed =
        expected_speed(model.file(), model.config(), options, model.engine().plan(), Measuring::Never);
    return {{"decode_tps", speed ? Json(speed->decode) : Json(nullptr)},
            {"prefill_tps", speed ? Json(speed->prefill) : Json(nullptr)}};
  }

  Json decisions(TextModel& model, int n_parallel) const {
    const EngineInfo& info = model.engine().info();
    return Json::array(
        {fmt::format("ctx {}: {}", model.engine().n_ctx(),
                     engine_.n_ctx > 0 || engine_.whole_context ? "asked" : "auto"),
         fmt::format("parallel {}: {}", n_parallel, serve_.parallel == "auto" ? "auto, what fits" : "asked"),
         kv_decision(info.k_type, info.v_type, engine_),
         info.repacked ? "weights repacked: default" : "weights as in the file: asked"});
  }

  // Another one where the same request may get another answer: of another build, file, template or device, or
  // with other positions or types of the cache.
  static std::string fingerprint_of(TextModel& model, const PromptRenderer& renderer) {
    const EngineInfo& info = model.engine().info();
    const std::string facts =
        model_fingerprint(model.file(), model.engine().config(), info.k_type, info.v_type) + info.device +
        renderer.source();
    return build_fingerprint() + "-" +
           sha256_hex(std::as_bytes(std::span(facts.data(), facts.size()))).substr(0, 8);
  }

  void write_port_file(const Server& server) const {
    if (serve_.port_file.empty()) return;
    std::ofstream out(serve_.port_file);
    for (const std::string& url : server.urls()) out << url << "\n";
    if (!out.flush()) throw ConfigError(fmt::format("--port-file: '{}' cannot be written", serve_.port_file));
  }

  std::string model_;
  ServeFlags serve_;
  SamplingFlags sampling_;
  TemplateFlags template_;
  EngineFlags engine_;
  DraftFlags draft_;
  std::optional<GgufFile> drafter_;
};

}  // namespace

std::unique_ptr<Command> make_serve_command() {
  return std::make_unique<ServeCommand>();
}

}  // namespace thermo
