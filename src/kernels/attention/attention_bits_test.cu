// The rows of GPU steps of up to 64 rows have the bits of plain decoding: every cache type, chains and trees,
// borders of tiles, several sequences, long contexts. One and two rows in three launches and in one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "device/device_info.h"
#include "device/testing/skip_without_gpu.h"
#include "kernels/testing/device_attention.h"

namespace thermo {
namespace {

using namespace thermo::testing;
using namespace thermo::testing::device_attention;

// The rows of a step have the bits that plain decoding along their branch gives, and so have the keys and
// values they leave. `chains`: uncommitted rows are chains. Values of the rows differ widely: what a row does
// not see must not show.
void expect_bits_of_decoding(const Case& c, bool chains, uint64_t seed) {
  const size_t n_groups = c.groups.size(), q_dim = as_size(c.shape.n_head * c.shape.head_dim),
               kv_dim = as_size(c.shape.n_head_kv * c.shape.head_dim);
  Inputs in(seed);
  const DeviceStep step(c.groups, c.n_padding, c.uncommitted, seed, chains);
  const size_t n_rows = as_size(step.n_rows);
  Projected projected(c, n_rows, in);
  for (size_t i = 0; i < n_rows * kv_dim; ++i) {
    const float factor = i / kv_dim % 3 == 0 ? 1e3f : i / kv_dim % 3 == 1 ? 1.0f : 1e-3f;
    projected.v[i] = std::clamp(projected.v[i] * factor, -6e4f, 6e4f);
  }
  int n_slots = 0;
  for (const StepGroup& g : c.groups) n_slots = std::max(n_slots, g.past + g.n_rows);
  TestKv cache(c.k_type, c.v_type, c.shape.n_head_kv, c.shape.head_dim, n_slots + 5,
               static_cast<int>(n_groups));
  const DeviceArray<int32_t> device_table(cache.table);
  for (size_t g = 0; g < n_groups; ++g) {
    const size_t past = as_size(c.groups[g].past);
    const std::vector<float> k = in.normal(past * kv_dim), v = in.spiky(past * kv_dim);
    attention_kernels(Isa::Portable)
        .kv_append({.k = k.data(),
                    .v = v.data(),
                    .kv = cache.view(step.sequence(g)),
                    .first_slot = 0,
                    .n_rows = c.groups[g].past,
                    .n_head_kv = c.shape.n_head_kv,
                    .head_dim = c.shape.head_dim});
  }
  const auto about = [&](size_t g, size_t row) {
    return ::testing::Message() << "row " << row << " of group " << g << " of " << n_groups << ", past "
                                << c.groups[g].past << ", heads " << c.shape.n_head << "/"
                                << c.shape.n_head_kv << ", dim " << c.shape.head_dim << ", rows of the step "
                                << n_rows << ", window " << c.window << ", uncommitted " << c.uncommitted
                                << ", chains " << chains << ", k " << kv_type_name(c.k_type) << ", v "
                                << kv_type_name(c.v_type);
  };

  // One row after the other, each after its ancestors in the cache.
  std::vector<float> want(n_rows * q_dim);
  std::vector<std::vector<std::byte>> want_k(n_rows), want_v(n_rows);
  const auto copy = [](void* to, const void* from, size_t n) {
    ASSERT_EQ(cudaMemcpy(to, from, n, cudaMemcpyDefault), cudaSuccess);
  };
  const DeviceArray<std::byte> one_cache(cache.bytes);
  for (size_t g = 0; g < n_groups; ++g) {
    const size_t begin = as_size(step.group_begin[g]), rows = as_size(c.groups[g].n_rows);
    const int past = c.groups[g].past, sequence = step.sequence(g);
    const std::vector<int32_t> parents(&step.parent[begin], &step.parent[begin] + rows);
    // The only sequence of its steps.
    const DeviceKv kv = cache.device(one_cache.data(), device_table.data() + sequence * cache.table_pages);
    const auto k_at = [&](int slot) { return one_cache.data() + cache.k_at(sequence, slot); };
    const auto v_at = [&](int slot) { return one_cache.data() + cache.v_at(sequence, slot); };
    StepOnDevice one(c, DeviceStep({{0, 1}}, 0, false, seed), projected.row(begin, n_rows), kv);
    for (size_t i = 0; i < rows; ++i) {
      const std::vector<int32_t> path = path_to(parents, static_cast<int32_t>(i));
      for (size_t d = 0; d + 1 < path.size(); ++d) {
        const size_t row = begin + as_size(path[d]);
        copy(k_at(past + static_cast<int>(d)), want_k[row].data(), cache.k_slot);
        copy(v_at(past + static_cast<int>(d)), want_v[row].data(), cache.v_slot);
      }
      const size_t r = begin + i;
      const int slot = past + static_cast<int>(path.size()) - 1;
      const DeviceStep single({{slot, 1}}, 0, false, seed);
      one.take(single, projected.row(r, n_rows));
      for (int way = 0; way < 2; ++way) {
        ASSERT_NO_FATAL_FAILURE(one.run(way)) << about(g, i);
        const std::vector<float> out = one.out.read();
        if (way == 1) {
          ASSERT_EQ(std::memcmp(out.data(), &want[r * q_dim], q_dim * sizeof(float)), 0)
              << "in one launch, " << about(g, i);
        }
        std::copy_n(out.data(), q_dim, &want[r * q_dim]);
      }
      want_k[r].resize(cache.k_slot);
      want_v[r].resize(cache.v_slot);
      copy(want_k[r].data(), k_at(slot), cache.k_slot);
      copy(want_v[r].data(), v_at(slot), cache.v_slot);
    }
  }

  DeviceArray<std::byte> device_cache(cache.bytes);
  StepOnDevice device(c, step, projected, cache.device(device_cache.data(), device_table.data()));
  for (int way = 0; way < StepOnDevice::n_ways(n_rows); ++way) {
    device_cache.write(cache.bytes);
    device.out.write(std::vector<float>(n_rows * q_dim, NAN));
    ASSERT_NO_FATAL_FAILURE(device.run(way));
    const std::vector<float> got = device.out.read();
    std::vector<std::byte> cache_after = device_cache.read();
    for (size_t g = 0; g < n_groups; ++g)
      for (size_t i = 0; i < as_size(c.groups[g].n_rows); ++i) {
        const size_t r = as_size(step.group_begin[g]) + i,
                     k_at = cache.k_at(step.sequence(g), c.groups[g].past + static_cast<int>(i)),
                     v_at = cache.v_at(step.sequence(g), c.groups[g].past + static_cast<int>(i));
        ASSERT_EQ(std::memcmp(&cache_after[k_at], want_k[r].data(), cache.k_slot), 0)
            << "key, way " << way << ", " << about(g, i);
        ASSERT_EQ(std::memcmp(&cache_after[v_at], want_v[r].data(), cache.v_slot), 0)
            << "value, way " << way << ", " << about(g, i);
        std::copy_n(&cache.bytes[k_at], cache.k_slot, &cache_after[k_at]);
        std::copy_n(&cache.bytes[v_at], cache.v_slot, &cache_after[v_at]);
        size_t first = 0;
        while (first < q_dim && std::memcmp(&got[r * q_dim + first], &want[r * q_dim + first], 4) == 0)
          ++first;
        ASSERT_EQ(first, q_dim) << got[r * q_dim + first] << " instead of " << want[r * q_dim + first]
                                << ", way " << way << ", " << about(g, i);
      }
    // Nothing but the step's own slots was written.
    ASSERT_TRUE(cache_after == cache.bytes) << "way " << way << ", " << about(0, 0);
    ASSERT_TRUE(device.intact() && device_cache.intact()) << "way " << way << ", " << about(0, 0);
  }
}

TEST(AttentionCuda, GivesARowTheSameBitsInEveryStep) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 20000;
  const auto expect_all = [&](Case c) {
    c.uncommitted = false;
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, true, seed++));
    c.uncommitted = true;
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, true, seed++));
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, false, seed++));
  };
  for (const int n_rows : {2, 3, 8, 17, 33, 64})
    for (const KvType type : kTypes) {
      ASSERT_NO_FATAL_FAILURE(expect_all({{16, 2, 256}, {{7 + 11 * n_rows, n_rows}}, type, type}));
      ASSERT_NO_FATAL_FAILURE(expect_all({{12, 2, 128}, {{90 + n_rows, n_rows}}, type, type}));
    }
  for (const KvType type : kTypes)
    for (const Shape& shape : {Shape{2, 2, 64}, Shape{10, 1, 32}, Shape{20, 1, 64}, Shape{6, 2, 16}}) {
      if (kv_in_blocks(type) && shape.head_dim % 32 != 0) continue;
      for (const int n_rows : {3, 33}) {
        ASSERT_NO_FATAL_FAILURE(expect_all({shape, {{7 + 11 * n_rows, n_rows}}, type, type}));
      }
    }
}

TEST(AttentionCuda, GivesARowTheSameBitsAroundTheBordersOfTiles) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 21000;
  for (const KvType type : kTypes)
    for (const int past : {0, 1, 15, 16, 17, 63, 100, 120, 127, 128, 129, 1000, 1023})
      for (const int window : {0, 20, 100})
        for (const bool chains : {true, false}) {
          Case c{{16, 2, 128}, {{past, 19}}, type, type, window, true};
          c.n_multiprocessors = past % 2 == 0 ? 132 : 6;  // few parts: their tiles follow each other
          ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, chains, seed++));
        }
}

TEST(AttentionCuda, GivesARowTheSameBitsBesideOtherSequences) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 22000;
  for (const KvType type : kTypes)
    for (const Shape& shape : {Shape{16, 2, 256}, Shape{12, 2, 128}, Shape{6, 2, 16}, Shape{4, 4, 64}}) {
      if (kv_in_blocks(type) && shape.head_dim % 32 != 0) continue;
      Case c{shape, {{5, 1}, {300, 1}, {64, 1}, {0, 1}, {130, 2}}, type, type};
      c.n_padding = 2;
      ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, true, seed++));
      c.groups.back() = {700, 1};  // a row of each
      ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, true, seed++));
      c.groups = {{70, 1, true}, {33, 9}, {0, 3, true}, {128, 21}, {15, 6}};
      c.n_padding = 0;
      c.uncommitted = true;
      ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, false, seed++));
      c.window = 50;
      ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, false, seed++));
    }
}

TEST(AttentionCuda, GivesARowTheSameBitsInLongContexts) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 23000;
  for (const int n_multiprocessors : {132, 16})
    for (const int window : {0, 512})
      for (const bool chains : {true, false}) {
        Case c{{16, 2, 256}, {{5000, 12}}, KvType::F16, KvType::F16, window, true};
        c.n_multiprocessors = n_multiprocessors;
        ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, chains, seed++));
      }
  ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(
      {{16, 2, 256}, {{8180, 15}, {8191, 2}}, KvType::F16, KvType::F16, 0, true}, false, seed++));
}

// Every way in which two rows can be related, and one row beside padding. `past` is of the first sequence,
// `other` of the second if there are two.
void expect_bits_of_two_rows(Case c, int past, int other, uint64_t& seed) {
  struct Rows {
    std::vector<StepGroup> groups;
    bool uncommitted;
    int n_padding = 0;
  };
  const StepGroup committed{other, 1, true};
  for (const Rows& rows :
       {Rows{{{past, 2}}, false}, Rows{{{past, 2}}, true}, Rows{{{past, 2, false, true}}, true},
        Rows{{{past, 1}, {other, 1}}, false}, Rows{{{past, 1}, {other, 1}}, true},
        Rows{{{past, 1}, committed}, true}, Rows{{{past, 1}}, false, 1}}) {
    c.groups = rows.groups;
    c.uncommitted = rows.uncommitted;
    c.n_padding = rows.n_padding;
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, true, seed++))
        << "siblings " << rows.groups[0].siblings;
  }
}

TEST(AttentionCuda, GivesTwoRowsTheSameBitsAroundBorders) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 24000;
  // Few parts: the rows share blocks, or walk together. On the third card all is one part.
  const int cards[] = {132, 6, 2};
  size_t n = 0;
  for (const KvType type : {KvType::F16, KvType::Q8_0})
    for (const int past : {0, 1, 14, 15, 16, 126, 127, 128, 254, 255, 383, 900})
      for (const int window : {0, 1, 20, 130}) {
        Case c{{16, 2, n % 2 == 0 ? 256 : 128}, {}, type, type, window};
        c.n_multiprocessors = cards[n++ % 3];
        ASSERT_NO_FATAL_FAILURE(expect_bits_of_two_rows(c, past, (past * 7 + 100) % 300, seed));
      }
}

// qwen35moe, qwen3moe, both kinds of layers of laguna, few and odd numbers of heads.
TEST(AttentionCuda, GivesTwoRowsTheSameBitsForEveryShapeAndType) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 25000;
  struct Model {
    Shape shape;
    HeadGate gate;
    int n_rot;
  };
  struct Types {
    KvType k, v;
  };
  for (const Model& model :
       {Model{{16, 2, 256}, HeadGate::SigmoidElement, 64}, Model{{32, 4, 128}, HeadGate::None, 128},
        Model{{48, 8, 128}, HeadGate::SoftplusHead, 64}, Model{{64, 8, 128}, HeadGate::SoftplusElement, 128},
        Model{{5, 1, 256}, HeadGate::None, 256}, Model{{3, 3, 128}, HeadGate::SoftplusHead, 32}})
    for (const Types& types : {Types{KvType::F16, KvType::F16}, Types{KvType::Q8_0, KvType::Q8_0},
                               Types{KvType::F16, KvType::Q8_0}, Types{KvType::Q8_0, KvType::F16},
                               Types{KvType::F32, KvType::F32}})
      for (const int window : {0, 200}) {
        Case c{model.shape, {}, types.k, types.v, window, false, model.gate};
        c.n_rot = model.n_rot;
        ASSERT_NO_FATAL_FAILURE(expect_bits_of_two_rows(c, 255, 300, seed));
      }
}

TEST(AttentionCuda, GivesTwoRowsTheSameBitsInLongContexts) {
  SKIP_WITHOUT_GPU();
  uint64_t seed = 26000;
  struct Lengths {
    int past, other, window;
  };
  // 132 multiprocessors and 2 kv heads: 64 parts of 128 slots, so the rows share blocks from 4096 slots on.
  for (const Lengths& lengths :
       {Lengths{4063, 0, 0}, Lengths{4095, 4094, 0}, Lengths{8191, 200, 0}, Lengths{5000, 8300, 4100}}) {
    const Case c{{16, 2, 256}, {}, KvType::F16, KvType::F16, lengths.window};
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_two_rows(c, lengths.past, lengths.other, seed));
  }
  // 16 parts.
  for (const int past : {1022, 1023, 1024, 2047}) {
    const KvType type = past == 1024 ? KvType::Q8_0 : KvType::F16;
    const Case c{{48, 8, 128}, {}, type, type};
    ASSERT_NO_FATAL_FAILURE(expect_bits_of_two_rows(c, past, 700, seed));
  }
  const Case c{{16, 2, 256}, {{16439, 2}}, KvType::F16, KvType::F16, 0, true};
  ASSERT_NO_FATAL_FAILURE(expect_bits_of_decoding(c, true, seed));
}

// The other tests would pass without it.
TEST(AttentionCuda, AttendsTwoRowsInOneLaunch) {
  SKIP_WITHOUT_GPU();
  if (!dependent_launch() || device_in_use().n_multiprocessors < 132) GTEST_SKIP() << "an older card";
  for (const auto& groups : std::vector<std::vector<StepGroup>>{
           {{300, 2}}, {{9000, 2}}, {{300, 2, false, true}}, {{300, 1}, {20, 1}}, {{300, 1}}}) {
    Case c{{16, 2, 256}, groups, KvType::F16, KvType::F16, 0, true};
    Inputs in(1);
    const DeviceStep step(groups, 0, true, 1, true);
    TestKv cache(c.k_type, c.v_type, 2, 256, 9100, static_cast<int>(groups.size()));
    std::fill(cache.bytes.begin(), cache.bytes.end(), std::byte{0});
    const DeviceArray<std::byte> device_cache(cache.bytes);
    const DeviceArray<int32_t> table(cache.table);
    StepOnDevice device(c, step, Projected(c, as_size(step.n_rows), in),
                        cache.device(device_cache.data(), table.data()));
    const auto is_zero = [&] {
      const std::vector<std::byte> bytes = device.tagged.read();
      return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
    };
    ASSERT_NO_FATAL_FAILURE(device.run(0));
    EXPECT_TRUE(is_zero());
    ASSERT_NO_FATAL_FAILURE(device.run(1));
    EXPECT_FALSE(is_zero()) << groups.size() << " groups, past " << groups[0].past;
  }
}

}  // namespace
}  // namespace thermo
