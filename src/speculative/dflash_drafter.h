// A DFlash drafter on the processor: a small network that fills a block of masked positions in one pass. It
// sees hidden states of the target for everything that is committed, as keys and values of its own, which are
// computed once and kept.
#pragma once

#include "model/drafter_network.h"
#include "model/model.h"
#include "speculative/state_queue.h"

namespace thermo {

class GgufFile;

struct DrafterOptions {
  int n_ctx = 0;
  int n_sequences = 1;
  KvType k_type = KvType::F16;  // of its own cache
  KvType v_type = KvType::F16;
  Isa isa = Isa::Portable;
  bool repack = true;
};

// What a drafter's model takes for these options; arithmetic only.
ModelOptions drafter_model_options(const DrafterOptions& options, int block);

class DflashDrafter final : public Drafter {
 public:
  // `file` and `target` must outlive it.
  DflashDrafter(DflashConfig config, const GgufFile& file, const Weights& target,
                const DrafterOptions& options, ThreadPool& pool);

  std::string_view name() const override { return "dflash"; }
  int max_depth() const override { return config_.block - 1; }
  std::span<const int> states() const override { return config_.states; }
  void commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) override;
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void truncate(int sequence, int n) override;
  std::vector<float> snapshot(int) const override { return {}; }
  void restore(int sequence, int n, std::span<const float>) override { truncate(sequence, n); }

  // One pass over the block of `root`, with logits of every slot; for verification. `hidden`: [block][n_embd]
  // after the last norm, or nullptr.
  StepOutput run_block(int sequence, TokenId root, float* hidden);

 private:
  void flush(int sequence);
  void add_block(TokenId root, int n_logits, std::vector<Row>& rows) const;

  DflashConfig config_;
  size_t width_;  // of the features
  Model model_;
  std::vector<StateQueue> queues_;
  std::vector<Row> rows_;
  std::vector<SequenceRows> groups_;
};

}  // namespace thermo
