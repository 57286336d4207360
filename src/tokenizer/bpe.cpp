// encode: cut out special tokens -> per stretch of text between them: valid UTF-8 -> normal form C ->
// pieces -> merges.
//
// Words repeat, so each call remembers the ids of short pieces in a small direct-mapped table. It belongs
// to the call and not to the tokenizer: no lock, and nothing of one request is kept for the next.
#include "tokenizer/bpe.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>
#include <utility>

#include "base/check.h"
#include "tokenizer/pre_tokenizer.h"
#include "tokenizer/unicode.h"

namespace thermo {
namespace {

constexpr size_t kLookEvery = size_t{256} << 10;  // bytes of pieces: a few milliseconds

class PieceCache {
 public:
  static constexpr size_t kMaxIds = 6;

  // The piece as a number, with its length in the top byte.
  struct Key {
    uint64_t low = 0;
    uint64_t high = 0;
    bool operator==(const Key&) const = default;
  };
  struct Entry {
    Key key;
    std::array<int32_t, kMaxIds> ids;
    size_t n_ids;
  };

  PieceCache() : entries_(kEntries) {}

  static bool fits(std::string_view piece) { return piece.size() < sizeof(Key); }

  // `readable` is how many bytes may be read from piece.data() on: with 16, no loop over bytes is needed.
  static Key key_of(std::string_view piece, size_t readable) {
    std::array<uint64_t, 2> words{};
    if (readable >= sizeof words) {
      std::memcpy(words.data(), piece.data(), sizeof words);
      const size_t n = piece.size();
      words[0] &= n >= 8 ? ~uint64_t{0} : (uint64_t{1} << 8 * n) - 1;
      words[1] &= n <= 8 ? 0 : (uint64_t{1} << 8 * (n - 8)) - 1;
    } else {
      std::memcpy(words.data(), piece.data(), piece.size());
    }
    return {words[0], words[1] | uint64_t{piece.size()} << 56};
  }

  Entry& entry_for(const Key& key) {
    const uint64_t mixed = (key.low ^ key.high * 0xD6E8FEB86659FD93) * 0x9E3779B97F4A7C15;
    return entries_[mixed >> kHashShift];
  }

 private:
  static constexpr size_t kEntries = 4096;  // 192 KiB: stays in the second-level cache
  static constexpr int kHashShift = 64 - 12;
  static_assert(kEntries == size_t{1} << (64 - kHashShift));
  std::vector<Entry> entries_;
};

}  // namespace

// One encode call: its output and its working memory.
class Tokenizer::TextEncoder {
 public:
  TextEncoder(const Tokenizer& tokenizer, size_t text_size, const std::function<void()>* look)
      : tokenizer_(tokenizer), look_(look) {
    if (look_ != nullptr) (*look_)();
    constexpr size_t kWorthCaching = 4096;  // bytes; below, clearing the cache costs more than it saves
    if (text_size >= kWorthCaching) cache_.emplace();
    ids_.reserve(text_size / 3 + 2);
  }

  void add_token(int32_t id) {
    ids_.push_back(id);
    count(1);  // a text may be nothing but special tokens
  }

  void add_text(std::string_view text) {
    const PreTokenizer kind = tokenizer_.vocab_.pre_tokenizer();
    text = replace_invalid_utf8(text, valid_);
    if (normalizes(kind)) text = normalize_nfc(text, normal_);
    PieceScanner scanner(kind, text);
    const char* const end = text.data() + text.size();
    for (std::string_view piece = scanner.next(); !piece.empty(); piece = scanner.next()) {
      add_piece(piece, static_cast<size_t>(end - piece.data()));
      count(piece.size());
    }
  }

  std::vector<int32_t> take_ids() { return std::move(ids_); }

 private:
  void count(size_t n_bytes) {
    if (look_ == nullptr || (n_unseen_ += n_bytes) < kLookEvery) return;
    n_unseen_ = 0;
    (*look_)();
  }

  void add_piece(std::string_view piece, size_t readable) {
    if (!cache_ || !PieceCache::fits(piece)) {
      tokenizer_.merges_.merge(piece, scratch_, ids_, look_);
      return;
    }
    const PieceCache::Key key = PieceCache::key_of(piece, readable);
    PieceCache::Entry& entry = cache_->entry_for(key);
    if (entry.key == key) {
      ids_.insert(ids_.end(), entry.ids.begin(),
                  entry.ids.begin() + static_cast<std::ptrdiff_t>(entry.n_ids));
      return;
    }
    const size_t before = ids_.size();
    tokenizer_.merges_.merge(piece, scratch_, ids_);
    const size_t n_ids = ids_.size() - before;
    if (n_ids > PieceCache::kMaxIds) return;
    entry.key = key;
    entry.n_ids = n_ids;
    std::copy(ids_.end() - static_cast<std::ptrdiff_t>(n_ids), ids_.end(), entry.ids.begin());
  }

  const Tokenizer& tokenizer_;
  const std::function<void()>* const look_;
  size_t n_unseen_ = 0;  // bytes since it was called
  std::vector<int32_t> ids_;
  std::string valid_, normal_;  // storage of repaired and of normalised text
  MergeTable::Scratch scratch_;
  std::optional<PieceCache> cache_;
};

// Vocab leaves data.merges as they are.
Tokenizer::Tokenizer(VocabData data)
    : vocab_(std::move(data)), specials_(vocab_), merges_(vocab_, data.merges) {}

std::vector<int32_t> Tokenizer::encode(std::string_view text, EncodeOptions options) const {
  return encode_segments(text, {}, options);
}

std::vector<int32_t> Tokenizer::encode_segments(std::string_view text, std::span<const ByteRange> untrusted,
                                                EncodeOptions options) const {
  TextEncoder encoder(*this, text.size(), options.look);
  if (options.add_bos_eos && vocab_.add_bos() && vocab_.bos()) encoder.add_token(*vocab_.bos());

  size_t text_begin = 0;  // what was not encoded yet
  const auto cut_specials_in = [&](size_t from, size_t to) {
    while (const auto match = specials_.find(text, from, to, options.parse_special)) {
      encoder.add_text(text.substr(text_begin, match->begin - text_begin));
      encoder.add_token(match->id);
      text_begin = from = match->end;
    }
  };
  size_t trusted_begin = 0;
  for (const ByteRange& range : untrusted) {
    THERMO_CHECK(range.begin >= trusted_begin && range.begin <= range.end && range.end <= text.size(),
                 "untrusted ranges must be ascending and inside the text");
    if (range.begin == range.end) continue;
    cut_specials_in(trusted_begin, range.begin);
    trusted_begin = range.end;
  }
  cut_specials_in(trusted_begin, text.size());
  encoder.add_text(text.substr(text_begin));

  if (options.add_bos_eos && vocab_.add_eos() && vocab_.eos()) encoder.add_token(*vocab_.eos());
  return encoder.take_ids();
}

std::string Tokenizer::decode(std::span<const int32_t> ids, DecodeOptions options) const {
  std::string bytes;
  for (const int32_t id : ids) bytes += visible_bytes(id, options);
  return bytes;
}

std::string_view Tokenizer::visible_bytes(int32_t id, DecodeOptions options) const noexcept {
  if (!vocab_.contains(id) || (!options.special && vocab_.is_control(id))) return {};
  return vocab_.token_bytes(id);
}

}  // namespace thermo
