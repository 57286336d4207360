#include "cli/bench/bench_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "base/error.h"
#include "cli/options/model_options.h"
#include "kernels/delta_net/delta_net.h"

namespace thermo {
namespace {

constexpr int kMaxValue = 1 << 24;
constexpr int kMaxRows = kDeltaChunk;  // of a step that is not kept
constexpr int kMaxParallel = 1024;     // sequences; each has its memory
constexpr size_t kMaxValues = 1000;    // a list longer than this is a slip of the keyboard

[[noreturn]] void refuse(std::string_view option, std::string_view text) {
  throw ConfigError(
      fmt::format("{}: '{}' cannot be used; expected up to {} numbers like 512, 512,2048, 128-512+128 or "
                  "1-16*2, each at most {}",
                  option, text, kMaxValues, kMaxValue));
}

int parse_number(std::string_view option, std::string_view text, std::string_view digits) {
  int value = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
  if (error != std::errc() || end != digits.data() + digits.size() || value < 0 || value > kMaxValue)
    refuse(option, text);
  return value;
}

void append_range(std::string_view option, std::string_view text, std::vector<int>& out) {
  const size_t dash = text.find('-', 1);
  if (dash == std::string_view::npos) {
    out.push_back(parse_number(option, text, text));
    return;
  }
  std::string_view last_text = text.substr(dash + 1);
  const size_t sign = last_text.find_first_of("+*");
  const bool multiplies = sign != std::string_view::npos && last_text[sign] == '*';
  int step = 1;
  if (sign != std::string_view::npos) {
    step = parse_number(option, text, last_text.substr(sign + 1));
    last_text = last_text.substr(0, sign);
  }
  int64_t value = parse_number(option, text, text.substr(0, dash));
  const int last = parse_number(option, text, last_text);
  // A range that does not move would never end.
  if (value > last || step < (multiplies ? 2 : 1) || (multiplies && value == 0)) refuse(option, text);
  for (; value <= last; value = multiplies ? value * step : value + step) {
    out.push_back(static_cast<int>(value));
    if (out.size() > kMaxValues) refuse(option, text);
  }
}

std::vector<int> ints_or(std::string_view option, const std::vector<std::string>& texts, int standard) {
  return texts.empty() ? std::vector<int>{standard} : parse_int_lists(option, texts);
}

// nullopt: as the engine does.
std::vector<std::optional<int>> poll_levels(const std::vector<std::string>& texts) {
  if (texts.empty()) return {std::nullopt};
  std::vector<std::optional<int>> levels;
  for (const int level : parse_int_lists("--poll", texts)) {
    if (level > 100)
      throw ConfigError(fmt::format("--poll: {} cannot be used, 0 to 100 was expected", level));
    levels.emplace_back(level);
  }
  return levels;
}

std::vector<std::string> words_or(const std::vector<std::string>& texts, const char* standard) {
  return texts.empty() ? std::vector<std::string>{standard} : parse_word_lists(texts);
}

std::optional<Isa> parse_isa(const std::string& name) {
  if (name == "auto") return std::nullopt;
  const std::optional<Isa> isa = isa_from_name(name);
  if (!isa) throw ConfigError(fmt::format("--isa: '{}' is not known; use auto, {}", name, kIsaNames));
  if (!isa_available(*isa))
    throw ThermoError(ExitCode::Device,
                      fmt::format("--isa {}: this CPU or this build does not have it; the best here is {}",
                                  name, isa_name(best_isa())));
  return isa;
}

// Whether weights are repacked, in every setup: one of two ways to say it.
std::vector<bool> repackings(const BenchLists& lists) {
  if (!lists.repack.empty() && !lists.load_mode.empty())
    throw ConfigError("--repack and --load-mode exclude each other: give one of them");
  std::vector<bool> values = lists.repack;
  for (const std::string& mode : parse_word_lists(lists.load_mode)) {
    if (mode != "auto" && mode != "none" && mode != "mmap")
      throw ConfigError(
          fmt::format("--load-mode: '{}' cannot be used, auto, none or mmap was expected", mode));
    values.push_back(mode != "mmap");
  }
  if (values.empty()) values.push_back(true);
  return values;
}

// How much device memory experts get, in every setup: one of three ways to say it, or auto.
std::vector<BenchSetup> expert_setups(const BenchLists& lists) {
  const int n_ways =
      int{!lists.expert_cache.empty()} + int{!lists.expert_sweep.empty()} + int{!lists.n_cpu_moe.empty()};
  if (n_ways > 1)
    throw ConfigError(
        "--expert-cache, --sweep-expert-cache and --n-cpu-moe exclude each other: give one of them");
  std::vector<BenchSetup> setups;
  for (const std::string& text : parse_word_lists(lists.expert_cache)) {
    try {
      expert_budget_option(text);
    } catch (const ConfigError& error) {
      throw ConfigError(fmt::format("--expert-cache: '{}' cannot be used, {}", text, error.what()));
    }
    setups.emplace_back().expert_cache = text;
  }
  std::vector<std::string> sweep = lists.expert_sweep;
  for (std::string& text : sweep) std::erase(text, '%');
  for (const int percent : parse_int_lists("--sweep-expert-cache", sweep)) {
    if (percent > 100)
      throw ConfigError(fmt::format(
          "--sweep-expert-cache: {}% cannot be used, shares of the experts from 0 to 100 were expected",
          percent));
    setups.emplace_back().expert_cache = fmt::format("{}%", percent);
  }
  for (const int n : parse_int_lists("-ncmoe", lists.n_cpu_moe)) setups.emplace_back().n_cpu_moe = n;
  if (setups.empty()) setups.emplace_back();
  return setups;
}

std::vector<BenchTest> make_tests(const BenchLists& lists) {
  std::vector<BenchTest> pairs;
  for (const std::string& text : lists.prompt_gen) {
    const std::vector<std::string> parts = split_list(text);
    if (parts.size() != 2)
      throw ConfigError(fmt::format("-pg: '{}' cannot be used; expected PROMPT,GEN", text));
    pairs.push_back(
        {.n_prompt = parse_number("-pg", text, parts[0]), .n_gen = parse_number("-pg", text, parts[1])});
  }
  std::vector<BenchTest> tests;
  const auto add = [&](BenchTest test, int depth) {
    test.n_depth = depth;
    if (test.n_tokens() > 0) tests.push_back(test);
  };
  const std::vector<int> parallel = ints_or("--parallel", lists.n_parallel, 1);
  for (const int n : parallel)
    if (n < 1 || n > kMaxParallel)
      throw ConfigError(fmt::format("--parallel: {} cannot be used, 1 to {} sequences", n, kMaxParallel));
  // Who asks for rows wants these alone, who asks for several sequences their generation.
  const bool defaults = lists.n_rows.empty(), alone = parallel == std::vector<int>{1};
  for (const int depth : ints_or("-d", lists.n_depth, 0)) {
    for (const int n : ints_or("-p", lists.n_prompt, defaults && alone ? 512 : 0))
      add({.n_prompt = n}, depth);
    for (const int n : ints_or("-n", lists.n_gen, defaults ? 128 : 0))
      for (const int n_parallel : parallel) add({.n_gen = n, .n_parallel = n_parallel}, depth);
    for (const BenchTest& pair : pairs) add(pair, depth);
    for (const int n : parse_int_lists("--rows", lists.n_rows)) {
      if (n > kMaxRows) throw ConfigError(fmt::format("--rows: {} is too many, at most {}", n, kMaxRows));
      add({.n_rows = n}, depth);
    }
  }
  return tests;
}

}  // namespace

std::vector<int> parse_int_lists(std::string_view option, const std::vector<std::string>& texts) {
  std::vector<int> values;
  for (const std::string& text : texts)
    for (const std::string& part : split_list(text)) append_range(option, part, values);
  return values;
}

std::vector<std::string> parse_word_lists(const std::vector<std::string>& texts) {
  std::vector<std::string> words;
  for (const std::string& text : texts)
    for (std::string& part : split_list(text)) words.push_back(std::move(part));
  return words;
}

std::string BenchTest::name() const {
  std::string name;
  if (n_prompt > 0) name += fmt::format("pp{}", n_prompt);
  if (n_prompt > 0 && n_gen > 0) name += '+';
  if (n_gen > 0) name += fmt::format("tg{}", n_gen);
  if (n_rows > 0) name += fmt::format("rows{}", n_rows);
  if (n_parallel > 1) name += fmt::format(" x {}", n_parallel);
  if (n_depth > 0) name += fmt::format(" @ d{}", n_depth);
  return name;
}

int BenchPlan::max_tokens() const {
  int most = 1;
  for (const BenchTest& test : tests) most = std::max(most, test.n_positions());
  return most;
}

int BenchPlan::max_rows() const {
  int most = 0;
  for (const BenchTest& test : tests) most = std::max(most, test.n_rows);
  return most;
}

int BenchPlan::max_parallel() const {
  int most = 1;
  for (const BenchTest& test : tests) most = std::max(most, test.n_parallel);
  return most;
}

BenchPlan make_bench_plan(const BenchLists& lists) {
  BenchPlan plan;
  plan.tests = make_tests(lists);
  if (plan.tests.empty())
    throw ConfigError("there is nothing to measure: -p and -n are both 0; give one of them, or --rows");
  for (const int n_batch : ints_or("-b", lists.n_batch, 2048))
    for (const int n_ubatch : ints_or("-ub", lists.n_ubatch, 0))
      for (const int n_threads : ints_or("-t", lists.n_threads, 0))
        for (const std::optional<int> poll : poll_levels(lists.poll))
          for (const std::string& k_type : words_or(lists.k_type, "auto"))
            for (const std::string& v_type : words_or(lists.v_type, "auto"))
              for (const std::string& isa : words_or(lists.isa, "auto"))
                for (const bool repack : repackings(lists))
                  for (const BenchSetup& experts : expert_setups(lists)) {
                    if (n_batch < 1 || n_ubatch < 0 || (n_ubatch == 0 && !lists.n_ubatch.empty()))
                      throw ConfigError("-b and -ub are at least 1");
                    BenchSetup setup = experts;
                    setup.n_batch = n_batch;
                    setup.n_ubatch = std::min(n_ubatch, n_batch);
                    setup.n_threads = n_threads;
                    setup.poll = poll;
                    setup.k_type = kv_type_from_name(k_type).value_or(KvType::F16);
                    setup.v_type = kv_type_from_name(v_type).value_or(KvType::F16);
                    setup.isa = parse_isa(isa);
                    setup.repack = repack;
                    plan.setups.push_back(setup);
                  }
  return plan;
}

}  // namespace thermo
