#include "cli/options/model_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/log.h"
#include "chat/dry_breaker_texts.h"
#include "chat/text_model.h"
#include "cli/options/hub_options.h"
#include "cli/options/rope_options.h"
#include "cli/terminal.h"
#include "gguf/gguf_file.h"
#include "model/model_config.h"

namespace thermo {

constexpr int kLongestContext = 1 << 24;  // of any model

void add_model_option(OptionSet& set, std::string& model) {
  // An empty variable of a script must not become another model.
  const auto take = [&model](std::string_view text) {
    if (text.empty())
      throw ConfigError("a file or a folder was expected; leave it out for the embedded model");
    model = text;
  };
  set.positional_for(
      "model", "MODEL",
      "GGUF file, first file of a split model, a folder with one model, or hf:owner/repo[:quant]; without it "
      "the embedded model");
  set.custom("-m,--model", "MODEL", take, "the same, as an option").llama_env("LLAMA_ARG_MODEL");
  add_hub_options(set, model);
}

namespace {

// Switches of llama.cpp for what is always so here. The other way round is refused with the reason.
struct AlwaysSo {
  const char* names;
  bool so;
  const char* help;
  const char* otherwise;  // nullptr: nobody is misled by the other way
};
constexpr AlwaysSo kAlwaysSo[] = {
    {"--perf", true, "statistics cost nothing here; -q hides them", nullptr},
    {"--verbose-prompt", false, "the prompt is never echoed; tokenize shows it", nullptr},
    {"--display-prompt", false, "the prompt is never echoed", "the prompt is not echoed; print it yourself"},
    {"--simple-io", true, "a pipe gets plain text", "plain text is all a pipe gets; leave it out"},
};

// -ngl 0 is the CPU; more, where it is not a device that is named, a GPU.
void contradict_about_devices(OptionSet& set) {
  const auto is_cpu = [](const std::string& device) { return device == "cpu" || device == "none"; };
  set.contradict("--device", "--n-gpu-layers", [is_cpu](const std::string& device, const std::string& n) {
    return n != "auto" && is_cpu(device) != (n == "0");
  });
  set.contradict("--device", "--main-gpu",
                 [](const std::string&, const std::string& gpu) { return gpu != "0"; });
  set.contradict("--main-gpu", "--n-gpu-layers",
                 [](const std::string& gpu, const std::string& n) { return gpu != "0" && n == "0"; });
}

}  // namespace

void add_llama_switches(OptionSet& set) {
  for (const AlwaysSo& one : kAlwaysSo)
    set.custom_flag(
           one.names,
           [&one](bool on) {
             if (on != one.so && one.otherwise != nullptr) throw ConfigError(one.otherwise);
           },
           std::string("accepted: ") + one.help)
        .advanced();
}

void add_engine_options(OptionSet& set, EngineFlags& flags) {
  set.section("Engine");
  set.custom(
         "-c,--ctx-size", "N",
         [&flags](std::string_view text) {
           flags.n_ctx = text == "auto" ? 0 : parse_count(text);
           flags.whole_context = flags.n_ctx == 0 && text != "auto";
           if (flags.n_ctx < 0 || flags.n_ctx > kLongestContext)
             throw ConfigError("0, auto or a number of tokens up to 16M was expected");
         },
         "tokens the context holds; 0: the training length; auto: what fits of it, up to 32K (default auto)")
      .suggest({"auto"})
      .llama_env("LLAMA_ARG_CTX_SIZE");
  set.value("-t,--threads", "N", flags.n_threads, "threads (default: one for each physical core)")
      .range(-1, 1024)
      .llama_env("LLAMA_ARG_THREADS");
  set.value("-tb,--threads-batch", "N", flags.n_threads_batch,
            "accepted where it is the same as -t: one set of threads reads prompts and writes answers")
      .range(-1, 1024)
      .llama_env("LLAMA_ARG_THREADS_BATCH")
      .advanced();
  set.contradict("--threads", "--threads-batch", [](const std::string& n, const std::string& n_batch) {
    return n != n_batch && n_batch != "0" && n_batch != "-1";
  });
  set.value("-b,--batch-size", "N", flags.n_batch, "tokens of a prompt chunk (default 512; on a GPU 2048)")
      .range(1, 65536)
      .llama_env("LLAMA_ARG_BATCH")
      .advanced();
  set.value("-ub,--ubatch-size", "N", flags.n_ubatch, "the same; the smaller of -b and -ub counts")
      .range(1, 65536)
      .llama_env("LLAMA_ARG_UBATCH")
      .advanced();
  set.value("-ctk,--cache-type-k", "TYPE", flags.k_type,
            "type of cached keys: auto, f32, f16, bf16, q8_0 or q4_0 (default auto: f16)")
      .choices(kv_type_choices())
      .advanced();
  set.value("-ctv,--cache-type-v", "TYPE", flags.v_type,
            "type of cached values, likewise (default auto: f16)")
      .choices(kv_type_choices())
      .advanced();
  add_rope_options(set, flags.rope);
  set.value("-dev,--device", "NAME", flags.device,
            "auto, cpu, cuda:N (a build with CUDA), or sim: the CPU stands in for a device, to try expert "
            "placement")
      .suggest({"auto", "cpu", "sim", "cuda:0"})
      .llama_env("LLAMA_ARG_DEVICE");
  set.value("-ngl,--gpu-layers,--n-gpu-layers", "N", flags.n_gpu_layers,
            "0: the CPU, all: the GPU (default auto)")
      .suggest({"auto", "all", "0"})
      .llama_env("LLAMA_ARG_N_GPU_LAYERS")
      .advanced();
  set.value("-mg,--main-gpu", "N", flags.main_gpu, "the same as --device cuda:N; 0: as if it were not there")
      .range(0, 255)
      .advanced();
  contradict_about_devices(set);
  set.size("--gpu-memory,--vram-budget", "SIZE", flags.gpu_memory,
           "take no more GPU memory than this in total (12G; default: what is free)");
  set.custom(
         "-fit,--fit", "WHEN", [&flags](std::string_view text) { flags.fit = text == "on"; },
         "choose a context that fits into memory (default on); off: without -c the training length, or an "
         "error")
      .choices({"on", "off"})
      .llama_env("LLAMA_ARG_FIT")
      .advanced();
  set.value("-fitc,--fit-ctx", "N", flags.fit_ctx,
            "shortest context that may be chosen to fit (default 8192)")
      .range(1, 1 << 24)
      .llama_env("LLAMA_ARG_FIT_CTX")
      .advanced();
  set.value("-fitt,--fit-target", "MIB", flags.fit_target_mib,
            "GPU memory to leave free for the driver and other programs, in MiB (default 1024)")
      .range(0, 1 << 20)
      .llama_env("LLAMA_ARG_FIT_TARGET")
      .advanced();
  set.custom(
         "-fa,--flash-attn", "WHEN",
         [](std::string_view text) {
           if (text != "on" && text != "auto" && text != "1")
             throw ConfigError("attention is always computed in blocks here: on or auto was expected");
         },
         "accepted as on or auto: attention is always computed in blocks")
      .choices({"on", "off", "auto", "1", "0"})
      .bare("on")
      .advanced();
  add_llama_switches(set);
  set.flag("--warmup", flags.warm_up,
           "serve: warm up at the start, so that the first request is as fast as later ones (default on)")
      .advanced();
  set.flag("--context-shift", flags.context_shift,
           "chat: forget the oldest messages when the context is full (default off)")
      .advanced();
  set.value("--isa", "NAME", flags.isa,
            "instruction set: auto, portable, avx2, avxvnni, avx512 or amx (default: the best there is)")
      .choices({"auto", "portable", "avx2", "avxvnni", "avx512", "amx"})
      .advanced();
  set.flag("--repack", flags.repack,
           "copy the weights into the kernels' own layout (default); --no-repack reads them through the file "
           "mapping: less memory, slower")
      .advanced();
  set.custom(
         "-lm,--load-mode", "HOW",
         [&flags](std::string_view text) {
           if (text == "dio")
             throw ConfigError(
                 "the file is read through a mapping, whose pages are given back; auto, mmap, mlock or none "
                 "was "
                 "expected");
           if (text == "mmap" || text == "none") flags.repack = text == "none";
           if (text == "mlock") flags.lock_memory = true;
         },
         "auto; mmap: as --no-repack; mlock: as --mlock; none: as --repack (default auto)")
      .choices({"auto", "mmap", "mlock", "dio", "none"})
      .advanced();
  set.flag("--mmap", flags.use_mmap, "accepted; with --repack the mapping is only read while loading")
      .advanced();
  set.contradict("--repack", "--mmap", [](const std::string& repack, const std::string& mmap) {
    return repack == "off" && mmap == "off";
  });
  set.contradict("--load-mode", "--mmap", [](const std::string& how, const std::string& mmap) {
    return how == "mmap" && mmap == "off";
  });
  set.flag("--mlock", flags.lock_memory, "lock the model in memory, so the system cannot swap it out")
      .advanced();
  set.flag("--check-tensors", flags.check_tensors,
           "look at every weight while loading, and refuse a file that has numbers no model can have "
           "(default off)")
      .advanced();
  add_cpu_options(set, flags.cpu);
  add_expert_options(set, flags.experts);
}

namespace {

constexpr KvType kKvTypes[] = {KvType::F32, KvType::F16, KvType::BF16, KvType::Q8_0, KvType::Q4_0};

}  // namespace

std::vector<std::string> kv_type_choices() {
  std::vector<std::string> names = {"auto"};
  for (const KvType type : kKvTypes) names.emplace_back(kv_type_name(type));
  return names;
}

std::optional<KvType> kv_type_from_name(const std::string& name) {
  if (name == "auto") return std::nullopt;
  for (const KvType type : kKvTypes)
    if (name == kv_type_name(type)) return type;
  throw ConfigError(fmt::format("cache type '{}' is not known: one of {} was expected", name,
                                fmt::join(kv_type_choices(), ", ")));
}

std::string kv_decision(KvType k, KvType v, const EngineFlags& flags) {
  const bool asked = flags.k_type != "auto" || flags.v_type != "auto";
  return fmt::format("kv {}/{}: {}", kv_type_name(k), kv_type_name(v), asked ? "asked" : "default");
}

namespace {

DeviceChoice device_from_name(const std::string& name) {
  using Kind = DeviceChoice::Kind;
  if (name == "auto") return {};
  if (name == "cpu" || name == "none") return {.kind = Kind::Cpu};
  if (name == "sim") return {.kind = Kind::StandIn};
  DeviceChoice device{.kind = Kind::Gpu};
  if (name == "cuda" || name == "gpu") return device;
  if (name.starts_with("cuda:") || name.starts_with("CUDA:")) {
    const char* const end = name.data() + name.size();
    const auto [at, code] = std::from_chars(name.data() + 5, end, device.gpu);
    if (code == std::errc{} && at == end && device.gpu >= 0) return device;
  }
  throw ConfigError(fmt::format("--device: '{}' is not known, use auto, cpu, sim or cuda:N", name));
}

}  // namespace

DeviceChoice device_option(const std::string& name, const std::string& n_gpu_layers) {
  const DeviceChoice device = device_from_name(name);
  if (n_gpu_layers == "auto") return device;
  int layers = 1;
  if (n_gpu_layers != "all") {
    try {
      parse_value(n_gpu_layers, layers);
    } catch (const ConfigError&) {
      throw ConfigError(fmt::format("--n-gpu-layers: '{}' cannot be used, a number, all or auto was expected",
                                    n_gpu_layers));
    }
  }
  if (layers == 0) return {.kind = DeviceChoice::Kind::Cpu};
    // As with llama.cpp, a build without CUDA says so and goes on. With it, auto takes the GPU, and says so
    // if there is none.
#ifndef THERMO_HAS_CUDA
  if (layers > 0 && device.kind == DeviceChoice::Kind::Auto)
    log_warning("cli", "--n-gpu-layers {}: this build has no CUDA; the CPU does everything", n_gpu_layers);
#endif
  return device;
}

EngineOptions engine_options(const EngineFlags& flags) {
  if (flags.context_shift)
    throw ConfigError(
        "--context-shift: only a conversation (`thermocline chat`) forgets; give the context more tokens "
        "with -c");
  if (flags.n_ctx < 0)
    throw ConfigError(fmt::format("--ctx-size: {} is negative; 0 is the training length", flags.n_ctx));
  if (!flags.use_mmap && !flags.repack)
    throw ConfigError(
        "--no-mmap and --no-repack contradict each other: weights are either copied or read through the "
        "mapping; leave one out");
  // -1 and 0 stand for the default of both.
  const int n_threads = std::max(0, flags.n_threads), n_threads_batch = std::max(0, flags.n_threads_batch);
  if (n_threads_batch > 0 && n_threads_batch != n_threads)
    throw ConfigError(
        fmt::format("--threads-batch: {} threads for prompts and {} for answers cannot be had, because one "
                    "set of threads "
                    "does both; leave it out and use -t",
                    n_threads_batch, n_threads > 0 ? std::to_string(n_threads) : "all"));
  EngineOptions options;
  options.fit = flags.fit && !flags.whole_context;
  options.min_ctx = flags.fit_ctx;
  options.gpu_reserve = static_cast<uint64_t>(flags.fit_target_mib) << 20;
  const std::string main_gpu = fmt::format("cuda:{}", flags.main_gpu);
  if (flags.main_gpu > 0 && flags.device != "auto" && flags.device != main_gpu)
    throw ConfigError(fmt::format("--device {} and --main-gpu {} contradict each other: leave one out",
                                  flags.device, flags.main_gpu));
  options.device = device_option(flags.main_gpu > 0 ? main_gpu : flags.device, flags.n_gpu_layers);
  options.n_ctx = flags.n_ctx;
  options.k_type = kv_type_from_name(flags.k_type);
  options.v_type = kv_type_from_name(flags.v_type);
  options.rope = flags.rope;
  options.n_threads = n_threads;
  set_cpu_options(flags.cpu, options);
  options.check_tensors = flags.check_tensors;
  options.repack = flags.repack;
  options.gpu_memory = flags.gpu_memory;
  if (flags.n_batch > 0) options.n_batch = flags.n_batch;
  if (flags.n_ubatch > 0)
    options.n_batch = flags.n_batch > 0 ? std::min(flags.n_batch, flags.n_ubatch) : flags.n_ubatch;
  if (flags.isa != "auto") {
    options.isa = isa_from_name(flags.isa);
    if (!options.isa || !isa_available(*options.isa))
      throw ThermoError(ExitCode::Device,
                        fmt::format("--isa {}: this CPU or this build does not have it; the best here is {}",
                                    flags.isa, isa_name(best_isa())));
  }
  set_expert_options(flags.experts, options);
  return options;
}

void note_unusual(const ModelConfig& config, const EngineOptions& options, const Terminal& terminal) {
  ModelConfig stretched = config;
  override_rope(options.rope, stretched);
  if (options.n_ctx > stretched.n_ctx_train)
    terminal.note(
        fmt::format("a context of {} is more than the {} tokens the model was trained for: answers late in "
                    "it may be poor",
                    options.n_ctx, stretched.n_ctx_train));
  const int n_cores = cpu_info().n_cores;
  if (options.n_threads > static_cast<int>(usable_cores().size()))
    terminal.note(fmt::format("{} threads on {} cores wait for each other: -t {} is faster",
                              options.n_threads, n_cores, n_cores));
}

void add_sampling_options(OptionSet& set, SamplingFlags& flags) {
  set.section("Sampling");
  set.value("--temp,--temperature", "T", flags.temperature,
            "temperature; 0 always takes the most likely token (default 1.0)")
      .range(0, 5);
  set.value("--top-k", "N", flags.top_k, "keep the N most likely tokens; 0: all (default 20)").range(-1, 1e9);
  set.value("--top-p", "P", flags.top_p,
            "keep the most likely tokens whose probabilities add up to P (default 0.95)")
      .range(0, 1);
  set.value("--min-p", "P", flags.min_p,
            "drop tokens below this share of the most likely one's probability (default 0)")
      .range(0, 1);
  set.custom(
      "-s,--seed", "N",
      [&flags](std::string_view text) {
        uint64_t seed = 0;
        try {
          if (text != "-1") parse_value(text, seed);
        } catch (const ConfigError&) {
          throw ConfigError("-1 or a whole number from 0 to 18446744073709551615 was expected");
        }
        flags.seed = text == "-1" ? std::nullopt : std::optional<uint64_t>(seed);
      },
      "same seed, same answer; -1: random (default)");
  set.value("--repeat-penalty", "X", flags.repeat_penalty, "1: off (default 1)").range(0.1, 10).advanced();
  set.value("--repeat-last-n", "N", flags.repeat_last_n,
            "how many tokens --repeat-penalty looks back; -1: all")
      .range(-1, 1e9)
      .advanced();
  set.value("--presence-penalty", "X", flags.presence_penalty,
            "-2 to 2, for tokens that are already in the answer (default 0)")
      .range(-2, 2)
      .advanced();
  set.value("--frequency-penalty", "X", flags.frequency_penalty,
            "-2 to 2, for each time a token has occurred (default 0)")
      .range(-2, 2)
      .advanced();
  set.value("--dry-multiplier", "X", flags.dry_multiplier,
            "DRY: penalty for a token that would continue a repeated sequence; 0: off (default 0)")
      .range(0, 100)
      .advanced();
  set.value("--dry-base", "X", flags.dry_base,
            "DRY: the penalty grows by this factor with each repeated token (default 1.75)")
      .range(1, 10)
      .advanced();
  set.value("--dry-allowed-length", "N", flags.dry_allowed_length,
            "DRY: repeating up to N tokens costs nothing (default 2)")
      .range(1, 1 << 20)
      .advanced();
  set.value("--dry-penalty-last-n", "N", flags.dry_penalty_last_n,
            "DRY: how many tokens it looks back; -1: all, 0: off (default: as --repeat-last-n)")
      .range(-1, 1e9)
      .advanced();
  set.list(
         "--dry-sequence-breaker", "TEXT", flags.dry_breakers,
         "DRY: no run extends over this text; none: over any; repeatable (default: the end of a line, and : "
         "\" *)")
      .advanced();
  set.list("-l,--logit-bias", "ID(+|-)X", flags.logit_bias,
           "add X to the logit of a token: 15043+1, 15043-inf; repeatable")
      .advanced();
  set.flag("--ignore-eos", flags.ignore_eos, "ignore the end-of-text token and write up to the limit")
      .advanced();
}

namespace {

// "15043+1.5", "15043-100", "15043-inf".
void add_logit_bias(const std::string& text, std::map<int32_t, float>& bias) {
  size_t sign = text.find_first_of("+-", 1);
  try {
    if (sign == std::string::npos) throw ConfigError("");
    int id = 0;
    parse_value(text.substr(0, sign), id);
    std::string_view amount = std::string_view(text).substr(sign);
    float value = kBanToken;
    if (amount != "-inf") parse_value(amount, value);
    bias[id] = value;
  } catch (const ConfigError&) {
    throw ConfigError(
        fmt::format("--logit-bias: '{}' cannot be used, a token id and a signed number were expected "
                    "(15043+1, 15043-inf)",
                    text));
  }
}

}  // namespace

std::vector<std::string> dry_breaker_texts(const SamplingFlags& flags) {
  if (flags.dry_breakers.empty()) return usual_dry_breakers();
  if (flags.dry_breakers == std::vector<std::string>{"none"}) return {};
  if (flags.dry_breakers.size() > kMaxDryBreakers)
    throw ConfigError(fmt::format("--dry-sequence-breaker was given {} times; at most {} texts can end a run",
                                  flags.dry_breakers.size(), kMaxDryBreakers));
  for (const std::string& text : flags.dry_breakers)
    if (text.empty() || text.size() > kMaxDryBreakerBytes)
      throw ConfigError(
          fmt::format("--dry-sequence-breaker: a text of {} bytes cannot be used, 1 to {} were expected",
                      text.size(), kMaxDryBreakerBytes));
  return flags.dry_breakers;
}

SamplingParams sampling_params(const SamplingFlags& flags, const TextModel& model) {
  SamplingParams params;
  const GgufFile& file = model.file();
  auto recommended = [&file](const char* key, auto built_in) {
    std::optional<double> value;
    if (const GgufValue* found = file.find(key); found != nullptr) {
      bool is_float = found->type == GgufType::F32 || found->type == GgufType::F64;
      value = is_float ? *file.find_float(key) : static_cast<double>(*file.find_int(key));
    }
    return value ? static_cast<decltype(built_in)>(*value) : built_in;
  };
  params.temperature = recommended("general.sampling.temp", params.temperature);
  params.top_k = recommended("general.sampling.top_k", params.top_k);
  params.top_p = recommended("general.sampling.top_p", params.top_p);
  params.min_p = recommended("general.sampling.min_p", params.min_p);
  params.repetition_penalty = recommended("general.sampling.penalty_repeat", params.repetition_penalty);
  params.repeat_last_n = recommended("general.sampling.penalty_last_n", params.repeat_last_n);
  if (model.card()) model.card()->apply(params);

  params.temperature = flags.temperature.value_or(params.temperature);
  params.top_k = flags.top_k.value_or(params.top_k);
  params.top_p = flags.top_p.value_or(params.top_p);
  params.min_p = flags.min_p.value_or(params.min_p);
  params.repetition_penalty = flags.repeat_penalty.value_or(params.repetition_penalty);
  params.repeat_last_n = flags.repeat_last_n.value_or(params.repeat_last_n);
  params.presence_penalty = flags.presence_penalty.value_or(params.presence_penalty);
  params.frequency_penalty = flags.frequency_penalty.value_or(params.frequency_penalty);
  params.dry_multiplier = flags.dry_multiplier.value_or(params.dry_multiplier);
  params.dry_base = flags.dry_base.value_or(params.dry_base);
  params.dry_allowed_length = flags.dry_allowed_length.value_or(params.dry_allowed_length);
  if (flags.dry_penalty_last_n) params.dry_penalty_last_n = flags.dry_penalty_last_n;
  if (params.dry_multiplier > 0.0f)
    params.dry_breakers = dry_breakers(model.tokenizer(), dry_breaker_texts(flags));
  params.seed = flags.seed;
  params.ignore_eos = flags.ignore_eos;
  for (const std::string& text : flags.logit_bias) add_logit_bias(text, params.logit_bias);
  if (Status status = validate(params, model.tokenizer().vocab().n_tokens()); !status)
    throw ConfigError(status.error().message);
  return params;
}

}  // namespace thermo
