// The experts that the uncommitted rows of each sequence chose, kept until it is known which rows are
// accepted: heat counts only text that was written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "experts/heat.h"

namespace thermo {

class DraftUses {
 public:
  // A layer has a place for the choices of so many rows, n_used of each. Allocates all it needs.
  void reserve(int n_sequences, int n_layer, int max_rows, int n_used) {
    n_layer_ = static_cast<size_t>(n_layer);
    n_used_ = static_cast<size_t>(n_used);
    drafts_.resize(static_cast<size_t>(n_sequences));
    for (Draft& draft : drafts_) draft.ids.resize(n_layer_ * static_cast<size_t>(max_rows) * n_used_);
  }

  // Before a step. Its choices replace those of the sequence's last step; none is known yet.
  void begin(int sequence, int n_rows) noexcept {
    Draft& draft = drafts_[static_cast<size_t>(sequence)];
    draft.n_rows = static_cast<size_t>(n_rows);
    std::fill_n(draft.ids.begin(), n_layer_ * draft.n_rows * n_used_, kUnknown);
  }
  // Where the step puts the choices of a layer: [row][n_used].
  int32_t* of_layer(int sequence, int layer) noexcept {
    Draft& draft = drafts_[static_cast<size_t>(sequence)];
    return draft.ids.data() + static_cast<size_t>(layer) * draft.n_rows * n_used_;
  }
  // These rows of the sequence's last step are kept. It counts once, as steps of one row each would.
  void count(int sequence, std::span<const int32_t> path, HeatMap& heat) noexcept {
    Draft& draft = drafts_[static_cast<size_t>(sequence)];
    if (draft.n_rows == 0) return;
    for (const int32_t row : path) {
      for (size_t il = 0; il < n_layer_; ++il) {
        const int32_t* const ids =
            draft.ids.data() + (il * draft.n_rows + static_cast<size_t>(row)) * n_used_;
        for (size_t k = 0; k < n_used_; ++k)
          if (ids[k] != kUnknown) heat.use(static_cast<int>(il), ids[k], 1.0f);
      }
      heat.advance(1);
    }
    draft.n_rows = 0;
  }

 private:
  static constexpr int32_t kUnknown = -1;  // no choice, or one that was counted with the step

  struct Draft {
    std::vector<int32_t> ids;  // [layer][row][n_used]
    size_t n_rows = 0;
  };
  std::vector<Draft> drafts_;
  size_t n_layer_ = 0, n_used_ = 0;
};

}  // namespace thermo
