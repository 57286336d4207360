// What the device and the host tell each other about cold experts during a step.
//
// The router posts the (row, expert) pairs that the processor must compute into page-locked memory that both
// see, and goes on with the hot ones; the kernel that adds up the experts waits for the answer and adds it. A
// layer whose chosen experts are all hot posts nothing and waits for nothing. Tickets grow by one for each
// layer of each step, so nothing needs to be cleared.
//
// Parcels go the other way: experts that the host guessed some layers early and copied into device memory.
// After its copy, each is announced by one word with the ticket of the layer it is for. A layer looks once
// which of its parcels have arrived; those are hot for this step, the others are too late. A layer that used
// parcels and has nothing for the processor posts too, with no pairs, and waits for no answer: the host goes
// on guessing from there.
#pragma once

#include <cstdint>

namespace thermo {

inline constexpr int kMaxMailRows = 64;
inline constexpr int kMaxFetchTable = 64;
inline constexpr int kMaxParcels = 4;  // of a layer of a step

// The ticket of a layer of a step; 0 is none.
constexpr uint32_t layer_ticket(uint32_t step, int layer) {
  return step + static_cast<uint32_t>(layer) + 1;
}

// What announces a parcel: the ticket of its layer, the expert, and the parcel place it is in.
constexpr uint64_t parcel_word(uint32_t ticket, int expert, int place) {
  return static_cast<uint64_t>(ticket) << 32 | static_cast<uint64_t>(expert) << 16 |
         static_cast<uint64_t>(place);
}
constexpr uint32_t parcel_ticket(uint64_t word) {
  return static_cast<uint32_t>(word >> 32);
}
constexpr int parcel_expert(uint64_t word) {
  return static_cast<int>(word >> 16 & 0xffff);
}
constexpr int parcel_place(uint64_t word) {
  return static_cast<int>(word & 0xffff);
}

// A parcel that had arrived when its layer looked.
struct alignas(16) CameParcel {
  const uint8_t* address;  // nullptr: none
  int64_t expert;
};

// One row sent to one cold expert.
struct ColdPair {
  int16_t row = 0;
  int16_t expert = 0;
  float weight = 0.0f;
};

// In page-locked host memory. Each side writes its own lines.
struct ColdMail {
  alignas(128) uint32_t posted;                    // by the device: ticket of the last post
  alignas(128) uint32_t near;                      // by the host: ticket of the answer that is being written
  alignas(128) uint32_t gave_up;                   // by the device: a wait that took too long
  alignas(128) ColdPair pairs[kMaxMailRows * 32];  // of that post, sorted by expert
};

// One number of the answer: a sum over experts on the grid of 2^-32, the least number for one that is lost.
// Each half comes with the ticket it answers in the same 8 bytes, so that it is seen whole or not at all.
struct alignas(16) StampedSum {
  uint64_t low, high;  // 32 bits of the sum, and the ticket above them
};

// What a layer of a step did; by the device. In page-locked host memory.
struct ColdRecord {
  uint64_t posted_ns = 0, ready_ns = 0,
           went_ns = 0;               // device clock: handed over, own share done, answer seen
  int32_t n_pairs = 0;                // for the processor
  int32_t n_cold = 0, n_fetched = 0;  // distinct experts; read by the device from host memory
  uint32_t came = 0, carried = 0;     // bits by parcel: it was there; and was chosen
  float x_scale[kMaxMailRows];        // of the rows: the norm's factors, which follow the rounding
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
  const uint64_t* announced = nullptr;     // [kMaxParcels] parcel_word()s of this layer, any ticket
  CameParcel* came = nullptr;              // [kMaxParcels] those of this step, seen when the layer looked
  const uint8_t* const* places = nullptr;  // where the places are
  int layer = 0;

  // [kMaxMailRows][n_embd] in page-locked memory: what the experts read, before the norms' factors.
  float* x = nullptr;
  const StampedSum* y = nullptr;  // [kMaxMailRows][n_embd] the answer, in page-locked memory
};

}  // namespace thermo
