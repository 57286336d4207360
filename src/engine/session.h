// The inside of a Session: its tokens, its memory, the points it can go back to.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "engine/backend.h"
#include "engine/engine.h"
#include "model/sequence_state.h"

namespace thermo {

struct Session::Impl {
  Engine* engine = nullptr;
  Backend* backend = nullptr;
  int sequence = 0;
  std::function<void()> release;
  std::vector<Impl*>* unread = nullptr;         // the engine's; this session is in it while `top` is set
  std::vector<int32_t>* uncommitted = nullptr;  // the engine's, of this sequence

  std::vector<TokenId> tokens;
  // After the last token: the row, or its top while the row is still on the device.
  std::vector<float> logits;
  const TopLogits* top = nullptr;
  int top_index = 0;                    // of that row in the step's output
  std::vector<Checkpoint> checkpoints;  // increasing lengths; the empty beginning is always reachable
  std::vector<Row> rows;                // of the chunk being run

  int n_past() const { return backend->n_past(sequence); }
  bool has_logits() const { return !logits.empty() || top != nullptr; }
  void drop_logits();
  // Of this session's last row: rows[i] of the step that just ended.
  void take_logits(const StepOutput& output, int i);
  // Brings the row here, if it is not. False after a device fault.
  bool fetch_logits();
  Status append(std::span<const TokenId> ids, LogitsNeed need, const PrefillProgressFn& progress);
  std::optional<TokenId> choose(Sampler& sampler);
  // The newest point from which the first n tokens can be continued.
  void go_back_to(int n);
};

}  // namespace thermo
