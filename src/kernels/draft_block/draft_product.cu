// What ends the products of a drafter's block: heads, the residual stream, swiglu.
#include "base/check.h"
#include "base/units.h"
#include "kernels/attention/attention_heads.cuh"
#include "kernels/attention/attention_parts.cuh"
#include "kernels/draft_block/draft_product.cuh"
#include "kernels/quant_matmul/panel_columns.cuh"

namespace thermo {
namespace {

constexpr int kOutPanels = kDraftOutColumns / 16, kGatePanels = 3;
// Blocks of a cluster, as a power of two, where columns are many enough.
constexpr int kHeadRanksLog2 = 2, kOutRanksLog2 = 2, kGateRanksLog2 = 1;
constexpr size_t kMaxShared = 112 * 1024;  // beside another kernel's, if possible

__device__ __forceinline__ const uint8_t* panel_of(const DeviceMatrix& w, int panel) {
  return panel * 16 < w.n_rows ? w.panels + panel * w.panel_bytes : nullptr;
}

// ---- heads ----

struct HeadsPlan {
  DraftShape shape;
  DraftHeadsArgs args;
  int first_group[kMaxDraftHeadJobs + 1];  // heads of the jobs before
};

// Out of the way of what is always fetched.
__device__ __noinline__ void store_rounded(KvType type, std::byte* at, const float* x, int dim, int lane) {
  store_head(type, at, x, dim, lane);
}

// Cosine and sine of a position's angle. Short: the library's are long for large angles. 2 pi in three parts,
// the first two of which times 2^16 are exact.
__device__ __forceinline__ float2 turn_of(float angle) {
  const float n = rintf(angle * 0.15915494f);
  float x = fmaf(n, -6.28125f, angle);
  x = fmaf(n, -0.00193023681640625f, x);
  x = fmaf(n, -5.0703632e-6f, x);
  float s, c;
  __sincosf(x, &s, &c);
  return {c, s};
}

struct HeadsEnd {
  const HeadsPlan& plan;
  const DraftHeadsArgs::Job& job;
  int head;
  float* norm;    // [head_dim]
  float2* turns;  // [rows of the block][n_rot / 2]
  std::byte* to;

  __device__ __forceinline__ float2* turns_of(int warp) const { return turns + warp * (plan.args.n_rot / 2); }
  __device__ __forceinline__ void before(int act) {
    const DraftHeadsArgs& a = plan.args;
    const int lane = threadIdx.x % 32;
    to = nullptr;
    if (job.kind != DraftHead::Value)
      for (int d = threadIdx.x; d < a.head_dim; d += kDraftThreads) norm[d] = __ldg(job.norm + d);
    if (act < 0) return;
    if (job.kind != DraftHead::Value) {
      const float position = static_cast<float>(a.rows.position[act]);
#pragma unroll 1
      for (int i = lane; i < a.n_rot / 2; i += 32) {
        const float2 turn = turn_of(position * __ldg(a.inv_freq + i));
        turns_of(threadIdx.x / 32)[i] = {turn.x * a.rope_magnitude, turn.y * a.rope_magnitude};
      }
    }
    const int group = a.rows.group[act];
    if (job.kind == DraftHead::Query || group < 0) return;
    const int place = a.rows.group_past[group] + act - a.rows.group_begin[group];
    to = paged_head(a.kv, job.kind == DraftHead::Value, a.rows.group_sequence[group], a.n_head_kv, head,
                    a.head_dim)
             .at(place) +
         job.kv_offset;
  }
  __device__ __forceinline__ void after(int) {}
  __device__ __forceinline__ void finish(int act, const DraftSums& sums) {
    const DraftHeadsArgs& a = plan.args;
    const int lane = threadIdx.x % 32, dim = a.head_dim, half_rot = a.n_rot / 2;
    float* const row = sums.first;
    float square = 0.0f;
#pragma unroll 2
    for (int d = lane; d < dim; d += 32) {
      const float y = sums(d);
      row[d] = y;
      square = fmaf(y, y, square);
    }
    __syncwarp();
    if (job.kind != DraftHead::Value) {
      const float scale = rsqrtf(__fdividef(warp_sum(square), static_cast<float>(dim)) + a.eps);
#pragma unroll 2
      for (int d = lane; d < dim; d += 32) row[d] *= scale * norm[d];
      __syncwarp();
      const float2* const turn = turns_of(threadIdx.x / 32);
#pragma unroll 2
      for (int i = lane; i < half_rot; i += 32) {
        const float u = row[i], v = row[half_rot + i];
        row[i] = fmaf(u, turn[i].x, -(v * turn[i].y));
        row[half_rot + i] = fmaf(v, turn[i].x, u * turn[i].y);
      }
      __syncwarp();
    }
    const KvType type = job.kind == DraftHead::Value ? a.kv.v_type : a.kv.k_type;
    const bool is_q = job.kind == DraftHead::Query;
    if (is_q) to = static_cast<std::byte*>(a.q) + (static_cast<int64_t>(act) * a.n_head + head) * dim * 2;
    if (is_q || (to != nullptr && type == KvType::F16)) {
      const float scale = is_q ? a.q_scale : 1.0f;
#pragma unroll 1
      for (int d = 2 * lane; d < dim; d += 64)
        *reinterpret_cast<half2*>(reinterpret_cast<half*>(to) + d) =
            __floats2half2_rn(row[d] * scale, row[d + 1] * scale);
    } else if (to != nullptr) {
      store_rounded(type, to, row, dim, lane);
    }
  }
};

template <int kUnits>
__global__ void __launch_bounds__(kDraftThreads, 2)
    draft_heads_kernel(const __grid_constant__ HeadsPlan plan) {
  extern __shared__ __align__(128) std::byte draft_shared[];
  const int group = static_cast<int>(blockIdx.x) >> plan.shape.ranks_log2, n_panels = plan.shape.n_panels;
  int j = 0;
  while (j + 1 < plan.args.n_jobs && group >= plan.first_group[j + 1]) ++j;
  const DraftHeadsArgs::Job& job = plan.args.jobs[j];
  const int head = group - plan.first_group[j];
  float* const extra = reinterpret_cast<float*>(draft_shared + draft_shared_bytes(n_panels, kUnits));
  HeadsEnd end{plan, job, head, extra, reinterpret_cast<float2*>(extra + plan.args.head_dim), nullptr};
  draft_product<kUnits>(
      plan.shape, [&](int p) { return panel_of(job.w, head * n_panels + p); }, end);
}

// ---- the residual stream ----

struct OutPlan {
  DraftShape shape;
  DeviceMatrix w;
  DraftStream to;
  float inverse_scale;
  bool add;
};

struct OutEnd {
  static constexpr int kColumns = kDraftOutColumns / 32;  // of a lane
  const OutPlan& plan;
  int group;
  float weight[kColumns], x[kColumns];

  __device__ __forceinline__ int column(int j) const {
    return group * kDraftOutColumns + 32 * j + static_cast<int>(threadIdx.x % 32);
  }
  __device__ __forceinline__ void before(int) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      weight[j] = column(j) < plan.to.n_embd ? __ldg(plan.to.norm + column(j)) : 0.0f;
  }
  __device__ __forceinline__ void after(int act) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
      x[j] = plan.add && column(j) < plan.to.n_embd
                 ? plan.to.x[static_cast<int64_t>(act) * plan.to.n_embd + column(j)]
                 : 0.0f;
  }
  __device__ __forceinline__ void finish(int act, const DraftSums& sums) {
    float square = 0.0f;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const int c = column(j);
      if (c >= plan.to.n_embd) break;
      const float y = x[j] + sums(c - group * kDraftOutColumns);
      square = fmaf(y, y, square);
      plan.to.x[static_cast<int64_t>(act) * plan.to.n_embd + c] = y;
      static_cast<half*>(plan.to.f16)[act * plan.to.stride + act_place(c)] =
          draft_half(y * weight[j], plan.inverse_scale);
    }
    square = warp_sum(square);
    if (threadIdx.x % 32 == 0) plan.to.squares[group * kMaxDraftRows + act] = square;
  }
};

template <int kUnits>
__global__ void __launch_bounds__(kDraftThreads, 2) draft_out_kernel(const __grid_constant__ OutPlan plan) {
  const int group = static_cast<int>(blockIdx.x) >> plan.shape.ranks_log2;
  OutEnd end{plan, group, {}, {}};
  draft_product<kUnits>(
      plan.shape, [&](int p) { return panel_of(plan.w, group * kOutPanels + p); }, end);
}

// ---- swiglu ----

struct GatePlan {
  DraftShape shape;
  DraftGateArgs args;
  float inverse_scale;
};

struct GateEnd {
  const GatePlan& plan;
  int group;

  __device__ __forceinline__ void before(int) {}
  __device__ __forceinline__ void after(int) {}
  __device__ __forceinline__ void finish(int act, const DraftSums& sums) {
    constexpr int kWidth = kGatePanels * 16;
    const DraftGateArgs& a = plan.args;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < kWidth; i += 32) {
      const int c = group * kWidth + i;
      if (c >= a.gate.n_rows) break;
      const float gate = sums(i), up = sums(kWidth + i);
      static_cast<half*>(a.f16)[act * a.stride + act_place(c)] =
          draft_half(__fdividef(gate, 1.0f + __expf(-gate)) * up, plan.inverse_scale);
    }
  }
};

template <int kUnits>
__global__ void __launch_bounds__(kDraftThreads, 2) draft_gate_kernel(const __grid_constant__ GatePlan plan) {
  const int group = static_cast<int>(blockIdx.x) >> plan.shape.ranks_log2;
  GateEnd end{plan, group};
  draft_product<kUnits>(
      plan.shape,
      [&](int p) {
        return p < kGatePanels ? panel_of(plan.args.gate, group * kGatePanels + p)
                               : panel_of(plan.args.up, group * kGatePanels + p - kGatePanels);
      },
      end);
}

DraftShape shape_of(const DraftRows& in, int n_rows, const DeviceMatrix& w, int n_panels,
                    const DraftCut& cut) {
  THERMO_CHECK(cut.units > 0 && n_rows <= kMaxDraftRows, "a product that was asked for without a look");
  return {in, n_rows, w.n_cols, n_panels, cut.ranks_log2, static_cast<int>(w.panel_bytes)};
}

template <auto kKernel, class Plan>
void start(const Plan& plan, int groups, int units, size_t more_bytes, StreamView stream) {
  static const bool ready = [] { return allow_shared(kKernel, device_in_use().max_shared_bytes), true; }();
  static_cast<void>(ready);
  const size_t bytes = static_cast<size_t>(draft_shared_bytes(plan.shape.n_panels, units)) + more_bytes;
  launch_clusters(kKernel, 1 << plan.shape.ranks_log2, static_cast<unsigned>(groups) << plan.shape.ranks_log2,
                  kDraftThreads, bytes, stream, plan);
}

}  // namespace

// No more blocks than give every warp a unit; more while they would need too much memory or registers.
DraftCut draft_cut(int n_cols, int n_panels, int ranks_log2) noexcept {
  const int units = ceil_div(n_cols, 64);
  const auto units_of = [&](int log2) { return ceil_div(units, kDraftWarps << log2); };
  const auto bytes_of = [&](int log2) {
    return static_cast<size_t>(draft_shared_bytes(n_panels, units_of(log2)));
  };
  while (ranks_log2 > 1 && units <= kDraftWarps << (ranks_log2 - 1)) --ranks_log2;
  while (ranks_log2 < 3 && (units_of(ranks_log2) > 3 || bytes_of(ranks_log2) > kMaxShared)) ++ranks_log2;
  constexpr size_t kMost = 200 * 1024;
  if (units_of(ranks_log2) > kMaxDraftUnits || bytes_of(ranks_log2) > kMost) return {};
  return {ranks_log2, units_of(ranks_log2)};
}

bool draft_block_possible() noexcept {
  return dependent_launch() && device_in_use().max_shared_bytes >= 227 * 1024;
}

bool draft_heads_possible(const DeviceMatrix& w, int head_dim) noexcept {
  return w.dtype == DType::Q8_0 && head_dim <= 128 &&
         draft_cut(w.n_cols, head_dim / 16, kHeadRanksLog2).units > 0;
}
bool draft_out_possible(const DeviceMatrix& w) noexcept {
  return w.dtype == DType::Q8_0 && draft_cut(w.n_cols, kOutPanels, kOutRanksLog2).units > 0;
}
bool draft_gate_possible(const DeviceMatrix& w) noexcept {
  return w.dtype == DType::Q8_0 && draft_cut(w.n_cols, 2 * kGatePanels, kGateRanksLog2).units > 0;
}

void draft_heads_cuda(const DraftHeadsArgs& args, StreamView stream) noexcept {
  const DeviceMatrix& w = args.jobs[0].w;
  const int n_panels = args.head_dim / 16;
  const DraftCut cut = draft_cut(w.n_cols, n_panels, kHeadRanksLog2);
  HeadsPlan plan{shape_of(args.in, args.n_rows, w, n_panels, cut), args, {}};
  for (int j = 0; j < args.n_jobs; ++j)
    plan.first_group[j + 1] = plan.first_group[j] + args.jobs[j].w.n_rows / args.head_dim;
  const size_t more = static_cast<size_t>(args.head_dim + kDraftWarps * args.n_rot) * sizeof(float);
  for_draft_units(cut.units, [&]<int kUnits>() {
    start<draft_heads_kernel<kUnits>>(plan, plan.first_group[args.n_jobs], kUnits, more, stream);
  });
}

void draft_out_cuda(const DraftOutArgs& args, StreamView stream) noexcept {
  const DraftCut cut = draft_cut(args.w.n_cols, kOutPanels, kOutRanksLog2);
  const OutPlan plan{shape_of(args.in, args.n_rows, args.w, kOutPanels, cut), args.w, args.stream,
                     1.0f / args.stream.scale, args.add};
  for_draft_units(cut.units, [&]<int kUnits>() {
    start<draft_out_kernel<kUnits>>(plan, draft_squares(args.stream.n_embd), kUnits, 0, stream);
  });
}

void draft_gate_cuda(const DraftGateArgs& args, StreamView stream) noexcept {
  const DraftCut cut = draft_cut(args.gate.n_cols, 2 * kGatePanels, kGateRanksLog2);
  const GatePlan plan{shape_of(args.in, args.n_rows, args.gate, 2 * kGatePanels, cut), args,
                      1.0f / args.scale};
  for_draft_units(cut.units, [&]<int kUnits>() {
    start<draft_gate_kernel<kUnits>>(plan, ceil_div(args.gate.n_rows, 16 * kGatePanels), kUnits, 0, stream);
  });
}

// ---- embedding ----

namespace {

struct EmbedPlan {
  DeviceMatrix table;
  const int32_t* tokens;
  DraftStream to;
  float inverse_scale;
};

__global__ void __launch_bounds__(512) draft_embed_kernel(const __grid_constant__ EmbedPlan plan) {
  __shared__ float scratch[32];
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.x, token = plan.tokens[row];
  const uint8_t* const panel = plan.table.panels + static_cast<size_t>(token / 16) * plan.table.panel_bytes;
  float square = 0.0f;
  const auto decode = [&]<DType T>() {
    for (int c = threadIdx.x; c < plan.to.n_embd; c += blockDim.x) {
      const float y = panel_value<T>(panel, token % 16, c);
      square = fmaf(y, y, square);
      plan.to.x[static_cast<int64_t>(row) * plan.to.n_embd + c] = y;
      static_cast<half*>(plan.to.f16)[row * plan.to.stride + act_place(c)] =
          draft_half(y * __ldg(plan.to.norm + c), plan.inverse_scale);
    }
  };
  for_float_type(plan.table.dtype, decode);
  for_quant_type(plan.table.dtype, decode);
  square = block_sum(square, scratch);
  if (threadIdx.x == 0) plan.to.squares[row] = square;
}

}  // namespace

void draft_embed_cuda(const DeviceMatrix& table, const int32_t* tokens, int n_rows, const DraftStream& to,
                      StreamView stream) noexcept {
  launch(draft_embed_kernel, static_cast<unsigned>(n_rows), 512, 0, stream,
         EmbedPlan{table, tokens, to, 1.0f / to.scale});
}

}  // namespace thermo
