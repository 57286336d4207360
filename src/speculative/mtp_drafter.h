// The model's own next-token block as a drafter: one attention layer that reads the hidden state of a token
// and the token after it, and guesses the next. For a chain of guesses it reads its own state.
//
// The block's cache lacks the first token: entry s belongs to token s + 1 and the state of token s.
#pragma once

#include "speculative/drafter.h"

namespace thermo {

class MtpDrafter final : public Drafter {
 public:
  // `state`: of the target that it reads. `model` runs the next-token block (nextn_network()) where the
  // target runs, with drafter_model_options().
  MtpDrafter(int state, std::unique_ptr<Backend> model, int n_sequences);

  std::string_view name() const override { return "mtp"; }
  int max_depth() const override { return kMaxDepth; }
  std::span<const int> states() const override { return {&state_, 1}; }
  void commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) override;
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void truncate(int sequence, int n) override;
  std::vector<float> snapshot(int sequence) const override;
  size_t snapshot_bytes() const override { return width_ * sizeof(float); }
  void restore(int sequence, int n, std::span<const float> snapshot) override;
  Backend* kv_model() override { return model_.get(); }
  int kv_lag() const override { return 1; }
  void flush(int sequence) override;
  void resume(int sequence, std::span<const TokenId> tokens, std::span<const float> snapshot) override;

  // Logits of the block at `tokens`, each with the state before it, as part of the sequence; for
  // verification. They may be more than a pass takes.
  std::vector<float> run_pairs(int sequence, std::span<const TokenId> tokens, const StateRows& states);
  Backend& model() { return *model_; }

  // It was trained to guess one token; what it makes of its own guesses gets worse quickly.
  static constexpr int kMaxDepth = 4;

 private:
  struct Sequence {
    int n_tokens = 0;            // committed
    std::vector<TokenId> queue;  // those whose pairs are not in the cache yet
    // Row i: the state before queue[i]. One more, if there are tokens: the state of the last one. Zeros where
    // it is not known, which the block was not trained for but costs no more than a bad guess.
    std::unique_ptr<StateBuffer> states;
    bool has_root = false;  // the cache has one entry more: that of the last draft's root
    TokenId root = 0;

    int n_queued() const { return static_cast<int>(queue.size()); }
  };
  Sequence& at(int sequence) { return sequences_[static_cast<size_t>(sequence)]; }
  void forget_state(Sequence& s);
  void empty_queue(Sequence& s);
  StepOutput run(int sequence, std::span<const TokenId> tokens, std::span<const StateRows> states,
                 bool want_logits);
  void append_many(int sequence, std::span<const TokenId> tokens, const StateRows& states, bool first_known);
  void drop_root(int sequence);

  int state_;
  std::unique_ptr<Backend> model_;
  size_t width_;
  std::vector<Sequence> sequences_;
  // Of a pass.
  std::vector<Row> rows_;
  std::vector<SequenceRows> groups_;
  std::vector<StateRows> states_in_;
};

}  // namespace thermo
