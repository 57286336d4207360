// What constrained output costs with a vocabulary of 248,320 tokens. The vocabulary is made up, with the mix
// of a real one: words with and without a space before them, other scripts, numbers, white space, pieces of
// code.
//
//   TrieBuild    once for a tokenizer                                                             240 ms
//   MaskFirst    all tokens in a state, of a grammar that was never used: within a string          0.3 ms
//                in a number or before a name                                               8 to 34 us
//                where the length of a string is counted (every token is walked)                  6 ms
//   MaskPlace    within a string, once strings are known but not this nesting of them             60 us
//   MaskAgain    once the state is known                                                         10 ns
//   Ask          one token                                                                       25 ns
//   Answer       a JSON answer as a sampler with top_k 20 asks, for each token of it             0.4 us
//
// Processor time on one core of a busy AMD EPYC.
#include <benchmark/benchmark.h>

#include <random>
#include <set>

#include "grammar/grammar_matcher.h"
#include "grammar/json_schema.h"
#include "tokenizer/testing/small_vocab.h"

namespace thermo {
namespace {

constexpr size_t kTokens = 248'320;

const Vocab& vocab() {
  static const Vocab made([] {
    VocabData data = testing::small_vocab();
    std::mt19937_64 random(1);
    const auto below = [&](uint64_t n) { return random() % n; };
    static constexpr std::string_view kLetters = "etaoinshrdlucmfwypvbgkjqxzETAOINS";
    static constexpr std::string_view kSigns = "(){}[]<>=+-*/.,;:'\"\\!?#$%&|_\n\t ";
    std::set<std::string> known;
    while (data.tokens.size() < kTokens) {
      std::string bytes;
      const uint64_t kind = below(100);
      if (kind < 62) {  // a word
        if (below(3) != 0) bytes += ' ';
        for (uint64_t n = 2 + below(9); n > 0; --n)
          bytes += kLetters[below(below(2) == 0 ? 12 : kLetters.size())];
      } else if (kind < 85) {  // another script
        for (uint64_t n = 1 + below(4); n > 0; --n)
          append_utf8(bytes,
                      static_cast<char32_t>(below(2) == 0 ? 0x4E00 + below(6000) : 0x400 + below(250)));
        if (below(20) == 0) bytes.pop_back();  // a part of a character
      } else if (kind < 97) {                  // code
        for (uint64_t n = 1 + below(4); n > 0; --n) bytes += kSigns[below(kSigns.size())];
        if (below(2) == 0) bytes += kLetters[below(kLetters.size())];
        if (below(2) == 0) bytes += kLetters[below(kLetters.size())];
      } else {
        bytes = std::string(1 + below(80), below(2) == 0 ? ' ' : '\n');
      }
      if (known.insert(bytes).second)
        testing::add_token(data, testing::to_alphabet(bytes), TokenType::Normal);
    }
    return data;
  }());
  return made;
}

const std::shared_ptr<const TokenTrie>& trie() {
  static const auto made = std::make_shared<const TokenTrie>(vocab());
  return made;
}

std::shared_ptr<const Grammar> schema() {
  static const auto made = compile_json_schema(Json::parse(R"({"type": "object", "properties": {
      "name": {"type": "string"}, "text": {"type": "string"}, "count": {"type": "integer", "minimum": 0},
      "kind": {"enum": ["first", "second", "third"]}, "short": {"type": "string", "maxLength": 100},
      "items": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "number"}},
      "required": ["a"]}}}, "required": ["name", "text", "count", "kind"]})"))
                               ->grammar;
  return made;
}

// States of an answer: where a string goes on, in a nested one, in a number, where a name is expected, where
// the length of a string is counted.
const std::vector<std::string> kTexts = {
    R"({"name": "Ab)", R"({"name": "", "text": "x", "count": 1, "kind": "first", "items": [{"a": "y)",
    R"({"name": "", "text": "", "count": 12)", R"({"name": "", )",
    R"({"name": "", "text": "x", "count": 1, "kind": "first", "short": "y)"};

void TrieBuild(benchmark::State& state) {
  vocab();
  for (auto _ : state) benchmark::DoNotOptimize(TokenTrie(vocab()).n_tokens());
}
BENCHMARK(TrieBuild)->Unit(benchmark::kMillisecond);

void MaskFirst(benchmark::State& state) {
  trie();
  for (auto _ : state) {
    state.PauseTiming();
    TokenMachine machine(schema(), trie());
    const auto at =
        machine.machine().walk(machine.machine().start(), kTexts[static_cast<size_t>(state.range(0))]);
    state.ResumeTiming();
    benchmark::DoNotOptimize(machine.mask(at));
  }
}
BENCHMARK(MaskFirst)->DenseRange(0, 4)->Unit(benchmark::kMicrosecond);

void MaskPlace(benchmark::State& state) {
  TokenMachine machine(schema(), trie());
  GrammarMachine& m = machine.machine();
  std::string text = R"({"name": "", "text": "x", "count": 1, "kind": "first", "other": [)";
  GrammarMachine::State at = m.walk(m.start(), text);
  machine.mask(m.walk(at, "\"a"));
  for (auto _ : state) {
    at = m.step(at, '[');  // one level deeper: a state that was never met
    const GrammarMachine::State in_string = m.walk(at, "\"a");
    benchmark::DoNotOptimize(machine.mask(in_string));
  }
}
BENCHMARK(MaskPlace)->Iterations(2000)->Unit(benchmark::kMicrosecond);

void MaskAgain(benchmark::State& state) {
  TokenMachine machine(schema(), trie());
  const auto at = machine.machine().walk(machine.machine().start(), kTexts[0]);
  for (auto _ : state) benchmark::DoNotOptimize(machine.mask(at));
}
BENCHMARK(MaskAgain)->Unit(benchmark::kMicrosecond);

void Ask(benchmark::State& state) {
  const auto machine = std::make_shared<TokenMachine>(schema(), trie());
  GrammarMatcher at(machine);
  at.accept_text(kTexts[0]);
  std::mt19937_64 random(3);
  std::vector<int32_t> tokens(4096);
  for (int32_t& token : tokens) token = static_cast<int32_t>(random() % kTokens);
  size_t i = 0;
  for (auto _ : state) {
    GrammarMatcher matcher = at;  // so that no mask is made
    benchmark::DoNotOptimize(matcher.allows(tokens[i++ % tokens.size()]));
  }
}
BENCHMARK(Ask)->Unit(benchmark::kNanosecond);

void Answer(benchmark::State& state) {
  const std::string text =
      R"({"name": "the thing that all is about", "text": "and then it said so", "count": 1234, "kind": "second", "items": [{"a": "x", "b": 1.5}, {"a": "y"}]})";
  // The longest token of a piece, as a model would write it.
  std::vector<int32_t> tokens;
  for (size_t at = 0; at < text.size();) {
    int32_t best = static_cast<uint8_t>(text[at]);
    for (int32_t id = 0; id < vocab().n_tokens(); ++id)
      if (trie()->is_text(id) && trie()->bytes(id).size() > trie()->bytes(best).size() &&
          text.compare(at, trie()->bytes(id).size(), trie()->bytes(id)) == 0)
        best = id;
    tokens.push_back(best);
    at += trie()->bytes(best).size();
  }
  std::mt19937_64 random(5);
  std::vector<int32_t> asked(40);
  for (int32_t& token : asked) token = static_cast<int32_t>(random() % kTokens);
  const auto machine = std::make_shared<TokenMachine>(schema(), trie());
  for (auto _ : state) {
    GrammarMatcher matcher(machine);
    for (const int32_t token : tokens) {
      for (const int32_t other : asked) benchmark::DoNotOptimize(matcher.allows(other));
      if (!matcher.accept(token)) state.SkipWithError("the text does not fit the schema");
    }
  }
  state.counters["per_token_us"] =
      benchmark::Counter(static_cast<double>(tokens.size()) * 1e-6,
                         benchmark::Counter::kIsIterationInvariantRate | benchmark::Counter::kInvert);
}
BENCHMARK(Answer)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace thermo
