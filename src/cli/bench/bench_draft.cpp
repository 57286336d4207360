#include "cli/bench/bench_draft.h"

#include <fmt/format.h>

#include <chrono>
#include <numeric>

#include "base/error.h"
#include "base/sha256.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kWarmTokens = 32;

// Writes the text once. Returns false when `stop` said so.
bool write_once(Engine& engine, bool drafts, std::span<const TokenId> start, GenerateOptions generate,
                const BenchRunOptions& options, BenchResult& result) {
  engine.set_drafting(drafts);
  Result<Session> session = engine.open_session();
  if (!session) throw ThermoError(ExitCode::Internal, "bench: " + session.error().message);
  if (const Status status = session->append(start); !status) fail_bench(status.error());
  std::vector<int32_t> written;
  bool stopped = false;
  const ExpertTelemetry experts_before = engine.expert_telemetry();
  const double busy_before = processor_seconds();
  const auto begin = Clock::now();
  const auto text = session->generate(generate, [&](const GeneratedToken& token) {
    written.push_back(token.id);
    stopped = options.stop && options.stop();
    return !stopped;
  });
  const auto ns = static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - begin).count());
  if (!text) fail_bench(text.error());
  if (stopped) return false;
  result.samples_ns.push_back(ns);
  result.busy_seconds += processor_seconds() - busy_before;
  result.experts = result.experts + (engine.expert_telemetry() - experts_before);
  result.draft = result.draft + text->draft;
  result.output_sha256 = sha256_hex(std::as_bytes(std::span(written)));
  return true;
}

}  // namespace

void add_draft_test_options(OptionSet& set, DraftFlags& flags, std::string& oracle) {
  set.section("Drafting");
  set.value("--draft", "WHO", flags.draft,
            "measure generation with and without this drafter, alternating: a drafter's file, mtp, lookup "
            "or auto")
      .no_environment();
  add_drafter_names(set, flags, /*from_environment=*/false);
  set.value("--draft-budget", "N", flags.budget,
            "tokens drafted in each round, 1 to 63, or auto: as many as pay off (default)")
      .no_environment();
  set.value("--oracle", "P", oracle,
            "the drafter does its work, but each guess is replaced by the right token with probability P; "
            "P,Q: and the second candidate with Q")
      .no_environment();
}

std::optional<DraftResults> run_draft_test(Engine& engine, const BenchTest& test,
                                           std::span<const TokenId> start, std::span<const TokenId> script,
                                           const BenchRunOptions& options) {
  GenerateOptions generate;
  generate.sampling.temperature = 0.0f;
  generate.script.assign(script.begin(), script.end());
  DraftResults results;
  for (BenchResult* result : {&results.plain, &results.drafted}) {
    result->test = test;
    result->test_time = time_now();
    // Also for the planner: it measures steps before it drafts.
    BenchResult warm;
    generate.max_tokens = std::min(kWarmTokens, test.n_gen);
    if (!write_once(engine, result == &results.drafted, start, generate, options, warm)) return std::nullopt;
  }
  generate.max_tokens = test.n_gen;
  const auto begin = Clock::now();
  const auto enough = [&](int n) {
    return n >= options.n_repetitions &&
           std::chrono::duration<double>(Clock::now() - begin).count() >= options.min_seconds;
  };
  for (int repetition = 0; !enough(repetition); ++repetition) {
    if (options.on_repetition) options.on_repetition(repetition);
    if (!write_once(engine, false, start, generate, options, results.plain) ||
        !write_once(engine, true, start, generate, options, results.drafted))
      return std::nullopt;
  }
  engine.set_drafting(true);
  for (BenchResult* result : {&results.plain, &results.drafted})
    result->set_busy_ratio(engine.info().n_threads);
  results.drafted.ratio_to_plain = results.plain.avg_ns() / results.drafted.avg_ns();
  return results;
}

std::vector<float> parse_oracle(const std::string& text) {
  std::vector<float> probabilities;
  for (const std::string& part : parse_word_lists({text})) {
    float p = -1.0f;
    try {
      parse_value(part, p);
    } catch (const ConfigError&) {
      p = -1.0f;
    }
    probabilities.push_back(p);
  }
  const auto wrong = [](float p) { return !(p >= 0.0f && p <= 1.0f); };
  if (std::any_of(probabilities.begin(), probabilities.end(), wrong) || probabilities.size() > 8 ||
      std::accumulate(probabilities.begin(), probabilities.end(), 0.0f) > 1.0f + 1e-4f)
    throw ConfigError(
        fmt::format("--oracle: '{}' cannot be used, a probability like 0.8, or one for each candidate, "
                    "0.8,0.1, was expected",
                    text));
  return probabilities;
}

}  // namespace thermo
