// For measurements: a drafter that does its work, and whose guesses are then replaced so that they are right
// as often as asked.
#pragma once

#include <memory>

#include "speculative/drafter.h"
#include "speculative/oracle_options.h"

namespace thermo {

class OracleDrafter final : public Drafter {
 public:
  OracleDrafter(std::unique_ptr<Drafter> drafter, OracleOptions options, int n_vocab, int n_sequences);

  std::string_view name() const override { return drafter_->name(); }
  int max_depth() const override { return drafter_->max_depth(); }
  std::span<const int> states() const override { return drafter_->states(); }
  void commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) override;
  void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) override;
  void truncate(int sequence, int n) override;
  std::vector<float> snapshot(int sequence) const override { return drafter_->snapshot(sequence); }
  size_t snapshot_bytes() const override { return drafter_->snapshot_bytes(); }
  void restore(int sequence, int n, std::span<const float> snapshot) override;
  Backend* kv_model() override { return drafter_->kv_model(); }
  int kv_lag() const override { return drafter_->kv_lag(); }
  void flush(int sequence) override { drafter_->flush(sequence); }
  void resume(int sequence, std::span<const TokenId> tokens, std::span<const float> snapshot) override;

 private:
  std::unique_ptr<Drafter> drafter_;
  OracleOptions options_;
  uint64_t n_vocab_;
  std::vector<size_t> n_tokens_;  // of each sequence
};

}  // namespace thermo
