// Constrained answers: every token that is written is allowed, and a draft changes nothing.
#include <gtest/gtest.h>

#include "engine/engine.h"
#include "gguf/gguf_file.h"
#include "sampling/token_constraint.h"

namespace thermo {
namespace {

constexpr TokenId kForced = 77, kReplaced = 55;

// Every other token has an even id, each seventh is forced, and ids that are a multiple of 10 are never
// written: another token takes their place.
class EvenTokens : public TokenConstraint {
 public:
  bool constrains() const override { return n_ % 2 == 0; }
  bool allows(TokenId token) override { return n_ % 2 != 0 || token % 2 == 0; }
  std::optional<TokenId> forced() const override {
    return n_ % 7 == 3 ? std::optional(kForced) : std::nullopt;
  }
  TokenId instead_of(TokenId chosen) override { return chosen % 10 == 0 ? kReplaced : chosen; }
  void accept(TokenId token) override {
    if (n_ % 7 == 3)
      EXPECT_EQ(token, kForced);
    else
      EXPECT_TRUE(token == kReplaced || (allows(token) && token % 10 != 0)) << "token " << n_;
    ++n_;
  }

 private:
  int n_ = 0;
};

std::vector<TokenId> text_of(Engine& engine, int i) {
  Session session = std::move(engine.open_session().value());
  std::vector<TokenId> prompt, text;
  for (int k = 0; k < 20; ++k) prompt.push_back((300 + 37 * i + 11 * (k % 5)) % 4000);
  EXPECT_TRUE(session.append(prompt).ok());
  GenerateOptions options;
  options.max_tokens = 40;
  options.sampling.temperature = i % 2 == 0 ? 0.0f : 1.5f;
  options.sampling.seed = 3;
  if (i == 2) options.sampling.repetition_penalty = 1.3f;
  if (i == 3) options.sampling.top_k = 0;
  options.constraint = std::make_shared<EvenTokens>();
  EXPECT_TRUE(session
                  .generate(options,
                            [&](const GeneratedToken& token) {
                              text.push_back(token.id);
                              return true;
                            })
                  .has_value());
  return text;
}

TEST(Constraint, HoldsForEveryTokenWithAndWithoutADraft) {
  const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  EngineOptions options;
  options.n_ctx = 128;
  options.n_threads = 2;
  options.device.kind = DeviceChoice::Kind::Cpu;
  std::vector<std::vector<TokenId>> plain;
  for (const DraftOptions::Kind kind : {DraftOptions::Kind::None, DraftOptions::Kind::Lookup}) {
    options.draft.kind = kind;
    options.draft.budget = kind == DraftOptions::Kind::None ? 0 : 7;
    Engine engine(file, options);
    for (int i = 0; i < 4; ++i) {
      const std::vector<TokenId> text = text_of(engine, i);
      EXPECT_EQ(text.size(), 40u);
      if (kind == DraftOptions::Kind::None)
        plain.push_back(text);
      else
        EXPECT_EQ(text, plain[static_cast<size_t>(i)]) << i;
    }
  }
}

}  // namespace
}  // namespace thermo
