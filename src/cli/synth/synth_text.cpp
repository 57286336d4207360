#include "cli/synth/synth_text.h"

#include <fmt/format.h>

#include "base/error.h"
#include "chat/model_source.h"
#include "gguf/gguf_file.h"

namespace thermo {

void set_synth_vocabulary(int n_vocab, GgufWriter& writer) {
  const GgufFile plankton = open_model("");
  constexpr const char *kTokens = "tokenizer.ggml.tokens", *kTypes = "tokenizer.ggml.token_type";
  for (const GgufEntry& entry : plankton.metadata())
    if (entry.key.starts_with("tokenizer.") && entry.key != kTokens && entry.key != kTypes)
      writer.set(entry.key, entry.value);
  const std::vector<std::string_view> known = plankton.require_strings(kTokens);
  const auto n_tokens = static_cast<size_t>(n_vocab);
  if (n_tokens < known.size())
    throw ConfigError(fmt::format(
        "--text needs a vocabulary of at least {} tokens, and this one would have {}; use --vocab {}",
        known.size(), n_vocab, known.size()));
  std::vector<std::string> tokens(known.begin(), known.end());
  std::vector<int32_t> types;
  for (const int64_t type : plankton.require_ints(kTypes)) types.push_back(static_cast<int32_t>(type));
  constexpr int32_t kNormal = 1;
  types.resize(n_tokens, kNormal);
  while (tokens.size() < n_tokens) tokens.push_back(fmt::format("\u0120w{}", tokens.size()));  // " w8192"
  writer.set_array(kTokens, tokens);
  writer.set_array(kTypes, types);
}

}  // namespace thermo
