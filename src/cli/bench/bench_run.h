// Runs one test of `bench` on a loaded engine and measures it. Tokenising and sampling are not part of it, as
// in llama-bench.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/result.h"
#include "cli/bench/bench_plan.h"
#include "engine/engine.h"
#include "experts/telemetry.h"

namespace thermo {

struct BenchResult {
  BenchTest test;
  std::string test_time;                 // start, UTC, "2026-01-31T12:00:00Z"
  std::vector<uint64_t> samples_ns;      // one for each repetition
  std::vector<uint64_t> token_ns;        // of each generated token, all repetitions
  double cpu_busy_ratio = 0.0;           // processor time over wall time and threads
  std::string output_sha256;             // of the most likely token after each timed step
  std::optional<double> cost_of_one;     // time of a step of n_rows rows over that of one row
  ExpertTelemetry experts;               // of the timed steps, all repetitions
  DraftTelemetry draft;                  // the same
  std::optional<double> ratio_to_plain;  // speed over that without drafts
  double busy_seconds = 0.0;             // processor time of all timed steps

  double avg_ns() const;
  double stddev_ns() const;
  std::vector<double> samples_ts() const;  // tokens per second
  double avg_ts() const;
  double stddev_ts() const;
  // The token time that `share` of the tokens stay below; nullopt when none was generated.
  std::optional<uint64_t> percentile_ns(double share) const;
  // From busy_seconds and the samples.
  void set_busy_ratio(int n_threads);
};

struct BenchRunOptions {
  int n_repetitions = 5;
  double min_seconds = 0.0;                           // repeats for at least this long
  std::function<void(int repetition)> on_repetition;  // before it, not timed
  std::function<bool()> stop;                         // asked between steps
};

// Throws what ends bench: damaged weights are the model's fault.
[[noreturn]] void fail_bench(const Error& error);

double processor_seconds();  // of this process so far
std::string time_now();      // for BenchResult::test_time

// nullopt when `stop` said so. `ids` are the tokens to feed, at least depth + prompt + gen. Throws
// ThermoError when the engine refuses.
std::optional<BenchResult> run_bench_test(Engine& engine, Session& session, const BenchTest& test,
                                          std::span<const TokenId> ids, const BenchRunOptions& options);

// The same for a test of rows: each repetition is the mean of several steps. Rows want the most likely token
// each. `one_row_ns`: the time of one row at this depth, 0 when it was not measured.
std::optional<BenchResult> run_rows_test(Engine& engine, Session& session, const BenchTest& test,
                                         std::span<const TokenId> ids, const BenchRunOptions& options,
                                         double one_row_ns);

// Generation of test.n_parallel sequences at once: every step has one row of each. The sequences read
// different parts of `ids`, which has at least n_positions() + 1 tokens for each. `sessions`: one for each.
std::optional<BenchResult> run_parallel_test(Engine& engine, std::span<Session> sessions,
                                             const BenchTest& test, std::span<const TokenId> ids,
                                             const BenchRunOptions& options);

// Feeds a little of everything once, so that pages are touched and clocks are up; with `whole` all that the
// test generates, so that its experts are hot.
void warm_up(Session& session, const BenchTest& test, int n_batch, std::span<const TokenId> ids, bool whole);

// Follows `reference` (the plain code path) for n_tokens and throws ThermoError (BelowTarget) when `engine`
// would have chosen another token by more than rounding.
void check_greedy(Engine& engine, Engine& reference, std::span<const TokenId> prompt, int n_tokens);

}  // namespace thermo
