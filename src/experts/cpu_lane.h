// The processor's share of a layer's experts: the cold (row, expert) pairs of a step, computed with the fused
// expert kernels on all threads of the pool.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "experts/catalog.h"
#include "experts/host_tier.h"
#include "kernels/expert_ffn/expert_ffn.h"
#include "kernels/isa.h"
#include "kernels/route_topk/cold_mail.h"

namespace thermo {

class ReadAhead;
class ThreadPool;

struct CpuLaneOptions {
  int max_rows = 32;
  int max_pairs = 0;  // 0: max_rows * n_active
  Isa isa = Isa::Portable;
  ReadAhead* ahead = nullptr;  // set to work by every call of up to kMaxMailRows rows, on the same pool
};

class CpuLane {
 public:
  CpuLane(const ExpertCatalog& catalog, HostTier& host, ThreadPool& pool, const CpuLaneOptions& options);
  ~CpuLane();
  CpuLane(const CpuLane&) = delete;
  CpuLane& operator=(const CpuLane&) = delete;

  static uint64_t planned_bytes(const ExpertCatalog& catalog, const CpuLaneOptions& options);

  // sums[r] = sum of weight * expert(x[r]) over the pairs of row r; zero for rows without any. x:
  // [n_rows][n_embd] floats. Pairs in any order; each expert's weights are read once. The sums are valid
  // until the next call.
  const ExpertSums& compute(int layer, std::span<const ColdPair> pairs, const float* x, int n_rows) noexcept;
  // y[r] = expert(x[r]), not weighted, of rows with one pair each: [n_rows][n_embd].
  void outputs(int layer, std::span<const ColdPair> pairs, const float* x, int n_rows, float* y) noexcept;

  // compute() for a device that polls the sums, of rows that are still to be multiplied by their factors
  // [n_rows]. At least one pair, at most kMaxMailRows rows, of which those after the first n_valid are
  // padding.
  void answer(int layer, std::span<const ColdPair> pairs, const float* x, const float* factors, int n_valid,
              const StampedRows& to) noexcept;

  // No pair of these rows is cold: only guesses on from them.
  void look_ahead(int layer, const float* x, const float* factors, int n_rows) noexcept;

  // Distinct experts of the last call, and how many of them had been foreseen.
  int last_experts() const noexcept;
  int last_foreseen() const noexcept;
  uint64_t last_ahead_bytes() const noexcept;  // loaded early in front of it

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
