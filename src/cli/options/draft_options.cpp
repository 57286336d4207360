#include "cli/options/draft_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <climits>
#include <iterator>

#include "base/error.h"
#include "base/log.h"
#include "chat/model_source.h"
#include "cli/options/model_options.h"
#include "embedded/embedded_model.h"
#include "model/model_config.h"
#include "safetensors/dflash_checkpoint.h"

namespace thermo {
namespace {

using Kind = DraftOptions::Kind;

bool is_number(std::string_view text) {
  if (text.starts_with('-')) text.remove_prefix(1);
  return !text.empty() && std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

int read_budget(const std::string& text) {
  if (text == "auto") return 0;
  int budget = 0;
  try {
    parse_value(text, budget);
  } catch (const ConfigError&) {
    budget = 0;
  }
  if (budget < 1 || budget > kMaxDraftNodes)
    throw ConfigError(fmt::format("--draft-budget: '{}' cannot be used, 1 to {} or auto was expected", text,
                                  kMaxDraftNodes));
  return budget;
}

constexpr std::string_view kTypes[] = {"none",        "draft-dflash", "draft-mtp",     "ngram-simple",
                                       "ngram-map-k", "ngram-mod",    "ngram-map-k4v", "ngram-cache"};
// llama.cpp's other drafters: a list may name them beside one of these.
constexpr std::string_view kOtherTypes[] = {"draft-simple", "draft-eagle3", "draft-dspark"};

std::vector<std::string> type_list(const std::string& text) {
  std::vector<std::string> types = split_list(text);
  for (const std::string& type : types) {
    const auto is_type = [&](std::string_view known) { return known == type; };
    if (std::any_of(std::begin(kTypes), std::end(kTypes), is_type)) continue;
    if (types.size() > 1 && std::any_of(std::begin(kOtherTypes), std::end(kOtherTypes), is_type)) continue;
    throw ConfigError(
        fmt::format("--spec-type: '{}' is not offered; one of {} was expected, or a list of them with commas",
                    type, fmt::join(kTypes, ", ")));
  }
  return types;
}

bool takes_a_file(const std::vector<std::string>& types) {
  return std::find(types.begin(), types.end(), "draft-dflash") != types.end();
}

// What a type says in the words of --draft; empty: it cannot be had.
std::string from_llama_type(const std::string& type, const DraftFlags& flags, bool embedded,
                            const ModelConfig& config) {
  if (type == "none") return "none";
  if (type.starts_with("ngram-")) return "lookup";
  if (type == "draft-dflash") return !flags.file.empty() ? flags.file : embedded ? "auto" : "";
  return type == "draft-mtp" && config.n_nextn > 0 ? "mtp" : "";
}

// What llama.cpp's options say in the words of --draft; empty: nothing.
std::string from_llama_names(const DraftFlags& flags, bool embedded, const ModelConfig& config) {
  if (flags.types.empty()) return flags.file.empty() && flags.standard ? "auto" : flags.file;
  const std::vector<std::string> types = type_list(flags.types);
  if (!flags.file.empty() && !takes_a_file(types))
    throw ConfigError(fmt::format("--spec-type {} and --model-draft contradict each other", flags.types));
  for (const std::string& type : types) {
    const std::string who = from_llama_type(type, flags, embedded, config);
    if (who.empty()) continue;
    if (types.size() > 1)
      log_warning("cli", "--spec-type {}: only {} drafts, because one drafter at a time can", flags.types,
                  type);
    return who;
  }
  throw ConfigError(fmt::format("--spec-type {}: {}", flags.types,
                                takes_a_file(types)
                                    ? "this needs the drafter's file; give it with --model-draft"
                                    : "this model has no next-token block; use a drafter or ngram-simple"));
}

// Who drafts, in the words of --draft. Options that still contradict each other come from one source.
std::string who_drafts(const DraftFlags& flags, bool embedded, const ModelConfig& config) {
  const std::string draft = flags.draft.value_or("auto");
  if (draft == "none") return "none";
  const std::string other = from_llama_names(flags, embedded, config);
  if (other.empty()) return flags.draft.value_or("none");
  if (draft != "auto" && draft != other && other != "auto")
    throw ConfigError(fmt::format("--draft {} and {} contradict each other", draft,
                                  flags.types.empty() ? "--model-draft" : "--spec-type " + flags.types));
  return draft == "auto" ? other : draft;
}

// llama.cpp takes any length.
int longest_draft(const char* option, int n) {
  if (n > kMaxDraftNodes)
    log_warning("cli", "{} {}: {} is used, the most that a draft can have", option, n, kMaxDraftNodes);
  return std::min(n, kMaxDraftNodes);
}

void contradict_about_drafts(OptionSet& set) {
  set.contradict_each_other({"--draft", "--model-draft", "--spec-default"});
  for (const char* other : {"--draft", "--spec-default"}) set.contradict("--spec-type", other);
  set.contradict("--spec-type", "--model-draft", [](const std::string& types, const std::string&) {
    return !takes_a_file(split_list(types));
  });
  for (const char* most : {"--spec-draft-n-max", "--draft-budget"})
    set.contradict("--spec-draft-n-min", most, [](const std::string& least, const std::string& n) {
      int low = 0, high = 0;
      try {
        parse_value(least, low);
        parse_value(n, high);
      } catch (const ConfigError&) {
        return false;  // auto, or refused later
      }
      return high > 0 && low > high;
    });
}

}  // namespace

GgufFile open_drafter(const std::string& path) {
  return is_checkpoint(path) ? open_dflash_checkpoint(path) : GgufFile(resolve_model_path(path));
}

void add_drafter_names(OptionSet& set, DraftFlags& flags, bool from_environment) {
  Option& file =
      set.value("-md,--model-draft,--spec-draft-model", "FILE", flags.file, "the same as --draft FILE")
          .llama_env("LLAMA_ARG_SPEC_DRAFT_MODEL", "LLAMA_ARG_MODEL_DRAFT")
          .advanced();
  if (!from_environment) file.no_environment();
  Option& types =
      set.value(
             "--spec-type", "TYPES", flags.types,
             "the same as --draft: none, draft-dflash, draft-mtp, ngram-simple and the other ngram-*; of a "
             "list with commas, the first that can be had")
          .advanced();
  if (!from_environment) types.no_environment();
}

void add_draft_options(OptionSet& set, DraftFlags& flags) {
  set.section("Drafting");
  set.value("--draft", "WHO", flags.draft,
            "draft tokens, so that one step can verify several; from a drafter's file, mtp (the model's own "
            "next-token block), lookup (in the context), auto or none (default); never changes the text");
  set.value("--draft-budget", "N", flags.budget,
            "tokens drafted in each round, 1 to 63, or auto: as many as pay off (default)");
  add_drafter_names(set, flags);
  set.flag("--spec-default", flags.standard, "the same as --draft auto").advanced();
  set.value("--spec-draft-n-max,--draft-max,--draft-n", "N", flags.n_max,
            "draft at most N tokens in a row; 0: what the drafter can do (default)")
      .range(0, INT_MAX)
      .llama_env("LLAMA_ARG_SPEC_DRAFT_N_MAX", "LLAMA_ARG_DRAFT_MAX")
      .advanced();
  set.value("--spec-draft-n-min,--draft-min,--draft-n-min", "N", flags.n_min,
            "do not verify drafts shorter than N tokens (default 0)")
      .range(0, INT_MAX)
      .llama_env("LLAMA_ARG_SPEC_DRAFT_N_MIN", "LLAMA_ARG_DRAFT_MIN")
      .advanced();
  set.value("--spec-draft-p-min,--draft-p-min", "P", flags.p_min,
            "leave out tokens to which the drafter gives a lower probability (default 0)")
      .range(0, 1)
      .llama_env("LLAMA_ARG_SPEC_DRAFT_P_MIN", "LLAMA_ARG_DRAFT_P_MIN")
      .advanced();
  set.value("-ctkd,--cache-type-k-draft,--spec-draft-type-k", "TYPE", flags.k_type,
            "type of the drafter's keys (default auto: f16)")
      .choices(kv_type_choices())
      .llama_env("LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K", "LLAMA_ARG_CACHE_TYPE_K_DRAFT")
      .advanced();
  set.value("-ctvd,--cache-type-v-draft,--spec-draft-type-v", "TYPE", flags.v_type,
            "type of the drafter's values (default auto: f16)")
      .choices(kv_type_choices())
      .llama_env("LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V", "LLAMA_ARG_CACHE_TYPE_V_DRAFT")
      .advanced();
  contradict_about_drafts(set);
}

void set_draft_options(const DraftFlags& flags, const std::string& model, const ModelConfig& config,
                       std::optional<GgufFile>& file, EngineOptions& options) {
  DraftOptions& draft = options.draft;
  draft.budget = read_budget(flags.budget);
  draft.max_depth = longest_draft("--draft-max", flags.n_max);
  draft.min_depth = longest_draft("--draft-min", flags.n_min);
  draft.min_probability = flags.p_min;
  draft.k_type = kv_type_from_name(flags.k_type);
  draft.v_type = kv_type_from_name(flags.v_type);
  const std::string who = who_drafts(flags, model.empty(), config);
  if (is_number(who))
    throw ConfigError(fmt::format(
        "--draft {}: this option names the drafter; set how much to draft with --draft-budget", who));
  if (who.empty()) throw ConfigError("--draft: a drafter's file, mtp, lookup, auto or none was expected");
  for (const auto& [most, name] :
       {std::pair(draft.max_depth, "--draft-max"), std::pair(draft.budget, "--draft-budget")})
    if (most > 0 && draft.min_depth > most)
      throw ConfigError(
          fmt::format("--draft-min {}: no draft is that long, {} is {}", draft.min_depth, name, most));
  if (who == "none") {
    draft.kind = Kind::None;
  } else if (who == "mtp") {
    draft.kind = Kind::Mtp;
  } else if (who == "lookup") {
    draft.kind = Kind::Lookup;
  } else if (who == "auto") {
    draft.kind = Kind::Auto;
    if (model.empty()) draft.file = &file.emplace(embedded_drafter(), "the embedded drafter");
  } else {
    draft.kind = Kind::File;
    draft.file = &file.emplace(open_drafter(who));
  }
}

std::string describe(const DraftTelemetry& t) {
  if (t.drafter.empty() || t.n_steps() == 0) return "";
  std::string depths;
  for (size_t d = 1; d < t.tried.size() && t.tried[d] > 0 && d <= 8; ++d)
    depths += fmt::format("{}{:.0f}", depths.empty() ? "" : " ",
                          100.0 * static_cast<double>(t.accepted[d]) / static_cast<double>(t.tried[d]));
  const double total = t.draft_seconds + t.verify_seconds + t.commit_seconds + t.plain_seconds;
  std::string text = fmt::format("draft {}: {:.2f} tokens a step, {} of {} accepted in {} rounds", t.drafter,
                                 t.tokens_per_step(), t.n_accepted, t.n_drafted, t.n_rounds);
  if (!depths.empty()) text += fmt::format(" (by depth {} %)", depths);
  if (total > 0.0)
    text += fmt::format(
        ", time: draft {:.0f} %, verify {:.0f} %, plain steps {:.0f} %", 100.0 * t.draft_seconds / total,
        100.0 * (t.verify_seconds + t.commit_seconds) / total, 100.0 * t.plain_seconds / total);
  if (t.n_experts > 0) text += fmt::format(", {:.1f} experts a layer to verify", t.experts_per_layer());
  if (t.n_cold_experts > 0) text += fmt::format(", {:.1f} of them cold", t.cold_experts_per_layer());
  if (t.state != "on") text += fmt::format(", {}", t.state);
  return text;
}

}  // namespace thermo
