// A DFlash drafter: a small network that fills a block of masked positions in one pass. It sees hidden states
// of the target for everything that is committed, as keys and values of its own, which are computed once and
// kept.
#pragma once

#include "model/drafter_network.h"
#include "speculative/drafter.h"

namespace thermo {

class DflashDrafter final : public Drafter {
 public:
  // `model` runs the drafter's network where the target runs, with drafter_model_options() and a block of
  // draft rows.
  DflashDrafter(DflashConfig config, std::unique_ptr<Backend> model, int n_sequences);

  std::string_view name() const override { return "dflash"; }
  int max_depth() const override { return config_.block - 1; }
  float repeat_weight() const override { return -3.0f; }
  std::span<const int> states() const override { return config_.states; }
  void commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) override;
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void truncate(int sequence, int n) override;
  std::vector<float> snapshot(int) const override { return {}; }
  void restore(int sequence, int n, std::span<const float>) override { truncate(sequence, n); }
  Backend* kv_model() override { return model_.get(); }
  void flush(int sequence) override;
  void resume(int sequence, std::span<const TokenId>, std::span<const float>) override {
    queue(sequence).n = 0;
  }

  // One pass over the block of `root`, with logits of every slot; for verification. `hidden`: [block][n_embd]
  // after the last norm, or nullptr.
  StepOutput run_block(int sequence, TokenId root, float* hidden);
  Backend& model() { return *model_; }

 private:
  // States that wait until the drafter drafts, or until they are many.
  struct Queue {
    std::unique_ptr<StateBuffer> states;
    int n = 0;
  };
  Queue& queue(int sequence) { return queues_[static_cast<size_t>(sequence)]; }
  void append(int sequence, const StateRows& states);
  void add_block(TokenId root, int n_logits, std::vector<Row>& rows) const;

  DflashConfig config_;
  std::unique_ptr<Backend> model_;
  std::vector<Queue> queues_;
  std::vector<Row> rows_;
  std::vector<SequenceRows> groups_;
};

}  // namespace thermo
