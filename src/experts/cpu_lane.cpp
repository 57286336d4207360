#include "experts/cpu_lane.h"

#include <algorithm>
#include <functional>
#include <vector>

#include "base/check.h"
#include "base/cpu_info.h"
#include "base/thread_pool.h"
#include "experts/read_ahead.h"
#include "kernels/expert_ffn/expert_ffn.h"
#include "kernels/linear/linear.h"
#include "kernels/row_ops/row_ops.h"

namespace thermo {
namespace {

int max_ff(const ExpertCatalog& catalog) {
  int most = 0;
  for (const ExpertLayer& layer : catalog.layers)
    if (!layer.experts.empty()) most = std::max(most, layer.experts.front().gate.n_rows);
  return most;
}

int max_pairs(const ExpertCatalog& catalog, const CpuLaneOptions& o) {
  return o.max_pairs > 0 ? o.max_pairs : o.max_rows * catalog.n_active;
}

// From here on quantising the rows is worth waking the pool for.
constexpr int kRowsForPool = 8;

}  // namespace

struct CpuLane::Impl {
  const ExpertCatalog& catalog;
  HostTier& host;
  ThreadPool& pool;
  const QuantMatmulKernels& matmul;
  const RowOpKernels& row_ops;
  ReadAhead* ahead;
  int max_rows;
  int max_pairs;

  ActBuffer x;
  LinearScratch linear_scratch;
  ExpertFfnScratch ffn_scratch;
  ExpertSums sums;

  std::vector<Ffn> ffns;  // of the distinct experts
  std::vector<FfnGroup> groups;
  std::vector<int32_t> distinct;
  std::vector<int32_t> n_pairs_of;  // of each expert; all zero between calls
  std::vector<int32_t> pair_rows;
  std::vector<float> pair_weights;
  std::vector<uint8_t> row_used;
  std::vector<int32_t> used_rows;
  int last_experts = 0, last_foreseen = 0;
  uint64_t last_ahead_bytes = 0;

  Impl(const ExpertCatalog& c, HostTier& h, ThreadPool& p, const CpuLaneOptions& o)
      : catalog(c),
        host(h),
        pool(p),
        matmul(quant_matmul_kernels(o.isa)),
        row_ops(row_op_kernels(o.isa)),
        ahead(o.ahead),
        max_rows(o.max_rows),
        max_pairs(thermo::max_pairs(c, o)),
        x(o.max_rows, c.n_embd),
        linear_scratch(p.size(), 0),
        ffn_scratch(max_pairs, max_ff(c), std::max(1, std::min(max_pairs, c.n_expert)), p.size()),
        sums(o.max_rows, c.n_embd),
        ffns(static_cast<size_t>(c.n_expert)),
        n_pairs_of(static_cast<size_t>(c.n_expert)),
        pair_rows(static_cast<size_t>(max_pairs)),
        pair_weights(static_cast<size_t>(max_pairs)),
        row_used(static_cast<size_t>(o.max_rows)) {
    groups.reserve(static_cast<size_t>(c.n_expert));
    distinct.reserve(static_cast<size_t>(c.n_expert));
    used_rows.reserve(static_cast<size_t>(o.max_rows));
  }

  struct Rows {
    const float* x;                  // [n][n_embd]
    const float* factors = nullptr;  // [n]; nullptr: 1
    int n = 0;
    int n_valid = 0;  // the others are padding
  };
  void run(int layer, std::span<const ColdPair> pairs, const Rows& rows, float* outputs,
           const StampedRows* stamped) noexcept;
  void sort_pairs(std::span<const ColdPair> pairs) noexcept;
  void take_rows(const ExpertLayer& layer, std::span<const ColdPair> pairs, const Rows& rows,
                 const ReadAhead::Rows& guessed_from) noexcept;
  void take_row(int row, const Rows& rows, const ActFormats& formats) noexcept;
};

// Groups by expert, ascending.
void CpuLane::Impl::sort_pairs(std::span<const ColdPair> pairs) noexcept {
  distinct.clear();
  groups.clear();
  for (const ColdPair& pair : pairs)
    if (n_pairs_of[static_cast<size_t>(pair.expert)]++ == 0) distinct.push_back(pair.expert);
  std::sort(distinct.begin(), distinct.end());
  int begin = 0;
  for (size_t i = 0; i < distinct.size(); ++i) {
    int32_t& n = n_pairs_of[static_cast<size_t>(distinct[i])];
    groups.push_back({&ffns[i], begin, n});
    n = std::exchange(begin, begin + n);  // from here on: where the expert's next pair goes
  }
  for (const ColdPair& pair : pairs) {
    const size_t at = static_cast<size_t>(n_pairs_of[static_cast<size_t>(pair.expert)]++);
    pair_rows[at] = pair.row;
    pair_weights[at] = pair.weight;
  }
  for (const int32_t expert : distinct) n_pairs_of[static_cast<size_t>(expert)] = 0;
}

// Copies, quantises and scales the rows that some pair or guess uses.
void CpuLane::Impl::take_rows(const ExpertLayer& layer, std::span<const ColdPair> pairs, const Rows& rows,
                              const ReadAhead::Rows& guessed_from) noexcept {
  used_rows.clear();
  const auto use = [&](int32_t row) {
    if (!std::exchange(row_used[static_cast<size_t>(row)], uint8_t{1})) used_rows.push_back(row);
  };
  for (const ColdPair& pair : pairs) use(pair.row);
  for (int i = 0; i < guessed_from.n; ++i) use(guessed_from.at[i]);
  for (const int32_t row : used_rows) row_used[static_cast<size_t>(row)] = 0;

  ActFormats formats;
  formats.add(layer.experts.front().gate);
  formats.add(layer.experts.front().up);
  if (ahead != nullptr) ahead->add_format(formats);
  const auto take = [&](int i, int) { take_row(used_rows[static_cast<size_t>(i)], rows, formats); };
  const int n = static_cast<int>(used_rows.size());
  if (n >= kRowsForPool)
    pool.run(n, take);
  else
    for (int i = 0; i < n; ++i) take(i, 0);
}

void CpuLane::Impl::take_row(int row, const Rows& rows, const ActFormats& formats) noexcept {
  const float* const source = rows.x + static_cast<size_t>(row) * static_cast<size_t>(catalog.n_embd);
  const float scale = rows.factors == nullptr ? 1.0f : rows.factors[row];
  std::copy_n(source, catalog.n_embd, x.row(row));
  x.quantize(row, catalog.n_embd, formats, matmul);
  // After rounding, as on the device, which did not know the scale before.
  if (scale != 1.0f) x.scale(row, catalog.n_embd, formats, scale);
}

CpuLane::CpuLane(const ExpertCatalog& catalog, HostTier& host, ThreadPool& pool,
                 const CpuLaneOptions& options)
    : impl_(std::make_unique<Impl>(catalog, host, pool, options)) {}
CpuLane::~CpuLane() = default;

uint64_t CpuLane::planned_bytes(const ExpertCatalog& catalog, const CpuLaneOptions& options) {
  return ActBuffer::planned_bytes(options.max_rows, catalog.n_embd) +
         ExpertFfnScratch::planned_bytes(max_pairs(catalog, options), max_ff(catalog)) +
         ExpertSums::planned_bytes(options.max_rows, catalog.n_embd) +
         LinearScratch::planned_bytes(cpu_info().n_cores, 0);
}

void CpuLane::Impl::run(int layer, std::span<const ColdPair> pairs, const Rows& rows, float* outputs,
                        const StampedRows* stamped) noexcept {
  THERMO_CHECK(rows.n <= max_rows && static_cast<int>(pairs.size()) <= max_pairs,
               "more rows or pairs for the CPU lane than planned");
  if (ahead != nullptr) ahead->end();
  sort_pairs(pairs);
  last_experts = static_cast<int>(distinct.size());
  last_ahead_bytes = ahead != nullptr ? ahead->take_bytes() : 0;
  last_foreseen = ahead != nullptr ? ahead->n_foreseen(layer, distinct) : 0;
  if (!pairs.empty() && !host.complete()) host.want(layer, distinct);
  for (size_t i = 0; i < distinct.size(); ++i) ffns[i] = host.acquire(layer, distinct[i]);
  const auto prepare = [&] {
    const bool guesses = ahead != nullptr && rows.n_valid <= kMaxMailRows;
    const ReadAhead::Rows guessed_from = ReadAhead::rows_of(guesses ? rows.n_valid : 0);
    take_rows(catalog.layers[static_cast<size_t>(layer)], pairs, rows, guessed_from);
    if (guesses) ahead->begin(layer, x, guessed_from);
  };
  const std::function<void()> prepare_x = std::ref(prepare);  // which allocates nothing
  const bool many_rows = rows.n >= kRowsForPool;              // they take a region of their own
  if (!pairs.empty() && many_rows) prepare();
  expert_ffn_cpu({.groups = groups,
                  .pair_rows = pair_rows.data(),
                  .pair_weights = pair_weights.data(),
                  .x = &x,
                  .sums = &sums,
                  .n_rows = rows.n,
                  .y_stride = catalog.n_embd,
                  .n_embd = catalog.n_embd,
                  .stamped = stamped,
                  .outputs = outputs,
                  .prepare_x = many_rows ? nullptr : &prepare_x},
                 ffn_scratch, row_ops, {matmul, pool, linear_scratch});
  for (const int32_t expert : distinct) host.release(layer, expert);
}

const ExpertSums& CpuLane::compute(int layer, std::span<const ColdPair> pairs, const float* x,
                                   int n_rows) noexcept {
  impl_->run(layer, pairs, {.x = x, .n = n_rows, .n_valid = n_rows}, nullptr, nullptr);
  return impl_->sums;
}

void CpuLane::outputs(int layer, std::span<const ColdPair> pairs, const float* x, int n_rows,
                      float* y) noexcept {
  impl_->run(layer, pairs, {.x = x, .n = n_rows, .n_valid = n_rows}, y, nullptr);
}

void CpuLane::answer(int layer, std::span<const ColdPair> pairs, const float* x, const float* factors,
                     int n_valid, const StampedRows& to) noexcept {
  impl_->run(layer, pairs, {.x = x, .factors = factors, .n = to.n_rows, .n_valid = n_valid}, nullptr, &to);
}

void CpuLane::look_ahead(int layer, const float* x, const float* factors, int n_rows) noexcept {
  Impl& m = *impl_;
  m.last_experts = m.last_foreseen = 0;
  m.last_ahead_bytes = 0;
  if (m.ahead == nullptr) return;
  m.ahead->end();
  m.last_ahead_bytes = m.ahead->take_bytes();
  ActFormats formats;
  m.ahead->add_format(formats);
  const ReadAhead::Rows rows = ReadAhead::rows_of(n_rows);
  for (int i = 0; i < rows.n; ++i)
    m.take_row(rows.at[i], {.x = x, .factors = factors, .n = n_rows, .n_valid = n_rows}, formats);
  m.ahead->begin(layer, m.x, rows);
  m.pool.run_threads([](int) {});
}

int CpuLane::last_experts() const noexcept {
  return impl_->last_experts;
}
int CpuLane::last_foreseen() const noexcept {
  return impl_->last_foreseen;
}
uint64_t CpuLane::last_ahead_bytes() const noexcept {
  return impl_->last_ahead_bytes;
}

}  // namespace thermo
