// The model's own next-token block as a drafter on the processor: one attention layer that reads the hidden
// state of a token and the token after it, and guesses the next. For a chain of guesses it reads its own
// state.
//
// The block's cache lacks the first token: entry s belongs to token s + 1 and the state of token s.
#pragma once

#include "speculative/dflash_drafter.h"

namespace thermo {

class MtpDrafter final : public Drafter {
 public:
  // REQUIRES: target.n_nextn > 0. `weights` (the target's) must outlive it.
  MtpDrafter(const ModelConfig& target, const Weights& weights, const DrafterOptions& options,
             ThreadPool& pool);

  std::string_view name() const override { return "mtp"; }
  int max_depth() const override { return kMaxDepth; }
  std::span<const int> states() const override { return {&state_, 1}; }
  void commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) override;
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void truncate(int sequence, int n) override;
  std::vector<float> snapshot(int sequence) const override;
  void restore(int sequence, int n, std::span<const float> snapshot) override;

  // Logits of the block at `tokens`, each with the state before it, as part of the sequence; for
  // verification.
  StepOutput run_pairs(int sequence, std::span<const TokenId> tokens, const float* states);

  // It was trained to guess one token; what it makes of its own guesses gets worse quickly.
  static constexpr int kMaxDepth = 4;

 private:
  struct Sequence {
    int n_tokens = 0;               // committed
    StateQueue queue;               // pairs that are not in the cache yet
    std::vector<float> last_state;  // of the last token; empty: unknown
    bool has_root = false;          // the cache has one entry more: that of the last draft's root
    TokenId root = 0;
  };
  Sequence& at(int sequence) { return sequences_[static_cast<size_t>(sequence)]; }
  std::span<const float> state_before(const Sequence& s) const;
  void flush(int sequence);
  void drop_root(int sequence);

  ModelConfig config_;
  int state_;  // of the target that it reads
  size_t width_;
  Model model_;
  std::vector<Sequence> sequences_;
  std::vector<float> zero_;
  // Of a pass.
  std::vector<Row> rows_;
  std::vector<SequenceRows> groups_;
  std::vector<float> states_in_, states_out_;
};

}  // namespace thermo
