// The GPU's attention, from projected heads to gated results, against attention_ref: every way to attend,
// head size and cache type, several sequences, windows, trees, padding. What a step must not read is NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "base/units.h"
#include "device/device_info.h"
#include "device/testing/skip_without_gpu.h"
#include "kernels/quant_matmul/panel_mma.cuh"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_attention.h"

namespace thermo {
namespace {

using namespace thermo::testing;
using namespace thermo::testing::device_attention;

// Norm and rotation of one head.
void prepare_ref(float* x, const std::vector<float>& weight, const std::vector<float>& inv_freq, int position,
                 float eps, float magnitude) {
  const size_t dim = weight.size(), half = inv_freq.size();
  double square = 0.0;
  for (size_t d = 0; d < dim; ++d) square += double{x[d]} * x[d];
  const double scale = 1.0 / std::sqrt(square / static_cast<double>(dim) + double{eps});
  std::vector<double> y(dim);
  for (size_t d = 0; d < dim; ++d) y[d] = x[d] * scale * weight[d];
  for (size_t i = 0; i < half; ++i) {
    const double angle = static_cast<float>(position) * inv_freq[i];  // one rounding, as everywhere
    const double c = std::cos(angle) * magnitude, s = std::sin(angle) * magnitude;
    const double u = y[i], v = y[half + i];
    y[i] = u * c - v * s;
    y[half + i] = u * s + v * c;
  }
  for (size_t d = 0; d < dim; ++d) x[d] = static_cast<float>(y[d]);
}

double length(const float* x, size_t n) {
  double sum = 0.0;
  for (size_t i = 0; i < n; ++i) sum += double{x[i]} * x[i];
  return std::sqrt(sum);
}

// Of an element, as a share of the farthest one that is rounded with it.
double last_place(KvType type) {
  switch (type) {
    case KvType::F32:
      return 0.0;
    case KvType::F16:
      return 0x1p-11;
    case KvType::BF16:
      return 0x1p-8;
    case KvType::Q8_0:
      return 0x1p-7;
    case KvType::Q4_0:
      return 0x1p-3;
  }
  return 0.0;
}

void run_case(const Case& c, uint64_t seed) {
  const int n_head = c.shape.n_head, n_head_kv = c.shape.n_head_kv, head_dim = c.shape.head_dim;
  const size_t dim = as_size(head_dim), q_dim = as_size(n_head) * dim, kv_dim = as_size(n_head_kv) * dim;
  Inputs in(seed);
  const DeviceStep step(c.groups, c.n_padding, c.uncommitted, seed, c.both_ways);
  const size_t n_rows = as_size(step.n_rows), n_valid = as_size(step.n_valid());
  const bool gate_inside = c.gate == HeadGate::SigmoidElement;
  const size_t q_step = gate_inside ? 2 * dim : dim;
  const float eps = kEps, magnitude = kMagnitude, scale = 1.0f / std::sqrt(static_cast<float>(head_dim));

  Projected projected(c, n_rows, in);
  auto& [q_full, k, v, gate, q_norm, k_norm, inv_freq] = projected;
  for (size_t r = n_valid; r < n_rows; ++r) {
    std::fill_n(&q_full[r * as_size(n_head) * q_step], as_size(n_head) * q_step, NAN);
    std::fill_n(&k[r * kv_dim], kv_dim, NAN);
    std::fill_n(&v[r * kv_dim], kv_dim, NAN);
  }

  // Caches: committed slots, and after them NaN for the kernel to write over.
  int n_slots = 0;
  for (const StepGroup& g : c.groups) n_slots = std::max(n_slots, g.past + g.n_rows);
  TestKv cache(c.k_type, c.v_type, n_head_kv, head_dim, n_slots + 5, static_cast<int>(c.groups.size()));

  std::vector<float> want(n_valid * q_dim);
  std::vector<double> bound(want.size());
  const bool floats = c.k_type == KvType::F32 || c.v_type == KvType::F32;
  for (size_t g = 0; g < c.groups.size(); ++g) {
    const StepGroup& group = c.groups[g];
    const size_t begin = as_size(step.group_begin[g]), past = as_size(group.past),
                 rows = as_size(group.n_rows);
    std::vector<float> all_k = in.normal((past + rows) * kv_dim, 1.0f), all_v = in.spiky(past * kv_dim);
    all_v.insert(all_v.end(), &v[begin * kv_dim], &v[begin * kv_dim] + rows * kv_dim);
    std::vector<float> q(rows * q_dim);
    for (size_t r = 0; r < rows; ++r) {
      const int position = step.position[begin + r];
      for (size_t h = 0; h < as_size(n_head); ++h) {
        std::copy_n(&q_full[((begin + r) * as_size(n_head) + h) * q_step], dim, &q[r * q_dim + h * dim]);
        prepare_ref(&q[r * q_dim + h * dim], q_norm, inv_freq, position, eps, magnitude);
      }
      for (size_t h = 0; h < as_size(n_head_kv); ++h) {
        float* const to = &all_k[(past + r) * kv_dim + h * dim];
        std::copy_n(&k[(begin + r) * kv_dim + h * dim], dim, to);
        prepare_ref(to, k_norm, inv_freq, position, eps, magnitude);
      }
    }
    TestKv own(c.k_type, c.v_type, n_head_kv, head_dim, static_cast<int>(past + rows), 1);
    const KvView view = own.view(0);
    KvAppendArgs appended;
    appended.k = all_k.data();
    appended.kv = view;
    appended.first_slot = 0;
    appended.n_rows = static_cast<int>(past + rows);
    appended.n_head_kv = n_head_kv;
    appended.head_dim = head_dim;
    const auto append = [&](const std::vector<float>& values) {
      appended.v = values.data();
      attention_kernels(Isa::Portable).kv_append(appended);
    };
    std::vector<float> out(rows * q_dim), size(rows * q_dim);
    AttentionArgs args = {.q = q.data(),
                          .kv = view,
                          .out = out.data(),
                          .positions = &step.position[begin],
                          .n_rows = group.n_rows,
                          .n_past = group.past,
                          .n_head = n_head,
                          .n_head_kv = n_head_kv,
                          .head_dim = head_dim,
                          .scale = scale,
                          .window = c.window,
                          .ancestors = {},
                          .both_ways = c.both_ways};
    if (step.uncommitted(g) && !c.both_ways) args.ancestors = {&step.ancestors[begin], 1};
    // What rounding may do scales with the attention over |v|.
    std::vector<float> positive = all_v;
    for (float& x : positive) x = std::fabs(x);
    append(positive);
    AttentionArgs absolute = args;
    absolute.out = size.data();
    attention_ref(absolute);
    append(all_v);
    attention_ref(args);
    // Pages that no row sees are somebody else's.
    const int first = c.window > 0 ? std::max(0, group.past - c.window + 1) / kKvPage * kKvPage : 0;
    for (int slot = first; slot < group.past; ++slot) {
      const int s = step.sequence(g);
      std::copy_n(&own.bytes[own.k_at(0, slot)], own.k_slot, &cache.bytes[cache.k_at(s, slot)]);
      std::copy_n(&own.bytes[own.v_at(0, slot)], own.v_slot, &cache.bytes[cache.v_at(s, slot)]);
    }

    double longest_k = 0.0;
    std::vector<double> most_k(dim);
    for (size_t i = 0; i < all_k.size(); i += dim) {
      longest_k = std::max(longest_k, length(&all_k[i], dim));
      for (size_t d = 0; d < dim; ++d) most_k[d] = std::max(most_k[d], std::fabs(double{all_k[i + d]}));
    }
    for (size_t r = 0; r < rows; ++r)
      for (size_t h = 0; h < as_size(n_head); ++h) {
        const float* const query = &q[r * q_dim + h * dim];
        double error;  // of a score
        if (floats) {
          error = (static_cast<double>(dim) + 32) * kF32Epsilon * length(query, dim) * longest_k * scale;
        } else {
          // q is rounded to f16, d * q of q8_0 and q4_0 too: random signs, four deviations of the sum.
          double sum = 0.0;
          for (size_t d = 0; d < dim; ++d) sum += query[d] * most_k[d] * query[d] * most_k[d];
          error = 4 * 0x1p-11 * std::sqrt(2 * sum / 3) * scale;
        }
        // Keys and values of the step are rounded to the cache's type from values that differ in the last
        // digit: now and then to the other side.
        const double flip = std::max(last_place(c.k_type), last_place(c.v_type));
        // Below 2^-14 bf16 loses its last places on its way to f16.
        const double tiny = c.v_type == KvType::BF16 && !floats ? 0x1p-25 : 0.0;
        const double unit = floats ? (n_slots + 64) * kF32Epsilon : 0x1p-10;
        for (size_t d = 0; d < dim; ++d) {
          const size_t at = (begin + r) * q_dim + h * dim + d, gate_at = (begin + r) * as_size(n_head) + h;
          double factor = 1.0;
          if (gate_inside)
            factor = 1.0 / (1.0 + std::exp(-double{q_full[gate_at * q_step + dim + d]}));
          else if (c.gate != HeadGate::None)
            factor = std::log1p(
                std::exp(double{gate[c.gate == HeadGate::SoftplusHead ? gate_at : gate_at * dim + d]}));
          want[at] = static_cast<float>(out[r * q_dim + h * dim + d] * factor);
          bound[at] = factor * ((2 * error + unit + flip) * size[r * q_dim + h * dim + d] + tiny) + 1e-30;
        }
      }
  }

  const DeviceArray<std::byte> device_cache(cache.bytes);
  const DeviceArray<int32_t> device_table(cache.table);
  StepOnDevice device(c, step, projected, cache.device(device_cache.data(), device_table.data()));
  for (int way = 0; way < StepOnDevice::n_ways(n_rows); ++way) {
    ASSERT_NO_FATAL_FAILURE(device.run(way));

    std::vector<float> got = device.out.read();
    const std::vector<half> got_half = device.out_half.read();
    got.resize(n_valid * q_dim);
    ASSERT_TRUE(all_close_at(
        got, want, [&](size_t i) { return bound[i]; }, 0x1p-20, 0.9999))
        << n_head << " heads, " << n_head_kv << " kv, dim " << head_dim << ", " << c.groups.size()
        << " groups, past " << c.groups[0].past << ", rows " << c.groups[0].n_rows << ", window " << c.window
        << ", uncommitted " << c.uncommitted << ", k " << kv_type_name(c.k_type) << ", v "
        << kv_type_name(c.v_type);
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(__half2float(got_half[i / q_dim * q_dim + as_size(act_place(static_cast<int>(i % q_dim)))]),
                __half2float(__float2half_rn(got[i])));
    ASSERT_TRUE(device.intact() && device_cache.intact());
    // Nothing but the step's own slots was written.
    std::vector<std::byte> cache_after = device_cache.read();
    for (size_t g = 0; g < c.groups.size(); ++g)
      for (int slot = c.groups[g].past; slot < c.groups[g].past + c.groups[g].n_rows; ++slot) {
        const size_t k_at = cache.k_at(step.sequence(g), slot), v_at = cache.v_at(step.sequence(g), slot);
        std::copy_n(&cache.bytes[k_at], cache.k_slot, &cache_after[k_at]);
        std::copy_n(&cache.bytes[v_at], cache.v_slot, &cache_after[v_at]);
      }
    EXPECT_TRUE(cache_after == cache.bytes);
  }
}

TEST(AttentionCuda, DecodesOneRowForEveryShapeAndType) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 1;
  for (const KvType type : kTypes)
    for (const Shape& shape : {Shape{16, 2, 256}, Shape{12, 2, 128}, Shape{8, 8, 64}, Shape{4, 1, 32}})
      for (const int past : {0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 1000})
        ASSERT_NO_FATAL_FAILURE(run_case({shape, {{past, 1}}, type, type}, seed++));
}

TEST(AttentionCuda, AttendsAnyNumberOfRows) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 1000;
  for (const KvType type : kTypes)
    for (const int dim : {32, 64, 128, 256})
      for (const int n_rows : {2, 3, 7, 8, 9, 33, 63, 64, 65, 130})
        for (const int past : {0, 1, 63, 1000}) {
          if (past == 1000 && dim != 256) continue;
          ASSERT_NO_FATAL_FAILURE(run_case({{8, 2, dim}, {{past, n_rows}}, type, type}, seed++));
        }
}

TEST(AttentionCuda, SharesHeadsInEveryProportion) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 2000;
  for (const int per_kv : {1, 2, 3, 5, 6, 8, 12, 16, 20})
    for (const int n_rows : {1, 2, 5, 40})
      for (const KvType type : kTypes)
        ASSERT_NO_FATAL_FAILURE(run_case({{2 * per_kv, 2, 64}, {{70, n_rows}}, type, type}, seed++));
}

TEST(AttentionCuda, KeepsSequencesApart) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 3000;
  for (const KvType type : kTypes)
    for (const int dim : {64, 256})
      for (const bool uncommitted : {false, true}) {
        Case c{{16, 2, dim}, {{5, 1}, {300, 1}}, type, type, 0, uncommitted};
        ASSERT_NO_FATAL_FAILURE(run_case(c, seed++));
        c.groups = {{0, 1}, {70, 1}, {64, 1}, {200, 1}, {1, 1}, {0, 1}};
        c.n_padding = 2;
        ASSERT_NO_FATAL_FAILURE(run_case(c, seed++));
        c.groups = {{40, 3}, {0, 20}, {129, 1}, {63, 33}};
        c.n_padding = 0;
        ASSERT_NO_FATAL_FAILURE(run_case(c, seed++));
      }
}

TEST(AttentionCuda, LeavesPaddingAlone) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 4000;
  for (const KvType type : kTypes)
    for (const int n_rows : {1, 3, 5, 9, 20})
      for (const int n_padding : {1, 3, 12})
        ASSERT_NO_FATAL_FAILURE(
            run_case({{16, 2, 128}, {{100, n_rows}}, type, type, 0, false, {}, n_padding}, seed++));
}

TEST(AttentionCuda, LooksBackAsFarAsTheWindow) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 5000;
  for (const KvType type : kTypes)
    for (const int window : {1, 13, 64, 100})
      for (const bool uncommitted : {false, true})
        for (const int n_rows : {1, 2, 9, 64})
          for (const int past : {0, 50, 300})
            ASSERT_NO_FATAL_FAILURE(
                run_case({{12, 2, 128}, {{past, n_rows}}, type, type, window, uncommitted}, seed++));
}

TEST(AttentionCuda, FollowsTheBranchesOfATree) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 6000;
  for (const KvType type : kTypes)
    for (const int dim : {32, 256})
      for (const int n_rows : {1, 2, 7, 16, 33, 64})
        for (const int past : {0, 63, 1000})
          ASSERT_NO_FATAL_FAILURE(run_case({{16, 2, dim}, {{past, n_rows}}, type, type, 0, true}, seed++));
}

// Several first rows: each sees itself and what is committed.
TEST(AttentionCuda, KeepsSiblingsApart) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 6300;
  for (const KvType type : kTypes)
    for (const int dim : {128, 256})
      for (const int n_rows : {2, 3, 17})
        for (const int window : {0, 70})
          for (const int past : {0, 15, 127, 1000})
            ASSERT_NO_FATAL_FAILURE(
                run_case({{16, 2, dim}, {{past, n_rows, false, true}}, type, type, window, true}, seed++));
}

// Blocks of a drafter.
TEST(AttentionCuda, SeesBothWaysInABlock) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 6500;
  for (const KvType type : kTypes)
    for (const int dim : {32, 64, 128, 256})
      for (const int n_rows : {1, 2, 6, 8, 16, 33, 64})
        for (const int window : {0, 70})
          for (const int past : {0, 5, 63, 300}) {
            Case c{{8, 2, dim}, {{past, n_rows}}, type, type, window, true, HeadGate::None};
            c.both_ways = true;
            ASSERT_NO_FATAL_FAILURE(run_case(c, seed++));
          }
  Case several{{32, 8, 128}, {{40, 16}, {0, 16}, {129, 16}}, KvType::F16, KvType::F16, 0, true};
  several.both_ways = true;
  several.n_padding = 16;
  ASSERT_NO_FATAL_FAILURE(run_case(several, seed++));
}

TEST(AttentionCuda, AttendsWithSmallHeads) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 6800;
  for (const KvType type : {KvType::F32, KvType::F16, KvType::BF16})
    for (const int past : {0, 1, 31, 32, 33, 200})
      for (const int n_rows : {1, 6, 40})
        for (const int window : {0, 50})
          for (const bool uncommitted : {false, true})
            for (const bool both_ways : {false, true}) {
              Case c{{6, 2, 16}, {{past, n_rows}, {5, 2}}, type, type, window, uncommitted};
              c.n_padding = 3;
              c.both_ways = both_ways;
              ASSERT_NO_FATAL_FAILURE(run_case(c, seed++));
            }
}

// A value of bf16 that f16 cannot hold: with one slot the result is that value, on every path.
TEST(AttentionCuda, KeepsLargeBf16Finite) {
  SKIP_WITHOUT_GPU();
  for (const int dim : {32, 128})
    for (const float value : {1e6f, -1e6f, 65504.0f, 60160.0f, 0x1p-24f}) {
      Case c{{4, 1, dim}, {{0, 1}}, KvType::BF16, KvType::BF16};
      c.gate = HeadGate::None;
      Inputs in(1);
      const DeviceStep step(c.groups, 0, false, 1);
      Projected projected(c, 1, in);
      std::fill(projected.v.begin(), projected.v.end(), value);
      const TestKv cache(c.k_type, c.v_type, 1, dim, 1, 1);
      const DeviceArray<std::byte> device_cache(cache.bytes);
      const DeviceArray<int32_t> table(cache.table);
      StepOnDevice device(c, step, projected, cache.device(device_cache.data(), table.data()));
      for (int way = 0; way < 2; ++way) {
        ASSERT_NO_FATAL_FAILURE(device.run(way));
        for (const float got : device.out.read())
          ASSERT_EQ(got, std::clamp(value, -65504.0f, 65504.0f)) << "dim " << dim << ", way " << way;
      }
    }
}

// Features of a drafter: keys and values of several layers.
TEST(AttentionCuda, AppendsTheRowsOfAllLayers) {
  SKIP_WITHOUT_GPU();
  const int n_head_kv = 3, n_layers = 2, n_slots = 60;
  uint64_t seed = 6900;
  for (const KvType type : kTypes)
    for (const int head_dim : {16, 32, 128}) {
      if (kv_in_blocks(type) && head_dim % 32 != 0) continue;
      Inputs in(seed);
      const DeviceStep step({{7, 5}, {0, 20}}, 3, false, seed++);
      const size_t dim = as_size(head_dim), kv_dim = as_size(n_head_kv) * dim, rows = as_size(step.n_rows);
      const std::vector<float> projected = in.spiky(as_size(n_layers) * 2 * rows * kv_dim);
      std::vector<std::vector<float>> norms;
      std::vector<DeviceArray<float>> device_norms;
      for (int l = 0; l < n_layers; ++l) {
        norms.push_back(in.uniform(dim, 0.5f, 1.5f));
        device_norms.emplace_back(norms.back());
      }
      std::vector<float> inv_freq;
      for (size_t i = 0; i < dim / 2; ++i) inv_freq.push_back(std::pow(10000.0f, -2.0f * i / dim));
      TestKv want(type, type, n_head_kv, head_dim, n_slots, 2, n_layers);
      const size_t n_bytes = want.bytes.size();
      for (size_t g = 0; g < step.groups.size(); ++g)
        for (size_t l = 0; l < as_size(n_layers); ++l)
          for (size_t r = 0; r < as_size(step.groups[g].n_rows); ++r) {
            const size_t row = as_size(step.group_begin[g]) + r;
            std::vector<float> k(&projected[(2 * l * rows + row) * kv_dim],
                                 &projected[(2 * l * rows + row) * kv_dim] + kv_dim);
            for (size_t h = 0; h < as_size(n_head_kv); ++h)
              prepare_ref(&k[h * dim], norms[l], inv_freq, step.position[row], 1e-6f, 1.25f);
            KvAppendArgs append;
            append.k = k.data();
            append.v = &projected[((2 * l + 1) * rows + row) * kv_dim];
            append.kv = want.view(step.sequence(g), l);
            append.first_slot = step.groups[g].past + static_cast<int>(r);
            append.n_rows = 1;
            append.n_head_kv = n_head_kv;
            append.head_dim = head_dim;
            attention_kernels(Isa::Portable).kv_append(append);
          }
      const DeviceArray<float> device_projected(projected), device_freq(inv_freq);
      const DeviceArray<std::byte> cache(n_bytes);
      const DeviceArray<int32_t> table(want.table);
      DeviceKvAppendArgs args{.rows = step.rows(),
                              .kv = want.device(cache.data(), table.data()),
                              .layer_bytes = static_cast<int64_t>(want.layer_bytes()),
                              .n_layers = n_layers,
                              .n_rows = step.n_rows,
                              .n_head_kv = n_head_kv,
                              .head_dim = head_dim,
                              .eps = 1e-6f,
                              .k = device_projected.data(),
                              .v = device_projected.data() + rows * kv_dim,
                              .layer_stride = static_cast<int64_t>(2 * rows * kv_dim),
                              .k_norm = {},
                              .inv_freq = device_freq.data(),
                              .n_rot = head_dim,
                              .rope_magnitude = 1.25f};
      for (size_t l = 0; l < as_size(n_layers); ++l) args.k_norm[l] = device_norms[l].data();
      kv_append_cuda(args, {});
      ASSERT_EQ(cudaGetLastError(), cudaSuccess);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      ASSERT_TRUE(cache.intact());
      const std::vector<std::byte> got = cache.read();
      if (type != KvType::F32) {
        // Rounded from values that differ in the last digit: a few to the other side.
        size_t n_different = 0;
        size_t n_written = 0;
        for (size_t i = 0; i < n_bytes; ++i) {
          n_different += got[i] != want.bytes[i] ? 1 : 0;
          n_written += want.bytes[i] != std::byte{0xff} ? 1 : 0;
        }
        EXPECT_LE(n_different, n_written / 21) << kv_type_name(type) << " " << head_dim;
        continue;
      }
      for (size_t i = 0; i < n_bytes; i += sizeof(float)) {
        float x, y;
        std::memcpy(&x, &got[i], sizeof(x));
        std::memcpy(&y, &want.bytes[i], sizeof(y));
        ASSERT_EQ(std::isnan(x), std::isnan(y)) << i;
        if (!std::isnan(y)) {
          ASSERT_NEAR(x, y, 1e-4) << i;
        }
      }
    }
}

// What commits do: rows of paths down to the end of their sequences, in every layer.
TEST(AttentionCuda, MovesTheRowsOfPaths) {
  SKIP_WITHOUT_GPU();
  const int head_dim = 32, n_head_kv = 3, n_layers = 3, n_sequences = 4, n_slots = 300;
  for (const KvType type : kTypes) {
    TestKv cache(type, type, n_head_kv, head_dim, n_slots, n_sequences, n_layers);
    Inputs in(9);
    for (std::byte& b : cache.bytes) b = static_cast<std::byte>(in.below(256));
    const std::vector<std::vector<int32_t>> chosen = {{0}, {0, 1, 2}, {0, 2, 3, 9, 11, 12, 13, 14, 15, 16}};
    std::vector<DevicePath> paths;
    std::vector<std::byte> want = cache.bytes;
    for (size_t i = 0; i < chosen.size(); ++i) {
      const int s = static_cast<int>(3 - i), past = i == 2 ? 249 : static_cast<int>(i) * 7;
      DevicePath& path = paths.emplace_back(DevicePath{s, past, static_cast<int32_t>(chosen[i].size()), {}});
      std::copy(chosen[i].begin(), chosen[i].end(), path.rows);
      for (size_t l = 0; l < as_size(n_layers); ++l)
        for (size_t d = 0; d < chosen[i].size(); ++d) {
          const int from = past + chosen[i][d], to = past + static_cast<int>(d);
          std::copy_n(&cache.bytes[cache.k_at(s, from, l)], cache.k_slot, &want[cache.k_at(s, to, l)]);
          std::copy_n(&cache.bytes[cache.v_at(s, from, l)], cache.v_slot, &want[cache.v_at(s, to, l)]);
        }
    }
    const DeviceArray<std::byte> device_cache(cache.bytes);
    const DeviceArray<int32_t> table(cache.table);
    const DeviceArray<DevicePath> device_paths(paths);
    kv_move_cuda({.kv = cache.device(device_cache.data(), table.data()),
                  .layer_bytes = static_cast<int64_t>(cache.layer_bytes()),
                  .n_layers = n_layers,
                  .paths = {device_paths.data(), static_cast<int>(paths.size())},
                  .n_head_kv = n_head_kv,
                  .head_dim = head_dim},
                 {});
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_TRUE(device_cache.read() == want) << kv_type_name(type);
    EXPECT_TRUE(device_cache.intact());
  }
}

TEST(AttentionCuda, TakesEveryGateAndMixedTypes) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 7000;
  for (const HeadGate gate :
       {HeadGate::None, HeadGate::SigmoidElement, HeadGate::SoftplusHead, HeadGate::SoftplusElement})
    for (const KvType k_type : kTypes)
      for (const KvType v_type : kTypes)
        for (const int n_rows : {1, 2, 70})
          ASSERT_NO_FATAL_FAILURE(
              run_case({{8, 2, 64}, {{40, n_rows}}, k_type, v_type, 0, false, gate}, seed++));
}

// A small card: no row's slots are cut into parts.
TEST(AttentionCuda, AttendsInOnePart) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 9000;
  for (const HeadGate gate :
       {HeadGate::None, HeadGate::SigmoidElement, HeadGate::SoftplusHead, HeadGate::SoftplusElement})
    for (const KvType type : kTypes)
      for (const int n_rows : {1, 6, 33, 65})
        for (const bool uncommitted : {false, true}) {
          if (uncommitted && n_rows > 64) continue;
          Case c{{16, 2, 128}, {{70, n_rows}, {0, 3}}, type, type, 0, uncommitted,
                 gate,         n_rows == 6 ? 3 : 0,    1};
          ASSERT_NO_FATAL_FAILURE(run_case(c, seed++));
        }
}

TEST(AttentionCuda, AttendsChainsBesideTrees) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 9500;
  for (const KvType type : kTypes)
    for (const int window : {0, 40}) {
      ASSERT_NO_FATAL_FAILURE(
          run_case({{16, 2, 128}, {{70, 1, true}, {33, 5}, {0, 2, true}}, type, type, window, true}, seed++));
      ASSERT_NO_FATAL_FAILURE(
          run_case({{16, 2, 128}, {{70, 9}, {50, 100, true}, {0, 3}, {3, 1, true}}, type, type, window, true},
                   seed++));
    }
}

TEST(AttentionCuda, RunsLongContexts) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 8000;
  for (const int n_rows : {1, 2, 4, 8, 16, 32})
    ASSERT_NO_FATAL_FAILURE(run_case({{16, 2, 256}, {{9000, n_rows}}}, seed++));
}

}  // namespace
}  // namespace thermo
