#include "tokenizer/vocab_gguf.h"

#include <fmt/format.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "gguf/gguf_file.h"

namespace thermo {
namespace {

std::vector<std::string> read_strings(const GgufFile& file, std::string_view key) {
  const std::vector<std::string_view> views = file.require_strings(key);
  return {views.begin(), views.end()};
}

std::vector<int32_t> read_types(const GgufFile& file) {
  constexpr const char* kKey = "tokenizer.ggml.token_type";
  std::vector<int32_t> types;
  for (const int64_t type : file.require_ints(kKey)) {
    if (type < std::numeric_limits<int32_t>::min() || type > std::numeric_limits<int32_t>::max()) {
      throw LoadError(fmt::format("{}: {}: {} for token {}, expected 1 to 6; the file is damaged",
                                  file.path(), kKey, type, types.size()));
    }
    types.push_back(static_cast<int32_t>(type));
  }
  return types;
}

std::optional<uint32_t> read_id(const GgufFile& file, std::string_view key) {
  constexpr int64_t kNone = std::numeric_limits<uint32_t>::max();  // outside of every vocabulary
  const auto id = file.find_int(key);
  if (!id) return std::nullopt;
  return static_cast<uint32_t>(*id < 0 || *id > kNone ? kNone : *id);
}

}  // namespace

std::optional<VocabData> read_vocab(const GgufFile& file) {
  const auto model = file.find_string("tokenizer.ggml.model");
  if (!model || *model == "none") return std::nullopt;
  if (*model != "gpt2") {
    throw LoadError(fmt::format(
        "{}: tokenizer.ggml.model: \"{}\" is not a supported kind of tokenizer (supported: gpt2, which is "
        "byte-level BPE, and none)",
        file.path(), escape_text(*model)));
  }

  VocabData data;
  data.pre = file.require_string("tokenizer.ggml.pre");
  data.tokens = read_strings(file, "tokenizer.ggml.tokens");
  if (data.tokens.empty())
    throw LoadError(
        fmt::format("{}: tokenizer.ggml.tokens: empty, expected the tokens of the vocabulary", file.path()));
  data.types = read_types(file);
  data.merges = read_strings(file, "tokenizer.ggml.merges");
  data.bos = read_id(file, "tokenizer.ggml.bos_token_id");
  data.eos = read_id(file, "tokenizer.ggml.eos_token_id");
  data.eot = read_id(file, "tokenizer.ggml.eot_token_id");
  data.eom = read_id(file, "tokenizer.ggml.eom_token_id");
  data.pad = read_id(file, "tokenizer.ggml.padding_token_id");
  data.mask = read_id(file, "tokenizer.ggml.mask_token_id");
  data.add_bos = file.find_bool("tokenizer.ggml.add_bos_token").value_or(false);
  data.add_eos = file.find_bool("tokenizer.ggml.add_eos_token").value_or(false);
  data.chat_template = file.find_string("tokenizer.chat_template").value_or("");

  // Rows may exceed tokens (padding), never the other way round: an id would read past the matrix.
  if (const GgufTensor* embedding = file.find_tensor("token_embd.weight")) {
    if (data.tokens.size() > embedding->dims[1]) {
      throw LoadError(
          fmt::format("{}: tokenizer.ggml.tokens: {} tokens, but token_embd.weight has only {} rows",
                      file.path(), data.tokens.size(), embedding->dims[1]));
    }
  }
  return data;
}

}  // namespace thermo
