// The tokens that `bench` feeds. Real text by default: routing of random ids is not routing of text, so
// speeds of mixture models measured with random ids mislead.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "model/step.h"

namespace thermo {

class GgufFile;

struct BenchText {
  std::string source;        // "builtin", a path, "random"; part of the result
  std::vector<TokenId> ids;  // as many as asked for; the text is repeated
};

// In files that `synth` made with locality: tokens with ids in a row that are of one topic.
inline constexpr const char* kTopicTokensKey = "synth.topic_tokens";

// The text's ids; a model without a vocabulary gets an id for each word, the same for the same word. Where
// the file has topics, the words of as many tokens as a topic has are of one, and then of another.
std::vector<TokenId> encode_or_hash(const std::string& text, const GgufFile& file, int n_vocab);

// `text` is builtin or the path of a text file. Throws LoadError: file not readable or empty.
std::string bench_text_of(const std::string& text);

// `text` is builtin, random or the path of a text file. A model without a vocabulary gets an id for each
// word, the same for the same word, which keeps how often words come back. Throws LoadError: file not
// readable or empty.
BenchText make_bench_text(const std::string& text, const GgufFile& file, int n_vocab, size_t n_ids,
                          uint64_t seed);

}  // namespace thermo
