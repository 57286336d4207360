// The inside of a Session: its tokens, its memory, the points it can go back to.
#pragma once

#include <functional>
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

  std::vector<TokenId> tokens;
  std::vector<float> logits;            // after the last token
  std::vector<Checkpoint> checkpoints;  // increasing lengths; the empty beginning is always reachable
  std::vector<Row> rows;                // of the chunk being run

  int n_past() const { return backend->n_past(sequence); }
  // The newest point from which the first n tokens can be continued.
  void go_back_to(int n);
};

}  // namespace thermo
