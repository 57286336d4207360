// Text to token ids and back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/utf8.h"  // ByteRange
#include "tokenizer/merge_table.h"
#include "tokenizer/special_finder.h"
#include "tokenizer/vocab.h"

namespace thermo {

struct EncodeOptions {
  bool parse_special = true;  // false: control texts are ordinary text, user-defined ones are still cut
  bool add_bos_eos = false;   // true: BOS and EOS where the file asks for them. Off for rendered templates,
                              // which write their own
  // Called at the start and now and then during a long text; what it throws ends the call.
  const std::function<void()>* look = nullptr;
};

struct DecodeOptions {
  bool special = false;  // true: control tokens show as their text instead of nothing
};

// Immutable after construction: any thread.
class Tokenizer {
 public:
  // Throws LoadError when the vocabulary is not one we can tokenise with.
  explicit Tokenizer(VocabData data);

  // Any bytes are text: where no well-formed UTF-8 begins, a byte counts as U+FFFD. For qwen35 the text is
  // converted to normal form C.
  std::vector<int32_t> encode(std::string_view text, EncodeOptions options = {}) const;

  // The same for a prompt that holds untrusted text. A special text that touches an untrusted range is
  // ordinary text there, so that a message cannot forge a role marker, not even together with the template
  // around it. Pieces may cross the border of a range, which is why the parts are not encoded one by one.
  // REQUIRES: ranges ascending, not overlapping, inside the text. Empty ranges do nothing.
  std::vector<int32_t> encode_segments(std::string_view text, std::span<const ByteRange> untrusted,
                                       EncodeOptions options = {}) const;

  // The bytes of the tokens; not always valid UTF-8, as a token may end inside a character (StreamDecoder
  // repairs that). Ids outside the vocabulary give nothing.
  std::string decode(std::span<const int32_t> ids, DecodeOptions options = {}) const;

  // The bytes that decode() emits for one token; valid as long as the tokenizer.
  std::string_view visible_bytes(int32_t id, DecodeOptions options = {}) const noexcept;

  // The raw bytes of a token, control or not.
  std::string_view token_bytes(int32_t id) const noexcept { return vocab_.token_bytes(id); }

  const Vocab& vocab() const noexcept { return vocab_; }

 private:
  class TextEncoder;

  Vocab vocab_;
  SpecialFinder specials_;
  MergeTable merges_;
};

}  // namespace thermo
