// Generation with a drafter beside the same without, for `bench --draft`.
#pragma once

#include "cli/bench/bench_run.h"
#include "cli/options/draft_options.h"

namespace thermo {

// Who drafts, how much, and --oracle.
void add_draft_test_options(OptionSet& set, DraftFlags& flags, std::string& oracle);

struct DraftResults {
  BenchResult plain, drafted;
};

// Each repetition writes the text twice, once without drafts and once with them. `script`: the text, after
// its first tokens of the depth, at least one; empty: what the model writes itself after `start`. nullopt
// when `stop` said so. REQUIRES: no session is open.
std::optional<DraftResults> run_draft_test(Engine& engine, const BenchTest& test,
                                           std::span<const TokenId> start, std::span<const TokenId> script,
                                           const BenchRunOptions& options);

// "0.8", "0.8,0.1": for OracleOptions. Throws ConfigError.
std::vector<float> parse_oracle(const std::string& text);

}  // namespace thermo
