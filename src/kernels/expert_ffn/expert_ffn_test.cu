// The experts' FFNs of a small step, of a large one and of one row against their definition: odd sizes, slots
// of one pair and of as many as they hold, all rows to one expert, one row to each.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "device/device_info.h"
#include "device/testing/skip_without_gpu.h"
#include "kernels/expert_ffn/decode_ffn_cuda.h"
#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/quant_matmul/panel_exact.cuh"
#include "kernels/testing/device_case.h"
#include "kernels/testing/exact_case.h"

namespace thermo {
namespace {

constexpr float kGuard = -12345.0f;
constexpr size_t kGuards = 64;

float silu_of(float x) {
  return x / (1.0f + std::exp(-x));
}

struct Ffn {
  HostMatrix gate, up, down;

  Ffn() = default;
  Ffn(DType in, DType out, int n_embd, int n_ff, std::mt19937& random)
      : gate(in, n_ff, n_embd, random, 1.0f / std::sqrt(static_cast<float>(n_embd))),
        up(in, n_ff, n_embd, random, 1.0f / std::sqrt(static_cast<float>(n_embd))),
        down(out, n_embd, n_ff, random, 1.0f / std::sqrt(static_cast<float>(n_ff))) {}

  std::vector<float> times(const float* x) const {
    std::vector<float> hidden = gate.times(x);
    const std::vector<float> u = up.times(x);
    for (size_t i = 0; i < hidden.size(); ++i) hidden[i] = silu_of(hidden[i]) * u[i];
    return down.times(hidden.data());
  }
  std::vector<std::byte> bytes() const {
    std::vector<std::byte> all = gate.panels;
    all.insert(all.end(), up.panels.begin(), up.panels.end());
    all.insert(all.end(), down.panels.begin(), down.panels.end());
    return all;
  }
};

// Experts and a shared one, in GPU memory.
struct Experts {
  std::vector<Ffn> routed;
  Ffn shared;
  DeviceBuffer memory, shared_memory, table;
  DeviceMatrix gate, up, down, shared_gate, shared_up, shared_down;

  Experts(int n_expert, DType in, DType out, DType shared_type, int n_embd, int n_ff, std::mt19937& random) {
    std::vector<std::byte> all;
    for (int e = 0; e < n_expert; ++e) {
      routed.emplace_back(in, out, n_embd, n_ff, random);
      const std::vector<std::byte> bytes = routed.back().bytes();
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    shared = Ffn(shared_type, shared_type, n_embd, n_ff, random);
    memory = to_device(all);
    shared_memory = to_device(shared.bytes());
    std::vector<const uint8_t*> base;
    for (int e = 0; e < n_expert; ++e) base.push_back(base_of(e));
    table = to_device(base);
    const auto place = [](const Ffn& f, size_t at, DeviceMatrix& g, DeviceMatrix& u, DeviceMatrix& d) {
      g = f.gate.at(at);
      u = f.up.at(at + f.gate.panels.size());
      d = f.down.at(at + f.gate.panels.size() + f.up.panels.size());
    };
    if (n_expert > 0) place(routed[0], 0, gate, up, down);
    place(shared, reinterpret_cast<size_t>(shared_memory.data()), shared_gate, shared_up, shared_down);
  }
  const uint8_t* base_of(int e) const {
    return reinterpret_cast<const uint8_t*>(memory.data()) +
           static_cast<size_t>(e) * routed[0].bytes().size();
  }
};

// f16 and int8 forms of a row: rounded in groups of 256 columns and of 32.
void put_row(const float* x, int n_cols, half* f16, BlockActs* groups256, BlockActs* groups32) {
  for (int c = 0; c < n_cols; ++c) f16[act_place(c)] = __float2half_rn(x[c]);
  for (const int group : {256, 32})
    for (int c = 0; c < n_cols; ++c) {
      const int begin = c / group * group, end = std::min(n_cols, begin + group);
      float top = 0.0f;
      for (int k = begin; k < end; ++k) top = std::max(top, std::fabs(x[k]));
      BlockActs& chunk = (group == 256 ? groups256 : groups32)[c / 256];
      BlockActs::Meta& meta = chunk.meta[c / 32 % 8];
      if (c % 32 == 0) meta = {top / 127.0f, 0, 0, 0};
      const int code = static_cast<int>(std::lrint(x[c] * (127.0f / top)));
      (c % 32 < 16 ? meta.sum0 : meta.sum1) += code;
      reinterpret_cast<int8_t*>(&chunk.codes[c / 32 % 8][c % 16 / 4][c % 32 / 16])[c % 4] =
          static_cast<int8_t>(code);
      if (c % 256 == 255 || c + 1 == n_cols) put_sum_bytes(chunk);
    }
}

// `unit`: bound of the root mean square error, as a share of that of `want`; single values may be 5 times
// as far away.
void expect_close(const std::vector<float>& got, const std::vector<float>& want, double unit,
                  const std::string& what) {
  double square = 0, error = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    square += static_cast<double>(want[i]) * want[i];
    error += (static_cast<double>(got[i]) - want[i]) * (static_cast<double>(got[i]) - want[i]);
  }
  const double bound = unit * std::sqrt(square / static_cast<double>(want.size()));
  EXPECT_LT(std::sqrt(error / static_cast<double>(want.size())), bound) << what;
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 5 * bound) << what << " at " << i;
}

struct Slot {
  int expert;
  std::vector<int> rows;
};

// int8 rounds to 1/254 of the largest of 256 at most, evenly: of normal numbers 0.7 % of their deviation.
// That error enters gate and up, and their product is rounded once more. The largest of 256 such products is
// 8 times their deviation or more, which gives 1.8 %: about 2 % in all.
constexpr double kUnit = 0.03;

// f16 rounds weights and activations: 0.2 % of a product at most, as in linear_test, and there are two in a
// row.
constexpr double kTileUnit = 0.004;

// `tile`: 0: the small form; else the large one.
void run_slots(DType in, DType out, DType shared_type, int n_embd, int n_ff, int n_expert, int n_rows,
               const std::vector<Slot>& slots, int tile = 0) {
  std::mt19937 random(static_cast<unsigned>(n_embd + n_ff + n_rows));
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const Experts experts(n_expert, in, out, shared_type, n_embd, n_ff, random);
  const size_t stride = static_cast<size_t>((n_embd + 31) / 32 * 32),
               chunks = static_cast<size_t>(dot_chunks(n_embd));
  std::vector<float> x(static_cast<size_t>(n_rows) * n_embd);
  for (float& v : x) v = normal(random);
  std::vector<half> f16(stride * static_cast<size_t>(n_rows));
  std::vector<BlockActs> groups256(chunks * static_cast<size_t>(n_rows)), groups32(groups256.size());
  for (int r = 0; r < n_rows; ++r)
    put_row(x.data() + static_cast<size_t>(r) * n_embd, n_embd, f16.data() + static_cast<size_t>(r) * stride,
            groups256.data() + static_cast<size_t>(r) * chunks,
            groups32.data() + static_cast<size_t>(r) * chunks);

  std::vector<DeviceSlot> list;
  std::vector<int32_t> pair_row;
  for (const Slot& slot : slots) {
    DeviceSlot s{};
    s.base = slot.expert == n_expert ? nullptr : experts.base_of(slot.expert);
    s.expert = slot.expert;
    s.first = static_cast<int32_t>(pair_row.size());
    s.count = static_cast<int32_t>(slot.rows.size());
    for (size_t i = 0; i < slot.rows.size(); ++i) {
      if (i < kSlotRows) s.rows[i] = slot.rows[i];
      pair_row.push_back(slot.rows[i]);
    }
    list.push_back(s);
  }
  const size_t n_pairs = pair_row.size();
  const int max_slots = static_cast<int>(list.size()) + 3;
  list.resize(static_cast<size_t>(max_slots));
  const DeviceBuffer device_x = to_device(x), device_f16 = to_device(f16),
                     device_groups256 = to_device(groups256), device_groups32 = to_device(groups32);
  DeviceBuffer device_slots = to_device(list), device_rows = to_device(pair_row),
               n_slots = to_device(std::vector<int32_t>{static_cast<int32_t>(slots.size())});
  const size_t hidden_stride = static_cast<size_t>((n_ff + 31) / 32 * 32);
  DeviceBuffer hidden16(n_pairs * hidden_stride * sizeof(half)),
      hidden32(n_pairs * static_cast<size_t>(n_ff) * sizeof(float));
  cudaMemset(hidden16.data(), 0, hidden16.size());
  DeviceBuffer y = to_device(std::vector<float>(n_pairs * static_cast<size_t>(n_embd) + kGuards, kGuard));

  DeviceExpertArgs args;
  args.gate = experts.gate;
  args.up = experts.up;
  args.down = experts.down;
  args.shared_gate = experts.shared_gate;
  args.shared_up = experts.shared_up;
  args.shared_down = experts.shared_down;
  args.n_expert = n_expert;
  args.routes.n_slots = n_slots.as<int32_t>();
  args.routes.slots = device_slots.as<DeviceSlot>();
  args.routes.pair_row = device_rows.as<int32_t>();
  args.max_slots = max_slots;
  args.max_slot_rows = std::min(n_rows, kExpertSmallTile);
  args.x = {device_f16.data(),       device_x.as<float>(),   static_cast<int64_t>(stride), n_embd, 1.0f,
            device_groups256.data(), device_groups32.data(), static_cast<int64_t>(chunks)};
  args.hidden = {hidden16.data(), hidden32.as<float>(), static_cast<int64_t>(hidden_stride), n_ff,
                 kHiddenScale};
  args.y = y.as<float>();
  args.n_embd = n_embd;
  args.large = tile > 0;
  args.tile = tile;
  ASSERT_TRUE(tile == 0 || expert_tiles_possible(args));
  expert_ffn_cuda(args, {});
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  const std::vector<float> got = to_host(y.as<float>(), n_pairs * static_cast<size_t>(n_embd) + kGuards);
  for (size_t i = n_pairs * static_cast<size_t>(n_embd); i < got.size(); ++i)
    ASSERT_EQ(got[i], kGuard) << "written past the end";
  size_t pair = 0;
  for (const Slot& slot : slots)
    for (const int row : slot.rows) {
      const Ffn& ffn =
          slot.expert == n_expert ? experts.shared : experts.routed[static_cast<size_t>(slot.expert)];
      const auto begin = got.begin() + static_cast<std::ptrdiff_t>(pair * static_cast<size_t>(n_embd));
      expect_close({begin, begin + n_embd}, ffn.times(x.data() + static_cast<size_t>(row) * n_embd),
                   tile > 0                                                            ? kTileUnit
                   : is_float_type(in) && is_float_type(out) && slot.expert < n_expert ? 1e-4
                                                                                       : kUnit,
                   std::string(dtype_name(in)) + " pair " + std::to_string(pair));
      ++pair;
    }
}

std::vector<int> rows_up_to(int n) {
  std::vector<int> rows;
  for (int r = 0; r < n; ++r) rows.push_back(r);
  return rows;
}

TEST(ExpertFfnCuda, SmallStepsMatchTheReference) {
  SKIP_WITHOUT_GPU();
  const DType types[][3] = {
      {DType::Q4_K, DType::Q6_K, DType::Q4_K}, {DType::Q4_K, DType::Q4_K, DType::Q8_0},
      {DType::Q5_K, DType::Q5_K, DType::Q6_K}, {DType::Q8_0, DType::Q8_0, DType::Q8_0},
      {DType::Q6_K, DType::Q4_0, DType::Q4_K}, {DType::MXFP4, DType::MXFP4, DType::Q8_0},
      {DType::F32, DType::F32, DType::F16}};
  for (const auto& t : types) {
    const bool whole = dtype_info(t[0]).block_elements <= 32 && dtype_info(t[1]).block_elements <= 32 &&
                       dtype_info(t[2]).block_elements <= 32;
    const int n_embd = whole ? 352 : 512, n_ff = whole ? 160 : 256;
    // One row to each.
    std::vector<Slot> each;
    for (int e = 0; e <= 5; ++e) each.push_back({e, {e}});
    run_slots(t[0], t[1], t[2], n_embd, n_ff, 5, 6, each);
    // All rows to one expert, and every size of a slot.
    for (int n = 1; n <= 8; ++n)
      run_slots(t[0], t[1], t[2], n_embd, n_ff, 2, 8, {{1, rows_up_to(n)}, {2, rows_up_to(n)}});
    run_slots(t[0], t[1], t[2], n_embd, n_ff, 3, 17,
              {{2, rows_up_to(8)}, {2, {8, 9, 10, 11, 12, 13, 14, 15}}, {2, {16}}, {3, {7, 0, 3}}});
  }
  run_slots(DType::Q4_K, DType::Q6_K, DType::Q4_K, 2048, 512, 3, 4,
            {{0, {2}}, {1, {0, 3}}, {3, {0, 1, 2, 3}}});
}

TEST(ExpertFfnCuda, LargeStepsMatchTheReference) {
  SKIP_WITHOUT_GPU();
  // With the shared expert of the same type and of another.
  const DType types[][3] = {
      {DType::Q4_K, DType::Q6_K, DType::Q4_K}, {DType::Q4_K, DType::Q4_K, DType::Q4_K},
      {DType::Q5_K, DType::Q5_K, DType::Q6_K}, {DType::Q8_0, DType::Q8_0, DType::Q8_0},
      {DType::Q3_K, DType::Q4_0, DType::Q2_K}, {DType::MXFP4, DType::MXFP4, DType::Q8_0}};
  for (const auto& t : types) {
    const bool whole = dtype_info(t[0]).block_elements <= 32 && dtype_info(t[1]).block_elements <= 32 &&
                       dtype_info(t[2]).block_elements <= 32;
    const int n_embd = whole ? 352 : 512, n_ff = whole ? 160 : 256;
    // Compute capability 7.5 has no memory for the large tile.
    std::vector<int> tiles = {kExpertLowTile};
    if (expert_tile(1024, 1, 1) == kExpertTile) tiles.push_back(kExpertTile);
    for (const int tile : tiles) {
      std::vector<Slot> each;
      for (int e = 0; e <= 5; ++e) each.push_back({e, {5 - e}});
      run_slots(t[0], t[1], t[2], n_embd, n_ff, 5, 6, each, tile);
      for (const int n : {1, 2, 7, 8, 9, 15, 16, 17, 33, 64})
        if (n <= tile)
          run_slots(t[0], t[1], t[2], n_embd, n_ff, 2, n, {{1, rows_up_to(n)}, {2, rows_up_to(n)}}, tile);
      std::vector<int> all = rows_up_to(tile);
      std::reverse(all.begin(), all.end());
      run_slots(t[0], t[1], t[2], n_embd, n_ff, 3, tile + 1, {{2, all}, {2, {tile}}, {3, {1, 0}}}, tile);
    }
  }
  run_slots(DType::Q4_K, DType::Q6_K, DType::Q4_K, 2048, 512, 3, 12,
            {{0, {2}}, {1, {0, 3, 9, 4, 11}}, {2, rows_up_to(9)}, {3, rows_up_to(12)}}, kExpertLowTile);
}

// Two rows, the second another one or the same, have the bits of each alone.
void run_two_rows(DecodeFfnArgs args, const std::vector<float>& x, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const size_t n = x.size();
  DeviceBuffer device_x(sizeof(float) * (2 * n + kGuards)), uses(sizeof(uint32_t) * args.config.n_expert);
  args.norm.x = args.x = device_x.as<float>();
  args.routes.uses.counts = uses.as<uint32_t>();
  const auto run = [&](int n_rows, std::vector<float> rows) {
    rows.resize(static_cast<size_t>(n_rows) * n + kGuards, kGuard);
    args.n_rows = n_rows;
    EXPECT_EQ(cudaMemcpy(device_x.data(), rows.data(), rows.size() * sizeof(float), cudaMemcpyHostToDevice),
              cudaSuccess);
    EXPECT_EQ(cudaMemset(uses.data(), 0, uses.size()), cudaSuccess);
    decode_ffn_cuda(args, {});
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    rows = to_host(device_x.as<float>(), rows.size());
    for (size_t i = static_cast<size_t>(n_rows) * n; i < rows.size(); ++i)
      EXPECT_EQ(rows[i], kGuard) << "written past the end";
    return rows;
  };
  for (const bool same : {false, true}) {
    std::vector<float> other = x, both = x;
    if (!same)
      for (float& v : other) v = 3.0f * normal(random);
    both.insert(both.end(), other.begin(), other.end());
    std::vector<uint32_t> counts[2];
    std::vector<float> want[2];
    for (int r = 0; r < 2; ++r) {
      want[r] = run(1, r == 0 ? x : other);
      counts[r] = to_host(uses.as<uint32_t>(), static_cast<size_t>(args.config.n_expert));
    }
    const std::vector<float> got = run(2, both);
    for (size_t r = 0; r < 2; ++r)
      EXPECT_EQ(std::memcmp(got.data() + r * n, want[r].data(), n * sizeof(float)), 0) << "row " << r;
    const std::vector<uint32_t> counted =
        to_host(uses.as<uint32_t>(), static_cast<size_t>(args.config.n_expert));
    for (size_t e = 0; e < counted.size(); ++e) EXPECT_EQ(counted[e], counts[0][e] + counts[1][e]);

    // The second row is drafted: what it chose waits.
    const auto n_used = static_cast<size_t>(args.config.n_expert_used);
    DeviceBuffer drafted = to_device(std::vector<int16_t>(2 * n_used, -1)),
                 n_valid = to_device(std::vector<int32_t>{2}), group = to_device(std::vector<int32_t>{0, 1}),
                 sequence = to_device(std::vector<int32_t>{0, 1});
    args.routes.uses.drafted = drafted.as<int16_t>();
    args.routes.uses.sequence_stride = static_cast<int64_t>(n_used);
    args.routes.uses.n_valid = n_valid.as<int32_t>();
    args.routes.uses.group = args.routes.uses.group_begin = args.routes.uses.group_uncommitted =
        group.as<int32_t>();
    args.routes.uses.group_sequence = sequence.as<int32_t>();
    run(2, both);
    EXPECT_EQ(to_host(uses.as<uint32_t>(), counted.size()), counts[0]);
    const std::vector<int16_t> waiting = to_host(drafted.as<int16_t>(), 2 * n_used);
    std::vector<uint32_t> chosen(counted.size());
    for (size_t k = 0; k < n_used; ++k) {
      EXPECT_EQ(waiting[k], -1);
      ASSERT_TRUE(waiting[n_used + k] >= 0 && waiting[n_used + k] < args.config.n_expert);
      ++chosen[static_cast<size_t>(waiting[n_used + k])];
    }
    EXPECT_EQ(chosen, counts[1]);
    args.routes.uses.drafted = nullptr;
  }
}

// `two`: whether two rows fit into the shared memory of a large card.
void run_decode(DType in, DType out, DType shared_type, DType router_type, int n_embd, int n_ff, int n_expert,
                int n_used, bool gated, bool two) {
  SCOPED_TRACE(testing::Message() << dtype_name(in) << " " << dtype_name(out) << " shared "
                                  << dtype_name(shared_type) << " embd " << n_embd << " ff " << n_ff
                                  << " experts " << n_expert);
  std::mt19937 random(static_cast<unsigned>(n_embd + n_ff + n_expert));
  std::normal_distribution<float> normal(0.0f, 1.0f);
  const Experts experts(n_expert, in, out, shared_type, n_embd, n_ff, random);
  const HostMatrix router(router_type, n_expert, n_embd, random, 0.3f);
  std::vector<float> x, norm, bias, shared_weight;
  for (int c = 0; c < n_embd; ++c) {
    x.push_back(normal(random));
    norm.push_back(1.0f + 0.2f * normal(random));
    shared_weight.push_back(normal(random) / std::sqrt(static_cast<float>(n_embd)));
  }
  for (int e = 0; e < n_expert; ++e) bias.push_back(0.05f * normal(random));

  double square = 0;
  for (const float v : x) square += static_cast<double>(v) * v;
  const float scale = static_cast<float>(1.0 / std::sqrt(square / n_embd + 1e-6));
  std::vector<float> h(x.size());
  for (size_t i = 0; i < h.size(); ++i) h[i] = x[i] * scale * norm[i];
  const RouteConfig config{Gating::Softmax, n_expert, n_used, true, 1.0f};
  std::vector<float> want(x.size());
  if (n_expert > 0) {
    std::vector<float> logits = router.times(h.data());
    std::vector<int32_t> ids(static_cast<size_t>(n_used));
    std::vector<float> weights(static_cast<size_t>(n_used));
    route_topk_ref(config, logits.data(), bias.data(), ids.data(), weights.data());
    for (size_t k = 0; k < ids.size(); ++k) {
      const std::vector<float> y = experts.routed[static_cast<size_t>(ids[k])].times(h.data());
      for (size_t i = 0; i < want.size(); ++i) want[i] += weights[k] * y[i];
    }
  }
  float gate = 0.0f;
  for (size_t i = 0; i < h.size(); ++i) gate += h[i] * shared_weight[i];
  const std::vector<float> y = experts.shared.times(h.data());
  for (size_t i = 0; i < want.size(); ++i) want[i] += (gated ? 1.0f / (1.0f + std::exp(-gate)) : 1.0f) * y[i];

  std::vector<float> guarded = x;
  guarded.resize(x.size() + kGuards, kGuard);
  DeviceBuffer device_x = to_device(guarded), device_norm = to_device(norm), device_bias = to_device(bias),
               device_shared = to_device(shared_weight), panels = to_device(router.panels);
  DeviceBuffer weights(sizeof(float) * 2 * static_cast<size_t>(n_used + 1)),
      partial(sizeof(float) * 2 * static_cast<size_t>(kRouterParts * n_expert + 1)),
      hidden(sizeof(float) * 2 * static_cast<size_t>((n_used + 1) * n_ff));
  DecodeFfnArgs args;
  args.norm = {device_x.as<float>(), device_norm.as<float>(), 1e-6f};
  args.x = device_x.as<float>();
  args.n_embd = n_embd;
  args.config = config;
  args.router = router.at(reinterpret_cast<size_t>(panels.data()));
  args.bias = device_bias.as<float>();
  args.base = experts.table.as<const uint8_t*>();
  args.gate = experts.gate;
  args.up = experts.up;
  args.down = experts.down;
  args.shared_gate = experts.shared_gate;
  args.shared_up = experts.shared_up;
  args.shared_down = experts.shared_down;
  args.shared_weight = gated ? device_shared.as<float>() : nullptr;
  args.routes.pair_weight = weights.as<float>();
  args.routes.partial = partial.as<float>();
  args.hidden = hidden.as<float>();
  args.hidden_stride = n_ff;
  ASSERT_TRUE(decode_ffn_possible(args));
  // In two launches; in one, where the card can; and again, over what the first left behind.
  const DeviceBuffer exchange(decode_exchange_bytes(n_used, n_ff));
  for (const bool together : {false, true, true}) {
    args.exchange = together ? exchange.data() : nullptr;
    ASSERT_EQ(
        cudaMemcpy(device_x.data(), guarded.data(), guarded.size() * sizeof(float), cudaMemcpyHostToDevice),
        cudaSuccess);
    decode_ffn_cuda(args, {});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    std::vector<float> got = to_host(device_x.as<float>(), guarded.size());
    for (size_t i = x.size(); i < got.size(); ++i) ASSERT_EQ(got[i], kGuard) << "written past the end";
    got.resize(x.size());
    for (size_t i = 0; i < x.size(); ++i) got[i] -= x[i];
    expect_close(got, want, kUnit, together ? "sum, one launch" : "sum");
  }
  args.n_rows = 2;
  const bool possible = decode_ffn_possible(args);
  if (device_in_use().max_shared_bytes >= 227 * 1024 && device_in_use().n_multiprocessors >= 128)
    EXPECT_EQ(possible, two);
  if (possible) run_two_rows(args, x, random);
}

TEST(DecodeFfnCuda, OneRowMatchesTheReferenceAndTwoHaveItsBits) {
  SKIP_WITHOUT_GPU();
  using enum DType;
  run_decode(Q4_K, Q6_K, Q4_K, F32, 512, 256, 20, 4, true, true);
  run_decode(Q4_K, Q4_K, Q4_K, F16, 2048, 512, 16, 8, true, true);
  run_decode(Q4_K, Q6_K, Q6_K, F32, 2048, 512, 16, 8, true, true);  // 35B-A3B
  run_decode(Q5_K, Q5_K, Q8_0, BF16, 768, 256, 250, 3, false, true);
  run_decode(Q8_0, Q8_0, Q8_0, F32, 352, 160, 17, 2, true, true);
  run_decode(Q8_0, Q8_0, Q8_0, F32, 352, 160, 17, 17, true, false);
  run_decode(Q6_K, Q4_K, Q5_K, F32, 2304, 768, 9, 1, true, false);
  run_decode(Q4_K, Q4_K, Q4_K, F32, 1024, 5888, 0, 0, false, false);  // dense
}

}  // namespace
}  // namespace thermo
