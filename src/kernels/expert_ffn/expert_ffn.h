// Gated FFNs for a list of experts, each with the rows routed to it, added into the residual stream:
//
//   y[row(p)] += weight(p) * down_e(silu(gate_e x[row(p)]) * (up_e x[row(p)]))     for every pair p of every
//   group
//
// A group is one expert and its pairs; the shared expert and a dense FFN are groups whose pairs are all rows.
//
// One parallel region with two kinds of tasks; a thread turns to the second when none of the first is left to
// take:
//   A  (group, tile of the FFN width): gate and up, activation; the thread that finishes a group's last tile
//      quantises its rows for the second product.
//   B  (tile of outputs), all groups: waits for each group's A tasks, multiplies, adds. Output-stationary, so
//      nothing is reduced between threads and no atomics touch the data.
// A thread that must wait loads what it will multiply next, so that main memory does not rest.
// Each weight is read once for all rows of the step. Sums are exact (row_ops/sum_grid.h): neither the order
// of the groups nor who computed which of them changes a bit.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/linear/linear.h"
#include "kernels/route_topk/cold_mail.h"
#include "kernels/row_ops/row_ops.h"

namespace thermo {

// Its pairs are of different rows.
struct FfnGroup {
  const Ffn* ffn;
  int pair_begin;
  int n_pairs;
};

// Sums for a reader that polls them: each comes with its stamp, so that nobody has to wait for all of them to
// be written.
struct StampedRows {
  StampedSum* rows = nullptr;  // [n_rows][stride]
  int64_t stride = 0;
  int n_rows = 0;  // rows without a pair become zero
  uint32_t stamp = 0;
  uint32_t* near = nullptr;  // becomes `stamp` when the first columns are written: the rest follows soon
};

// A row of exact sums for each row of a step: [n_rows][n_embd] doubles on the grid of sum_grid.h.
class ExpertSums {
 public:
  ExpertSums() = default;
  ExpertSums(int max_rows, int n_embd);
  static size_t planned_bytes(int max_rows, int n_embd);
  double* row(int r) const noexcept { return memory_.as<double>() + static_cast<size_t>(r) * stride_; }
  // Adds another part of the same sums.
  void add(const ExpertSums& other, int n_rows) noexcept;

 private:
  HostBuffer memory_;
  int n_embd_ = 0;
  size_t stride_ = 0;
};

struct ExpertFfnArgs {
  std::span<const FfnGroup> groups;
  const int32_t* pair_rows;  // row of x and y of each pair
  const float* pair_weights;
  const ActBuffer* x;  // [rows][n_embd], in the forms that gate and up need
  ExpertSums* sums;    // the terms are added here
  int n_rows;          // of x and of the sums
  bool fresh = true;   // the sums start from zero, whatever they held
  // Where finished sums are added: [n_rows] of y_stride floats. nullptr: other groups will follow.
  float* y = nullptr;
  int64_t y_stride = 0;
  int n_embd;
  const StampedRows* stamped = nullptr;  // finished sums go there instead
  // Not null: rows have one pair each, and its output is stored here as it is: [n_rows] of y_stride floats.
  // Neither weights nor sums are used.
  float* outputs = nullptr;
  // What brings x into its forms, where that is still to be done: called by the first thread while the others
  // load weights.
  const std::function<void()>* prepare_x = nullptr;
};

// Working memory for up to max_pairs pairs of FFNs up to max_ff wide.
class ExpertFfnScratch {
 public:
  ExpertFfnScratch() = default;
  ExpertFfnScratch(int max_pairs, int max_ff, int max_groups, int n_threads);
  static size_t planned_bytes(int max_pairs, int max_ff) {
    return ActBuffer::planned_bytes(max_pairs, max_ff);
  }

 private:
  friend void expert_ffn_cpu(const ExpertFfnArgs&, ExpertFfnScratch&, const RowOpKernels&,
                             const LinearContext&) noexcept;
  ActBuffer hidden_;  // one row per pair: silu(gate x) * (up x)
  // Whoever waits for a group must not slow those down it waits for: two lines, and none is another group's.
  struct Group {
    alignas(128) std::atomic<int> tiles_left{0};
    alignas(128) std::atomic<int> open{0};
  };
  std::unique_ptr<Group[]> groups_;
  // How a group's gate and up are cut.
  struct Tiles {
    int panels;
    int n;
  };
  std::vector<Tiles> tiles_a_;
  alignas(128) std::atomic<int> x_ready_{0};
  std::vector<int> first_a_;  // of each thread
  TaskRanges tasks_a_{1}, tasks_b_{1};
};

// The panels of an expert that a thread computes when nobody is late (about: tiles may be wider than a
// panel).
struct PanelRange {
  int begin, end;
};
struct FfnShare {
  PanelRange gate_up, down;
};
FfnShare ffn_share(const Ffn& ffn, int thread, int n_threads) noexcept;

void expert_ffn_cpu(const ExpertFfnArgs& args, ExpertFfnScratch& scratch, const RowOpKernels& row_ops,
                    const LinearContext& context) noexcept;

}  // namespace thermo
