#include "server/constraint.h"

#include <gtest/gtest.h>

#include "chat/text_model.h"

namespace thermo {
namespace {

// What ends a thought that goes on until nothing but the reserve is left.
std::string close_of(int max_tokens) {
  static const TextModel plankton("");
  const Tokenizer& tokenizer = plankton.tokenizer();
  ServedModel model;
  model.tokenizer = &tokenizer;
  model.trie = std::make_shared<const TokenTrie>(tokenizer.vocab());
  ServerOptions options;
  options.loop_guard = false;
  std::vector<std::string> ignored;
  const auto constraints =
      make_constraints({}, model, options, /*in_reasoning=*/true, max_tokens, 1, ignored);
  AnswerConstraint& constraint = *constraints.front();
  const int32_t letter = tokenizer.encode("a").front();
  int n = 0;
  for (; n < max_tokens && !constraint.forced(); ++n) constraint.accept(letter);
  std::string text;
  for (; constraint.forced(); ++n) {
    const int32_t token = *constraint.forced();
    constraint.accept(token);
    text += tokenizer.token_bytes(token);
  }
  EXPECT_LT(n, max_tokens) << "nothing is left for the reply";
  EXPECT_STREQ(constraint.reasoning_close(), "reserve");
  return text;
}

// Of 60 tokens the sentence took all of the 15 that were kept for the reply.
TEST(Constraint, EndsAThoughtWithoutASentenceWhereItWouldTakeTheReply) {
  EXPECT_EQ(close_of(60), "</think>\n\n");
  EXPECT_NE(close_of(1000).find("Considering the limited time"), std::string::npos);
}

}  // namespace
}  // namespace thermo
