// Lookup in the text: proposes what followed the last tokens when they appeared before. It needs no model,
// and a long match (an edited file, a quotation, a tool's result) is worth more than any drafter.
#pragma once

#include <cstdint>
#include <vector>

#include "speculative/drafter.h"

namespace thermo {

class LookupDrafter final : public Drafter {
 public:
  LookupDrafter(int n_sequences, int n_ctx);

  std::string_view name() const override { return "lookup"; }
  int max_depth() const override { return kMaxDraftNodes; }
  void commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) override;
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void truncate(int sequence, int n) override;
  std::vector<float> snapshot(int) const override { return {}; }
  void restore(int sequence, int n, std::span<const float>) override { truncate(sequence, n); }
  void resume(int sequence, std::span<const TokenId> tokens, std::span<const float>) override;

  // Tokens that must agree before a draft is made.
  static constexpr int kMinMatch = 3;

 private:
  static constexpr int kPlacesPerToken = 2;

 public:
  // Of main memory, for each token of a sequence's context. All of it is taken at load.
  static constexpr uint64_t kTokenBytes = sizeof(TokenId) + (1 + kPlacesPerToken) * sizeof(int32_t);

 private:
  // One text and, for each run of kMinMatch tokens, where it ended last. Runs have a place in a table by
  // their hash, which a few share.
  struct Text {
    std::vector<TokenId> tokens;
    std::vector<int32_t> last_end;      // by place: the number of tokens up to the last run's end; 0: none
    std::vector<int32_t> previous_end;  // by number of tokens: the end before that, of the same place

    explicit Text(int n_ctx);
    void push(TokenId token);
    void truncate(size_t n);
    // The place of the run that ends there.
    int32_t& last_of_run(size_t end);
    // How many tokens before `end` agree with those at the end of the text.
    int agreement(size_t end) const;
    // The end of the best earlier match of the text's end; 0: none.
    size_t find(int& length) const;
  };
  std::vector<Text> texts_;
};

}  // namespace thermo
