// What `bench` measures: lists and ranges of the options, and the tests that follow from them. Pure.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/isa.h"

namespace thermo {

// "512,2048", "1-4", "128-512+128", "1-16*2": the numbers it stands for. Several texts one after the other.
// Throws ConfigError with the option's name.
std::vector<int> parse_int_lists(std::string_view option, const std::vector<std::string>& texts);
// "f16,q8_0": the parts.
std::vector<std::string> parse_word_lists(const std::vector<std::string>& texts);

// A prompt of n_prompt tokens, then n_gen tokens one by one, after n_depth tokens that are not timed; or
// steps of n_rows tokens that are looked at and dropped again, as drafts are verified. Generation may be of
// several sequences, one row of each in every step.
struct BenchTest {
  int n_prompt = 0;
  int n_gen = 0;
  int n_depth = 0;
  int n_rows = 0;
  int n_parallel = 1;

  int n_tokens() const { return (n_prompt + n_gen + n_rows) * n_parallel; }
  // Of one sequence, what is not timed included.
  int n_positions() const { return n_depth + n_prompt + n_gen + n_rows; }
  // "pp512", "tg128 @ d4096", "pp512+tg128", "rows8", "tg128 x 16".
  std::string name() const;
};

// What the engine must be loaded anew for.
struct BenchSetup {
  int n_batch = 2048;
  int n_ubatch = 0;         // 0: the engine's choice
  int n_threads = 0;        // 0: one for each core
  std::optional<int> poll;  // nullopt: as the engine does
  KvType k_type = KvType::F16;
  KvType v_type = KvType::F16;
  std::optional<Isa> isa;  // nullopt: the best
  bool repack = true;
  std::string expert_cache = "auto";  // as EngineOptions
  int n_cpu_moe = -1;                 // instead of it: as ExpertFlags
};

struct BenchPlan {
  std::vector<BenchSetup> setups;
  std::vector<BenchTest> tests;  // run for each setup

  int max_tokens() const;    // of one sequence, depth included
  int max_rows() const;      // of a step that is dropped again
  int max_parallel() const;  // sequences
};

// The texts as given; empty: the default.
struct BenchLists {
  std::vector<std::string> n_prompt, n_gen, prompt_gen, n_depth, n_rows, n_parallel;
  std::vector<std::string> n_batch, n_ubatch, n_threads, poll, k_type, v_type, isa;
  std::vector<bool> repack;
  std::vector<std::string> load_mode;
  std::vector<std::string> expert_cache, expert_sweep, n_cpu_moe;
};

// Every combination. Throws ConfigError.
BenchPlan make_bench_plan(const BenchLists& lists);

}  // namespace thermo
