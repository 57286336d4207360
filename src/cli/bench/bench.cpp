// `thermocline bench`: how fast a model is here, modelled on llama-bench so that scripts and habits carry
// over.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <thread>

#include "base/thread_pool.h"
#include "chat/model_source.h"
#include "cli/bench/bandwidth.h"
#include "cli/bench/bench_draft.h"
#include "cli/bench/bench_output.h"
#include "cli/bench/bench_plan.h"
#include "cli/bench/bench_report.h"
#include "cli/bench/bench_run.h"
#include "cli/bench/bench_text.h"
#include "cli/bench/bench_url_flags.h"
#include "cli/commands.h"
#include "cli/inspect_facts.h"
#include "cli/interrupt.h"
#include "cli/options/draft_options.h"
#include "cli/options/hub_options.h"
#include "cli/options/model_options.h"
#include "cli/options/rope_options.h"
#include "cli/progress.h"
#include "engine/draft_plan.h"
#include "engine/gpu_backend.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

constexpr int kCheckPrompt = 32, kCheckTokens = 24;
const std::string kCold = "cold", kWarm = "warm";  // what bench_fields() says in heat_state

// An option of llama-bench that has one meaning here: accepts the values that say so.
Option& add_cpu_only(OptionSet& set, std::string_view names, std::vector<std::string> accepted,
                     std::string help) {
  const std::string first(names.substr(0, names.find(',')));
  return set
      .custom(
          names, "VALUE",
          [accepted, first](std::string_view text) {
            if (std::find(accepted.begin(), accepted.end(), text) == accepted.end())
              throw ConfigError(fmt::format("this release does not do that; leave {} out or use {}", first,
                                            fmt::join(accepted, " or ")));
          },
          std::move(help))
      .advanced()
      .no_environment();
}

class BenchCommand : public Command {
 public:
  CommandText text() const override {
    return {"bench", "bench [-m MODEL] [options]", "measure prefill and decode speed",
            "Lists (-p 512,2048), ranges (-t 1-16*2, -d 0-8192+4096) and repeated options run in every "
            "combination. "
            "Tokenising and sampling are not timed, as in llama-bench. GB/s is the decode speed times the "
            "weight bytes of a token; the last column is its share of the memory bandwidth of this machine "
            "(on a GPU: of the card), empty where the caches hold the weights. --rows measures the cost of "
            "verifying n drafted tokens compared to "
            "one, --draft the gain from drafting, --parallel steps of several sequences. --url measures a "
            "server instead, with many clients at once.",
            "thermocline bench -m model.gguf -p 512,2048 -n 128 -d 0,4096\n"
            "thermocline bench -m model.gguf --rows 1-64*2\n"
            "thermocline bench -m model.gguf --parallel 1,4,16,64\n"
            "thermocline bench -m model.gguf --draft drafter.gguf --oracle 0.8 -n 512\n"
            "thermocline bench --url http://127.0.0.1:8080 --concurrency 1,4,16 -p 512 -n 256\n"
            "thermocline bench -m model.gguf -o json > before.json\n"
            "thermocline bench -m model.gguf --compare before.json --fail-below 0.97\n"
            "thermocline bench -m model.gguf --sweep-expert-cache 0,40,60,100 -o csv\n"};
  }

  void declare(OptionSet& set) override {
    set.section("Model");
    const auto add_model = [this](std::string_view text) {
      if (text.empty())
        throw ConfigError("a file or a folder was expected; leave it out for the embedded model");
      models_.emplace_back(text);
    };
    set.positional_for("model", "MODEL",
                       "GGUF file, or a folder with one model; without it the embedded model");
    set.custom_list("-m,--model", "MODEL", add_model,
                    "the same, as an option; repeatable: each model is measured");
    add_hub_options(set, models_);
    set.section("Tests");
    const auto list = [&](std::string_view names, std::string metavar, std::vector<std::string>& target,
                          std::string help) {
      return &set.list(names, std::move(metavar), target, std::move(help)).no_environment();
    };
    list("-p,--n-prompt", "LIST", lists_.n_prompt, "tokens of the prompt (default 512; 0: none)");
    list("-n,--n-gen", "LIST", lists_.n_gen, "tokens generated one by one (default 128; 0: none)");
    list("-pg,--prompt-gen", "PP,TG", lists_.prompt_gen,
         "a prompt and then generation, timed together; repeatable");
    list("--rows", "LIST", lists_.n_rows,
         "rows of a step that verifies a draft, up to 64; without -p and -n, only these are measured");
    list("-d,--n-depth", "LIST", lists_.n_depth, "tokens already in the context (default 0)");
    list("-np,--parallel", "LIST", lists_.n_parallel,
         "sequences generated at once, one row of each in every step (default 1); without -p, only "
         "generation is measured");
    set.value("-r,--repetitions", "N", run_.n_repetitions, "how often each test is run")
        .range(1, 1000)
        .no_environment();
    set.value("--seconds", "S", run_.min_seconds, "repeat each test for at least this long")
        .range(0, 86400)
        .no_environment();
    set.value("--text", "SOURCE", text_,
              "tokens to feed: builtin (real text), random, or a text file; with --draft and no --oracle "
              "also own: what the model itself writes (the default in that case)")
        .no_environment();
    set.value("-s,--seed", "N", seed_, "seed of random tokens").no_environment();
    add_draft_test_options(set, draft_, oracle_);
    add_url_options(set, url_);
    set.section("Setup");
    list("-t,--threads", "LIST", lists_.n_threads, "threads (default: one for each core)");
    list("--poll", "LIST", lists_.poll,
         "how long threads without work spin before they sleep, in milliseconds, 0 to 100 (default 50)");
    add_numa_option(set, numa_).no_environment();
    list("-b,--batch-size", "LIST", lists_.n_batch, "logical batch (default 2048)");
    list("-ub,--ubatch-size", "LIST", lists_.n_ubatch,
         "tokens of a prompt chunk (default 512; on a GPU 2048)");
    set.value("-dev,--device", "NAME", device_,
              "auto, cpu, cuda:N (a build with CUDA), or sim: the CPU stands in for a device")
        .no_environment();
    set.value("-ngl,--n-gpu-layers", "N", n_gpu_layers_, "0: the CPU, all: the GPU (default auto)")
        .no_environment();
    set.size("--gpu-memory", "SIZE", gpu_memory_,
             "take no more GPU memory than this in total (default: what is free)")
        .no_environment();
    set.value("-fitt,--fit-target", "MIB", fit_target_mib_, "GPU memory to leave free, in MiB (default 1024)")
        .range(0, 1 << 20)
        .no_environment();
    list("-ctk,--cache-type-k", "LIST", lists_.k_type,
         "type of the keys: f32, f16, bf16, q8_0, q4_0 (default f16)");
    list("-ctv,--cache-type-v", "LIST", lists_.v_type, "type of the values (default f16)");
    add_rope_options(set, rope_, /*from_environment=*/false);
    list("--isa", "LIST", lists_.isa, "code path: auto, portable, avx2, avxvnni, avx512, amx (default auto)");
    set.custom_flag(
           "--repack", [this](bool on) { lists_.repack = {on}; },
           "repack the weights for the CPU at load (default)")
        .no_environment();
    list("-lm,--load-mode", "LIST", lists_.load_mode,
         "auto and none: as --repack; mmap: as --no-repack (default auto)")
        ->advanced();
    set.section("Experts");
    list("--expert-cache", "LIST", lists_.expert_cache,
         "device memory for experts: sizes (11G), shares of all experts (60%), or auto: what fits (default)");
    list("--sweep-expert-cache", "[LIST]", lists_.expert_sweep,
         "run with these shares of the experts on the device (default 0,20,40,60,80,100), reloading the "
         "model for each")
        ->bare("0,20,40,60,80,100");
    list("-ncmoe,--n-cpu-moe", "LIST", lists_.n_cpu_moe,
         "taken as a budget: the size of the experts of all but N layers");
    set.custom(
           "--expert-ram", "SIZE",
           [this](std::string_view text) {
             expert_budget_option(text);
             experts_.ram = text;
           },
           "main memory for experts; the rest is read from the file (default auto)")
        .no_environment();
    set.value("--pin-layers", "N", experts_.pin_layers,
              "keep all experts of the first N layers on the device")
        .range(0, 10000)
        .no_environment();
    set.flag("--expert-swaps", experts_.swaps,
             "move experts according to their use while running (default on)")
        .no_environment();
    add_link_limit(set, experts_).no_environment();
    list("--heat", "LIST", heat_lists_,
         "generation with split experts: cold (each run starts as if just loaded), warm (after an untimed "
         "run); default both");
    set.value("--heat-file", "FILE", experts_.heat_file, "start from this heat; it is updated at the end")
        .no_environment();
    set.value("--trace", "FILE", experts_.trace_file,
              "record what each lane does and when, for chrome://tracing")
        .no_environment();
    set.section("Output");
    const std::vector<std::string> formats{"md", "csv", "json", "jsonl", "sql"};
    set.value("-o,--output", "FORMAT", format_, "md, csv, json, jsonl or sql")
        .choices(formats)
        .no_environment();
    std::vector<std::string> and_none = formats;
    and_none.emplace_back("none");
    set.value("-oe,--output-err", "FORMAT", error_format_, "the same to stderr as well")
        .choices(and_none)
        .no_environment();
    set.value("--compare", "FILE", compare_,
              "JSON output of an earlier run: adds a column with the ratio to it")
        .no_environment();
    set.value("--fail-below", "R", fail_below_, "exit with 9 when a ratio is below R")
        .range(0, 1000)
        .no_environment();
    set.flag("--check", check_, "first check greedy choices against the plain code path").no_environment();
    set.value("--delay", "S", delay_seconds_, "seconds to wait before each test")
        .range(0, 3600)
        .no_environment();
    set.flag("--warmup", warm_up_, "run each test briefly before timing it (default)").no_environment();
    set.flag("--bandwidth", bandwidth_, "measure the memory bandwidth of this machine (default)")
        .no_environment();
    set.section("Accepted for llama-bench scripts");
    add_cpu_only(set, "-fa,--flash-attn", {"1", "on", "auto"}, "attention is always computed in one pass: 1")
        .choices({"1", "on", "auto", "0", "off"})
        .bare("1");
  }

  ExitCode run(const Terminal& terminal) override {
    if (fail_below_ > 0.0 && compare_.empty()) throw ConfigError("--fail-below needs --compare FILE");
    if (!url_.options.url.empty()) return run_url(terminal);
    const bool drafts = draft_.asks_for_drafts();
    if (!drafts && !oracle_.empty())
      throw ConfigError("--oracle needs --draft: it replaces the guesses of a drafter");
    if (!oracle_.empty()) parse_oracle(oracle_);  // a bad one is refused at once
    if (drafts && lists_.n_prompt.empty()) lists_.n_prompt = {"0"};
    const BenchPlan plan = make_bench_plan(lists_);
    if (drafts)
      for (const BenchTest& test : plan.tests)
        if (test.n_prompt > 0 || test.n_rows > 0 || test.n_parallel > 1)
          throw ConfigError(
              "--draft measures generation of one sequence: give -n and -d, and no -p, -pg, --rows or "
              "--parallel");
    const bool own = text_ == "own" || (text_.empty() && drafts && oracle_.empty());
    if (own && (!drafts || !oracle_.empty()))
      throw ConfigError("--text own needs --draft and no --oracle: the text is what the model writes");
    own_text_ = own;
    if (text_.empty() || own) text_ = "builtin";
    read_heat();
    if (!experts_.trace_file.empty() && plan.setups.size() > 1)
      throw ConfigError(
          fmt::format("--trace records one run, but these options make {}; give one setup, or leave it out",
                      plan.setups.size()));
    if (models_.empty()) models_.emplace_back();
    for (const std::string& model : models_) {  // a bad one is refused at once
      ModelConfig config = read_model_config(open_model(model));
      override_rope(rope_, config);
      EngineOptions options;
      std::optional<GgufFile> drafter;
      if (drafts) set_draft_options(draft_, model, config, drafter, options);
      if (drafts && options.draft.kind == DraftOptions::Kind::None)
        throw ConfigError("--draft auto and --spec-type none contradict each other: give one of them");
      plan_draft(options.draft, config, 1);
    }
    terminal.note(drafts ? "with --draft sampling is part of the time, as in `run`"
                         : "tokenising and sampling are not timed, as in llama-bench");

    const auto table = [columns = extra_columns()](BenchPrinter::Sink sink) {
      return make_model_table(columns, std::move(sink));
    };
    return print(terminal, table, [&](const std::function<void(Json)>& emit) {
      for (const std::string& model : models_) run_model(terminal, model, plan, emit);
    });
  }

 private:
  // Runs the tests and prints each row as it comes.
  ExitCode print(const Terminal& terminal, const MakeTable& table,
                 const std::function<void(const std::function<void(Json)>&)>& tests) {
    std::optional<BenchBaseline> baseline;
    if (!compare_.empty()) baseline.emplace(compare_);
    std::vector<std::unique_ptr<BenchPrinter>> printers;
    printers.push_back(make_bench_printer(format_, table, [](std::string_view text) { write_stdout(text); }));
    if (error_format_ != "none")
      printers.push_back(make_bench_printer(error_format_, table, [](std::string_view text) {
        std::fwrite(text.data(), 1, text.size(), stderr);
      }));
    const std::optional<ExitCode> interrupted =
        print_rows(terminal, printers, [&](const std::function<void(const Json&)>& row) {
          tests([&](Json fields) {
            if (baseline) add_ratio(*baseline, fields);
            row(fields);
          });
        });
    return interrupted ? *interrupted : judge(terminal);
  }

  ExitCode run_url(const Terminal& terminal) {
    if (!models_.empty()) throw ConfigError("--url measures what a server serves: leave the model out");
    UrlBenchOptions& options = url_.options;
    options.text_source = text_.empty() ? "builtin" : text_;
    options.text = bench_text_of(options.text_source);
    options.n_rounds = run_.n_repetitions;
    options.warm_up = warm_up_;
    options.stop = [] { return InterruptScope::interrupted(); };
    const std::vector<UrlTest> tests = url_tests(url_, lists_.n_prompt, lists_.n_gen);
    return print(terminal, make_url_table, [&](const std::function<void(Json)>& emit) {
      run_url_bench(options, tests, [&](const Json& fields) {
        emit(fields);
        if (fields["errors"] > 0)
          terminal.note(fmt::format("{} of {} requests failed, the last one with: {}",
                                    fields["errors"].dump(), fields["n_requests"].dump(),
                                    fields["error"].get<std::string>()));
      });
    });
  }

  void run_model(const Terminal& terminal, const std::string& model, const BenchPlan& plan,
                 const std::function<void(Json)>& emit) {
    if (InterruptScope::interrupted()) return;
    model_ = model;
    const GgufFile file = open_model(model);
    text_ids_ = make_bench_text(text_, file, read_model_config(file).n_vocab,
                                static_cast<size_t>(std::max(plan.max_tokens() + 1, kCheckPrompt)) *
                                    static_cast<size_t>(plan.max_parallel()),
                                seed_);
    if (own_text_) text_ids_.source = "own";
    for (const BenchSetup& setup : plan.setups) {
      if (InterruptScope::interrupted()) return;
      run_setup(terminal, file, plan, setup, emit);
    }
  }

  void run_setup(const Terminal& terminal, const GgufFile& file, const BenchPlan& plan,
                 const BenchSetup& setup, const std::function<void(Json)>& emit) {
    BenchContext context;
    context.setup = setup;
    context.read_bytes_per_s = read_bandwidth(setup.n_threads);  // while there is memory
    reset_peak_memory();                                         // which is the model's from here on
    ProgressLine progress(terminal);
    const int n_ctx = std::max(plan.max_tokens(), check_ ? kCheckPrompt + kCheckTokens : 0);
    EngineOptions options = engine_options_of(setup, n_ctx);
    set_expert_options(expert_flags(setup), read_model_config(file), options);
    options.progress = progress.callback();
    options.max_draft_rows = plan.max_rows();
    options.n_sequences = plan.max_parallel();
    const bool drafts = draft_.asks_for_drafts();
    std::optional<GgufFile> drafter;
    if (drafts) {
      set_draft_options(draft_, model_, read_model_config(file), drafter, options);
      options.n_ctx += kMaxDraftNodes + 1;
      if (!oracle_.empty())
        options.draft.oracle = {.probabilities = parse_oracle(oracle_), .seed = seed_, .text = text_ids_.ids};
    }
    note_unusual(read_model_config(file), options, terminal);
    Engine engine(file, options);
    progress.clear();
    terminal.note_unless_empty(engine.plan().note);
    note_unused_cache(expert_flags(setup), engine, terminal);
    context.engine = engine.info();
    if (!runs_on_processor(engine.info()) && bandwidth_)
      context.read_bytes_per_s = measure_gpu_read_bandwidth();  // decoding reads the card's memory
    context.device_bytes = engine.plan().device_total_bytes;
    context.fit_target_mib = fit_target_mib_;
    context.setup.n_ubatch = engine.n_batch();
    context.model_filename = model_.empty() ? "embedded" : resolve_model_path(model_);
    context.model_type = engine.config().describe(engine.info().n_params);
    if (const std::string type = quantisation_name(file); !type.empty()) context.model_type += " " + type;
    context.model_size = engine.info().file_bytes;
    context.model_n_params = engine.info().n_params;
    context.text_source = text_ids_.source;
    context.draft_budget = draft_.budget;
    context.oracle = oracle_;
    if (experts_.cpu_moe) context.setup.expert_cache = "0";
    if (setup.n_cpu_moe >= 0 && options.expert_cache.share)
      context.setup.expert_cache = fmt::format("{:.4f}%", 100.0 * *options.expert_cache.share);
    if (check_) {
      check(file, setup, engine);
      terminal.note(
          fmt::format("check passed: {} greedy choices are those of the plain code path", kCheckTokens));
    }

    const bool can_reset = experts_.heat_file.empty() && engine.reset_experts();
    if (!can_reset && !heat_.empty())
      terminal.note("--heat has no effect: no experts are split between a device and main memory");
    if (drafts) {
      for (const BenchTest& test : plan.tests)
        if (!run_drafts(terminal, engine, test, context, emit)) return;
      return;
    }
    std::vector<Session> sessions;
    for (int i = 0; i < plan.max_parallel(); ++i) {
      Result<Session> session = engine.open_session();
      if (!session) throw ThermoError(ExitCode::Internal, "bench: " + session.error().message);
      sessions.push_back(std::move(*session));
    }
    std::map<int, double> one_row_ns;  // by depth
    for (size_t i = 0; i < plan.tests.size(); ++i) {
      const BenchTest& test = plan.tests[i];
      if (delay_seconds_ > 0.0) std::this_thread::sleep_for(std::chrono::duration<double>(delay_seconds_));
      if (InterruptScope::interrupted()) return;
      for (const std::string& heat : heats_of(test, can_reset)) {
        context.heat_state = heat;
        const bool cold = can_reset && heat == kCold, warm = can_reset && heat == kWarm;
        if ((warm_up_ || warm) && test.n_rows == 0)
          warm_up(sessions.front(), test, engine.n_batch(), text_ids_.ids, warm);
        BenchRunOptions run = run_;
        run.stop = [] { return InterruptScope::interrupted(); };
        run.on_repetition = [&](int repetition) {
          if (terminal.progress)
            fmt::print(stderr, "bench: test {}/{} {}, run {}/{}\n", i + 1, plan.tests.size(), test.name(),
                       repetition + 1, run_.n_repetitions);
          if (cold) engine.reset_experts();
        };
        const std::optional<BenchResult> result =
            test.n_rows > 0
                ? run_rows_test(engine, sessions.front(), test, text_ids_.ids, run, one_row_ns[test.n_depth])
            : test.n_parallel > 1
                ? run_parallel_test(engine, std::span(sessions).first(static_cast<size_t>(test.n_parallel)),
                                    test, text_ids_.ids, run)
                : run_bench_test(engine, sessions.front(), test, text_ids_.ids, run);
        if (!result) return;
        if (test.n_rows == 1) one_row_ns[test.n_depth] = result->avg_ns();
        emit(bench_fields(context, *result));
      }
    }
  }

  // False when it was interrupted.
  bool run_drafts(const Terminal& terminal, Engine& engine, const BenchTest& test, BenchContext& context,
                  const std::function<void(Json)>& emit) const {
    BenchRunOptions run = run_;
    run.stop = [] { return InterruptScope::interrupted(); };
    run.on_repetition = [&](int repetition) {
      if (terminal.progress)
        fmt::print(stderr, "bench: {}, run {}/{} without and with drafts\n", test.name(), repetition + 1,
                   run_.n_repetitions);
    };
    context.heat_state = kWarm;
    const std::span<const TokenId> ids = text_ids_.ids;
    const auto n_start = static_cast<size_t>(std::max(1, test.n_depth));
    const auto script =
        own_text_ ? std::span<const TokenId>{} : ids.subspan(n_start, static_cast<size_t>(test.n_gen));
    const auto results = run_draft_test(engine, test, ids.first(n_start), script, run);
    if (!results) return false;
    emit(bench_fields(context, results->plain));
    emit(bench_fields(context, results->drafted));
    terminal.note_unless_empty(describe(results->drafted.draft));
    return true;
  }

  void read_heat() {
    heat_ = parse_word_lists(heat_lists_);
    for (const std::string& heat : heat_)
      if (heat != kCold && heat != kWarm)
        throw ConfigError(
            fmt::format("--heat: '{}' is not known, use cold, warm, or cold,warm; a file of heat is "
                        "given with --heat-file",
                        heat));
    if (!heat_.empty() && !experts_.heat_file.empty())
      throw ConfigError("--heat and --heat-file contradict each other: the file says how hot; leave one out");
  }

  // How a test begins. Prompts use nearly all experts, whichever are hot.
  std::vector<std::string> heats_of(const BenchTest& test, bool can_reset) const {
    if (!experts_.heat_file.empty()) return {experts_.heat_file};
    if (!can_reset || test.n_gen == 0) return {warm_up_ ? kWarm : kCold};
    if (!heat_.empty()) return heat_;
    if (!warm_up_) return {kCold};
    return {kCold, kWarm};
  }

  EngineOptions engine_options_of(const BenchSetup& setup, int n_ctx) const {
    EngineOptions options;
    options.device = device_option(device_, n_gpu_layers_);
    options.n_ctx = n_ctx;
    options.rope = rope_;
    options.k_type = setup.k_type;
    options.v_type = setup.v_type;
    options.n_threads = setup.n_threads;
    set_cpu_options({.poll = setup.poll, .numa = numa_}, options);
    options.isa = setup.isa;
    options.repack = setup.repack;
    options.gpu_memory = gpu_memory_;
    options.gpu_reserve = static_cast<uint64_t>(fit_target_mib_) << 20;
    options.n_batch = setup.n_ubatch;
    return options;
  }

  ExpertFlags expert_flags(const BenchSetup& setup) const {
    ExpertFlags flags = experts_;
    flags.cache = setup.expert_cache;
    flags.n_cpu_moe = setup.n_cpu_moe;
    return flags;
  }

  // The plain path is portable code that reads the file as it is, with a float cache.
  void check(const GgufFile& file, const BenchSetup& setup, Engine& engine) const {
    EngineOptions options = engine_options_of(setup, kCheckPrompt + kCheckTokens);
    options.device.kind = DeviceChoice::Kind::Cpu;
    options.isa = Isa::Portable;
    options.repack = false;
    options.n_batch = kCheckPrompt;
    Engine reference(file, options);
    check_greedy(engine, reference, std::span(text_ids_.ids).first(kCheckPrompt), kCheckTokens);
  }

  // Once for each number of threads.
  double read_bandwidth(int n_threads) {
    if (!bandwidth_) return 0.0;
    const auto [at, is_new] = bandwidths_.try_emplace(n_threads, 0.0);
    if (is_new) {
      ThreadPool pool({.n_threads = n_threads, .spread = numa_ == "distribute"});
      at->second = measure_read_bandwidth(pool);
    }
    return at->second;
  }

  void add_ratio(const BenchBaseline& baseline, Json& fields) {
    const std::optional<double> ratio = baseline.ratio(fields);
    fields["ratio"] = ratio ? Json(*ratio) : Json(nullptr);
    if (ratio) {
      ratios_.push_back(*ratio);
    } else {
      ++n_alone_;
    }
  }

  ExitCode judge(const Terminal& terminal) const {
    if (compare_.empty()) return ExitCode::Ok;
    if (n_alone_ > 0) {
      const std::string missing =
          fmt::format("{} has no result of the same test and setup for {} of {} tests", compare_, n_alone_,
                      n_alone_ + ratios_.size());
      if (fail_below_ > 0.0)
        throw ThermoError(ExitCode::BelowTarget,
                          missing + ": a test that is not compared cannot pass; measure the same tests");
      terminal.note(missing);
    }
    if (ratios_.empty()) return ExitCode::Ok;
    const double worst = *std::min_element(ratios_.begin(), ratios_.end());
    terminal.note(fmt::format("smallest ratio to {}: {:.3f}", compare_, worst));
    if (worst >= fail_below_) return ExitCode::Ok;
    throw ThermoError(ExitCode::BelowTarget,
                      fmt::format("a test ran at {:.3f} of its earlier speed, --fail-below allows {:g}; run "
                                  "again on an idle machine, or look for what changed",
                                  worst, fail_below_));
  }

  // What the user chose or varies is shown.
  std::vector<std::string> extra_columns() const {
    std::vector<std::string> columns;
    const auto add = [&](bool given, const char* name) {
      if (given) columns.emplace_back(name);
    };
    add(!lists_.n_threads.empty(), "threads");
    add(!lists_.poll.empty(), "poll");
    add(!lists_.n_batch.empty(), "n_batch");
    add(!lists_.n_ubatch.empty(), "n_ubatch");
    add(!lists_.k_type.empty(), "type_k");
    add(!lists_.v_type.empty(), "type_v");
    add(!lists_.isa.empty(), "isa");
    add(!lists_.repack.empty(), "repack");
    add(!lists_.load_mode.empty(), "load_mode");
    add(!lists_.n_rows.empty() || !lists_.n_parallel.empty(), "ms a step");
    add(!lists_.n_rows.empty(), "x one row");
    add(!lists_.n_rows.empty() || draft_.asks_for_drafts(), "experts");
    add(!lists_.n_cpu_moe.empty(), "n_cpu_moe");
    add(!lists_.expert_cache.empty() || !lists_.expert_sweep.empty(), "expert_cache");
    if (draft_.asks_for_drafts())
      for (const char* name : {"draft", "t/step", "accepted %", "draft %", "verify %", "x none"})
        columns.emplace_back(name);
    add(text_ != "builtin", "text");
    add(!compare_.empty(), "ratio");
    return columns;
  }

  std::vector<std::string> models_;
  std::string model_;  // the one that is measured
  std::string text_, format_ = "md", error_format_ = "none", compare_;
  BenchLists lists_;
  UrlBenchFlags url_;
  DraftFlags draft_;
  std::string oracle_;
  bool own_text_ = false;  // what the model writes itself
  BenchRunOptions run_;
  RopeOverride rope_;
  uint64_t seed_ = 1, gpu_memory_ = 0;
  int fit_target_mib_ = 1024;
  double delay_seconds_ = 0.0, fail_below_ = 0.0;
  std::string device_ = "auto", n_gpu_layers_ = "auto", numa_;
  ExpertFlags experts_;                         // what is the same in every setup
  std::vector<std::string> heat_lists_, heat_;  // empty: what makes sense
  bool check_ = false, warm_up_ = true, bandwidth_ = true;

  BenchText text_ids_;
  std::map<int, double> bandwidths_;  // bytes per second by threads asked for
  std::vector<double> ratios_;
  size_t n_alone_ = 0;  // rows that --compare has no counterpart for
};

}  // namespace

std::unique_ptr<Command> make_bench_command() {
  return std::make_unique<BenchCommand>();
}

}  // namespace thermo
