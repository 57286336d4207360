#include "cli/bench/bench_text.h"

#include <fmt/format.h>

#include <random>
#include <string_view>

#include "base/error.h"
#include "cli/input.h"
#include "gguf/gguf_file.h"
#include "tokenizer/bpe.h"
#include "tokenizer/vocab_gguf.h"

namespace thermo {
namespace {

// Prose, a list, code in two languages and a little data: what people ask models about.
constexpr std::string_view kBuiltinText =
    R"TEXT(The lake lies in a bowl of granite, and in summer it is really two lakes. The upper one is warm, bright and restless:
wind turns it over every afternoon, and most of what lives here lives in its first eight metres. Below it, dark and
still, lies water that has not seen the sun since April. Between the two there is a layer barely a metre thick where
the temperature drops so fast that a diver can hold a hand in June and a foot in March. Fishermen have known about it
for centuries, because the fish stop there; physicists gave it a name and a gradient; and the children who jump from
the pier learn about it in the time it takes to scream.

What keeps the two lakes apart is nothing but density. Cold water is heavier, so it stays where it is, and to mix the
layers the wind would have to lift the whole cold lake against gravity. In autumn the surface cools, the difference
shrinks, and one night in November a storm that would have done nothing in August turns everything over. Oxygen goes
down, nutrients come up, and in spring the cycle begins again. It is a simple mechanism, and like many simple
mechanisms it decides almost everything: where the plankton bloom, when the trout spawn, how clear the water is.

To measure it you need a rope, a thermometer and patience. Do the following:

1. Anchor over the deepest point, which is marked on the chart by the harbour.
2. Lower the probe one metre at a time and wait thirty seconds at each depth.
3. Write down depth, temperature and time; do not trust your memory.
4. Repeat on the way up, because the boat has drifted and so has the water.

The numbers then go through a short program. It looks for the depth at which temperature changes fastest:

```python
def thermocline(profile, window=3):
    """Depth of the steepest change in (depth, temperature) pairs, or None for a mixed lake."""
    best_depth, best_slope = None, 0.0
    for i in range(len(profile) - window):
        (d0, t0), (d1, t1) = profile[i], profile[i + window]
        slope = abs(t1 - t0) / (d1 - d0)
        if slope > best_slope:
            best_depth, best_slope = (d0 + d1) / 2, slope
    return best_depth if best_slope > 1.0 else None

readings = [(0, 22.4), (2, 22.3), (4, 22.1), (6, 21.8), (8, 17.2), (10, 11.0), (12, 8.1), (14, 7.2), (20, 6.4)]
print(f"thermocline at about {thermocline(readings)} m")
```

The same idea in C++, for the buoy that sends its readings every ten minutes:

```cpp
std::optional<double> steepest(std::span<const Reading> readings) {
  std::optional<double> depth;
  double best = 1.0;  // degrees per metre; less than that is a mixed lake
  for (size_t i = 1; i < readings.size(); ++i) {
    const double slope = (readings[i - 1].celsius - readings[i].celsius) / (readings[i].depth - readings[i - 1].depth);
    if (slope > best) {
      best = slope;
      depth = (readings[i].depth + readings[i - 1].depth) / 2;
    }
  }
  return depth;
}
```

"And what is it good for?" asked the girl who had held the rope all morning. The old man thought about it. "If you know
where the warm water ends," he said, "you know where to look for the fish, where to put the intake of the waterworks,
and why your feet are cold. But mostly it is good to know that there is a second lake under the one you can see." She
wrote that down too, next to {"depth_m": 9, "celsius": 14.1, "time": "11:40", "note": "rope wet, hands cold"}.

By the end of the season the notebook held four hundred profiles. Plotted one after another they looked like breathing:
the layer sank a little each week, from six metres in June to fourteen in October, thinned, wavered for a few days, and
was gone. Nobody at the harbour was surprised. Everybody came to look at the picture.
)TEXT";

std::string read_text(const std::string& path) {
  std::string text = read_text_file(path, kLargestPrompt);
  if (text.empty()) throw ConfigError(fmt::format("--text {}: the file is empty", path));
  return text;
}

// One id for each word or mark; with topics, of the topic that it stands in.
std::vector<TokenId> hash_words(std::string_view text, int n_vocab, int topic_tokens) {
  const auto is_word = [](char c) { return (c | 0x20) >= 'a' && (c | 0x20) <= 'z'; };
  std::vector<TokenId> ids;
  for (size_t i = 0; i < text.size();) {
    size_t end = i + 1;
    while (is_word(text[i]) && end < text.size() && is_word(text[end])) ++end;
    uint64_t hash = 0xCBF29CE484222325;
    for (const char c : text.substr(i, end - i))
      hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
    if (text[i] != ' ') {
      uint64_t first = 0, n = static_cast<uint64_t>(n_vocab);
      if (topic_tokens > 0 && n >= static_cast<uint64_t>(topic_tokens)) {
        const uint64_t n_topics = n / static_cast<uint64_t>(topic_tokens);
        const uint64_t topic = (ids.size() / static_cast<size_t>(topic_tokens) * 0x9E3779B97F4A7C15) >> 20;
        n = static_cast<uint64_t>(topic_tokens);
        first = topic % n_topics * n;
      }
      ids.push_back(static_cast<TokenId>(first + (hash >> 20) % n));
    }
    i = end;
  }
  if (ids.empty()) ids.push_back(0);
  return ids;
}

}  // namespace

std::vector<TokenId> encode_or_hash(const std::string& text, const GgufFile& file, int n_vocab) {
  std::optional<VocabData> vocab = read_vocab(file);
  if (!vocab)
    return hash_words(text, n_vocab, static_cast<int>(file.find_uint(kTopicTokensKey, 1 << 20).value_or(0)));
  return Tokenizer(std::move(*vocab)).encode(text, {.parse_special = false});
}

std::string bench_text_of(const std::string& text) {
  return text == "builtin" ? std::string(kBuiltinText) : read_text(text);
}

BenchText make_bench_text(const std::string& text, const GgufFile& file, int n_vocab, size_t n_ids,
                          uint64_t seed) {
  BenchText out{.source = text, .ids = {}};
  if (text == "random") {
    std::mt19937_64 random(seed);
    for (size_t i = 0; i < n_ids; ++i)
      out.ids.push_back(static_cast<TokenId>(random() % static_cast<uint64_t>(n_vocab)));
    return out;
  }
  const std::vector<TokenId> once = encode_or_hash(bench_text_of(text), file, n_vocab);
  const auto tokenizer = file.find_string("tokenizer.ggml.model");
  if (!tokenizer || *tokenizer == "none") out.source += " (words)";
  out.ids.reserve(n_ids);
  for (size_t i = 0; i < n_ids; ++i) out.ids.push_back(once[i % once.size()]);
  return out;
}

}  // namespace thermo
