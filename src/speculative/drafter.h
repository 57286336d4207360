// What proposes the next tokens. The model verifies them all in one step, so a drafter decides how fast a
// text is written and, where a row's bits do not depend on its neighbours, never what is written.
//
// This folder holds drafters, the tree built from their proposals, and the planner that decides whether
// drafting pays. It includes the model and what is below it; it knows no session and no request.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "model/backend.h"
#include "model/step.h"
#include "speculative/ddtree.h"

namespace thermo {

// What is known of a sequence whose next tokens are to be guessed.
struct DraftRequest {
  int sequence = 0;
  TokenId root = 0;  // chosen, not computed yet: it follows the committed tokens
  int n_depths = 0;  // positions after the root that are of use
  int n_ranks = 1;   // candidates of each that are of use
};

// Candidates of each position, best first; see DraftCandidates. Memory is reused from round to round.
struct Draft {
  int n_depths = 0;
  int n_ranks = 0;
  std::vector<int32_t> tokens;
  std::vector<float> logprobs;

  // Everything is absent: -inf.
  void reset(int depths, int ranks);
  DraftCandidates candidates() const { return {n_depths, n_ranks, tokens, logprobs}; }
  std::span<int32_t> tokens_at(int depth);  // 1..n_depths
  std::span<float> logprobs_at(int depth);
};

// A drafter follows every sequence of the engine: it is told of all tokens, whether it is asked or not.
class Drafter {
 public:
  virtual ~Drafter() = default;

  virtual std::string_view name() const = 0;
  virtual int max_depth() const = 0;
  // Hidden states of the target that it reads, as insert_taps() counts them, increasing; the taps of the rows
  // that it is told of.
  virtual std::span<const int> states() const { return {}; }
  // For DraftTreeBuilder::build().
  virtual float repeat_weight() const { return 0.0f; }

  // `tokens` are the new end of the sequence, `states` what the target had at each of them.
  virtual void commit(int sequence, std::span<const TokenId> tokens, const StateRows& states) = 0;
  // Fills drafts[i] for requests[i], which are of different sequences. A position that it knows nothing
  // about has no candidates, and none after it.
  virtual void draft(std::span<const DraftRequest> requests, std::span<Draft> drafts) = 0;

  // Forgets all but the first n tokens.
  virtual void truncate(int sequence, int n) = 0;
  // What truncate() cannot bring back; small. The K/V of the first tokens stay where they are.
  virtual std::vector<float> snapshot(int sequence) const = 0;
  virtual size_t snapshot_bytes() const { return 0; }  // at most
  // REQUIRES: the first n tokens are those of the snapshot.
  virtual void restore(int sequence, int n, std::span<const float> snapshot) = 0;

  // For caches, which copy keys and values to main memory and back: the model that has them, nullptr where
  // there are none. Those of token t are at position t - kv_lag().
  virtual Backend* kv_model() { return nullptr; }
  virtual int kv_lag() const { return 0; }
  // Computes what waits: then kv_model() has all tokens.
  virtual void flush(int) {}
  // The sequence became `tokens`: its keys and values were loaded. `snapshot`: of that length; empty: nobody
  // has one.
  virtual void resume(int sequence, std::span<const TokenId> tokens, std::span<const float> snapshot) = 0;
};

// How a request draws its tokens.
struct SampledChoice {
  float temperature = 0.0f;  // 0: greedy
  uint64_t seed = 0;
  uint32_t choice = 0;
  int64_t position = 0;  // of the token after the root
};

// Ranks the candidates of a draft by what the sampler will draw if the drafter is right: the noise of a token
// at its position is known beforehand. It changes what is guessed and never what is drawn. Nothing to do for
// a greedy choice.
void couple(Draft& draft, const SampledChoice& choice);

// The n best of a row of logits, best first, with exact log-probabilities: the sum goes over the whole row.
// Nothing but -inf gives no candidates, and neither does a NaN in a row that is looked at.
void best_candidates(std::span<const float> logits, std::span<int32_t> tokens, std::span<float> logprobs);
void best_candidates(const RowLogits& row, std::span<int32_t> tokens, std::span<float> logprobs);

// A drafter's own model, wherever it runs.
struct DrafterOptions {
  int n_ctx = 0;
  int n_sequences = 1;
  KvType k_type = KvType::F16;  // of its own cache
  KvType v_type = KvType::F16;
  Isa isa = Isa::Portable;
};
inline constexpr int kDrafterBatch = 256;  // rows of a pass
// Rows of a sequence that a drafter is told of and has not computed yet: where nothing is drafted, an answer
// of that length costs it nothing. A card's memory is worth more.
inline constexpr int kDrafterQueueRows = 256, kGpuDrafterQueueRows = 64;
inline int drafter_queue_rows(const Backend& model) {
  return model.is_gpu() ? kGpuDrafterQueueRows : kDrafterQueueRows;
}
// `max_draft_rows`: a DFlash drafter's block, else 0. Arithmetic only.
ModelOptions drafter_model_options(const DrafterOptions& options, int max_draft_rows);

}  // namespace thermo
