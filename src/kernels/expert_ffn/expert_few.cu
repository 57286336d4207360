// Quantised experts of steps of 2 rows up to short prompts, in slots of up to 8 or 16 pairs: integer products
// with the bits of the processor's kernels (panel_exact.cuh).
//
// Bound by the bytes of the chosen experts. A warp has a panel alone and streams it through shared memory,
// some chunks of 256 columns ahead, by copies that need no registers: 110 KB and more are in flight on a
// multiprocessor. With few slots that is three chunks of each warp of two blocks; with many it is two chunks
// of three blocks, or four for down, because latencies are the bound and more warps hide more of them. A
// block of the first product has 4 panels of gate and the same 4 of up; one of the second has some groups of
// 8 panels of down, whose weights it asks for before it waits for the first. Hidden rows are handed over as
// floats, and each block of down rounds them again: the group of columns that shares a step is made by many
// blocks.
//
// 35B-A3B on an H200, gate and up of a layer, then down (ncu, us): 64 sequences 75 and 58 with the form of
// few slots, 72 and 52 with that of many (58 and 35 at the bandwidth). Steps of 4 and 8 rows lose 15 and 9 %
// with it. 512 rows of a prompt 181 and 113 with slots of 16 pairs, 221 and 139 with f16 tiles of 64; from
// 768 rows on tiles are as fast.
//
// Lost: panels of a later slot asked into L2 by cp.async.bulk.prefetch, 235 and 160 us for 64 sequences.
#include <initializer_list>

#include "base/units.h"
#include "kernels/expert_ffn/expert_slots.cuh"
#include "kernels/linear/linear_few.cuh"
#include "kernels/row_ops/warp_ops.cuh"

namespace thermo {
namespace {

constexpr int kWarps = 8, kInPanels = kWarps / 2;
constexpr int kManySlots = 128;  // which fill a large card with either form

// Chunks of a warp in flight, blocks to a multiprocessor, chunks of down of a warp at least, pairs of a slot.
struct FewForm {
  int stages, in_blocks, out_blocks, out_chunks, rows;
};
constexpr int kNarrow = 0, kMany = 1, kWide = 2;
constexpr FewForm kForms[] = {
    {3, 2, 2, 4, kExpertSmallTile}, {2, 3, 4, 8, kExpertSmallTile}, {2, 2, 3, 8, kExpertWideTile}};

struct ExpertFewPlan {
  DeviceExpertArgs a;
  int chunk_bytes, acts_bytes;  // of a stage of a warp; of the rounded rows
  int act_rows;                 // of a slot, at most; rows that a tile has beyond are not looked at
  int groups;                   // of 8 panels, of a block of the second product
};

// One chunk of a panel, as it lies in shared memory, times one or two rows by integer dot products: a lane
// walks the chain of the value that comes to it.
template <DType T, int kRows>
__device__ __forceinline__ LaneValue dot_chunk(const uint8_t* chunk, int place, const std::byte* acts,
                                               int lane) {
  constexpr PanelFormat f = kPanelFormat<T>;
  DotChunk<T> data;
  data.template load_block<true>(chunk + place * f.header_step(), chunk + 64, lane);
  SubCodes x[kRows];
#pragma unroll
  for (int a = 0; a < kRows; ++a)
    x[a].load(*reinterpret_cast<const BlockActs*>(acts + a * kFewRowBytes), lane >> 2);
  int sums[kDotSums<T, kRows>];
  dot_sums<T, kRows>(data, x, lane >> 2, sums);
  return lane_value<T, kRows>(data, sums, lane);
}

// A warp's panels one after the other: panel_of(i), nullptr for none, i < n_panels. ready() makes the rows of
// the chunks, act_bytes each, from `acts` on; put(i, act, row of the panel, y) of every output of panel i,
// some of acts that are none. kRows: 1 and 2 for slots of as many, else 8 or 16.
template <DType T, int kRows, int kStages, class PanelOf, class Ready, class Put>
__device__ __forceinline__ void stream_panels(const DeviceMatrix& w, int n_panels, const PanelOf& panel_of,
                                              std::byte* stages, int chunk_bytes, const std::byte* acts,
                                              int act_bytes, int lane, const Ready& ready, const Put& put) {
  const int n_chunks = dot_chunks(w.n_cols);
  int asked_panel = 0, asked_chunk = 0;
  // Each call is one group of copies, also when nothing is left.
  const auto ask = [&](std::byte* stage) {
    if (asked_panel < n_panels)
      if (const uint8_t* const panel = panel_of(asked_panel); panel != nullptr)
        stage_chunk_of<T>(stage, panel, w.panel_bytes, asked_chunk, lane);
    copy_commit();
    if (++asked_chunk == n_chunks) asked_chunk = 0, ++asked_panel;
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) ask(stages + i * chunk_bytes);
  ready();
  int stage = 0;
#pragma unroll 1
  for (int panel = 0; panel < n_panels; ++panel) {
    constexpr int kTiles = kRows <= 8 ? 1 : kRows / 8;
    float y[kTiles][4] = {};
    int act = 2 * (lane & 3), row = 2 * (lane >> 2);
    bool mine = true;
#pragma unroll 1
    for (int chunk = 0; chunk < n_chunks; ++chunk) {
      std::byte* const here = stages + stage * chunk_bytes;
      copy_wait<kStages - 1>();
      __syncwarp();
      const uint8_t* const bytes = reinterpret_cast<const uint8_t*>(here);
      const std::byte* const rows = acts + chunk * act_bytes;
      if (panel_of(panel) != nullptr) {
        if constexpr (kRows <= 2) {
          const LaneValue v =
              dot_chunk<T, kRows>(bytes, chunk & (kPanelFormat<T>.unit_blocks - 1), rows, lane);
          const float step = reinterpret_cast<const BlockActs*>(rows + v.act * kFewRowBytes)->meta[0].step;
          y[0][0] = __fmaf_rn(v.value, step, y[0][0]);
          act = v.act;
          row = v.row;
          mine = v.here;
        } else {
          few_chunk<T, kTiles>(
              bytes, chunk & (kPanelFormat<T>.block_cols == 256 ? kPanelFormat<T>.unit_blocks - 1 : 0),
              min(8, (w.n_cols - chunk * 256) / 32), FewRows<>{rows}, lane,
              [&](int, int n, const float(&value)[4], float left, float right) {
#pragma unroll
                for (int k = 0; k < 4; ++k) y[n][k] = __fmaf_rn(value[k], k % 2 == 0 ? left : right, y[n][k]);
              });
        }
      }
      __syncwarp();
      ask(here);
      stage = stage + 1 == kStages ? 0 : stage + 1;
    }
    if (panel_of(panel) == nullptr || !mine) continue;
    if constexpr (kRows <= 2) {
      put(panel, act, row, y[0][0]);
    } else {
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int k = 0; k < 4; ++k) put(panel, 8 * n + act + k % 2, row + k / 2, y[n][k]);
    }
  }
}

// Calls run<T, kRows> for the weight type and the rows of a slot. Codes of 6 bits take a tensor core's lanes
// 35 instructions for 32 columns: with one or two rows dot products are a quarter faster. Those of 4 bits
// take 8, and dot products lose a third.
template <int kForm, bool kAny, class Run>
__device__ __forceinline__ void for_slot(DType dtype, int n_acts, const Run& run) {
  for_few_type<kAny>(dtype, [&]<DType T>() {
    if constexpr (kPanelFormat<T>.block_cols == 256 && kPanelFormat<T>.bits == 6) {
      if (n_acts == 1) return run.template operator()<T, 1>();
      if (n_acts == 2) return run.template operator()<T, 2>();
    }
    if constexpr (kForms[kForm].rows > 8)
      if (n_acts > 8) return run.template operator()<T, kForms[kForm].rows>();
    run.template operator()<T, 8>();
  });
}

template <int kForm, bool kAny>
__global__ void __launch_bounds__(32 * kWarps, kForms[kForm].in_blocks)
    expert_in_few_kernel(const __grid_constant__ ExpertFewPlan plan) {
  __shared__ __align__(16) float part[kWarps][16 * kForms[kForm].rows];
  extern __shared__ __align__(16) std::byte shared[];
  const DeviceExpertArgs& a = plan.a;
  wait_for_inputs();
  allow_next();  // after the wait: the next kernel reads the slots before its own
  // From the last on: those of the shared expert have the most rows.
  const int at = *a.routes.n_slots - 1 - static_cast<int>(blockIdx.y);
  if (at < 0) return;
  const DeviceSlot& slot = a.routes.slots[at];
  const int first = slot.first, n_acts = slot.count;
  const uint8_t* base;
  if (!resolve(a, slot, base)) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const DeviceMatrix& gate = base == nullptr ? a.shared_gate : a.gate;
  const DeviceMatrix& up = base == nullptr ? a.shared_up : a.up;
  const DeviceMatrix& w = warp < kInPanels ? gate : up;
  const int first_panel = blockIdx.x * kInPanels, panel = first_panel + warp % kInPanels;
  if (first_panel * 16 >= w.n_rows) return;
  const uint8_t* const bytes =
      panel * 16 < w.n_rows ? base + reinterpret_cast<size_t>(w.panels) + panel * w.panel_bytes : nullptr;
  const int n_chunks = dot_chunks(w.n_cols);
  const auto make_rows = [&] {
    const std::byte* const blocks =
        static_cast<const std::byte*>(act_group_cols(w.dtype) == 256 ? a.x.blocks256 : a.x.blocks32);
    for (int act = 0; act < n_acts; ++act) {
      const int row = kForms[kForm].rows <= kSlotRows ? slot.rows[act] : a.routes.pair_row[first + act];
      const std::byte* const from = blocks + row * a.x.blocks_stride * kDotChunkBytes + lane * 16;
      std::byte* const to = shared + act * kFewRowBytes + lane * 16;
      if (lane < kDotChunkBytes / 16)
#pragma unroll 2
        for (int chunk = warp; chunk < n_chunks; chunk += kWarps)
          *reinterpret_cast<uint4*>(to + chunk * plan.act_rows * kFewRowBytes) =
              *reinterpret_cast<const uint4*>(from + chunk * kDotChunkBytes);
    }
    __syncthreads();
  };
  for_slot<kForm, kAny>(w.dtype, n_acts, [&]<DType T, int kRows>() {
    stream_panels<T, kRows, kForms[kForm].stages>(
        w, 1, [&](int) { return bytes; },
        shared + plan.acts_bytes + warp * kForms[kForm].stages * plan.chunk_bytes, plan.chunk_bytes, shared,
        plan.act_rows * kFewRowBytes, lane, make_rows,
        [&](int, int act, int row, float y) { part[warp][act * 16 + row] = y; });
  });
  __syncthreads();
  for (int i = threadIdx.x; i < kInPanels * 16 * n_acts; i += 32 * kWarps) {
    const int r = i & 15, p = (i >> 4) % kInPanels, act = (i >> 4) / kInPanels;
    const int row = (first_panel + p) * 16 + r;
    if (row < w.n_rows)
      a.hidden.f32[(first + act) * a.hidden.f32_stride + row] =
          swiglu_exact(part[p][act * 16 + r], part[kInPanels + p][act * 16 + r]);
  }
}

template <int kForm, bool kAny>
__global__ void __launch_bounds__(32 * kWarps, kForms[kForm].out_blocks)
    expert_out_few_kernel(const __grid_constant__ ExpertFewPlan plan) {
  extern __shared__ __align__(16) std::byte shared[];
  const DeviceExpertArgs& a = plan.a;
  allow_next();
  const int at = *a.routes.n_slots - 1 - static_cast<int>(blockIdx.y);
  const DeviceSlot* const slot = at < 0 ? nullptr : a.routes.slots + at;
  const uint8_t* base = nullptr;
  if (slot == nullptr || !resolve(a, *slot, base)) {
    wait_for_inputs();
    return;
  }
  const int first = slot->first, n_acts = slot->count;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const DeviceMatrix& w = base == nullptr ? a.shared_down : a.down;
  const int n_chunks = dot_chunks(w.n_cols), first_panel = blockIdx.x * plan.groups * kWarps + warp;
  const uint8_t* const panels = base + reinterpret_cast<size_t>(w.panels);
  const auto panel_of = [&](int group) -> const uint8_t* {
    const int panel = first_panel + group * kWarps;
    return panel * 16 < w.n_rows ? panels + panel * w.panel_bytes : nullptr;
  };
  const auto make_rows = [&] {
    wait_for_inputs();
    for (int i = warp; i < n_acts * n_chunks; i += kWarps) {
      const int act = i % n_acts, chunk = i / n_acts;
      ActPiece piece;
      piece.load(a.hidden.f32 + (first + act) * a.hidden.f32_stride, chunk, w.n_cols, lane);
      BlockActs& out = *reinterpret_cast<BlockActs*>(shared + (chunk * plan.act_rows + act) * kFewRowBytes);
      if (act_group_cols(w.dtype) == 256)
        put_block_acts<256>(piece.low, piece.high, lane, out);
      else
        put_block_acts<32>(piece.low, piece.high, lane, out);
    }
    __syncthreads();
  };
  for_slot<kForm, kAny>(w.dtype, n_acts, [&]<DType T, int kRows>() {
    stream_panels<T, kRows, kForms[kForm].stages>(
        w, plan.groups, panel_of, shared + plan.acts_bytes + warp * kForms[kForm].stages * plan.chunk_bytes,
        plan.chunk_bytes, shared, plan.act_rows * kFewRowBytes, lane, make_rows,
        [&](int group, int act, int row, float y) {
          const int at = (first_panel + group * kWarps) * 16 + row;
          if (act < n_acts && at < w.n_rows) a.y[static_cast<int64_t>(first + act) * a.n_embd + at] = y;
        });
  });
}

using Matrices = std::initializer_list<const DeviceMatrix*>;

struct FewSizes {
  int chunk_bytes = 0, n_chunks = 0, n_rows = 0;
  bool dot = true;

  explicit FewSizes(Matrices matrices) {
    for (const DeviceMatrix* m : matrices) {
      if (m->n_rows == 0) continue;
      dot = dot && has_dot(m->dtype);
      if (64 + m->body_bytes > chunk_bytes) chunk_bytes = 64 + m->body_bytes;
      if (dot_chunks(m->n_cols) > n_chunks) n_chunks = dot_chunks(m->n_cols);
      if (m->n_rows > n_rows) n_rows = m->n_rows;
    }
  }
  // The last chunk has a whole tile: rows that it has beyond are read, though not looked at.
  int acts_bytes(int rows) const { return (n_chunks * rows + ceil_div(rows, 8) * 8 - rows) * kFewRowBytes; }
  int bytes(int rows, const FewForm& form) const {
    return acts_bytes(rows) + kWarps * form.stages * chunk_bytes;
  }
};

}  // namespace

bool expert_few_possible(const DeviceExpertArgs& a, int slot_rows) noexcept {
  const auto good = [](const DeviceMatrix& gate, const DeviceMatrix& up, const DeviceMatrix& down) {
    return gate.n_rows == 0 ||
           (!is_float_type(gate.dtype) && !is_float_type(up.dtype) && !is_float_type(down.dtype) &&
            act_group_cols(gate.dtype) == act_group_cols(up.dtype));
  };
  const FewForm& form = kForms[slot_rows > kExpertSmallTile ? kWide : kNarrow];
  const int own =
      kWarps * 16 * form.rows * static_cast<int>(sizeof(float)) + 4 * 1024;  // more than a kernel has itself
  const int most = static_cast<int>(device_in_use().max_shared_bytes) - own;
  const FewSizes in({&a.gate, &a.up, &a.shared_gate, &a.shared_up}), out({&a.down, &a.shared_down});
  return good(a.gate, a.up, a.down) && good(a.shared_gate, a.shared_up, a.shared_down) &&
         slot_rows <= form.rows && in.bytes(form.rows, form) <= most && out.bytes(form.rows, form) <= most &&
         (slot_rows <= kExpertSmallTile || (in.dot && out.dot));
}

namespace {

template <int kForm, bool kAny>
void launch_in(const DeviceExpertArgs& args, const FewSizes& sizes, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(expert_in_few_kernel<kForm, kAny>, device_in_use().max_shared_bytes), true;
  }();
  static_cast<void>(ready);
  const int rows = args.max_slot_rows;
  launch(expert_in_few_kernel<kForm, kAny>,
         dim3(static_cast<unsigned>(ceil_div(sizes.n_rows, 16 * kInPanels)),
              static_cast<unsigned>(args.max_slots)),
         32 * kWarps, static_cast<size_t>(sizes.bytes(rows, kForms[kForm])), stream,
         ExpertFewPlan{args, sizes.chunk_bytes, sizes.acts_bytes(rows), rows, 1});
}

template <int kForm, bool kAny>
void launch_out(const DeviceExpertArgs& args, const FewSizes& sizes, StreamView stream) {
  static const bool ready = [] {
    return allow_shared(expert_out_few_kernel<kForm, kAny>, device_in_use().max_shared_bytes), true;
  }();
  static_cast<void>(ready);
  const int rows = args.max_slot_rows, groups = ceil_div(kForms[kForm].out_chunks, sizes.n_chunks);
  launch(expert_out_few_kernel<kForm, kAny>,
         dim3(static_cast<unsigned>(ceil_div(sizes.n_rows, 16 * kWarps * groups)),
              static_cast<unsigned>(args.max_slots)),
         32 * kWarps, static_cast<size_t>(sizes.bytes(rows, kForms[kForm])), stream,
         ExpertFewPlan{args, sizes.chunk_bytes, sizes.acts_bytes(rows), rows, groups});
}

// The form of many slots is for cards whose multiprocessors then have room for another block.
int form_of(const DeviceExpertArgs& args, const FewSizes& sizes) {
  if (args.max_slot_rows > kExpertSmallTile) return kWide;
  const auto resident = [&](int form) {
    return static_cast<int>(device_in_use().max_shared_bytes) / sizes.bytes(args.max_slot_rows, kForms[form]);
  };
  return args.max_slots >= kManySlots && resident(kMany) > resident(kNarrow) ? kMany : kNarrow;
}

}  // namespace

void expert_few_cuda(const DeviceExpertArgs& args, StreamView stream) noexcept {
  const FewSizes in({&args.gate, &args.up, &args.shared_gate, &args.shared_up}),
      out({&args.down, &args.shared_down});
  const int in_form = form_of(args, in), out_form = form_of(args, out);
  if (!in.dot)
    launch_in<kNarrow, true>(args, in, stream);
  else if (in_form == kWide)
    launch_in<kWide, false>(args, in, stream);
  else if (in_form == kMany)
    launch_in<kMany, false>(args, in, stream);
  else
    launch_in<kNarrow, false>(args, in, stream);
  if (!out.dot)
    launch_out<kNarrow, true>(args, out, stream);
  else if (out_form == kWide)
    launch_out<kWide, false>(args, out, stream);
  else if (out_form == kMany)
    launch_out<kMany, false>(args, out, stream);
  else
    launch_out<kNarrow, false>(args, out, stream);
}

}  // namespace thermo
