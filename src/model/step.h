// What one step of the model computes, and what it gives back.
//
// A step runs N rows. A row is (sequence, position, parent row): plain decode is one row, a batch of requests
// one row each, a prefill chunk a chain of many, a draft tree its nodes. One code path serves all of them and
// reads each weight once for all rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/sample/sample.h"

namespace thermo {

using TokenId = int32_t;

struct Row {
  TokenId token = 0;
  int32_t sequence = 0;
  int32_t parent = -1;  // index of an earlier row of this step and sequence; -1: follows what is committed
  bool want_logits = false;
};

// What becomes of a sequence's rows once the step is done.
enum class Commit : uint8_t {
  All,    // the rows are a chain and are kept: the usual step
  Later,  // nothing is kept until Model::commit() names the accepted path (draft verification)
};

struct StepBatch {
  std::span<const Row> rows;  // the rows of one sequence are neighbours, parents before children
  Commit commit = Commit::All;
  LogitsNeed need = LogitsNeed::Row;  // of the rows that want logits; a model may give more than is needed
  float* hidden = nullptr;  // [n_layer + 1][n_rows][n_embd]: embedding, output of each layer but the last
                            // one, and the final norm; for verification and drafters. nullptr: not wanted
};

// Valid until the next step.
struct StepOutput {
  std::span<const float> logits;        // [logit rows][n_vocab]; empty when `tops` is not
  std::span<const TopLogits> tops;      // [logit rows] when less than rows is needed and these stay on a GPU
  std::span<const int32_t> logit_rows;  // row of the batch that each belongs to, increasing

  std::span<const float> logits_of(int i, int n_vocab) const {
    return logits.subspan(static_cast<size_t>(i) * static_cast<size_t>(n_vocab),
                          static_cast<size_t>(n_vocab));
  }
};

}  // namespace thermo
