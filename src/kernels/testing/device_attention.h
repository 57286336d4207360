// A step of the GPU's attention, for tests: shapes, caches in pages, what projections give, and the step in
// device memory.
#pragma once

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <gtest/gtest.h>
#include <algorithm>

#include <cmath>
#include <vector>

#include "base/units.h"
#include "kernels/attention/attention_cuda.h"
#include "kernels/testing/device_step.h"

namespace thermo::testing::device_attention {

struct Shape {
  int n_head, n_head_kv, head_dim;
};
struct Case {
  Shape shape;
  std::vector<StepGroup> groups;
  KvType k_type = KvType::F16, v_type = KvType::F16;
  int window = 0;
  bool uncommitted = false;
  HeadGate gate = HeadGate::SigmoidElement;
  int n_padding = 0;
  int n_multiprocessors = 132;
  bool both_ways = false;
  int n_rot = 0;  // 0: a quarter of head_dim
};

inline size_t as_size(int64_t n) {
  return static_cast<size_t>(n);
}

// Caches of some sequences in pages, K before V in each, of one or more layers. Pages are in an order of
// their own, every other one is nobody's, and all are NaN at first.
struct TestKv {
  KvType k_type, v_type;
  size_t k_slot, v_slot, n_layers;
  int table_pages, n_sequences;
  std::vector<int32_t> table;
  std::vector<std::byte> bytes;

  TestKv(KvType kt, KvType vt, int n_head_kv, int head_dim, int n_slots, int sequences, int layers = 1)
      : k_type(kt),
        v_type(vt),
        k_slot(as_size(n_head_kv) * kv_head_bytes(kt, head_dim)),
        v_slot(as_size(n_head_kv) * kv_head_bytes(vt, head_dim)),
        n_layers(as_size(layers)),
        table_pages(ceil_div(n_slots, kKvPage)),
        n_sequences(sequences) {
    const int n = table_pages * sequences;
    for (int i = 0; i < n; ++i) table.push_back(2 * (n - 1 - i));
    bytes.assign(as_size(2 * n) * page_bytes(), std::byte{0xff});
  }
  size_t layer_bytes() const { return kKvPage * (k_slot + v_slot); }
  size_t page_bytes() const { return n_layers * layer_bytes(); }
  size_t k_at(int sequence, int slot, size_t layer = 0) const {
    return page_at(sequence, slot, layer) + as_size(slot % kKvPage) * k_slot;
  }
  size_t v_at(int sequence, int slot, size_t layer = 0) const {
    return page_at(sequence, slot, layer) + kKvPage * k_slot + as_size(slot % kKvPage) * v_slot;
  }
  size_t page_at(int sequence, int slot, size_t layer) const {
    return as_size(table[as_size(sequence * table_pages + slot / kKvPage)]) * page_bytes() +
           layer * layer_bytes();
  }
  KvView view(int sequence, size_t layer = 0) {
    std::byte* const base = bytes.data() + layer * layer_bytes();
    return {k_type,
            v_type,
            base,
            base + kKvPage * k_slot,
            table.data() + sequence * table_pages,
            static_cast<int64_t>(page_bytes())};
  }
  DeviceKv device(std::byte* memory, const int32_t* device_table) const {
    return {k_type,       v_type,
            memory,       memory + kKvPage * k_slot,
            device_table, static_cast<int64_t>(page_bytes()),
            table_pages};
  }
};

inline constexpr float kEps = 1e-6f, kMagnitude = 1.1f;
inline constexpr KvType kTypes[] = {KvType::F16, KvType::Q8_0, KvType::F32, KvType::BF16, KvType::Q4_0};

// What the projections give, and the norms.
struct Projected {
  std::vector<float> q_full, k, v, gate;
  std::vector<float> q_norm, k_norm, inv_freq;

  Projected(const Case& c, size_t n_rows, Inputs& in) {
    const size_t dim = as_size(c.shape.head_dim), q_dim = as_size(c.shape.n_head) * dim,
                 kv_dim = as_size(c.shape.n_head_kv) * dim;
    q_full = in.spiky(n_rows * q_dim * (c.gate == HeadGate::SigmoidElement ? 2 : 1));
    k = in.normal(n_rows * kv_dim);
    v = in.spiky(n_rows * kv_dim);
    gate = in.normal(n_rows * (c.gate == HeadGate::SoftplusHead ? as_size(c.shape.n_head) : q_dim));
    q_norm = in.uniform(dim, 0.5f, 1.5f);
    k_norm = in.uniform(dim, 0.5f, 1.5f);
    const size_t n_rot = c.n_rot > 0 ? as_size(c.n_rot) : dim / 4;
    for (size_t i = 0; i < n_rot / 2; ++i) inv_freq.push_back(std::pow(10000.0f, -2.0f * i / n_rot));
  }
  // Row r of n alone.
  Projected row(size_t r, size_t n) const {
    Projected one = *this;
    const auto cut = [&](std::vector<float>& x) {
      const size_t width = x.size() / n;
      x = std::vector<float>(&x[r * width], &x[r * width] + width);
    };
    for (std::vector<float>* x : {&one.q_full, &one.k, &one.v, &one.gate}) cut(*x);
    return one;
  }
};

// A step in device memory.
struct StepOnDevice {
  DeviceArray<float> q_full, k, v, gate, q_norm, k_norm, inv_freq, q, partial, out;
  DeviceArray<half> out_half;
  DeviceArray<std::byte> tagged;
  DeviceArray<uint32_t> launch{1};
  uint32_t n_launches = 6;
  DeviceAttentionArgs args;

  StepOnDevice(const Case& c, const DeviceStep& step, const Projected& in, const DeviceKv& kv)
      : StepOnDevice(c, step, in, kv,
                     attention_splits(step.n_rows, c.shape.n_head, c.shape.n_head_kv, c.n_multiprocessors)) {}

  // Other rows of the same shape.
  void take(const DeviceStep& step, const Projected& in) {
    q_full.write(in.q_full);
    k.write(in.k);
    v.write(in.v);
    gate.write(in.gate);
    args.rows = step.rows();
  }
  // Way 0: in three launches. One or two rows also: 1: in one launch where the card can, 2: again over what
  // that left.
  void run(int way) {
    args.tagged = way == 0 ? nullptr : tagged.data();
    launch.write({++n_launches});
    args.launch = launch.data();
    attention_cuda(args, {});
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    const cudaError_t error = cudaDeviceSynchronize();
    ASSERT_EQ(error, cudaSuccess) << cudaGetErrorString(error) << ", way " << way;
  }
  static int n_ways(size_t n_rows) { return n_rows <= as_size(kMaxTaggedRows) ? 3 : 1; }
  bool intact() const {
    return out.intact() && out_half.intact() && partial.intact() && q.intact() && tagged.intact();
  }

 private:
  static size_t tagged_bytes(const Case& c, int n_rows, int splits) {
    return attention_tagged_bytes(std::min(n_rows, kMaxTaggedRows), c.shape.n_head, splits, c.shape.head_dim);
  }
  StepOnDevice(const Case& c, const DeviceStep& step, const Projected& in, const DeviceKv& kv, int splits)
      : q_full(in.q_full),
        k(in.k),
        v(in.v),
        gate(in.gate),
        q_norm(in.q_norm),
        k_norm(in.k_norm),
        inv_freq(in.inv_freq),
        q(as_size(step.n_rows) * as_size(c.shape.n_head * c.shape.head_dim)),
        partial(as_size(step.n_rows) * as_size(c.shape.n_head * splits) * as_size(c.shape.head_dim + 2)),
        out(as_size(step.n_rows) * as_size(c.shape.n_head * c.shape.head_dim)),
        out_half(as_size(step.n_rows) * as_size(c.shape.n_head * c.shape.head_dim)),
        tagged(tagged_bytes(c, step.n_rows, splits)) {
    cudaMemset(tagged.data(), 0, tagged_bytes(c, step.n_rows, splits));
    const int64_t q_dim = c.shape.n_head * c.shape.head_dim;
    args = {.rows = step.rows(),
            .kv = kv,
            .n_rows = step.n_rows,
            .n_head = c.shape.n_head,
            .n_head_kv = c.shape.n_head_kv,
            .head_dim = c.shape.head_dim,
            .scale = 1.0f / std::sqrt(static_cast<float>(c.shape.head_dim)),
            .window = c.window,
            .both_ways = c.both_ways,
            .singles = std::all_of(c.groups.begin(), c.groups.end(),
                                   [](const StepGroup& group) { return group.n_rows == 1; }),
            .eps = kEps,
            .q_full = q_full.data(),
            .k = k.data(),
            .v = v.data(),
            .gate = gate.data(),
            .head_gate = c.gate,
            .q_norm = q_norm.data(),
            .k_norm = k_norm.data(),
            .inv_freq = inv_freq.data(),
            .n_rot = static_cast<int>(2 * in.inv_freq.size()),
            .rope_magnitude = kMagnitude,
            .q = q.data(),
            .partial = partial.data(),
            .n_splits = splits,
            .out = {.f16 = out_half.data(),
                    .f32 = out.data(),
                    .f16_stride = q_dim,
                    .f32_stride = q_dim,
                    .scale = 1.0f}};
  }
};

}  // namespace thermo::testing::device_attention
