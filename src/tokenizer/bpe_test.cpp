#include "tokenizer/bpe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <map>
#include <random>
#include <utility>

#include "base/error.h"
#include "tokenizer/testing/small_vocab.h"

namespace thermo {
namespace {

using testing::add_merge;
using testing::add_token;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::small_vocab;
using testing::to_alphabet;
using Ids = std::vector<int32_t>;

int32_t special(const Tokenizer& tokenizer, std::string_view text) {
  return *tokenizer.vocab().find_special(text);
}

// The ids of single bytes in the small vocabulary.
Ids byte_ids(std::string_view bytes) {
  Ids ids;
  for (const char byte : bytes) ids.push_back(static_cast<uint8_t>(byte));
  return ids;
}

// The definition: on strings, one merge at a time.
Ids merge_naively(const VocabData& data, std::string_view piece) {
  std::map<std::pair<std::string, std::string>, size_t> ranks;
  for (size_t rank = 0; rank < data.merges.size(); ++rank) {
    const size_t space = data.merges[rank].find(' ', 1);
    ranks.emplace(std::pair(data.merges[rank].substr(0, space), data.merges[rank].substr(space + 1)), rank);
  }
  std::vector<std::string> symbols;
  for (const char byte : piece) symbols.push_back(to_alphabet(std::string(1, byte)));
  for (;;) {
    size_t best_rank = SIZE_MAX, best = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const auto found = ranks.find({symbols[i], symbols[i + 1]});
      if (found != ranks.end() && found->second < best_rank) {
        best_rank = found->second;
        best = i;
      }
    }
    if (best_rank == SIZE_MAX) break;
    symbols[best] += symbols[best + 1];
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best) + 1);
  }
  std::map<std::string, int32_t> ids_of;
  for (size_t id = 0; id < data.tokens.size(); ++id) {
    if (data.types[id] == 1) ids_of.emplace(data.tokens[id], static_cast<int32_t>(id));
  }
  Ids ids;
  for (const std::string& symbol : symbols) {
    if (const auto found = ids_of.find(symbol); found != ids_of.end()) {
      ids.push_back(found->second);
      continue;
    }
    for (size_t i = 0; i < symbol.size();) {  // no such token: one per byte
      const DecodedChar c = decode_utf8(symbol, i);
      ids.push_back(ids_of.at(symbol.substr(i, c.length)));
      i += c.length;
    }
  }
  return ids;
}

TEST(Bpe, MergesTheLowestRankFirst) {
  const Tokenizer tokenizer(small_vocab());
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("the aaaaab the")), "the aaaaab the");
  EXPECT_EQ(tokenizer.encode("the").size(), 1u);
  EXPECT_EQ(tokenizer.encode(" the").size(), 1u);
  EXPECT_TRUE(tokenizer.encode("").empty());
}

TEST(Bpe, EqualsNaiveMergingOnRandomPieces) {
  std::mt19937 random(3);
  for (int round = 0; round < 60; ++round) {
    // A random vocabulary over few letters, so that merges chain, some of them duplicates, some making
    // texts that are not tokens.
    VocabData data = small_vocab();
    data.merges.clear();
    std::vector<std::string> parts = {"a", "b", "c", "d"};
    for (int i = 0; i < 40; ++i) {
      const std::string left = parts[random() % parts.size()];
      const std::string right = parts[random() % parts.size()];
      if (left.size() + right.size() > 9) continue;
      if (random() % 5 == 0) {
        data.merges.push_back(left + " " + right);
      } else {
        add_merge(data, left, right);
      }
      parts.push_back(left + right);
    }
    // In any order: merges make pairs of lower ranks than their own, too.
    if (round % 2 == 0) std::shuffle(data.merges.begin(), data.merges.end(), random);
    // Of so many ranks no piece here is long enough for lists.
    if (round % 3 == 0) data.merges.insert(data.merges.end(), 3000, "x y");
    const MergeTable table(Vocab(VocabData(data)), data.merges);
    MergeTable::Scratch scratch;
    for (int piece_round = 0; piece_round < 60; ++piece_round) {
      std::string piece;
      const size_t n = 1 + random() % (piece_round % 4 == 0 ? 300 : 60);  // both ways of merging
      const size_t letters = 1 + random() % 4;
      for (size_t i = 0; i < n; ++i) piece += static_cast<char>('a' + random() % letters);
      Ids ids;
      table.merge(piece, scratch, ids);
      ASSERT_EQ(ids, merge_naively(data, piece)) << piece;
    }
  }
}

// With lists of ranks, and with a heap alone.
TEST(Bpe, LongPiecesAreMergedTheSameWayWithAnyNumberOfRanks) {
  VocabData data = small_vocab();
  const MergeTable few(Vocab(VocabData(data)), data.merges);
  data.merges.insert(data.merges.end(), 200000, "x y");
  const MergeTable many(Vocab(VocabData(data)), data.merges);
  std::mt19937 random(7);
  MergeTable::Scratch scratch;
  for (const std::string_view letters : {"a", " ", "ab", "aab ", "the l"}) {
    std::string piece(20000, ' ');
    for (char& c : piece) c = letters[random() % letters.size()];
    Ids with_few, with_many;
    few.merge(piece, scratch, with_few);
    many.merge(piece, scratch, with_many);
    EXPECT_EQ(with_few, with_many) << letters;
  }
}

TEST(Bpe, AMegabyteOfOneLetterIsNotQuadratic) {
  const Tokenizer tokenizer(small_vocab());
  const std::string text(1 << 20, 'a');
  const auto start = std::chrono::steady_clock::now();
  const Ids ids = tokenizer.encode(text);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
  EXPECT_EQ(tokenizer.decode(ids), text);
}

// A client that had gone away kept a worker busy to the end of its text.
TEST(Bpe, LooksNowAndThenWhetherItGoesOn) {
  struct Enough {};
  const Tokenizer tokenizer(small_vocab());
  const std::string one_piece(2 << 20, 'a');
  std::string words, specials;
  while (words.size() < one_piece.size()) words += "the bee. ";
  while (specials.size() < 3 * one_piece.size()) specials += "<think>";
  for (const std::string& text : {one_piece, words, specials}) {
    int n_looks = 0, last = INT_MAX;
    const std::function<void()> look = [&] {
      if (++n_looks == last) throw Enough{};
    };
    EXPECT_EQ(tokenizer.encode(text, {.look = &look}), tokenizer.encode(text));
    EXPECT_GE(n_looks, 4) << text.substr(0, 10);
    for (last = 1; last <= 3; ++last) {
      n_looks = 0;
      EXPECT_THROW(tokenizer.encode(text, {.look = &look}), Enough);
      EXPECT_EQ(n_looks, last);
    }
  }
}

TEST(Bpe, LongTextEncodesAsItsParts) {
  // Long enough for the cache of pieces; each line alone is not.
  const Tokenizer tokenizer(small_vocab());
  std::mt19937 random(5);
  std::string text;
  Ids expected;
  for (int i = 0; i < 3000; ++i) {
    std::string line = "x";
    const size_t n = random() % 20;
    for (size_t k = 0; k < n; ++k) line += "aab thel."[random() % 9];
    line += ".x\n";
    const Ids ids = tokenizer.encode(line);
    expected.insert(expected.end(), ids.begin(), ids.end());
    text += line;
  }
  EXPECT_EQ(tokenizer.encode(text), expected);
  EXPECT_EQ(tokenizer.decode(expected), text);
}

TEST(Bpe, NormalizesForQwenOnly) {
  const Tokenizer qwen2(small_vocab("qwen2")), qwen(small_vocab("qwen35")), laguna(small_vocab("laguna"));
  EXPECT_EQ(qwen2.decode(qwen2.encode("e\xCC\x81")), "\xC3\xA9");
  EXPECT_EQ(qwen.decode(qwen.encode("e\xCC\x81")), "\xC3\xA9");
  EXPECT_EQ(laguna.decode(laguna.encode("e\xCC\x81")), "e\xCC\x81");
}

TEST(Bpe, BytesThatAreNoTextBecomeReplacementCharacters) {
  const Tokenizer tokenizer(small_vocab());
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("a\xFF\xE4\xB8z")), "a\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBDz");
}

TEST(Bpe, CutsTheLeftmostThenTheLongestSpecial) {
  const Tokenizer tokenizer(small_vocab());
  EXPECT_THAT(tokenizer.encode("<|im_start|>"), ElementsAre(special(tokenizer, "<|im_start|>")));
  EXPECT_THAT(tokenizer.encode("<|im_x"), ElementsAre(special(tokenizer, "<|im"), '_', 'x'));
  EXPECT_THAT(tokenizer.encode("<<think><t"),
              ElementsAre('<', special(tokenizer, "<think>"), special(tokenizer, "<t")));
  EXPECT_THAT(tokenizer.encode(" <|im_end|> "), ElementsAre(' ', special(tokenizer, "<|im_end|>"), ' '))
      << "spaces around it stay";
}

TEST(Bpe, WithoutParsingSpecialsOnlyUserDefinedOnesAreCut) {
  const Tokenizer tokenizer(small_vocab());
  const Ids ids = tokenizer.encode("<|im_end|><think>", {.parse_special = false});
  EXPECT_EQ(ids.back(), special(tokenizer, "<think>"));
  EXPECT_EQ(tokenizer.decode(ids), "<|im_end|><think>");
  for (size_t i = 0; i + 1 < ids.size(); ++i)
    EXPECT_EQ(tokenizer.vocab().token_type(ids[i]), TokenType::Normal);
}

TEST(Bpe, MergingNeverMakesASpecialToken) {
  VocabData data = small_vocab();
  data.merges.push_back("x y");  // the text of a control token, and no other token has it
  add_token(data, "xy", TokenType::Control);
  const Tokenizer tokenizer(std::move(data));
  EXPECT_THAT(tokenizer.encode("xy", {.parse_special = false}), ElementsAre('x', 'y'));
  EXPECT_THAT(tokenizer.encode("xy"), ElementsAre(special(tokenizer, "xy")));
}

TEST(EncodeSegments, DoesNotCutInUntrustedTextNorAcrossItsBorder) {
  const Tokenizer tokenizer(small_vocab());
  const std::string text = "<|im_start|>hi <|im_end|> <think> bye<|im_end|>";
  const size_t begin = std::string("<|im_start|>").size();
  const size_t end = text.size() - std::string("<|im_end|>").size();
  const ByteRange content[] = {{begin, end}};
  const Ids ids = tokenizer.encode_segments(text, content);
  EXPECT_EQ(ids.front(), special(tokenizer, "<|im_start|>"));
  EXPECT_EQ(ids.back(), special(tokenizer, "<|im_end|>"));
  for (size_t i = 1; i + 1 < ids.size(); ++i)
    EXPECT_EQ(tokenizer.vocab().token_type(ids[i]), TokenType::Normal);
  EXPECT_EQ(tokenizer.decode(ids, {.special = true}), text);

  // Half of a marker in the message and half in the template, and the other way round.
  for (size_t cut = 1; cut < 7; ++cut) {
    for (const ByteRange half : {ByteRange{0, cut}, ByteRange{cut, 7}}) {
      const Ids forged = tokenizer.encode_segments("<think>", std::span(&half, 1));
      for (const int32_t id : forged) EXPECT_NE(id, special(tokenizer, "<think>"));
    }
  }
}

TEST(EncodeSegments, AShorterMarkerOutsideTheRangeIsStillCut) {
  const Tokenizer tokenizer(small_vocab());
  const ByteRange content[] = {{4, 12}};
  EXPECT_EQ(tokenizer.encode_segments("<|im_start|>", content).front(), special(tokenizer, "<|im"));
}

TEST(EncodeSegments, PiecesSpanTheBorder) {
  const Tokenizer tokenizer(small_vocab());
  const ByteRange content[] = {{0, 2}};
  EXPECT_EQ(tokenizer.encode_segments("x.\n", content), tokenizer.encode("x.\n"));
  EXPECT_EQ(tokenizer.encode("x.\n").size(), 2u) << "the merge of '.' and newline";
}

TEST(EncodeSegments, EmptyRangesDoNothing) {
  const Tokenizer tokenizer(small_vocab());
  const ByteRange content[] = {{0, 0}, {3, 3}, {12, 12}};
  EXPECT_THAT(tokenizer.encode_segments("<|im_start|>", content),
              ElementsAre(special(tokenizer, "<|im_start|>")));
}

TEST(Bpe, AddsBosAndEosOnlyAsTheFileAndTheCallerSay) {
  VocabData data = small_vocab();
  data.bos = 1;
  data.eos = 2;
  const Tokenizer neither{VocabData(data)};
  EXPECT_EQ(neither.encode("x", {.add_bos_eos = true}), byte_ids("x"));
  data.add_bos = data.add_eos = true;
  const Tokenizer both{VocabData(data)};
  EXPECT_THAT(both.encode("x", {.add_bos_eos = true}), ElementsAre(1, 'x', 2));
  EXPECT_EQ(both.encode("x"), byte_ids("x"));
}

TEST(Bpe, DecodingHidesControlTokensUnlessAsked) {
  const Tokenizer tokenizer(small_vocab());
  const Ids ids = tokenizer.encode("<|im_start|>a<think>");
  EXPECT_EQ(tokenizer.decode(ids), "a<think>");
  EXPECT_EQ(tokenizer.decode(ids, {.special = true}), "<|im_start|>a<think>");
  EXPECT_EQ(tokenizer.decode(Ids{-5, 1 << 30}), "");
}

TEST(Bpe, RefusesAMergeWithoutASpaceAndAMissingByte) {
  VocabData no_space = small_vocab();
  no_space.merges.push_back(" ab");
  EXPECT_THROW(Tokenizer{std::move(no_space)}, LoadError);
  VocabData no_byte = small_vocab();
  no_byte.tokens[0xC3] = "gone";
  try {
    Tokenizer tokenizer(std::move(no_byte));
    ADD_FAILURE() << "loaded";
  } catch (const LoadError& error) {
    EXPECT_THAT(error.what(), HasSubstr("0xC3"));
  }
}

TEST(Bpe, AMergePartMayBeginWithASpace) {
  // Split at the first space at index >= 1.
  VocabData data = small_vocab();
  data.merges.push_back("  x");
  EXPECT_NO_THROW(Tokenizer{std::move(data)});
}

}  // namespace
}  // namespace thermo
