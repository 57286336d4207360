#include "tokenizer/fill_in_middle.h"

namespace thermo {

std::optional<FillTokens> fill_tokens(const Vocab& vocab) {
  struct Spelling {
    const char *prefix, *suffix, *middle;
  };
  static constexpr Spelling kSpellings[] = {{"<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"},
                                            {"<fim_prefix>", "<fim_suffix>", "<fim_middle>"},
                                            {"<fim-prefix>", "<fim-suffix>", "<fim-middle>"}};
  for (const Spelling& spelling : kSpellings) {
    const auto prefix = vocab.find_special(spelling.prefix), suffix = vocab.find_special(spelling.suffix),
               middle = vocab.find_special(spelling.middle);
    if (!prefix || !suffix || !middle) continue;
    FillTokens tokens{*prefix, *suffix, *middle, {*prefix, *suffix, *middle}};
    for (const char* end : {"<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<|file_sep|>", "<file_sep>"})
      if (const auto id = vocab.find_special(end)) tokens.ends.push_back(*id);
    return tokens;
  }
  return std::nullopt;
}

std::vector<int32_t> fill_prompt(const Tokenizer& tokenizer, const FillTokens& tokens,
                                 std::span<const int32_t> before, std::string_view after,
                                 const std::function<void()>* look) {
  const Vocab& vocab = tokenizer.vocab();
  std::vector<int32_t> ids;
  if (vocab.add_bos() && vocab.bos()) ids.push_back(*vocab.bos());
  ids.push_back(tokens.prefix);
  ids.insert(ids.end(), before.begin(), before.end());
  ids.push_back(tokens.suffix);
  const std::vector<int32_t> rest = tokenizer.encode(after, {.parse_special = false, .look = look});
  ids.insert(ids.end(), rest.begin(), rest.end());
  ids.push_back(tokens.middle);
  return ids;
}

}  // namespace thermo
