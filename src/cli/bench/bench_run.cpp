#include "cli/bench/bench_run.h"

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <ctime>
#include <numeric>

#include "base/error.h"
#include "base/sha256.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

// Whether n repetitions since `start` are what was asked for.
bool enough(int n, Clock::time_point start, const BenchRunOptions& options) {
  return n >= options.n_repetitions &&
         std::chrono::duration<double>(Clock::now() - start).count() >= options.min_seconds;
}

uint64_t ns_since(Clock::time_point start) {
  return static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
}

double mean(std::span<const double> values) {
  return values.empty()
             ? 0.0
             : std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

double deviation(std::span<const double> values) {
  if (values.size() < 2) return 0.0;
  const double average = mean(values);
  double sum = 0.0;
  for (const double v : values) sum += (v - average) * (v - average);
  return std::sqrt(sum / static_cast<double>(values.size() - 1));
}

std::vector<double> to_doubles(std::span<const uint64_t> values) {
  return {values.begin(), values.end()};
}

int32_t argmax(std::span<const float> logits) {
  return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

// False when it was cancelled.
bool require(const Status& status) {
  if (status) return true;
  if (status.error().code == ErrorCode::Cancelled) return false;
  fail_bench(status.error());
}

}  // namespace

void fail_bench(const Error& error) {
  ExitCode code = ExitCode::Internal;
  if (error.code == ErrorCode::DeviceFault) code = ExitCode::DeviceFault;
  if (error.code == ErrorCode::Unsupported) code = ExitCode::Model;
  throw ThermoError(code, "bench: " + error.message, error.remedy);
}

double processor_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec);
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::string time_now() {
  return fmt::format("{:%Y-%m-%dT%H:%M:%SZ}", fmt::gmtime(std::time(nullptr)));
}

void BenchResult::set_busy_ratio(int n_threads) {
  const double seconds =
      1e-9 * static_cast<double>(std::accumulate(samples_ns.begin(), samples_ns.end(), uint64_t{0}));
  if (seconds > 0.0) cpu_busy_ratio = std::min(1.0, busy_seconds / (seconds * n_threads));
}

double BenchResult::avg_ns() const {
  return mean(to_doubles(samples_ns));
}
double BenchResult::stddev_ns() const {
  return deviation(to_doubles(samples_ns));
}
double BenchResult::avg_ts() const {
  return mean(samples_ts());
}
double BenchResult::stddev_ts() const {
  return deviation(samples_ts());
}

std::vector<double> BenchResult::samples_ts() const {
  std::vector<double> ts;
  for (const uint64_t ns : samples_ns) ts.push_back(1e9 * test.n_tokens() / static_cast<double>(ns));
  return ts;
}

std::optional<uint64_t> BenchResult::percentile_ns(double share) const {
  if (token_ns.empty()) return std::nullopt;
  std::vector<uint64_t> sorted = token_ns;
  std::sort(sorted.begin(), sorted.end());
  const auto at = static_cast<size_t>(share * static_cast<double>(sorted.size() - 1) + 0.5);
  return sorted[at];
}

std::optional<BenchResult> run_bench_test(Engine& engine, Session& session, const BenchTest& test,
                                          std::span<const TokenId> ids, const BenchRunOptions& options) {
  const auto go_on = [&](int, int) { return !options.stop || !options.stop(); };
  const auto depth = ids.first(static_cast<size_t>(test.n_depth));
  const auto prompt = ids.subspan(depth.size(), static_cast<size_t>(test.n_prompt));
  const auto gen = ids.subspan(depth.size() + prompt.size(), static_cast<size_t>(test.n_gen));

  BenchResult result;
  result.test = test;
  result.test_time = time_now();
  session.clear();
  std::vector<int32_t> chosen;
  const auto start = Clock::now();
  for (int repetition = 0; !enough(repetition, start, options); ++repetition) {
    if (options.on_repetition) options.on_repetition(repetition);
    if (depth.empty()) {
      session.clear();
    } else {
      // Comes back to the checkpoint after the first time, instead of computing the depth again.
      const Result<int> reused = session.set_tokens(depth, go_on);
      if (!reused) {
        if (!require(Status(reused.error()))) return std::nullopt;
      }
      if (repetition == 0) session.checkpoint();
    }
    chosen.clear();
    uint64_t sample_ns = 0;
    const double busy_before = processor_seconds();
    const ExpertTelemetry experts_before = engine.expert_telemetry();
    if (!prompt.empty()) {
      const auto before = Clock::now();
      if (!require(session.append(prompt, go_on))) return std::nullopt;
      sample_ns += ns_since(before);
      chosen.push_back(session.best());
    }
    for (const TokenId& token : gen) {
      const auto before = Clock::now();
      if (!require(session.append({&token, 1}))) return std::nullopt;
      const uint64_t ns = ns_since(before);
      sample_ns += ns;
      result.token_ns.push_back(ns);
      chosen.push_back(session.best());
      if (!go_on(0, 0)) return std::nullopt;
    }
    result.busy_seconds += processor_seconds() - busy_before;
    result.experts = result.experts + (engine.expert_telemetry() - experts_before);
    result.samples_ns.push_back(sample_ns);
  }
  result.set_busy_ratio(engine.info().n_threads);
  result.output_sha256 = sha256_hex(std::as_bytes(std::span(chosen)));
  return result;
}

std::optional<BenchResult> run_rows_test(Engine& engine, Session& session, const BenchTest& test,
                                         std::span<const TokenId> ids, const BenchRunOptions& options,
                                         double one_row_ns) {
  constexpr int kSteps = 16, kWarmSteps = 3;
  constexpr uint64_t kEnoughNs = 500'000'000;  // a slow machine needs fewer steps for a steady mean
  const auto go_on = [&](int, int) { return !options.stop || !options.stop(); };
  BenchResult result;
  result.test = test;
  result.test_time = time_now();
  // The steps leave nothing behind, so the test before this one may have left its depth here.
  if (const Result<int> reused = session.set_tokens(ids.first(static_cast<size_t>(test.n_depth)), go_on);
      !reused && !require(Status(reused.error())))
    return std::nullopt;
  if (test.n_depth > 0) session.checkpoint();

  std::vector<Row> rows(static_cast<size_t>(test.n_rows));
  std::vector<int32_t> chosen;
  size_t next = 0;  // other tokens in every step, so that other experts are read
  const auto one_step = [&]() -> uint64_t {
    for (size_t r = 0; r < rows.size(); ++r)
      rows[r] = {
          .token = ids[next++ % ids.size()], .parent = static_cast<int32_t>(r) - 1, .want_logits = true};
    const SequenceRows group{
        .sequence = session.sequence(), .rows = rows, .uncommitted = true, .need = LogitsNeed::Best};
    const auto before = Clock::now();
    const Result<StepOutput> output = engine.step({.groups = {&group, 1}});
    const uint64_t ns = ns_since(before);
    if (!output) fail_bench(output.error());
    for (const RowLogits& row : output->rows)
      chosen.push_back(row.top != nullptr ? row.top->best : argmax(row.logits));
    require(engine.commit(session.sequence(), {}));
    return ns;
  };
  for (int i = 0; i < kWarmSteps; ++i) one_step();
  double timed_seconds = 0.0, busy_seconds = 0.0;
  for (int repetition = 0; repetition < options.n_repetitions; ++repetition) {
    if (options.on_repetition) options.on_repetition(repetition);
    const double busy_before = processor_seconds();
    const ExpertTelemetry experts_before = engine.expert_telemetry();
    next = 0;
    chosen.clear();
    uint64_t total_ns = 0;
    int n_steps = 0;
    for (; n_steps < kSteps && (n_steps < 2 || total_ns < kEnoughNs); ++n_steps) {
      if (!go_on(0, 0)) return std::nullopt;
      total_ns += one_step();
    }
    busy_seconds += processor_seconds() - busy_before;
    result.experts = result.experts + (engine.expert_telemetry() - experts_before);
    timed_seconds += 1e-9 * static_cast<double>(total_ns);
    result.samples_ns.push_back(total_ns / static_cast<uint64_t>(n_steps));
  }
  if (test.n_rows == 1)
    result.cost_of_one = 1.0;
  else if (one_row_ns > 0.0)
    result.cost_of_one = result.avg_ns() / one_row_ns;
  result.cpu_busy_ratio = std::min(1.0, busy_seconds / (timed_seconds * engine.info().n_threads));
  result.output_sha256 = sha256_hex(std::as_bytes(std::span(chosen)));
  return result;
}

std::optional<BenchResult> run_parallel_test(Engine& engine, std::span<Session> sessions,
                                             const BenchTest& test, std::span<const TokenId> ids,
                                             const BenchRunOptions& options) {
  const auto go_on = [&](int, int) { return !options.stop || !options.stop(); };
  const auto n_depth = static_cast<size_t>(test.n_depth), n_gen = static_cast<size_t>(test.n_gen);
  BenchResult result;
  result.test = test;
  result.test_time = time_now();
  std::vector<int32_t> chosen;  // the script is written, so the last choice of each stands for all
  const auto start = Clock::now();
  for (int repetition = 0; !enough(repetition, start, options); ++repetition) {
    if (options.on_repetition) options.on_repetition(repetition);
    RequestLoop loop(engine);
    size_t n_written = 0;
    chosen.clear();
    for (size_t i = 0; i < sessions.size(); ++i) {
      // The depth, the token that is computed first, and what is written after it.
      const auto text = ids.subspan(i * (n_depth + n_gen + 1), n_depth + 1 + n_gen);
      const Result<int> reused = sessions[i].set_tokens(text.first(n_depth), go_on);
      if (!reused && !require(Status(reused.error()))) return std::nullopt;
      if (repetition == 0 && n_depth > 0) sessions[i].checkpoint();
      GenerateOptions generate;
      generate.sampling.temperature = 0.0f;
      generate.max_tokens = test.n_gen;
      generate.script.assign(text.begin() + static_cast<std::ptrdiff_t>(n_depth) + 1, text.end());
      if (const auto id = loop.add(sessions[i], text.subspan(n_depth, 1), generate); !id)
        fail_bench(id.error());
    }
    uint64_t sample_ns = 0;
    const double busy_before = processor_seconds();
    const ExpertTelemetry experts_before = engine.expert_telemetry();
    for (size_t i = 0; i < n_gen; ++i) {
      if (!go_on(0, 0)) return std::nullopt;
      const auto before = Clock::now();
      const std::span<const RequestEvent> events = loop.step();
      const uint64_t ns = ns_since(before);
      sample_ns += ns;
      result.token_ns.push_back(ns);
      for (const RequestEvent& event : events) {
        if (const auto* error = std::get_if<Error>(&event.what)) fail_bench(*error);
        n_written += std::holds_alternative<GeneratedToken>(event.what) ? 1 : 0;
      }
    }
    result.busy_seconds += processor_seconds() - busy_before;
    result.experts = result.experts + (engine.expert_telemetry() - experts_before);
    result.samples_ns.push_back(sample_ns);
    for (const Session& session : sessions) chosen.push_back(session.best());
    if (n_written != n_gen * sessions.size())
      throw ThermoError(ExitCode::Internal, "bench: a sequence wrote less than it was told to");
  }
  for (Session& session : sessions) session.clear();
  result.set_busy_ratio(engine.info().n_threads);
  result.output_sha256 = sha256_hex(std::as_bytes(std::span(chosen)));
  return result;
}

void warm_up(Session& session, const BenchTest& test, int n_batch, std::span<const TokenId> ids, bool whole) {
  session.clear();
  if (test.n_prompt > 0)
    require(session.append(ids.first(static_cast<size_t>(std::min(test.n_prompt, n_batch)))));
  const auto gen =
      ids.subspan(static_cast<size_t>(test.n_depth + test.n_prompt), static_cast<size_t>(test.n_gen));
  for (const TokenId& token : whole ? gen : gen.first(std::min<size_t>(gen.size(), 1)))
    require(session.append({&token, 1}));
  session.clear();
}

void check_greedy(Engine& engine, Engine& reference, std::span<const TokenId> prompt, int n_tokens) {
  // Paths round differently, and then a near tie of two experts may go the other way: now and then a token is
  // a little off. A fault is off often, or far. In deviations of the reference's logits:
  constexpr double kRounding = 0.05, kFar = 1.0;
  int n_off = 0;
  Result<Session> ours = engine.open_session();
  Result<Session> theirs = reference.open_session();
  if (!ours || !theirs) throw ThermoError(ExitCode::Internal, "bench --check: no free sequence");
  require(ours->append(prompt));
  require(theirs->append(prompt));
  for (int i = 0; i < n_tokens; ++i) {
    const std::span<const float> expected = theirs->logits();
    const TokenId best = argmax(expected);
    const TokenId our_best = argmax(ours->logits());
    const std::vector<double> values(expected.begin(), expected.end());
    const double lead = static_cast<double>(expected[static_cast<size_t>(best)]) -
                        static_cast<double>(expected[static_cast<size_t>(our_best)]);
    const double off = lead / deviation(values);
    if (!(off <= kRounding)) ++n_off;
    if (!(off <= kFar) || n_off > n_tokens / 8)
      throw ThermoError(
          ExitCode::BelowTarget,
          fmt::format("--check: {} of {} tokens differ from the plain path, the last one ({} instead of {}) "
                      "by {:.2g} deviations; run `thermocline verify` to see where it differs",
                      n_off, i + 1, our_best, best, off));
    require(ours->append({&best, 1}));
    require(theirs->append({&best, 1}));
  }
}

}  // namespace thermo
