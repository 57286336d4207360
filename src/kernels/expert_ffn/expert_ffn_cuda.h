// Gated FFNs of the experts that a step's rows chose, and of the shared or dense one, on the GPU.
//
//   hidden[p] = silu(gate_e x[row p]) * (up_e x[row p]),   y[p] = down_e hidden[p]      for every pair p of
//   the route lists
//
// Weighting and adding to the residual stream is left to residual_norm_cuda, which reads y by row.
//
// The small form reads x.blocks256 and x.blocks32, as its quantised gate and up types need, x.f32 for float
// types, and hands hidden rows over in hidden.f32. The large form reads x.f16 and uses hidden.f16.
#pragma once

#include "device/stream.h"
#include "kernels/linear/device_matrix.h"
#include "kernels/route_topk/route_topk_cuda.h"
#include "kernels/row_ops/row_ops_cuda.h"

namespace thermo {

struct DeviceExpertArgs {
  // Routed experts: a slot's base is where the gate panels of its expert lie; the matrices hold shapes, types
  // and offsets from there (as `panels` counted from null).
  DeviceMatrix gate, up, down;
  // Expert number n_expert.
  DeviceMatrix shared_gate, shared_up, shared_down;
  int n_expert = 0;

  DeviceRoutes routes;
  int max_slots = 0;
  int max_slot_rows = 0;  // of a slot, in the small form at most kExpertWideTile
  DeviceActs x;           // by row
  DeviceActsOut hidden;   // by pair
  float* y = nullptr;     // [pairs][n_embd]
  int n_embd = 0;
  // Not null: slots are resolved here and not by their `base`: only experts with an address are computed.
  // With `with_shared` the shared expert's slots are, too. So a layer can be computed in parts, as its
  // experts arrive.
  const uint8_t* const* table = nullptr;
  bool with_shared = true;
  int value_bytes = 0;  // set by expert_ffn_cuda, and `few`
  bool few = false;
  bool large = false;  // f16 tensor-core tiles
  int tile = 0;        // expert_slot_rows()
};

// Whether the large form can run these matrices: quantised, gate and up of one type.
bool expert_tiles_possible(const DeviceExpertArgs& args) noexcept;
// Pairs of a slot in the large form: enough for what an expert is likely to get, so that its weights are
// decoded once.
inline constexpr int kExpertLowTile = 16;
inline constexpr int kExpertTile = 64;
int expert_tile(int n_rows, int n_used, int n_expert) noexcept;
// And in the small form: few pairs, or kExpertWideTile where an expert gets more of them.
inline constexpr int kExpertSmallTile = 8;
inline constexpr int kExpertWideTile = 16;
// Pairs of an expert, on average, from which slots are wide, and up to which the small form is used where
// wide slots are possible.
inline constexpr int kNarrowPairs = 4, kWidePairs = 20;
// Up to here the small form is used in any case, because the processor may take part, so that experts have
// the bits of its kernels.
inline constexpr int kExpertSmallRows = 255;
// A dense layer is the GPU's alone, and up to here quantised ones are plain products (linear_few.cuh). No
// further: with 128 rows of a 27B model the large form takes 62 ms, slots of 8 rows 95.
inline constexpr int kDenseSmallRows = 64;
// Whether the matrices can be computed in the small form by integer products, in slots of so many pairs.
bool expert_few_possible(const DeviceExpertArgs& args, int slot_rows) noexcept;
bool expert_form_is_large(const DeviceExpertArgs& args, const RouteConfig& route, int n_rows) noexcept;
// Pairs of a slot in the form that a step of so many rows has.
int expert_slot_rows(const DeviceExpertArgs& args, const RouteConfig& route, int n_rows) noexcept;
// Rows of a step in the small form, at most, of quantised experts.
constexpr int max_expert_small_rows(const RouteConfig& route) {
  const int wide = route.n_expert_used > 0 ? (kWidePairs + 1) * route.n_expert / route.n_expert_used : 0;
  return wide > kExpertSmallRows ? wide : kExpertSmallRows;
}

void expert_ffn_cuda(const DeviceExpertArgs& args, StreamView stream) noexcept;

}  // namespace thermo
