// The choice of experts on the GPU, and the lists that the expert products work through. The host reads none
// of it.
//
// A pair is (row, expert it uses). Pairs are sorted by expert; a slot is a run of at most `tile` pairs of one
// expert. The shared expert, or the one FFN of a dense layer, is expert number n_expert and has a pair for
// every row.
#pragma once

#include <cstdint>

#include "device/stream.h"
#include "kernels/linear/device_matrix.h"
#include "kernels/route_topk/cold_mail.h"
#include "kernels/route_topk/route_topk.h"

namespace thermo {

inline constexpr int kSlotRows = 8;

struct alignas(64) DeviceSlot {
  const uint8_t* base;  // address of the expert's gate panels; nullptr: the shared expert, or a cold one
  int32_t expert;
  int32_t first;            // pair
  int32_t count;            // pairs
  int32_t rows[kSlotRows];  // rows of the first pairs
};

// How often experts are used. Uncommitted rows count when they are accepted; until then their choices wait.
struct DeviceUses {
  uint32_t* counts = nullptr;  // [n_expert] grows by the rows of text that use each; nullptr: nobody counts
  // Choices of uncommitted rows: at sequence * sequence_stride [rows of the group][n_expert_used]. nullptr:
  // no row is uncommitted, or somebody else knows; nothing below is looked at.
  int16_t* drafted = nullptr;
  int64_t sequence_stride = 0;
  const int32_t* n_valid = nullptr;  // as in DeviceRows
  const int32_t* group = nullptr;
  const int32_t *group_begin = nullptr, *group_sequence = nullptr, *group_uncommitted = nullptr;
};

struct DeviceRoutes {
  int32_t* n_slots = nullptr;    // [1]
  DeviceSlot* slots = nullptr;   // [max_slots]
  int32_t* pair_row = nullptr;   // [max_pairs]
  int32_t* pair_of = nullptr;    // [rows][n_expert_used + 1] pair, -1: none
  float* pair_weight = nullptr;  // [rows][n_expert_used + 1]

  // Between the kernels of a large step. `expert_count` is zero between steps.
  int32_t* expert_count = nullptr;  // [n_expert]
  int32_t* expert_first = nullptr;  // [n_expert + 1] first pair
  int32_t* expert_slot = nullptr;   // [n_expert + 1] first slot
  int32_t* chosen = nullptr;        // [rows][n_expert_used]
  int32_t* rank = nullptr;          // [rows][n_expert_used] index among the pairs of its expert
  // Between the blocks of a fused one.
  float* partial = nullptr;     // [kRouterParts][kMaxListRows][n_expert]
  uint32_t* counter = nullptr;  // [1], zero between steps

  DeviceUses uses;
};

struct DeviceRouteArgs {
  RouteConfig config;             // n_expert 0: no routing, only the shared expert
  DeviceMatrix router;            // n_rows 0: none (Gating::Every)
  DeviceActs x;                   // what the router reads; a float router with up to kMaxListRows rows:
  const float* stream = nullptr;  // [rows][n_embd], times the norm's weights [n_embd], times the
  const float* norm = nullptr;    // norm's factor [rows]
  const float* factor = nullptr;
  float* logits = nullptr;               // [router_logit_rows()][n_expert] scratch
  const float* bias = nullptr;           // [n_expert] or nullptr
  const uint8_t* const* base = nullptr;  // [n_expert] in device memory; nullptr: a cold expert
  DeviceCold cold;                       // with a mailbox: at most kMaxMailRows rows
  bool shared = false;
  const float* shared_logit = nullptr;  // [rows]: weight is its sigmoid; nullptr: 1
  int n_rows = 0;
  const int32_t* n_valid = nullptr;  // [1]: rows from here on are padding and use no expert
  int tile = kSlotRows;
  DeviceRoutes out;
};

inline constexpr int kRouterParts = 4;   // cuts of the router's columns
inline constexpr int kMaxListRows = 64;  // whose pairs one block lists

// Rows of logits, or of their parts.
size_t router_logit_rows(int max_rows) noexcept;

// n_expert <= 512, n_expert_used <= 32.
// Router product, choice and lists.
void route_topk_cuda(const DeviceRouteArgs& args, StreamView stream) noexcept;

inline constexpr int kMaxDeviceExperts = 512;

// These of a sequence's uncommitted rows became text: counts what they chose.
struct CountDraftedArgs {
  const int16_t* drafted =
      nullptr;  // of the sequence's first layer, the next one layer_stride further; -1: none
  int64_t layer_stride = 0;
  uint32_t* counts = nullptr;  // [n_layer][n_expert]
  int n_layer = 0, n_expert = 0, n_used = 0;
  int n_rows = 0;
  int32_t rows[kMaxListRows] = {};
};
void count_drafted_cuda(const CountDraftedArgs& args, StreamView stream) noexcept;

constexpr int max_route_pairs(const RouteConfig& config, bool shared, int n_rows) {
  return n_rows * (config.n_expert_used + (shared ? 1 : 0));
}
constexpr int max_route_slots(const RouteConfig& config, bool shared, int n_rows, int tile) {
  const int routed = n_rows * config.n_expert_used;
  return (routed < config.n_expert ? routed : config.n_expert) + routed / tile +
         (shared ? (n_rows + tile - 1) / tile : 0);
}

}  // namespace thermo
