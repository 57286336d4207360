// What the device and the host tell each other about cold experts during a step.
//
// The router posts the (row, expert) pairs that the processor must compute into page-locked memory that both
// see, and goes on with the hot ones; the norm behind the experts waits for the answer and adds it. A layer
// whose chosen experts are all hot posts nothing and waits for nothing. Tickets grow by one for each layer of
// each step, so nothing needs to be cleared.
#pragma once

#include <cstdint>

namespace thermo {

inline constexpr int kMaxMailRows = 32;
inline constexpr int kMaxFetchTable = 64;

// One row sent to one cold expert.
struct ColdPair {
  int16_t row = 0;
  int16_t expert = 0;
  float weight = 0.0f;
};

// In page-locked host memory. Each side writes its own lines.
struct ColdMail {
  alignas(128) uint32_t posted;  // by the device: ticket of the last post
  int32_t n_pairs;               // of that post, sorted by expert
  int32_t layer;
  float x_scale;  // of the rows: the norm's factor, where it was not known when they were written
  alignas(128) uint32_t near;     // by the host: ticket of the answer that is being written
  alignas(128) uint32_t gave_up;  // by the device: a wait that took too long
  alignas(128) ColdPair pairs[kMaxMailRows * 32];
};

// What a layer of a step did; by the device, for the counters. In page-locked host memory.
struct ColdRecord {
  uint64_t posted_ns = 0, ready_ns = 0,
           went_ns = 0;               // device clock: handed over, own share done, answer seen
  int32_t n_pairs = 0;                // for the processor
  int32_t n_cold = 0, n_fetched = 0;  // distinct experts; read by the device from host memory
};

// Of one layer. All pointers but `mail`, `chosen` and `record` are device memory.
struct DeviceCold {
  ColdMail* mail = nullptr;  // nullptr: every expert is hot, nothing below is looked at
  const uint8_t* const* host_base =
      nullptr;                        // [n_expert] where the device can read a cold expert in host memory
  const int32_t* fetch_of = nullptr;  // [kMaxFetchTable + 1] of so many cold experts, how many to read there
  const int32_t* n_cold = nullptr;    // [1] experts of this layer that are not hot
  const uint32_t* ticket = nullptr;   // [1] of the step
  int32_t* n_pairs = nullptr;         // [1] posted for this layer
  uint32_t* near = nullptr;           // [1] as in the mail, for the blocks that do not ask the host
  int16_t* chosen = nullptr;          // [kMaxMailRows][n_expert_used] of this layer, for the heat map
  ColdRecord* record = nullptr;
  int layer = 0;

  float* x = nullptr;  // [kMaxMailRows][n_embd] in page-locked memory: what the experts read
  // The answer, [kMaxMailRows][n_embd] in page-locked memory: each float beside the ticket it answers.
  const uint64_t* y = nullptr;
};

}  // namespace thermo
