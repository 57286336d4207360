// The vocabulary of a model: what each token id stands for, and which ids end a generation.
//
// VocabData is plain input, so that the tokenizer is tested without a file; read_vocab() (vocab_gguf.h)
// fills it from a model. Vocab is checked at construction and immutable after it: any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tokenizer/pre_tokenizer.h"

namespace thermo {

// Numbered as in the file.
enum class TokenType : uint8_t {
  Normal = 1,
  Unknown = 2,
  Control = 3,
  UserDefined = 4,
  Unused = 5,
  Byte = 6
};

struct VocabData {
  std::vector<std::string> tokens;  // normal ones in the byte alphabet, special ones literally
  std::vector<int32_t> types;       // TokenType as a number; at least as many as tokens
  std::vector<std::string> merges;  // "left right", rank = index
  std::string pre;                  // "qwen35" or "laguna"
  std::optional<uint32_t> bos, eos, eot, eom, pad, mask;
  bool add_bos = false;
  bool add_eos = false;
  std::string chat_template;  // Jinja; empty when the file has none
};

class Vocab {
 public:
  // Takes what it needs and leaves data.merges to the merge table. Throws LoadError: no tokens, too few
  // types, a type that does not exist, a special id out of range, an unknown pre-tokenizer.
  explicit Vocab(VocabData&& data);

  int32_t n_tokens() const noexcept { return static_cast<int32_t>(tokens_.size()); }
  bool contains(int32_t id) const noexcept { return id >= 0 && id < n_tokens(); }

  // The text as the vocabulary writes it. REQUIRES: contains(id).
  std::string_view token_text(int32_t id) const { return tokens_[static_cast<size_t>(id)]; }
  TokenType token_type(int32_t id) const { return types_[static_cast<size_t>(id)]; }
  // Unknown or control: not shown in decoded text unless asked for. REQUIRES: contains(id).
  bool is_control(int32_t id) const;

  // The bytes the token stands for; not always whole characters. Empty for an unused token and for an id
  // outside the vocabulary: the output matrix may have padding rows, so a model can choose such an id.
  std::string_view token_bytes(int32_t id) const noexcept;

  // A control, unknown or user-defined token by its literal text: "<think>".
  std::optional<int32_t> find_special(std::string_view text) const;

  // eos, eot, eom, and the tokens that end a turn by convention in this family, whatever the file names.
  bool is_end_of_generation(int32_t id) const noexcept;
  std::span<const int32_t> end_of_generation() const noexcept { return end_of_generation_; }  // ascending

  std::optional<int32_t> bos() const noexcept { return bos_; }
  std::optional<int32_t> eos() const noexcept { return eos_; }
  std::optional<int32_t> eot() const noexcept { return eot_; }
  std::optional<int32_t> eom() const noexcept { return eom_; }
  std::optional<int32_t> pad() const noexcept { return pad_; }
  std::optional<int32_t> mask() const noexcept { return mask_; }
  bool add_bos() const noexcept { return add_bos_; }
  bool add_eos() const noexcept { return add_eos_; }
  PreTokenizer pre_tokenizer() const noexcept { return pre_; }
  const std::string& chat_template() const noexcept { return chat_template_; }

 private:
  void collect_specials();
  void collect_bytes();
  void collect_end_of_generation();

  std::vector<std::string> tokens_;
  std::vector<TokenType> types_;
  std::string bytes_;              // of all tokens, one after another
  std::vector<size_t> bytes_end_;  // per token, end of its part of bytes_
  std::map<std::string, int32_t, std::less<>> specials_;
  std::vector<int32_t> end_of_generation_;
  std::optional<int32_t> bos_, eos_, eot_, eom_, pad_, mask_;
  bool add_bos_, add_eos_;
  PreTokenizer pre_;
  std::string chat_template_;
};

}  // namespace thermo
