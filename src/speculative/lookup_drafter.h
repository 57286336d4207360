// Lookup in the context: what followed the last tokens when they stood in the text before. Costs no model,
// and a long match (an edited file, a quotation, a tool's result) is worth more than any drafter.
#pragma once

#include <unordered_map>
#include <vector>

#include "speculative/drafter.h"

namespace thermo {

class LookupDrafter final : public Drafter {
 public:
  explicit LookupDrafter(int n_sequences);

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
  // One text and, for each run of kMinMatch tokens, where it ended last.
  struct Text {
    std::vector<TokenId> tokens;
    std::unordered_map<uint64_t, int32_t> last_end;  // hash of the run to the number of tokens up to its end
    std::vector<int32_t> previous_end;  // by number of tokens: the run's end before that; 0: none

    void push(TokenId token);
    void truncate(size_t n);
    uint64_t run_at(size_t end) const;
    // How many tokens before `end` agree with those at the end of the text.
    int agreement(size_t end) const;
    // The end of the best earlier match of the text's end; 0: none.
    size_t find(int& length) const;
  };
  std::vector<Text> texts_;
};

}  // namespace thermo
