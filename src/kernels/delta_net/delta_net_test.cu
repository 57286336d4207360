// The GPU's DeltaNet, from raw projections to the gated norm, against the references: every way to run it
// and state size, several sequences, uncommitted trees and their commit, padding. What a step must not read
// is NaN.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "device/device_info.h"
#include "device/testing/skip_without_gpu.h"
#include "kernels/delta_net/delta_net.h"
#include "kernels/delta_net/delta_net_cuda.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/device_step.h"

namespace thermo {
namespace {

using namespace thermo::testing;

struct Shape {
  int n_head_k, n_head_v, dim;
};
struct Case {
  Shape shape;
  std::vector<StepGroup> groups;
  bool uncommitted = false;
  float decay = 1.0f;
  int n_padding = 0;
  int taps = 4;
  int max_stages = 2;
};

size_t as_size(int64_t n) {
  return static_cast<size_t>(n);
}
double sigmoid(double x) {
  return 1.0 / (1.0 + std::exp(-x));
}

void run_case(const Case& c, uint64_t seed) {
  const int n_head_k = c.shape.n_head_k, n_head_v = c.shape.n_head_v, dim = c.shape.dim, taps = c.taps;
  const size_t d = as_size(dim), k_size = as_size(n_head_k) * d, v_size = as_size(n_head_v) * d,
               channels = 2 * k_size + v_size, heads = as_size(n_head_v), n_groups = c.groups.size();
  Inputs in(seed);
  const DeviceStep step(c.groups, c.n_padding, c.uncommitted, seed);
  const size_t n_rows = as_size(step.n_rows), n_valid = as_size(step.n_valid());
  const float eps = 1e-6f;

  std::vector<float> u = in.spiky(n_rows * channels), z = in.normal(n_rows * v_size),
                     alpha = in.normal(n_rows * heads), beta = in.normal(n_rows * heads, 2.0f);
  const std::vector<float> conv = in.normal(channels * as_size(taps), 0.5f), dt_bias = in.normal(heads),
                           norm = in.uniform(d, 0.5f, 1.5f);
  std::vector<float> a = in.uniform(heads, 0.0f, c.decay);
  for (float& x : a) x = -x;
  std::fill(u.begin() + static_cast<int64_t>(n_valid * channels), u.end(), NAN);

  // Of every sequence: the state, then the columns of the convolution.
  const size_t state_size = heads * d * d, sequence_size = state_size + as_size(taps - 1) * channels;
  const std::vector<float> memory = in.spiky(n_groups * sequence_size, 0.3f);
  std::vector<float> memory_after = memory;
  const int tape_rows = 64;
  const size_t tape_conv = as_size(tape_rows) * channels, tape_k = as_size(tape_rows) * k_size,
               tape_g = as_size(tape_rows) * heads, tape_delta = as_size(tape_rows) * v_size,
               tape_size = tape_conv + tape_k + tape_g + tape_delta;

  std::vector<float> want(n_valid * v_size), mixed(n_valid * channels), g(n_valid * heads),
      strength(n_valid * heads), delta(n_valid * v_size);
  std::vector<double> bound(want.size()), rule_bound(n_groups);
  for (size_t i = 0; i < n_valid * heads; ++i) {
    const double x = double{alpha[i]} + dt_bias[i % heads];
    g[i] = static_cast<float>(a[i % heads] * (x > 20.0 ? x : std::log1p(std::exp(x))));
    strength[i] = static_cast<float>(sigmoid(beta[i]));
  }
  for (size_t group = 0; group < n_groups; ++group) {
    const size_t begin = as_size(step.group_begin[group]), rows = as_size(c.groups[group].n_rows);
    float* const state = &memory_after[as_size(step.sequence(group)) * sequence_size];
    ConvArgs conv_args;
    conv_args.u = &u[begin * channels];
    conv_args.weight = conv.data();
    conv_args.state = state + state_size;
    conv_args.parents = step.uncommitted(group) ? &step.parent[begin] : nullptr;
    conv_args.out = &mixed[begin * channels];
    conv_args.n_rows = static_cast<int>(rows);
    conv_args.taps = taps;
    conv_args.stride = static_cast<int64_t>(channels);
    conv_ref(conv_args, static_cast<int>(channels));
    double most_state = 0.0, most_v = 0.0;
    for (size_t r = begin; r < begin + rows; ++r) {
      float* const row = &mixed[r * channels];
      l2_normalize_ref(row, n_head_k, dim, 1.0f / std::sqrt(static_cast<float>(dim)));
      l2_normalize_ref(row + k_size, n_head_k, dim, 1.0f);
      for (size_t i = 2 * k_size; i < channels; ++i) most_v = std::max(most_v, std::fabs(double{row[i]}));
    }
    for (size_t j = 0; j < heads * d; ++j) {
      double sum = 0.0;
      for (size_t i = 0; i < d; ++i) sum += double{state[j * d + i]} * state[j * d + i];
      most_state = std::max(most_state, std::sqrt(sum));
    }
    DeltaNetArgs args;
    args.q = &mixed[begin * channels];
    args.k = args.q + k_size;
    args.v = args.q + 2 * k_size;
    args.g = &g[begin * heads];
    args.beta = &strength[begin * heads];
    args.q_stride = args.k_stride = args.v_stride = static_cast<int64_t>(channels);
    args.state = state;
    args.out = &want[begin * v_size];
    args.delta = &delta[begin * v_size];
    args.n_rows = static_cast<int>(rows);
    args.n_head_k = n_head_k;
    args.n_head_v = n_head_v;
    args.dim = dim;
    args.ancestors = {};
    if (step.uncommitted(group)) args.ancestors = {&step.ancestors[begin], 1};
    args.uncommitted = step.uncommitted(group);
    delta_net_ref(args);
    // As for the CPU kernels: a step never amplifies an error, so each row of a chunk adds the rounding of a
    // sum of dim products (2^-22 of it for split products), relative to the longest row the state can have.
    rule_bound[group] = (std::min(static_cast<double>(rows), 64.0) + 8) *
                        std::max(std::sqrt(static_cast<double>(dim)) * kF32Epsilon, 0x1p-21) *
                        (most_state + 2 * most_v);
    for (size_t i = begin * heads; i < (begin + rows) * heads; ++i) {
      double square = 0.0;
      for (size_t e = 0; e < d; ++e) square += double{want[i * d + e]} * want[i * d + e];
      const double rms = std::sqrt(square / static_cast<double>(dim) + double{eps});
      for (size_t e = 0; e < d; ++e) {
        const double gate = norm[e] * z[i * d + e] * sigmoid(z[i * d + e]);
        bound[i * d + e] =
            std::fabs(gate) * rule_bound[group] / rms * (1.0 + std::fabs(want[i * d + e]) / rms) + 1e-7;
      }
    }
    gated_norm_ref(&want[begin * v_size], &z[begin * v_size], norm.data(), static_cast<int>(rows) * n_head_v,
                   dim, eps);
  }

  const DeviceArray<float> device_u(u), device_z(z), device_alpha(alpha), device_beta(beta),
      device_conv(conv), device_a(a), device_dt(dt_bias), device_norm(norm), device_memory(memory);
  const DeviceArray<float> tape(n_groups * tape_size), mixed_scratch(n_rows * channels),
      gates(2 * n_rows * heads), rule_out(n_rows * v_size), scores(n_rows * heads * kDeltaChunkRows),
      out(n_rows * v_size);
  DeviceDeltaNetArgs args;
  args.rows = step.rows();
  args.n_rows = step.n_rows;
  args.max_groups = static_cast<int>(n_groups);
  bool any_committed = false;
  for (size_t group = 0; group < n_groups; ++group) any_committed |= !step.uncommitted(group);
  args.max_group_rows = any_committed ? step.n_rows : 0;
  args.max_uncommitted_rows = std::min(step.n_rows, tape_rows);
  args.n_head_k = n_head_k;
  args.n_head_v = n_head_v;
  args.dim = dim;
  args.taps = taps;
  args.eps = eps;
  args.u = device_u.data();
  args.z = device_z.data();
  args.alpha = device_alpha.data();
  args.beta = device_beta.data();
  args.conv_weight = device_conv.data();
  args.a = device_a.data();
  args.dt_bias = device_dt.data();
  args.norm = device_norm.data();
  args.state = device_memory.data();
  args.conv_state = device_memory.data() + state_size;
  args.sequence_stride = static_cast<int64_t>(sequence_size);
  args.tape = {tape.data(), tape.data() + tape_conv, tape.data() + tape_conv + tape_k,
               tape.data() + tape_conv + tape_k + tape_g, static_cast<int64_t>(tape_size)};
  args.mixed = mixed_scratch.data();
  args.gates = gates.data();
  args.rule_out = rule_out.data();
  args.scores = scores.data();
  args.max_stages = c.max_stages;
  args.out = {};
  args.out.f32 = out.data();
  args.out.f32_stride = static_cast<int64_t>(v_size);
  delta_net_cuda(args, {});
  ASSERT_EQ(cudaGetLastError(), cudaSuccess);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);

  std::vector<float> got = out.read();
  got.resize(n_valid * v_size);
  const auto about = [&] {
    return ::testing::Message() << "dim " << dim << ", heads " << n_head_k << " and " << n_head_v << ", rows "
                                << c.groups[0].n_rows << ", groups " << n_groups << ", uncommitted "
                                << c.uncommitted << ", decay " << c.decay;
  };
  ASSERT_TRUE(all_close_at(
      got, want, [&](size_t i) { return bound[i]; }, 1e-5, 0.99999))
      << about();
  ASSERT_TRUE(out.intact() && tape.intact() && mixed_scratch.intact() && gates.intact() &&
              rule_out.intact() && scores.intact() && device_memory.intact());

  const auto compare_states = [&](const std::vector<float>& after, const std::vector<float>& expected) {
    for (size_t group = 0; group < n_groups; ++group) {
      const size_t from = as_size(step.sequence(group)) * sequence_size;
      ASSERT_TRUE(all_close(std::span(&after[from], state_size), std::span(&expected[from], state_size),
                            {.absolute = rule_bound[group], .relative = 0.0}))
          << "state, " << about();
    }
  };
  // The columns are shifted by another kernel, and uncommitted groups leave everything as it is.
  const std::vector<float> after_step = device_memory.read();
  for (size_t group = 0; group < n_groups; ++group) {
    const size_t first = as_size(step.sequence(group)) * sequence_size,
                 from = first + (step.uncommitted(group) ? 0 : state_size);
    ASSERT_EQ(std::memcmp(&after_step[from], &memory[from], (first + sequence_size - from) * sizeof(float)),
              0);
  }

  // Commit a path of every uncommitted group, all of them at once.
  std::vector<DevicePath> paths;
  for (size_t group = 0; group < n_groups; ++group) {
    if (!step.uncommitted(group)) continue;
    const size_t begin = as_size(step.group_begin[group]), rows = as_size(c.groups[group].n_rows);
    const std::vector<int32_t> parents(&step.parent[begin], &step.parent[begin] + rows);
    std::vector<int32_t> path = path_to(parents, static_cast<int32_t>(rows) - 1);
    float* const state = &memory_after[as_size(step.sequence(group)) * sequence_size];
    DeltaNetCommitArgs commit;
    commit.k = &mixed[begin * channels] + k_size;
    commit.g = &g[begin * heads];
    commit.delta = &delta[begin * v_size];
    commit.k_stride = static_cast<int64_t>(channels);
    commit.state = state;
    commit.path = path;
    commit.n_head_k = n_head_k;
    commit.n_head_v = n_head_v;
    commit.dim = dim;
    delta_net_commit_ref(commit);
    const int n = static_cast<int>(path.size());
    const std::vector<float> columns(state + state_size, state + sequence_size);
    for (int k = 0; k < taps - 1; ++k) {
      const int from = n - (taps - 1) + k;
      std::copy_n(from >= 0 ? &u[(begin + as_size(path[as_size(from)])) * channels]
                            : &columns[as_size(k + n) * channels],
                  channels, state + state_size + as_size(k) * channels);
    }

    DevicePath& to = paths.emplace_back(DevicePath{step.sequence(group), c.groups[group].past, n, {}});
    std::copy(path.begin(), path.end(), to.rows);
  }
  if (!paths.empty()) {
    const DeviceArray<DevicePath> device_paths(paths);
    DeviceDeltaCommitArgs device;
    device.paths = {device_paths.data(), static_cast<int>(paths.size())};
    device.n_layers = 1;
    device.tape = args.tape;
    device.tape_layer_stride = 0;
    device.state = args.state;
    device.conv_state = args.conv_state;
    device.sequence_stride = args.sequence_stride;
    device.layer_stride = 0;
    device.n_head_k = n_head_k;
    device.n_head_v = n_head_v;
    device.dim = dim;
    device.taps = taps;
    device.n_channels = static_cast<int>(channels);
    delta_net_commit_cuda(device, {});
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  const std::vector<float> after = device_memory.read();
  ASSERT_NO_FATAL_FAILURE(compare_states(after, memory_after));
  for (size_t s = 0; s < n_groups; ++s)
    ASSERT_EQ(
        std::memcmp(&after[s * sequence_size + state_size], &memory_after[s * sequence_size + state_size],
                    (sequence_size - state_size) * sizeof(float)),
        0);
  ASSERT_TRUE(device_memory.intact());
}

constexpr Shape kShapes[] = {{2, 4, 16}, {2, 2, 32}, {1, 3, 64}, {2, 4, 128}};

TEST(DeltaNetCuda, RunsChainsOfAnyLength) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 1;
  for (const Shape& shape : kShapes)
    for (const int n_rows : {1, 2, 7, 31, 32, 33, 63, 64, 65, 127, 128, 130, 200})
      ASSERT_NO_FATAL_FAILURE(run_case({shape, {{5, n_rows}}}, seed++));
}

TEST(DeltaNetCuda, KeepsDigitsUnderAnyDecay) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 1000;
  for (const float decay : {0.0f, 0.02f, 3.0f, 30.0f})
    for (const int n_rows : {1, 9, 64, 130})
      ASSERT_NO_FATAL_FAILURE(run_case({{2, 4, 128}, {{5, n_rows}}, false, decay}, seed++));
}

TEST(DeltaNetCuda, KeepsSequencesApart) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 2000;
  for (const Shape& shape : kShapes) {
    ASSERT_NO_FATAL_FAILURE(run_case({shape, {{1, 1}, {1, 2}, {3, 1}}, false, 1.0f, 4}, seed++));
    ASSERT_NO_FATAL_FAILURE(run_case({shape, {{1, 70}, {0, 1}, {3, 64}, {9, 5}}}, seed++));
    ASSERT_NO_FATAL_FAILURE(run_case({shape, {{1, 7}, {0, 20}}, true}, seed++));
    ASSERT_NO_FATAL_FAILURE(run_case({shape, {{1, 40}, {0, 3}, {7, 21}}, true, 1.0f, 3}, seed++));
  }
}

TEST(DeltaNetCuda, RunsCommittedAndUncommittedGroupsTogether) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 6000;
  for (const Shape& shape : kShapes) {
    ASSERT_NO_FATAL_FAILURE(run_case({shape, {{1, 3}, {0, 1, true}}, true}, seed++));
    ASSERT_NO_FATAL_FAILURE(run_case({shape, {{5, 1, true}, {1, 7}, {0, 4, true}, {2, 20}}, true}, seed++));
    for (const int max_stages : {2, 1, 0})
      ASSERT_NO_FATAL_FAILURE(run_case(
          {shape, {{1, 40}, {0, 130, true}, {7, 21}, {2, 1, true}}, true, 1.0f, 0, 4, max_stages}, seed++));
  }
}

TEST(DeltaNetCuda, LeavesTreesUncommittedAndCommitsAPath) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 3000;
  for (const Shape& shape : kShapes)
    for (const int n_rows : {1, 2, 4, 5, 7, 8, 9, 16, 17, 32, 33, 63, 64})
      ASSERT_NO_FATAL_FAILURE(run_case({shape, {{5, n_rows}}, true}, seed++));
  for (const float decay : {0.0f, 30.0f})
    ASSERT_NO_FATAL_FAILURE(run_case({{2, 4, 128}, {{5, 64}}, true, decay}, seed++));
}

TEST(DeltaNetCuda, RunsAsOnCardsWithLessMemory) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 5000;
  for (const Shape& shape : kShapes)
    for (const int max_stages : {1, 0})
      for (const int n_rows : {33, 64, 97})
        ASSERT_NO_FATAL_FAILURE(
            run_case({shape, {{5, n_rows}, {2, 3}}, false, 1.0f, 0, 4, max_stages}, seed++));
}

TEST(DeltaNetCuda, TakesAnyNumberOfTaps) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 4000;
  for (const int taps : {2, 3, 5, 8})
    for (const int n_rows : {1, 3, 40})
      ASSERT_NO_FATAL_FAILURE(run_case({{1, 2, 64}, {{5, n_rows}}, false, 1.0f, 0, taps}, seed++));
}

}  // namespace
}  // namespace thermo
