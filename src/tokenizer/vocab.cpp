#include "tokenizer/vocab.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "gguf/gguf_value.h"
#include "tokenizer/byte_alphabet.h"
#include "tokenizer/unicode.h"

namespace thermo {
namespace {

PreTokenizer parse_pre_tokenizer(const std::string& name) {
  if (name == "qwen2") return PreTokenizer::Qwen2;
  if (name == "qwen35") return PreTokenizer::Qwen35;
  if (name == "laguna") return PreTokenizer::Laguna;
  throw LoadError(
      fmt::format("tokenizer.ggml.pre: \"{}\" is not a supported pre-tokenizer (supported: qwen2, qwen35, "
                  "laguna); is this a model of another family?",
                  escape_text(name)));
}

TokenType parse_type(int32_t value, size_t id) {
  if (value == 0) return TokenType::Unused;  // "undefined" in some conversions
  if (value < 0 || value > static_cast<int32_t>(TokenType::Byte)) {
    throw LoadError(fmt::format(
        "tokenizer.ggml.token_type: {} for token {}, expected 1 to 6; the file is damaged", value, id));
  }
  return static_cast<TokenType>(value);
}

std::optional<int32_t> check_special_id(const char* key, std::optional<uint32_t> id, size_t n_tokens) {
  if (!id) return std::nullopt;
  if (*id < n_tokens) return static_cast<int32_t>(*id);
  // Some converters write -1 for a token that the model does not have.
  log_warning("tokenizer", "tokenizer.ggml.{} is {}, and the vocabulary has {} tokens: it is ignored", key,
              *id, n_tokens);
  return std::nullopt;
}

bool is_special(TokenType type) {
  return type == TokenType::Unknown || type == TokenType::Control || type == TokenType::UserDefined;
}

// Maps each character of a normal token back to its byte; a character outside the alphabet is itself.
void append_mapped_bytes(std::string& out, std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    const DecodedChar c = decode_utf8(text, i);
    const std::optional<uint8_t> byte = c.valid ? char_to_byte(c.code) : std::nullopt;
    if (byte) {
      out += static_cast<char>(*byte);
    } else {
      out.append(text, i, c.length);
    }
    i += c.length;
  }
}

}  // namespace

Vocab::Vocab(VocabData&& data)
    : tokens_(std::move(data.tokens)),
      add_bos_(data.add_bos),
      add_eos_(data.add_eos),
      pre_(parse_pre_tokenizer(data.pre)),
      chat_template_(std::move(data.chat_template)) {
  const size_t n = tokens_.size();
  if (n == 0) throw LoadError("tokenizer.ggml.tokens: empty, expected the tokens of the vocabulary");
  if (n > static_cast<size_t>(std::numeric_limits<int32_t>::max())) {
    throw LoadError(fmt::format("tokenizer.ggml.tokens: {} tokens, more than ids of 32 bits can name", n));
  }
  if (data.types.size() < n) {
    throw LoadError(
        fmt::format("tokenizer.ggml.token_type: {} entries, expected one for each of the {} tokens",
                    data.types.size(), n));
  }
  types_.reserve(n);
  for (size_t id = 0; id < n; ++id) types_.push_back(parse_type(data.types[id], id));
  bos_ = check_special_id("bos_token_id", data.bos, n);
  eos_ = check_special_id("eos_token_id", data.eos, n);
  eot_ = check_special_id("eot_token_id", data.eot, n);
  eom_ = check_special_id("eom_token_id", data.eom, n);
  pad_ = check_special_id("padding_token_id", data.pad, n);
  mask_ = check_special_id("mask_token_id", data.mask, n);
  collect_specials();
  collect_bytes();
  collect_end_of_generation();
}

bool Vocab::is_control(int32_t id) const {
  const TokenType type = token_type(id);
  return type == TokenType::Control || type == TokenType::Unknown;
}

std::string_view Vocab::token_bytes(int32_t id) const noexcept {
  if (!contains(id)) return {};
  const auto index = static_cast<size_t>(id);
  const size_t begin = index == 0 ? 0 : bytes_end_[index - 1];
  return {bytes_.data() + begin, bytes_end_[index] - begin};
}

std::optional<int32_t> Vocab::find_special(std::string_view text) const {
  const auto found = specials_.find(text);
  if (found == specials_.end()) return std::nullopt;
  return found->second;
}

bool Vocab::is_end_of_generation(int32_t id) const noexcept {
  return std::binary_search(end_of_generation_.begin(), end_of_generation_.end(), id);
}

void Vocab::collect_specials() {
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (is_special(types_[id]) && !tokens_[id].empty()) {
      specials_.try_emplace(tokens_[id], static_cast<int32_t>(id));
    }
  }
  // Older Laguna files type the end of a turn as user-defined; it must neither be shown nor forged.
  if (pre_ == PreTokenizer::Laguna) {
    if (const auto id = find_special("</assistant>")) types_[static_cast<size_t>(*id)] = TokenType::Control;
  }
}

void Vocab::collect_bytes() {
  bytes_end_.reserve(tokens_.size());
  for (size_t id = 0; id < tokens_.size(); ++id) {
    if (is_special(types_[id])) {
      bytes_ += tokens_[id];
    } else if (types_[id] != TokenType::Unused) {
      append_mapped_bytes(bytes_, tokens_[id]);
    }
    bytes_end_.push_back(bytes_.size());
  }
}

void Vocab::collect_end_of_generation() {
  // By text, not by number: revisions of a family move their ids. In every published Laguna file
  // "</assistant>" is token 24, which is also the end of turn where the file does not name one.
  std::vector<std::string_view> by_text;
  switch (pre_) {
    case PreTokenizer::Qwen2:
    case PreTokenizer::Qwen35:
      by_text = {"<|endoftext|>", "<|im_end|>"};
      break;
    case PreTokenizer::Laguna:
      by_text = {"</assistant>"};
      if (!eot_) eot_ = find_special("</assistant>");
      break;
  }
  std::vector<int32_t>& ids = end_of_generation_;
  for (const auto id : {eos_, eot_, eom_}) {
    if (id) ids.push_back(*id);
  }
  for (const std::string_view text : by_text) {
    if (const auto id = find_special(text)) ids.push_back(*id);
  }
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
}

}  // namespace thermo
