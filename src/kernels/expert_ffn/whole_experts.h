// Experts that one thread computes from the first product to the last, for steps of few rows.
//
// Cutting every expert for all threads makes them exchange half of every hidden row. Where there are several
// experts for each thread, it is cheaper to give each thread whole ones: its hidden rows stay in its
// first-level cache, and what the threads exchange at the end is one row of exact sums for each row of the
// step. Steps of 8 rows of Plankton on two cores took 0.90 of the time, and 0.81 while the two did not share
// a last-level cache.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels/expert_ffn/expert_ffn.h"

namespace thermo {

class WholeExperts {
 public:
  static constexpr int kMaxRows = 32;  // of a step

  WholeExperts() = default;
  WholeExperts(int max_ff, int n_embd, int max_groups, int n_threads);
  static size_t planned_bytes(int max_ff, int n_embd, int n_threads);

  // Whether this is how these groups are computed.
  bool suits(const ExpertFfnArgs& args, int n_threads) const noexcept;
  // As expert_ffn_cpu(). REQUIRES: suits().
  void run(const ExpertFfnArgs& args, const RowOpKernels& row_ops, const LinearContext& context) noexcept;

  // Whether add_rows() may be called with this FFN and so many rows.
  bool suits_rows(const Ffn& ffn, int n_rows) const noexcept {
    return !threads_.empty() && n_rows <= kMaxRows && ffn.gate.n_rows <= max_ff_;
  }
  // An FFN that all rows take, for rows [first, first + n) on the calling thread: y[r] += ffn(x[r]).
  void add_rows(const Ffn& ffn, const ActBuffer& x, int first, int n, int thread, float* y,
                const RowOpKernels& row_ops, const LinearContext& context) noexcept;

 private:
  struct alignas(128) Thread {
    ActBuffer hidden;  // a row for each pair of one group
    ExpertSums sums;
    bool has_sums = false;
  };

  void compute(const ExpertFfnArgs& args, const FfnGroup& group, int thread, const RowOpKernels& row_ops,
               const LinearContext& context) noexcept;
  // What `down` multiplies, of rows of x, into the first rows of the thread's `hidden`.
  void find_hidden(const Ffn& ffn, const ActRange& x, int thread, const RowOpKernels& row_ops,
                   const LinearContext& context) noexcept;
  // Products of `down` with the first n rows of the thread's `hidden`: body(row, column, products, n).
  template <class Body>
  void for_each_output(const Ffn& ffn, int n, int thread, const LinearContext& context,
                       const Body& body) noexcept;
  struct Range {
    int begin, end;
  };
  void add_sums(const ExpertFfnArgs& args, Range rows, Range columns,
                const RowOpKernels& row_ops) const noexcept;

  int max_ff_ = 0;
  std::vector<Thread> threads_;
  std::vector<int> order_;  // groups
  TaskRanges groups_{1}, sums_{1};
  std::unique_ptr<std::atomic<int>> n_computed_;  // on the heap, so that this can be moved
};

}  // namespace thermo
