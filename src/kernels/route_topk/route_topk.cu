// Up to 64 rows: the router's product, then one launch in which a block chooses for each row and the last of
// them to finish lists slots and pairs. The 2 MB of a float router (35B-A3B) are spread over 64 blocks for
// every 8 rows, asked for before the wait for the norm and multiplied from registers, with the bits of one
// row. Beyond 64 rows the product runs on tensor cores, a warp chooses for a row, one block lays out the
// slots and one kernel places the pairs.
//
// The last block of the product as the one that chooses for all rows took 11, 15 and 17 us in all for 2, 4
// and 8 rows, and 52 for 32.
//
// Beyond 64 rows the order of pairs inside an expert depends on timing; results do not, because a slot
// computes each pair alone, with the same operations whatever else it holds.
#include "base/units.h"
#include "device/launch.cuh"
#include "kernels/linear/linear_cuda.h"
#include "kernels/linear/linear_tiles_cuda.h"
#include "kernels/quant_matmul/panel_columns.cuh"
#include "kernels/route_topk/cold_answer.cuh"
#include "kernels/route_topk/count_uses.cuh"
#include "kernels/route_topk/route_choose.cuh"
#include "kernels/route_topk/route_topk_cuda.h"
#include "kernels/route_topk/router_sum.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {
namespace {

constexpr int kThreads = 256;

// Asked for early: it is needed when time is short.
__device__ __forceinline__ const uint8_t* expert_base(const DeviceRouteArgs& a) {
  const int e = threadIdx.x * ((a.config.n_expert + kThreads - 1) / kThreads);
  return e < a.config.n_expert ? a.base[e] : nullptr;
}

// Exclusive sum over the threads of the block, and the total. `scratch`: kThreads / 32 entries.
__device__ __forceinline__ int2 block_scan(int2 mine, int2* scratch, int2& all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int2 sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const int x = __shfl_up_sync(0xffffffffu, sum.x, step), y = __shfl_up_sync(0xffffffffu, sum.y, step);
    if (lane >= step) sum.x += x, sum.y += y;
  }
  if (lane == 31) scratch[warp] = sum;
  __syncthreads();
  int2 before = {sum.x - mine.x, sum.y - mine.y};
  all = {0, 0};
  for (int w = 0; w < kThreads / 32; ++w) {
    if (w < warp) before.x += scratch[w].x, before.y += scratch[w].y;
    all.x += scratch[w].x, all.y += scratch[w].y;
  }
  return before;
}

// An expert whose pairs the processor computes has this for its first slot; `first` then counts in the mail.
constexpr int kInMail = -1;

// First pair and first slot of every expert, and the slots but for their rows, by a block of kThreads.
// `count`: [n_expert]; `first`, `slot`: [n_expert + 1]; `base`: of the thread's first expert, expert_base().
// With a mailbox the cold experts that are chosen are dealt to the two cold lanes here: some are read from
// host memory where they lie, the rest gets no slot but a place in the mail. `came`: parcels that are here
// and count as hot, [kMaxParcels]; nullptr: none. Returns, to thread 0, whether the host is to be told.
__device__ bool lay_out_slots(const DeviceRouteArgs& a, const int32_t* count, int32_t* first, int32_t* slot,
                              int n_valid, const uint8_t* base, const CameParcel* came) {
  __shared__ int2 scratch[2][kThreads / 32];
  const int n_expert = a.config.n_expert;
  const int each = (n_expert + kThreads - 1) / kThreads;
  const int begin = threadIdx.x * each, end = min(n_expert, begin + each);
  const auto base_of = [&](int e) {
    const uint8_t* at = e == begin ? base : a.base[e];
    for (int i = 0; i < kMaxParcels && came != nullptr && at == nullptr; ++i)
      if (came[i].expert == e) at = came[i].address;
    return at;
  };
  const bool mail = a.cold.mail != nullptr && *a.cold.n_cold > 0;
  int fetch_before = 0, n_fetch = 0, n_cold = 0;  // cold experts before this thread's; read in place; in all
  int mail_pairs_before = 0;
  if (mail) {
    int2 cold = {0, 0}, all;
    for (int e = begin; e < end; ++e) cold.x += count[e] > 0 && base_of(e) == nullptr;
    fetch_before = block_scan(cold, scratch[1], all).x;
    n_cold = all.x;
    n_fetch = fetched_of(a.cold, n_cold);
  }
  // What becomes of expert e, the cold_rank-th cold one: nullptr for the processor.
  const auto lane_base = [&](int e, int& cold_rank) {
    const uint8_t* at = base_of(e);
    if (at == nullptr && mail && cold_rank++ < n_fetch) at = a.cold.host_base[e];
    return at;
  };

  int2 mine = {0, 0}, all;  // pairs, slots
  int mail_pairs = 0;
  int rank = fetch_before;
  for (int e = begin; e < end; ++e) {
    if (count[e] == 0) continue;
    if (mail && lane_base(e, rank) == nullptr) {
      mail_pairs += count[e];
      continue;
    }
    mine.x += count[e];
    mine.y += (count[e] + a.tile - 1) / a.tile;
  }
  int2 before = block_scan(mine, scratch[0], all);
  int n_mail = 0;
  if (mail && n_cold > n_fetch) {
    int2 total;
    __syncthreads();
    mail_pairs_before = block_scan({mail_pairs, 0}, scratch[1], total).x;
    n_mail = total.x;
  }
  const auto put = [&](int at, const uint8_t* from, int expert, int first_pair, int n) {
    DeviceSlot& s = a.out.slots[at];
    s.base = from;
    s.expert = expert;
    s.first = first_pair;
    s.count = n;
  };
  rank = fetch_before;
  for (int e = begin; e < end; ++e) {
    const uint8_t* const from = count[e] > 0 ? lane_base(e, rank) : nullptr;
    if (mail && count[e] > 0 && from == nullptr) {
      first[e] = mail_pairs_before;
      slot[e] = kInMail;
      mail_pairs_before += count[e];
      continue;
    }
    first[e] = before.x;
    slot[e] = before.y;
    for (int done = 0; done < count[e]; done += a.tile)
      put(before.y++, from, e, before.x + done, min(a.tile, count[e] - done));
    before.x += count[e];
  }
  const int shared_slots = a.shared ? (n_valid + a.tile - 1) / a.tile : 0;
  for (int s = threadIdx.x; s < shared_slots; s += kThreads)
    put(all.y + s, nullptr, n_expert, all.x + s * a.tile, min(a.tile, n_valid - s * a.tile));
  if (threadIdx.x != 0) return false;
  first[n_expert] = all.x;
  slot[n_expert] = all.y;
  *a.out.n_slots = all.y + shared_slots;
  if (a.cold.mail == nullptr) return false;
  unsigned here = 0, carried = 0;
  for (int i = 0; i < kMaxParcels && came != nullptr; ++i) {
    if (came[i].address == nullptr) continue;
    here |= 1u << i;
    if (count[came[i].expert] > 0) carried |= 1u << i;
  }
  *a.cold.n_pairs = n_mail;
  a.cold.record->n_pairs = n_mail;
  a.cold.record->n_cold = n_cold;
  a.cold.record->n_fetched = n_fetch;
  a.cold.record->came = here;
  a.cold.record->carried = carried;
  if (n_mail == 0) a.cold.record->posted_ns = a.cold.record->ready_ns = a.cold.record->went_ns = 0;
  return n_mail > 0 || carried != 0;
}

// Pair number k of a row (n_expert_used: the shared expert): the rank-th of its expert `id`, whose pairs
// start at `first` and slots at `slot`.
__device__ void place_pair(const DeviceRouteArgs& a, int row, int k, int id, bool used, int first, int slot,
                           int rank, float weight) {
  const int at = row * (a.config.n_expert_used + 1) + k;
  const bool in_mail = used && slot == kInMail;
  a.out.pair_of[at] = used && !in_mail ? first + rank : -1;
  a.out.pair_weight[at] = weight;
  if (a.cold.chosen != nullptr && k < a.config.n_expert_used)
    a.cold.chosen[row * a.config.n_expert_used + k] = static_cast<int16_t>(used ? id : -1);
  if (!used) return;
  if (in_mail) {
    a.cold.mail->pairs[first + rank] = {static_cast<int16_t>(row), static_cast<int16_t>(id), weight};
    return;
  }
  a.out.pair_row[first + rank] = row;
  if (rank % a.tile < kSlotRows) a.out.slots[slot + rank / a.tile].rows[rank % a.tile] = row;
}

__device__ float shared_weight(const DeviceRouteArgs& a, int row) {
  return a.shared_logit == nullptr ? 1.0f : sigmoid_device(a.shared_logit[row]);
}
__device__ void place_shared(const DeviceRouteArgs& a, int row, int first, int slot, bool valid,
                             float weight) {
  place_pair(a, row, a.config.n_expert_used, a.config.n_expert, a.shared && valid, first, slot, row, weight);
}

// All rows are text: an expert's uses are counted together.
__device__ __forceinline__ bool counts_at_once(const DeviceRouteArgs& a) {
  return a.out.uses.counts != nullptr && a.out.uses.drafted == nullptr;
}

// Slots and pairs of rows that have chosen, by one block of kThreads. users[e]: rows of expert e, as bits:
// the same whoever comes first, so pairs are in the order of the rows. `base`: expert_base(). `came`: see
// lay_out_slots().
template <class IdOf, class WeightOf, class SharedOf>
__device__ void list_rows(const DeviceRouteArgs& a, const unsigned long long* users, int n_valid,
                          const uint8_t* base, const CameParcel* came, const IdOf& id_of,
                          const WeightOf& weight_of, const SharedOf& shared_of) {
  __shared__ int32_t count[kMaxDeviceExperts];
  __shared__ int32_t first[kMaxDeviceExperts + 1], slot[kMaxDeviceExperts + 1];
  const int n_expert = a.config.n_expert, n_used = a.config.n_expert_used;
  for (int e = threadIdx.x; e < n_expert; e += kThreads) {
    count[e] = __popcll(users[e]);
    if (counts_at_once(a) && count[e] > 0) atomicAdd(a.out.uses.counts + e, static_cast<uint32_t>(count[e]));
  }
  __syncthreads();
  const bool tells = lay_out_slots(a, count, first, slot, n_valid, base, came);
  __syncthreads();
  for (int i = threadIdx.x; i < a.n_rows * (n_used + 1); i += kThreads) {
    const int row = i / (n_used + 1), k = i % (n_used + 1);
    const bool valid = row < n_valid;
    if (k == n_used) {
      place_shared(a, row, first[n_expert], slot[n_expert], valid, valid ? shared_of(row) : 0.0f);
    } else {
      const int id = valid ? id_of(row, k) : 0;
      const int rank = valid ? __popcll(users[id] & ((1ull << row) - 1)) : 0;
      place_pair(a, row, k, id, valid, first[id], slot[id], rank, valid ? weight_of(row, k) : 0.0f);
    }
  }
  if (a.cold.mail != nullptr) {
    __syncthreads();  // all pairs are written
    if (tells) post_mail(a.cold, *a.cold.n_pairs);
  }
}

constexpr int kRouterRows = 8;  // of a block

// Sums of parts of the logits, in the order of router_sum.cuh.
template <DType T>
__global__ void __launch_bounds__(32 * kRouterWarps)
    router_small_kernel(const __grid_constant__ DeviceRouteArgs a) {
  __shared__ float part[kRouterWarps][kRouterRows][16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, q = lane & 3;
  const int panel = blockIdx.x, k_part = blockIdx.y, first = static_cast<int>(blockIdx.z) * kRouterRows;
  const int n_cols = a.router.n_cols;
  const RouterShare share(n_cols, k_part, warp);
  const uint8_t* const weights = a.router.panels + panel * a.router.panel_bytes;
  float4 w[kRouterLoads];
  float norm[kRouterLoads];
  const auto load = [&](int from) {
#pragma unroll
    for (int i = 0; i < kRouterLoads; ++i) {
      const int c = from + lane / 4 + 8 * i;
      w[i] = c < share.end ? load_column<T>(weights, c, q) : float4{0, 0, 0, 0};
      norm[i] = c < share.end ? __ldg(a.norm + c) : 0.0f;
    }
  };
  load(share.begin);
  const int n_rows = min(kRouterRows, *a.n_valid - first);  // there since the step began
  allow_next();
  wait_for_inputs();
  if (n_rows <= 0) return;
  const float* const x = a.stream + static_cast<int64_t>(first) * n_cols;
  const auto multiply = [&]<int kRows>() {
    float acc[kRows][4] = {};
    for (int from = share.begin; from < share.end; from += 8 * kRouterLoads) {
      if (from != share.begin) load(from);
#pragma unroll
      for (int i = 0; i < kRouterLoads; ++i) {
        const int c = min(from + lane / 4 + 8 * i, n_cols - 1);
#pragma unroll
        for (int r = 0; r < kRows; ++r)
          add_router_column(
              w[i], __fmul_rn(x[static_cast<int64_t>(min(r, n_rows - 1)) * n_cols + c], norm[i]), acc[r]);
      }
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      scatter_sums(acc[r], lane);
      if (lane < 16) part[warp][r][router_row(lane)] = acc[r][0];
    }
  };
  if (n_rows == 1)
    multiply.template operator()<1>();
  else if (n_rows <= 4)
    multiply.template operator()<4>();
  else
    multiply.template operator()<kRouterRows>();
  __syncthreads();
  const int r = threadIdx.x / 16, e = panel * 16 + threadIdx.x % 16;
  if (r >= n_rows || e >= a.config.n_expert) return;
  a.out.partial[(static_cast<int64_t>(k_part) * kMaxListRows + first + r) * a.config.n_expert + e] =
      __fmul_rn(add_router_parts(&part[0][r][threadIdx.x % 16], kRouterRows * 16), a.factor[first + r]);
}

// Choice of rows, a warp for each, and places among the pairs of an expert as they come.
__global__ void __launch_bounds__(256)
    route_choose_kernel(const __grid_constant__ DeviceRouteArgs a, int n_parts) {
  allow_next();
  wait_for_inputs();
  const int row = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (row >= *a.n_valid || a.config.n_expert == 0) return;
  int id;
  float weight;
  // Sums of the parts, all loads of some parts together.
  __shared__ float sums[256 / 32][kMaxDeviceExperts];
  float* const logits = sums[threadIdx.x / 32];
  const int n_expert = a.config.n_expert;
  const float* const from = a.logits + static_cast<int64_t>(row) * n_expert;
  const int64_t part_stride = static_cast<int64_t>(a.n_rows) * n_expert;
  for (int first = lane; first < n_expert; first += 8 * 32) {
    float x[8] = {};
#pragma unroll 4
    for (int p = 0; p < n_parts; ++p)
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (first + 32 * i < n_expert) x[i] += from[p * part_stride + first + 32 * i];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (first + 32 * i < n_expert) logits[first + 32 * i] = x[i];
  }
  __syncwarp();
  choose_any(
      a.config, [&](int e) { return logits[e]; }, a.bias, lane, id, weight);
  if (lane >= a.config.n_expert_used) return;
  const int at = row * a.config.n_expert_used + lane;
  a.out.chosen[at] = id;
  a.out.rank[at] = atomicAdd(a.out.expert_count + id, 1);
  if (a.out.uses.drafted != nullptr)
    count_use(a.out.uses, drafted_of(a.out.uses, row, a.config.n_expert_used), lane, id);
  a.out.pair_weight[row * (a.config.n_expert_used + 1) + lane] = weight;
}

// The choice of one row by a block of kThreads. Logits are sums of n_parts. `drafted`: drafted_of() the row.
__device__ __forceinline__ void choose_row(const DeviceRouteArgs& a, const float* logits, int64_t part_stride,
                                           int n_parts, int row, int16_t* drafted) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n_expert = a.config.n_expert, n_used = a.config.n_expert_used;
  const auto logit = [&](int e) {
    float x = 0.0f;
#pragma unroll 4
    for (int p = 0; p < n_parts; ++p) x += logits[p * part_stride + static_cast<int64_t>(row) * n_expert + e];
    return x;
  };
  int id = 0;
  float weight = 0.0f;
  if (n_expert <= kBlockExperts) {
    __shared__ BlockCandidates candidates;
    __shared__ BlockChoice choice;
    const int e = static_cast<int>(threadIdx.x);
    offer_candidate(a.config, e, e < n_expert ? logit(e) : 0.0f, a.bias, nullptr, candidates);
    __syncthreads();
    rank_candidates(a.config, e, kThreads, candidates, choice);
    __syncthreads();
    if (warp != 0) return;
    weight = weight_of_choice(a.config, a.bias, choice, lane);
    if (lane < n_used) id = choice.chosen[lane];
  } else {
    __shared__ float sums[kMaxDeviceExperts];
    for (int e = threadIdx.x; e < n_expert; e += kThreads) sums[e] = logit(e);
    __syncthreads();
    if (warp != 0) return;
    choose_any(
        a.config, [&](int e) { return sums[e]; }, a.bias, lane, id, weight);
  }
  if (lane >= n_used) return;
  a.out.chosen[row * n_used + lane] = id;
  a.out.pair_weight[row * (n_used + 1) + lane] = weight;
  if (a.out.uses.drafted != nullptr) count_use(a.out.uses, drafted, lane, id);
}

// A block for a row; the last one lists all of them.
__global__ void __launch_bounds__(kThreads)
    route_rows_kernel(const __grid_constant__ DeviceRouteArgs a, const float* logits, int64_t part_stride,
                      int n_parts) {
  __shared__ unsigned long long users[kMaxDeviceExperts];
  __shared__ float weights[kMaxListRows * 31], shared_weights[kMaxListRows];
  __shared__ int16_t ids[kMaxListRows * 31];
  __shared__ CameParcel came[kMaxParcels];
  __shared__ bool is_last;
  static_assert(kMaxListRows <= 64);
  const int n_valid = *a.n_valid, n_used = a.config.n_expert_used;  // there since the step began
  const uint8_t* const base = expert_base(a);
  for (int e = threadIdx.x; e < a.config.n_expert; e += kThreads) users[e] = 0;
  const int row = static_cast<int>(blockIdx.x);
  int16_t* const drafted = drafted_of(a.out.uses, row, n_used);
  allow_next();
  wait_for_inputs();
  if (row < n_valid && a.config.n_expert > 0) choose_row(a, logits, part_stride, n_parts, row, drafted);
  // Release of this block's choice, acquire of the others': through thread 0, ordered with the rest of the
  // block by the barriers.
  __syncthreads();
  if (threadIdx.x == 0) is_last = count_up(a.out.counter) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  if (threadIdx.x == 0) *a.out.counter = 0;
  // Once and for all blocks of the experts' launches: they read what is in the slots.
  if (threadIdx.x < kMaxParcels)
    came[threadIdx.x] = a.cold.mail != nullptr && *a.cold.n_cold > 0
                            ? look_at_parcel(a.cold, static_cast<int>(threadIdx.x))
                            : CameParcel{};
  if (static_cast<int>(threadIdx.x) < n_valid) shared_weights[threadIdx.x] = shared_weight(a, threadIdx.x);
#pragma unroll 2
  for (int i = threadIdx.x; i < n_valid * n_used; i += kThreads) {
    const int r = i / n_used, id = __ldcg(a.out.chosen + i);
    weights[i] = __ldcg(a.out.pair_weight + r * (n_used + 1) + i % n_used);
    ids[i] = static_cast<int16_t>(id);
    atomicOr(&users[id], 1ull << r);
  }
  __syncthreads();
  list_rows(
      a, users, n_valid, base, came, [&](int r, int k) { return ids[r * n_used + k]; },
      [&](int r, int k) { return weights[r * n_used + k]; }, [&](int r) { return shared_weights[r]; });
}

__global__ void __launch_bounds__(kThreads) route_slots_kernel(const __grid_constant__ DeviceRouteArgs a) {
  allow_next();
  wait_for_inputs();
  lay_out_slots(a, a.out.expert_count, a.out.expert_first, a.out.expert_slot, *a.n_valid, expert_base(a),
                nullptr);
  __syncthreads();
  for (int e = threadIdx.x; e < a.config.n_expert; e += kThreads) {
    if (counts_at_once(a)) a.out.uses.counts[e] += static_cast<uint32_t>(a.out.expert_count[e]);
    a.out.expert_count[e] = 0;
  }
}

// With a mailbox one block places everything, because whoever posts must know that all pairs are written.
__global__ void __launch_bounds__(256) route_place_kernel(const __grid_constant__ DeviceRouteArgs a) {
  allow_next();
  wait_for_inputs();
  const int n_used = a.config.n_expert_used, n_valid = *a.n_valid;
  for (int i = blockIdx.x * 256 + threadIdx.x; i < a.n_rows * (n_used + 1); i += gridDim.x * 256) {
    const int row = i / (n_used + 1), k = i % (n_used + 1);
    const bool valid = row < n_valid;
    if (k == n_used) {
      place_shared(a, row, a.out.expert_first[a.config.n_expert], a.out.expert_slot[a.config.n_expert], valid,
                   shared_weight(a, row));
      continue;
    }
    const int id = valid ? a.out.chosen[row * n_used + k] : 0;
    place_pair(a, row, k, id, valid, a.out.expert_first[id], a.out.expert_slot[id],
               valid ? a.out.rank[row * n_used + k] : 0, a.out.pair_weight[row * (n_used + 1) + k]);
  }
  if (a.cold.mail != nullptr) {
    __syncthreads();  // all pairs are written
    if (threadIdx.x == 0 && *a.cold.n_pairs > 0) post_mail(a.cold, *a.cold.n_pairs);
  }
}

// Returns in how many parts the logits are. Without a router there are none, and nobody looks at them.
int multiply_router(const DeviceRouteArgs& args, StreamView stream) {
  if (args.config.n_expert == 0) return 1;
  if (args.router.n_rows == 0) return 0;
  DeviceLinearArgs linear;
  linear.jobs[0] = {args.router, args.logits, args.config.n_expert};
  linear.n_jobs = 1;
  linear.x = args.x;
  linear.n_acts = args.n_rows;
  const int parts = float_tile_parts(args.router, args.x, args.n_rows);
  if (parts > 2) {
    linear.jobs[0].k_parts = parts;
    linear.jobs[0].part_stride = static_cast<int64_t>(args.n_rows) * args.config.n_expert;
    linear_tiles_cuda(linear, stream);
    return parts;
  }
  linear_cuda(linear, stream);
  return 1;
}

}  // namespace

size_t router_logit_rows(int max_rows) noexcept {
  const int parts =
      max_rows * kMaxFloatParts < kMaxFloatPartRows ? max_rows * kMaxFloatParts : kMaxFloatPartRows;
  return static_cast<size_t>(parts > max_rows ? parts : max_rows);
}

void route_topk_cuda(const DeviceRouteArgs& args, StreamView stream) noexcept {
  const int n_expert = args.config.n_expert;
  if (args.n_rows <= kMaxListRows && args.config.n_expert_used < 32) {
    const float* logits = args.logits;
    int64_t part_stride = static_cast<int64_t>(args.n_rows) * n_expert;
    int n_parts = kRouterParts;
    if (args.router.n_rows > 0 && is_float_type(args.router.dtype)) {
      const dim3 grid(static_cast<unsigned>(ceil_div(n_expert, 16)), kRouterParts,
                      static_cast<unsigned>(ceil_div(args.n_rows, kRouterRows)));
      launch(args.router.dtype == DType::F32   ? router_small_kernel<DType::F32>
             : args.router.dtype == DType::F16 ? router_small_kernel<DType::F16>
                                               : router_small_kernel<DType::BF16>,
             grid, 32 * kRouterWarps, 0, stream, args);
      logits = args.out.partial;
      part_stride = static_cast<int64_t>(kMaxListRows) * n_expert;
    } else {
      n_parts = multiply_router(args, stream);
    }
    launch(route_rows_kernel, static_cast<unsigned>(n_expert > 0 ? args.n_rows : 1), kThreads, 0, stream,
           args, logits, part_stride, n_parts);
    return;
  }
  const int n_parts = multiply_router(args, stream);
  launch(route_choose_kernel, static_cast<unsigned>(ceil_div(args.n_rows, 8)), 256, 0, stream, args, n_parts);
  launch(route_slots_kernel, 1, kThreads, 0, stream, args);
  const int place_blocks =
      args.cold.mail != nullptr ? 1 : ceil_div(args.n_rows * (args.config.n_expert_used + 1), 256);
  launch(route_place_kernel, static_cast<unsigned>(place_blocks), 256, 0, stream, args);
}

}  // namespace thermo
