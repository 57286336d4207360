// What one step of the model computes, and what it gives back.
//
// A step runs the rows of one or more sequences. Plain decode is one row of one sequence, a batch of requests
// one row of each, a prefill chunk a chain of many rows, a draft its tree. All of these can share a step: one
// code path serves them and reads each weight once for all rows.
#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "kernels/sample/sample.h"
#include "model/hidden_states.h"

namespace thermo {

using TokenId = int32_t;

struct Row {
  TokenId token = 0;
  int32_t parent = -1;  // an earlier row of this sequence in the step; -1: follows what is committed
  bool want_logits = false;
};

// The rows of one sequence in a step.
struct SequenceRows {
  int32_t sequence = 0;
  std::span<const Row> rows = {};  // parents before children; a chain unless uncommitted
  // True: the sequence stays as it is until commit() names the rows that were accepted (draft verification).
  bool uncommitted = false;
  LogitsNeed need = LogitsNeed::Row;  // of the rows that want logits; a model may give more than is needed
};

struct StepBatch {
  std::span<const SequenceRows> groups = {};  // each of another sequence; the step's rows are counted through
  // In main memory, [taps of the network][n_rows][n_embd]: gets the states that insert_taps() asked for.
  // nullptr: not wanted; Backend::states() has them where they were computed.
  float* hidden = nullptr;
  // Hidden states of another network that the rows come with, in their order, in the backend's memory; only
  // for a network that begins with a next-token input.
  std::span<const StateRows> states = {};
  // Called once, on the caller's thread: where a device computes the step by itself, while it does; else
  // before. Must not throw. For work that would otherwise keep the device waiting between two steps.
  const std::function<void()>* meanwhile = nullptr;

  void do_meanwhile() const {
    if (meanwhile != nullptr && *meanwhile) (*meanwhile)();
  }
  int n_rows() const {
    size_t n = 0;
    for (const SequenceRows& group : groups) n += group.rows.size();
    return static_cast<int>(n);
  }
};

// What a row that wanted logits got: all of them, or what was needed of them while they stay on a GPU.
struct RowLogits {
  int32_t row = 0;                     // of the step
  std::span<const float> logits = {};  // [n_vocab]; empty when there is a top
  const TopLogits* top = nullptr;
};

// Valid until the next step.
struct StepOutput {
  std::span<const RowLogits> rows = {};  // in the order of the step's rows
};

}  // namespace thermo
