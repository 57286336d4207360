// Experts on the GPU against the processor's kernels, bit for bit: every quantised type, every form of the
// products, every instruction set that the processor has.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>

#include "device/testing/skip_without_gpu.h"
#include "kernels/expert_ffn/decode_ffn_cuda.h"
#include "kernels/expert_ffn/expert_ffn_cuda.h"
#include "kernels/linear/dot_product.cuh"
#include "kernels/quant_matmul/panel_exact.cuh"
#include "kernels/row_ops/row_ops.h"
#include "kernels/row_ops/row_ops_cuda.h"
#include "kernels/row_ops/warp_ops.cuh"
#include "kernels/testing/device_case.h"
#include "kernels/testing/exact_case.h"

namespace thermo {
namespace {

struct Expert {
  HostMatrix gate, up, down;

  Expert(DType in, DType out, int n_embd, int n_ff, std::mt19937& random)
      : gate(in, n_ff, n_embd, random, 1.0f / std::sqrt(static_cast<float>(n_embd))),
        up(in, n_ff, n_embd, random, 1.0f / std::sqrt(static_cast<float>(n_embd))),
        down(out, n_embd, n_ff, random, 1.0f / std::sqrt(static_cast<float>(n_ff))) {}

  // Of all rows, by the processor.
  std::vector<float> times(const float* x, int n_rows, float scale, Isa isa) const {
    const QuantMatmulKernels& kernels = quant_matmul_kernels(isa);
    const ActRows acts(gate.dtype, x, n_rows, gate.n_cols, scale, kernels);
    std::vector<float> hidden = multiply(gate, acts, n_rows, kernels);
    const std::vector<float> u = multiply(up, acts, n_rows, kernels);
    row_op_kernels(isa).swiglu(hidden.data(), u.data(), static_cast<int>(hidden.size()));
    const ActRows hidden_acts(down.dtype, hidden.data(), n_rows, down.n_cols, 1.0f, kernels);
    return multiply(down, hidden_acts, n_rows, kernels);
  }
};

// Experts in GPU memory, one after the other.
struct DeviceExperts {
  DeviceBuffer memory;
  size_t bytes_each;
  DeviceMatrix gate, up, down;  // offsets

  explicit DeviceExperts(const std::vector<Expert>& experts) {
    std::vector<std::byte> all;
    for (const Expert& e : experts)
      for (const HostMatrix* m : {&e.gate, &e.up, &e.down})
        all.insert(all.end(), m->panels.begin(), m->panels.end());
    bytes_each = all.size() / experts.size();
    memory = to_device(all);
    const Expert& first = experts[0];
    gate = first.gate.at(0);
    up = first.up.at(first.gate.panels.size());
    down = first.down.at(first.gate.panels.size() + first.up.panels.size());
  }
  const uint8_t* base_of(size_t e) const {
    return reinterpret_cast<const uint8_t*>(memory.data()) + e * bytes_each;
  }
};

void run_steps(DType in, DType out, int n_embd, int n_ff) {
  std::mt19937 random(static_cast<unsigned>(in) * 100 + static_cast<unsigned>(out));
  std::vector<Expert> experts;
  for (int e = 0; e < 2; ++e) experts.emplace_back(in, out, n_embd, n_ff, random);
  const DeviceExperts device(experts);
  constexpr int kRows = 64;
  const std::vector<float> x = spiky(static_cast<size_t>(kRows) * n_embd, random);
  std::vector<std::vector<float>> want;  // of each expert
  for (const Expert& e : experts) {
    for (const Isa isa : vector_isas()) {
      const std::vector<float> y = e.times(x.data(), kRows, 1.0f, isa);
      if (isa == vector_isas().front())
        want.push_back(y);
      else
        expect_bits(y.data(), want.back().data(), y.size(), std::string(isa_name(isa)));
    }
  }

  const size_t chunks = static_cast<size_t>(dot_chunks(n_embd));
  std::vector<BlockActs> blocks(chunks * kRows);
  const ActRows acts(in, x.data(), kRows, n_embd, 1.0f, quant_matmul_kernels(vector_isas().front()));
  for (int r = 0; r < kRows; ++r) acts.to_blocks(r, blocks.data() + static_cast<size_t>(r) * chunks);
  const DeviceBuffer device_blocks = to_device(blocks);

  // Slots of 8 pairs, the same among so many that kernels take another form, and slots of 16.
  struct Form {
    const char* name;
    int slot_rows, max_slots;
  };
  for (const Form& form : {Form{"few slots", kExpertSmallTile, 0}, Form{"many slots", kExpertSmallTile, 300},
                           Form{"wide slots", kExpertWideTile, 300}})
    for (const int n_rows : {1, 2, 3, 8, 17, 32, 64}) {
      // All rows to expert 0, one to expert 1.
      std::vector<DeviceSlot> slots;
      std::vector<int32_t> pair_row;
      for (int first = 0; first < n_rows; first += form.slot_rows) {
        DeviceSlot slot{device.base_of(0), 0, first, std::min(form.slot_rows, n_rows - first), {}};
        for (int i = 0; i < slot.count; ++i) {
          if (i < kSlotRows) slot.rows[i] = first + i;
          pair_row.push_back(first + i);
        }
        slots.push_back(slot);
      }
      slots.push_back({device.base_of(1), 1, n_rows, 1, {n_rows - 1}});
      pair_row.push_back(n_rows - 1);
      const size_t n_pairs = pair_row.size();
      DeviceBuffer device_slots = to_device(slots), device_rows = to_device(pair_row),
                   n_slots = to_device(std::vector<int32_t>{static_cast<int32_t>(slots.size())});
      DeviceBuffer hidden(n_pairs * static_cast<size_t>(n_ff) * sizeof(float)),
          y = to_device(std::vector<float>(n_pairs * static_cast<size_t>(n_embd), -1.0f));
      DeviceExpertArgs args;
      args.gate = device.gate;
      args.up = device.up;
      args.down = device.down;
      args.n_expert = 2;
      args.routes.n_slots = n_slots.as<int32_t>();
      args.routes.slots = device_slots.as<DeviceSlot>();
      args.routes.pair_row = device_rows.as<int32_t>();
      args.max_slots = std::max(static_cast<int>(slots.size()), form.max_slots);
      args.max_slot_rows = std::min(n_rows, form.slot_rows);
      if (!expert_few_possible(args, form.slot_rows) && form.slot_rows > kExpertSmallTile) continue;
      (act_format(in) == ActFormat::Q8x256 ? args.x.blocks256 : args.x.blocks32) = device_blocks.data();
      args.x.blocks_stride = static_cast<int64_t>(chunks);
      args.hidden.f32 = hidden.as<float>();
      args.hidden.f32_stride = n_ff;
      args.y = y.as<float>();
      args.n_embd = n_embd;
      expert_ffn_cuda(args, {});
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      const std::vector<float> got = to_host(y.as<float>(), n_pairs * static_cast<size_t>(n_embd));
      const std::string what = std::string(dtype_name(in)) + " " + dtype_name(out) + " " +
                               std::to_string(n_embd) + " x " + std::to_string(n_ff) + ", rows " +
                               std::to_string(n_rows) + ", " + form.name;
      expect_bits(got.data(), want[0].data(), static_cast<size_t>(n_rows) * n_embd, what);
      expect_bits(got.data() + static_cast<size_t>(n_rows) * n_embd,
                  want[1].data() + static_cast<size_t>(n_rows - 1) * n_embd, static_cast<size_t>(n_embd),
                  what + ", single");
    }
}

TEST(ExpertBitsCuda, SmallStepsHaveTheProcessorsBits) {
  SKIP_WITHOUT_GPU();
  if (vector_isas().empty()) GTEST_SKIP() << "needs AVX2";
  for (const DType dtype : kQuantised) {
    const bool big = act_format(dtype) == ActFormat::Q8x256;
    run_steps(dtype, dtype, 2048, 512);
    if (!big) run_steps(dtype, dtype, 352, 160);
  }
  run_steps(DType::Q4_K, DType::Q6_K, 2048, 512);
  run_steps(DType::Q4_K, DType::Q6_K, 3072, 1024);  // Laguna
  run_steps(DType::Q4_K, DType::Q8_0, 768, 2560);
  run_steps(DType::Q8_0, DType::Q4_K, 288, 256);
  run_steps(DType::MXFP4, DType::Q5_K, 2880, 768);
}

// The norm's factor of a row, as the launches of one row make it.
__global__ void norm_scale_kernel(const float* x, const float* weight, int n_cols, float eps, float* scale) {
  __shared__ float squares[kMaxNormChunks];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  NormWeights first;
  first.load(weight, n_cols, norm_chunk(n_cols, warp), lane);
  make_norm_acts(x, weight, first, n_cols, warp, 16, lane, squares, [](int, float4, float4) {});
  __syncthreads();
  if (threadIdx.x == 0) *scale = norm_scale(squares, n_cols, eps);
}

void run_row(DType in, DType out, DType shared_in, DType shared_out, int n_embd, int n_ff, int n_used) {
  const std::string what = std::string(dtype_name(in)) + " " + dtype_name(out) + ", shared " +
                           dtype_name(shared_in) + " " + dtype_name(shared_out) + ", " +
                           std::to_string(n_embd) + " x " + std::to_string(n_ff);
  std::mt19937 random(static_cast<unsigned>(n_embd + n_ff + n_used));
  std::vector<Expert> experts;
  for (int e = 0; e < n_used; ++e) experts.emplace_back(in, out, n_embd, n_ff, random);
  const std::vector<Expert> shared = {Expert(shared_in, shared_out, n_embd, n_ff, random)};
  const DeviceExperts device(experts), device_shared(shared);
  const std::vector<float> x = spiky(static_cast<size_t>(n_embd), random);
  std::vector<float> norm = spiky(static_cast<size_t>(n_embd), random), row(x.size());
  for (size_t i = 0; i < x.size(); ++i) row[i] = x[i] * norm[i];

  const DeviceBuffer device_norm = to_device(norm);
  DeviceBuffer device_x = to_device(x), scale_out(sizeof(float));
  norm_scale_kernel<<<1, 512>>>(device_x.as<float>(), device_norm.as<float>(), n_embd, 1e-6f,
                                scale_out.as<float>());
  const float scale = to_host(scale_out.as<float>(), 1)[0];

  // All are chosen, with one weight: a router without weights gives equal logits.
  const float weight = 1.0f / static_cast<float>(n_used) * 1.3f;
  std::vector<std::vector<float>> want;
  for (const Isa isa : vector_isas()) {
    std::vector<double> sums(x.size());
    const auto add = [&](const Expert& e, float w) {
      const std::vector<float> y = e.times(row.data(), 1, scale, isa);
      for (size_t i = 0; i < y.size(); ++i)
        sums[i] += std::nearbyint(static_cast<double>(w * y[i]) * 0x1p32) * 0x1p-32;
    };
    for (const Expert& e : experts) add(e, weight);
    add(shared[0], 1.0f);
    std::vector<float> y(x.size());
    for (size_t i = 0; i < y.size(); ++i) y[i] = x[i] + static_cast<float>(sums[i]);
    want.push_back(y);
  }

  const HostMatrix router(DType::F32, n_used, n_embd, random, 0.0f);
  const DeviceBuffer panels = to_device(router.panels);
  std::vector<const uint8_t*> base;
  for (size_t e = 0; e < experts.size(); ++e) base.push_back(device.base_of(e));
  DeviceBuffer table = to_device(base), weights(sizeof(float) * static_cast<size_t>(n_used + 1)),
               partial(sizeof(float) * static_cast<size_t>(kRouterParts * n_used)),
               hidden(sizeof(float) * static_cast<size_t>((n_used + 1) * n_ff));
  const auto at = [&](DeviceMatrix m) {
    m.panels = device_shared.base_of(0) + reinterpret_cast<size_t>(m.panels);
    return m;
  };
  DecodeFfnArgs args;
  args.norm = {device_x.as<float>(), device_norm.as<float>(), 1e-6f};
  args.x = device_x.as<float>();
  args.n_embd = n_embd;
  args.config = {Gating::Softmax, n_used, n_used, true, 1.3f};
  args.router = router.at(reinterpret_cast<size_t>(panels.data()));
  args.base = table.as<const uint8_t*>();
  args.gate = device.gate;
  args.up = device.up;
  args.down = device.down;
  args.shared_gate = at(device_shared.gate);
  args.shared_up = at(device_shared.up);
  args.shared_down = at(device_shared.down);
  args.routes.pair_weight = weights.as<float>();
  args.routes.partial = partial.as<float>();
  args.hidden = hidden.as<float>();
  args.hidden_stride = n_ff;
  ASSERT_TRUE(decode_ffn_possible(args)) << what;
  const DeviceBuffer exchange(decode_exchange_bytes(n_used, n_ff));
  for (const bool together : {false, true, true}) {
    args.exchange = together ? exchange.data() : nullptr;
    ASSERT_EQ(cudaMemcpy(device_x.data(), x.data(), x.size() * sizeof(float), cudaMemcpyHostToDevice),
              cudaSuccess);
    decode_ffn_cuda(args, {});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<float> got = to_host(device_x.as<float>(), x.size());
    for (size_t i = 0; i < want.size(); ++i)
      expect_bits(got.data(), want[i].data(), x.size(),
                  what + (together ? ", one launch, " : ", two launches, ") +
                      std::string(isa_name(vector_isas()[i])));
  }
}

TEST(ExpertBitsCuda, ADecodedRowHasTheProcessorsBits) {
  SKIP_WITHOUT_GPU();
  if (vector_isas().empty()) GTEST_SKIP() << "needs AVX2";
  using enum DType;
  run_row(Q4_K, Q6_K, Q4_K, Q6_K, 2048, 512, 8);
  run_row(Q4_K, Q4_K, Q8_0, Q8_0, 2048, 512, 8);
  run_row(Q5_K, Q5_K, Q6_K, Q4_K, 768, 512, 3);
  run_row(Q6_K, Q4_K, Q5_K, Q5_K, 2304, 768, 1);
  run_row(Q8_0, Q8_0, Q8_0, Q8_0, 352, 160, 17);
  run_row(Q8_0, Q6_K, Q4_K, Q8_0, 1024, 1024, 4);
  run_row(Q4_K, Q6_K, Q4_K, Q6_K, 3072, 1024, 10);  // Laguna
  run_row(Q8_0, Q8_0, Q8_0, Q8_0, 8192, 512, 2);    // more shared memory than a kernel may use unasked
}

// The norm before experts rounds rows as the processor does.
TEST(ExpertBitsCuda, TheNormRoundsAsTheProcessor) {
  SKIP_WITHOUT_GPU();
  if (vector_isas().empty()) GTEST_SKIP() << "needs AVX2";
  for (const int n_embd : {256, 768, 2048, 3072, 5120}) {
    std::mt19937 random(static_cast<unsigned>(n_embd));
    constexpr int kRows = 5;
    std::vector<float> x = spiky(static_cast<size_t>(kRows) * n_embd, random);
    for (int c = 0; c < n_embd; ++c) x[static_cast<size_t>(n_embd) + c] = 0.0f;  // a row of zeros
    const DeviceBuffer norm = to_device(spiky(static_cast<size_t>(n_embd), random));
    const size_t chunks = static_cast<size_t>(dot_chunks(n_embd));
    DeviceBuffer device_x = to_device(x), h(x.size() * sizeof(float)),
                 blocks256(kRows * chunks * sizeof(BlockActs)), blocks32(kRows * chunks * sizeof(BlockActs));
    ResidualNormArgs args{.x = device_x.as<float>(),
                          .norm = norm.as<float>(),
                          .eps = 1e-6f,
                          .h = {},
                          .n_rows = kRows,
                          .n_embd = n_embd,
                          .conv = {},
                          .cold_in = {},
                          .cold_out = {}};
    args.h.f32 = h.as<float>();
    args.h.f32_stride = n_embd;
    args.h.blocks256 = blocks256.data();
    args.h.blocks32 = blocks32.data();
    args.h.blocks_stride = static_cast<int64_t>(chunks);
    residual_norm_cuda(args, {});
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    const std::vector<float> rows = to_host(h.as<float>(), x.size());
    for (const DType dtype : {DType::Q4_K, DType::Q8_0}) {
      const std::vector<BlockActs> got =
          to_host((dtype == DType::Q4_K ? blocks256 : blocks32).as<BlockActs>(), kRows * chunks);
      for (const Isa isa : vector_isas()) {
        const ActRows acts(dtype, rows.data(), kRows, n_embd, 1.0f, quant_matmul_kernels(isa));
        std::vector<BlockActs> want(chunks);
        for (int r = 0; r < kRows; ++r) {
          acts.to_blocks(r, want.data());
          for (size_t i = 0; i < chunks; ++i) {
            const BlockActs& block = got[static_cast<size_t>(r) * chunks + i];
            ASSERT_EQ(std::memcmp(block.codes, want[i].codes, sizeof(block.codes)), 0);
            for (int s = 0; s < 8; ++s) {
              ASSERT_EQ(block.meta[s].step, want[i].meta[s].step);
              ASSERT_EQ(block.meta[s].sum0, want[i].meta[s].sum0);
              ASSERT_EQ(block.meta[s].sum1, want[i].meta[s].sum1);
              ASSERT_EQ(block.meta[s].sum_bytes, want[i].meta[s].sum_bytes);
            }
          }
        }
      }
    }
  }
}

__global__ void divide_kernel(uint32_t exponent, uint32_t* wrong) {
  const uint32_t bits = exponent << 23 | (blockIdx.x * blockDim.x + threadIdx.x);
  const float x = __uint_as_float(bits);
  if (x < 1e-35f) return;
  if (divide_127(x) != __fdiv_rn(127.0f, x) || divide_by_127(x) != __fdiv_rn(x, 127.0f)) atomicAdd(wrong, 1);
}

TEST(ExpertBitsCuda, DividesBy127AsIeee) {
  SKIP_WITHOUT_GPU();
  DeviceBuffer wrong = to_device(std::vector<uint32_t>{0});
  for (uint32_t exponent = 10; exponent < 255; ++exponent)
    divide_kernel<<<(1 << 23) / 256, 256>>>(exponent, wrong.as<uint32_t>());
  EXPECT_EQ(to_host(wrong.as<uint32_t>(), 1)[0], 0u);
}

__global__ void swiglu_kernel(const float* gate, const float* up, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = swiglu_exact(gate[i], up[i]);
}

TEST(ExpertBitsCuda, SwigluHasTheProcessorsBits) {
  SKIP_WITHOUT_GPU();
  std::vector<float> gate = {0.0f,   -0.0f,    1e-30f,    -1e-30f, 88.0f,
                             -88.0f, 87.3365f, -87.3365f, 100.0f,  -100.0f};
  std::mt19937 random(7);
  std::normal_distribution<float> normal(0.0f, 6.0f);
  while (gate.size() < 1 << 20) gate.push_back(normal(random) * (random() % 17 == 0 ? 8.0f : 1.0f));
  const std::vector<float> up = spiky(gate.size(), random);
  const DeviceBuffer device_gate = to_device(gate), device_up = to_device(up);
  DeviceBuffer y(gate.size() * sizeof(float));
  const int n = static_cast<int>(gate.size());
  swiglu_kernel<<<(n + 255) / 256, 256>>>(device_gate.as<float>(), device_up.as<float>(), y.as<float>(), n);
  const std::vector<float> got = to_host(y.as<float>(), gate.size());
  for (const Isa isa : vector_isas()) {
    std::vector<float> want = gate;
    row_op_kernels(isa).swiglu(want.data(), up.data(), n);
    expect_bits(got.data(), want.data(), want.size(), std::string(isa_name(isa)));
  }
}

}  // namespace
}  // namespace thermo
