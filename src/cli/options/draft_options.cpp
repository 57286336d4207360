#include "cli/options/draft_options.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "chat/model_source.h"
#include "cli/options/model_options.h"
#include "embedded/embedded_model.h"
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

// What llama.cpp's two options say in the words of --draft.
std::string from_llama_names(const DraftFlags& flags) {
  const std::string& type = flags.type;
  if (type.empty()) return flags.file;
  if (type == "none" || type == "draft-mtp" || type.starts_with("ngram-")) {
    if (!flags.file.empty())
      throw ConfigError(fmt::format("--spec-type {} and --model-draft contradict each other", type));
    return type == "none" ? "none" : type == "draft-mtp" ? "mtp" : "lookup";
  }
  if (type == "draft-dflash") return flags.file.empty() ? "auto" : flags.file;
  throw ConfigError(fmt::format(
      "--spec-type: '{}' is not offered; none, draft-dflash, draft-mtp or ngram-* was expected", type));
}

}  // namespace

GgufFile open_drafter(const std::string& path) {
  return is_checkpoint(path) ? open_dflash_checkpoint(path) : GgufFile(resolve_model_path(path));
}

void add_draft_options(OptionSet& set, DraftFlags& flags) {
  set.section("Drafting");
  set.value("--draft", "WHO", flags.draft,
            "draft tokens, so that one step can verify several; from a drafter's file, mtp (the model's own "
            "next-token block), lookup (in the context), auto or none (default); never changes the text");
  set.value("--draft-budget", "N", flags.budget,
            "tokens drafted in each round, 1 to 63, or auto: as many as pay off (default)");
  set.value("-md,--model-draft,--spec-draft-model", "FILE", flags.file, "the same as --draft FILE")
      .llama_env("LLAMA_ARG_SPEC_DRAFT_MODEL", "LLAMA_ARG_MODEL_DRAFT")
      .advanced();
  set.value("--spec-type", "TYPE", flags.type,
            "the same as --draft: none, draft-dflash, draft-mtp, ngram-simple and the other ngram-*")
      .advanced();
  set.custom_flag(
         "--spec-default", [&flags](bool on) { flags.draft = on ? "auto" : "none"; },
         "the same as --draft auto")
      .advanced();
  set.value("--spec-draft-n-max,--draft-max,--draft-n", "N", flags.n_max,
            "draft at most N tokens in a row; 0: what the drafter can do (default)")
      .range(0, kMaxDraftNodes)
      .llama_env("LLAMA_ARG_SPEC_DRAFT_N_MAX", "LLAMA_ARG_DRAFT_MAX")
      .advanced();
  set.value("--spec-draft-n-min,--draft-min,--draft-n-min", "N", flags.n_min,
            "do not verify drafts shorter than N tokens (default 0)")
      .range(0, kMaxDraftNodes)
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
}

void set_draft_options(const DraftFlags& flags, const std::string& model, std::optional<GgufFile>& file,
                       EngineOptions& options) {
  DraftOptions& draft = options.draft;
  draft.budget = read_budget(flags.budget);
  draft.max_depth = flags.n_max;
  draft.min_depth = flags.n_min;
  draft.min_probability = flags.p_min;
  draft.k_type = kv_type_from_name(flags.k_type);
  draft.v_type = kv_type_from_name(flags.v_type);
  const std::string other = from_llama_names(flags);
  const std::string who = other.empty() ? flags.draft : other;
  if (!other.empty() && flags.draft != "none" && flags.draft != "auto" && flags.draft != other)
    throw ConfigError(fmt::format("--draft {} and {} contradict each other", flags.draft,
                                  flags.file.empty() ? "--spec-type " + flags.type : "--model-draft"));
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
  if (t.state != "on") text += fmt::format(", {}", t.state);
  return text;
}

}  // namespace thermo
