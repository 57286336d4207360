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

constexpr int kTapeRows = 64;
constexpr float kEps = 1e-6f;

// Floats of everything.
struct Sizes {
  size_t d, k, v, channels, heads;
  size_t state, sequence;  // of a sequence: the state, then the columns of the convolution
  size_t tape_conv, tape_k, tape_decay, tape;

  explicit Sizes(const Case& c)
      : d(as_size(c.shape.dim)),
        k(as_size(c.shape.n_head_k) * d),
        v(as_size(c.shape.n_head_v) * d),
        channels(2 * k + v),
        heads(as_size(c.shape.n_head_v)),
        state(heads * d * d),
        sequence(state + as_size(c.taps - 1) * channels),
        tape_conv(as_size(kTapeRows) * channels),
        tape_k(as_size(kTapeRows) * k),
        tape_decay(as_size(kTapeRows) * heads),
        tape(tape_conv + tape_k + tape_decay + as_size(kTapeRows) * v) {}
};

struct LayerWeights {
  std::vector<float> conv, a, dt_bias, norm;

  LayerWeights(const Case& c, Inputs& in) {
    const Sizes size(c);
    conv = in.normal(size.channels * as_size(c.taps), 0.5f);
    dt_bias = in.normal(size.heads);
    norm = in.uniform(size.d, 0.5f, 1.5f);
    a = in.uniform(size.heads, 0.0f, c.decay);
    for (float& x : a) x = -x;
  }
};

// What the projections give.
struct Projected {
  std::vector<float> u, z, alpha, beta;

  Projected() = default;
  Projected(const Case& c, size_t n_rows, Inputs& in) {
    const Sizes size(c);
    u = in.spiky(n_rows * size.channels);
    z = in.normal(n_rows * size.v);
    alpha = in.normal(n_rows * size.heads);
    beta = in.normal(n_rows * size.heads, 2.0f);
  }
  Projected row(const Case& c, size_t r) const {
    const Sizes size(c);
    const auto cut = [&](const std::vector<float>& x, size_t n) {
      return std::vector<float>(&x[r * n], &x[r * n] + n);
    };
    Projected one;
    one.u = cut(u, size.channels);
    one.z = cut(z, size.v);
    one.alpha = cut(alpha, size.heads);
    one.beta = cut(beta, size.heads);
    return one;
  }
};

// A step in device memory, and the commit after it.
struct StepOnDevice {
  const Case& c;
  const Sizes size;
  DeviceArray<float> u, z, alpha, beta, conv, a, dt, norm, memory, tape, mixed, gates, rule_out, scores, out;
  DeviceDeltaNetArgs args;

  StepOnDevice(const Case& of, const DeviceStep& step, const LayerWeights& weights, const Projected& in,
               const std::vector<float>& memory_before)
      : c(of),
        size(of),
        u(in.u),
        z(in.z),
        alpha(in.alpha),
        beta(in.beta),
        conv(weights.conv),
        a(weights.a),
        dt(weights.dt_bias),
        norm(weights.norm),
        memory(memory_before),
        tape(step.groups.size() * size.tape),
        mixed(as_size(step.n_rows) * size.channels),
        gates(2 * as_size(step.n_rows) * size.heads),
        rule_out(as_size(step.n_rows) * size.v),
        scores(as_size(step.n_rows) * size.heads * kDeltaChunkRows),
        out(as_size(step.n_rows) * size.v) {
    args.rows = step.rows();
    args.n_rows = step.n_rows;
    args.max_groups = static_cast<int>(step.groups.size());
    args.max_group_rows = 0;
    for (size_t group = 0; group < step.groups.size(); ++group)
      if (!step.uncommitted(group))
        args.max_group_rows = std::max(args.max_group_rows, step.groups[group].n_rows);
    args.max_uncommitted_rows = std::min({step.n_rows, kTapeRows, max_uncommitted_delta_rows(of.shape.dim)});
    args.n_head_k = c.shape.n_head_k;
    args.n_head_v = c.shape.n_head_v;
    args.dim = c.shape.dim;
    args.taps = c.taps;
    args.eps = kEps;
    args.u = u.data();
    args.z = z.data();
    args.alpha = alpha.data();
    args.beta = beta.data();
    args.conv_weight = conv.data();
    args.a = a.data();
    args.dt_bias = dt.data();
    args.norm = norm.data();
    args.state = memory.data();
    args.conv_state = memory.data() + size.state;
    args.sequence_stride = static_cast<int64_t>(size.sequence);
    float* const at = tape.data();
    args.tape = {at, at + size.tape_conv, at + size.tape_conv + size.tape_k,
                 at + size.tape_conv + size.tape_k + size.tape_decay, static_cast<int64_t>(size.tape)};
    args.mixed = mixed.data();
    args.gates = gates.data();
    args.rule_out = rule_out.data();
    args.scores = scores.data();
    args.max_stages = c.max_stages;
    args.out = {};
    args.out.f32 = out.data();
    args.out.f32_stride = static_cast<int64_t>(size.v);
  }
  // Other rows and another state.
  void take(const Projected& in, const std::vector<float>& memory_before) {
    u.write(in.u);
    z.write(in.z);
    alpha.write(in.alpha);
    beta.write(in.beta);
    memory.write(memory_before);
  }
  void run() {
    delta_net_cuda(args, {});
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  bool intact() const {
    return out.intact() && tape.intact() && mixed.intact() && gates.intact() && rule_out.intact() &&
           scores.intact() && memory.intact();
  }
  void commit(const std::vector<DevicePath>& paths) {
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
    device.n_head_k = args.n_head_k;
    device.n_head_v = args.n_head_v;
    device.dim = args.dim;
    device.taps = args.taps;
    device.n_channels = args.n_channels();
    delta_net_commit_cuda(device, {});
    ASSERT_EQ(cudaGetLastError(), cudaSuccess);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
};

// Cards with less shared memory take fewer uncommitted rows: their models are not asked for more.
bool has_room(const Case& c) {
  const int most = max_uncommitted_delta_rows(c.shape.dim);
  EXPECT_GE(most, 24);  // compute capability 7.5 and heads of 128
  return !c.uncommitted || std::all_of(c.groups.begin(), c.groups.end(), [&](const StepGroup& group) {
    return group.committed || group.n_rows <= most;
  });
}

void run_case(const Case& c, uint64_t seed) {
  if (!has_room(c)) return;
  const int n_head_k = c.shape.n_head_k, n_head_v = c.shape.n_head_v, dim = c.shape.dim, taps = c.taps;
  const Sizes size(c);
  const size_t d = size.d, k_size = size.k, v_size = size.v, channels = size.channels, heads = size.heads,
               state_size = size.state, sequence_size = size.sequence, n_groups = c.groups.size();
  Inputs in(seed);
  const DeviceStep step(c.groups, c.n_padding, c.uncommitted, seed);
  const size_t n_rows = as_size(step.n_rows), n_valid = as_size(step.n_valid());
  const float eps = kEps;

  Projected projected(c, n_rows, in);
  const LayerWeights weights(c, in);
  std::vector<float>& u = projected.u;
  std::fill(u.begin() + static_cast<int64_t>(n_valid * channels), u.end(), NAN);
  const auto& [conv, a, dt_bias, norm] = weights;
  const std::vector<float>&z = projected.z, &alpha = projected.alpha, &beta = projected.beta;
  const std::vector<float> memory = in.spiky(n_groups * sequence_size, 0.3f);
  std::vector<float> memory_after = memory;

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

  StepOnDevice device(c, step, weights, projected, memory);
  ASSERT_NO_FATAL_FAILURE(device.run());

  std::vector<float> got = device.out.read();
  got.resize(n_valid * v_size);
  const auto about = [&] {
    return ::testing::Message() << "dim " << dim << ", heads " << n_head_k << " and " << n_head_v << ", rows "
                                << c.groups[0].n_rows << ", groups " << n_groups << ", uncommitted "
                                << c.uncommitted << ", decay " << c.decay;
  };
  ASSERT_TRUE(all_close_at(
      got, want, [&](size_t i) { return bound[i]; }, 1e-5, 0.99999))
      << about();
  ASSERT_TRUE(device.intact());

  const auto compare_states = [&](const std::vector<float>& after, const std::vector<float>& expected) {
    for (size_t group = 0; group < n_groups; ++group) {
      const size_t from = as_size(step.sequence(group)) * sequence_size;
      ASSERT_TRUE(all_close(std::span(&after[from], state_size), std::span(&expected[from], state_size),
                            {.absolute = rule_bound[group], .relative = 0.0}))
          << "state, " << about();
    }
  };
  // The columns are shifted by another kernel, and uncommitted groups leave everything as it is.
  const std::vector<float> after_step = device.memory.read();
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
  if (!paths.empty()) ASSERT_NO_FATAL_FAILURE(device.commit(paths));
  const std::vector<float> after = device.memory.read();
  ASSERT_NO_FATAL_FAILURE(compare_states(after, memory_after));
  for (size_t s = 0; s < n_groups; ++s)
    ASSERT_EQ(
        std::memcmp(&after[s * sequence_size + state_size], &memory_after[s * sequence_size + state_size],
                    (sequence_size - state_size) * sizeof(float)),
        0);
  ASSERT_TRUE(device.intact());
}

// The last columns of the convolution after one more row.
void shift_columns(const Case& c, const std::vector<float>& u, float* columns) {
  const size_t channels = Sizes(c).channels, kept = as_size(c.taps - 2) * channels;
  std::copy_n(columns + channels, kept, columns);
  std::copy_n(u.data(), channels, columns + kept);
}

// The rows of a step have the bits that plain decoding along their branch gives, and so has the state after a
// step or a commit. `chains`: uncommitted rows are chains.
void expect_bits_of_decoding(const Case& c, bool chains, uint64_t seed) {
  if (!has_room(c)) return;
  const Sizes size(c);
  Inputs in(seed);
  const DeviceStep step(c.groups, c.n_padding, c.uncommitted, seed, chains);
  const size_t n_rows = as_size(step.n_rows), n_groups = c.groups.size();
  const Projected projected(c, n_rows, in);
  const LayerWeights weights(c, in);
  const std::vector<float> memory = in.spiky(n_groups * size.sequence, 0.3f);

  // One row after the other, each from what its parent left.
  const DeviceStep single({{5, 1}}, 0, false, seed);
  std::vector<std::vector<float>> after(n_rows);
  std::vector<float> want(n_rows * size.v);
  StepOnDevice one(c, single, weights, projected.row(c, 0), std::vector<float>(size.sequence));
  for (size_t g = 0; g < n_groups; ++g)
    for (size_t i = 0; i < as_size(c.groups[g].n_rows); ++i) {
      const size_t begin = as_size(step.group_begin[g]), r = begin + i;
      const float* const stored = &memory[as_size(step.sequence(g)) * size.sequence];
      const std::vector<float> before = step.parent[r] < 0
                                            ? std::vector<float>(stored, stored + size.sequence)
                                            : after[begin + as_size(step.parent[r])];
      const Projected row = projected.row(c, r);
      one.take(row, before);
      ASSERT_NO_FATAL_FAILURE(one.run());
      after[r] = one.memory.read();
      shift_columns(c, row.u, &after[r][size.state]);
      const std::vector<float> out = one.out.read();
      std::copy_n(out.data(), size.v, &want[r * size.v]);
    }

  const auto same = [](const float* x, const float* y, size_t n) {
    return std::memcmp(x, y, n * sizeof(float)) == 0;
  };
  const auto about = [&](size_t g, size_t row) {
    return ::testing::Message() << "row " << row << " of group " << g << " of " << n_groups << ", dim "
                                << c.shape.dim << ", rows of the step " << n_rows << ", uncommitted "
                                << c.uncommitted << ", chains " << chains;
  };
  StepOnDevice device(c, step, weights, projected, memory);
  ASSERT_NO_FATAL_FAILURE(device.run());
  const std::vector<float> got = device.out.read();
  for (size_t g = 0; g < n_groups; ++g)
    for (size_t i = 0; i < as_size(c.groups[g].n_rows); ++i) {
      const size_t r = as_size(step.group_begin[g]) + i;
      ASSERT_TRUE(same(&got[r * size.v], &want[r * size.v], size.v)) << about(g, i);
    }

  const auto has_state_of = [&](const std::vector<float>& all, size_t g, size_t end, size_t n) {
    return same(&all[as_size(step.sequence(g)) * size.sequence],
                after[as_size(step.group_begin[g]) + end].data(), n);
  };
  const std::vector<float> memory_after = device.memory.read();
  for (size_t g = 0; g < n_groups; ++g) {
    if (step.uncommitted(g)) continue;
    const size_t end = as_size(c.groups[g].n_rows) - 1;
    // Columns are shifted by another kernel.
    ASSERT_TRUE(has_state_of(memory_after, g, end, size.state)) << "state, " << about(g, end);
  }
  // Paths of different lengths, each from the same stored state.
  for (const double depth : {1.0, 0.5, 0.0}) {
    std::vector<DevicePath> paths;
    std::vector<size_t> ends(n_groups);
    for (size_t g = 0; g < n_groups; ++g) {
      if (!step.uncommitted(g)) continue;
      const size_t begin = as_size(step.group_begin[g]), rows = as_size(c.groups[g].n_rows);
      const std::vector<int32_t> parents(&step.parent[begin], &step.parent[begin] + rows);
      ends[g] = as_size(static_cast<int64_t>(depth * static_cast<double>(rows - 1)));
      const std::vector<int32_t> path = path_to(parents, static_cast<int32_t>(ends[g]));
      DevicePath& to = paths.emplace_back(
          DevicePath{step.sequence(g), c.groups[g].past, static_cast<int32_t>(path.size()), {}});
      std::copy(path.begin(), path.end(), to.rows);
    }
    if (paths.empty()) break;
    device.memory.write(memory);
    ASSERT_NO_FATAL_FAILURE(device.commit(paths));
    const std::vector<float> committed = device.memory.read();
    for (size_t g = 0; g < n_groups; ++g)
      if (step.uncommitted(g)) {
        ASSERT_TRUE(has_state_of(committed, g, ends[g], size.sequence)) << "state, " << about(g, ends[g]);
      }
  }
  ASSERT_TRUE(device.intact());
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

TEST(DeltaNetCuda, GivesARowTheSameBitsInEveryStep) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 7000;
  for (const Shape& shape : kShapes) {
    for (const int n_rows : {1, 2, 3, 8, 9, 17, 33, 64}) {
      ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding({shape, {{5, n_rows}}}, true, seed++));
      ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding({shape, {{5, n_rows}}, true}, true, seed++));
      for (int tree = 0; tree < 2; ++tree)
        ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding({shape, {{5, n_rows}}, true}, false, seed++));
    }
    // Several sequences, and padding.
    std::vector<StepGroup> many;
    for (int i = 0; i < 34; ++i) many.push_back({i % 3, i % 7 == 0 ? 4 : i % 5 == 0 ? 2 : 1});
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding({shape, many, false, 1.0f, 3}, true, seed++));
    many.back().n_rows = 5;
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding({shape, many}, true, seed++));
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding({shape, {{1, 1}, {1, 2}, {3, 1}}}, true, seed++));
    ASSERT_NO_FATAL_FAILURE(
        expect_bits_of_decoding({shape, {{1, 20}, {0, 1}, {3, 12}, {9, 5}}, false, 1.0f, 26}, true, seed++));
    ASSERT_NO_FATAL_FAILURE(
        expect_bits_of_decoding({shape, {{1, 9}, {0, 1}, {7, 21}}, true, 1.0f, 1}, false, seed++));
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(
        {shape, {{5, 1, true}, {1, 7}, {0, 4, true}, {2, 20}, {3, 13, true}}, true}, false, seed++));
  }
  for (const int taps : {2, 5})
    ASSERT_NO_FATAL_FAILURE(
        expect_bits_of_decoding({{1, 2, 64}, {{5, 12}}, true, 1.0f, 0, taps}, false, seed++));
}

}  // namespace
}  // namespace thermo
