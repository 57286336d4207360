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
  Impl** unread = nullptr;  // the engine's; this session while `top` is set

  std::vector<TokenId> tokens;
  // After the last token: the row, or its top while the row is still on the device.
  std::vector<float> logits;
  const TopLogits* top = nullptr;
  std::vector<Checkpoint> checkpoints;  // increasing lengths; the empty beginning is always reachable
  std::vector<Row> rows;                // of the chunk being run

  int n_past() const { return backend->n_past(sequence); }
  bool has_logits() const { return !logits.empty() || top != nullptr; }
  void drop_logits();
  // Brings the row here, if it is not. False after a device fault.
  bool fetch_logits();
  Status append(std::span<const TokenId> ids, LogitsNeed need, const PrefillProgressFn& progress);
  std::optional<TokenId> choose(Sampler& sampler);
  // The newest point from which the first n tokens can be continued.
  void go_back_to(int n);
};

}  // namespace thermo
