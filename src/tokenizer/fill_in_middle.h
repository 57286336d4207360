// Fill in the middle: the prompt that asks a model for the text between two others.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "tokenizer/bpe.h"

namespace thermo {

struct FillTokens {
  int32_t prefix = 0, suffix = 0, middle = 0;
  std::vector<int32_t> ends = {};  // they, padding and the markers of other files: none belongs to the text
};

// By their usual spellings; nullopt: the vocabulary has not all three, so that the model was not trained for
// it.
std::optional<FillTokens> fill_tokens(const Vocab& vocab);

// Prefix marker, what is before, suffix marker, what is after, middle marker. No special token is read in
// `after`: it may be any text. `look`: see EncodeOptions.
std::vector<int32_t> fill_prompt(const Tokenizer& tokenizer, const FillTokens& tokens,
                                 std::span<const int32_t> before, std::string_view after,
                                 const std::function<void()>* look = nullptr);

}  // namespace thermo
