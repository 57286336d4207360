// The rows of GPU steps of up to 64 rows have the bits of plain decoding: every cache type, chains and trees,
// borders of tiles, several sequences, long contexts.
#include <gtest/gtest.h>

#include <algorithm>
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

  const DeviceArray<std::byte> device_cache(cache.bytes);
  StepOnDevice device(c, step, projected, cache.device(device_cache.data(), device_table.data()));
  ASSERT_NO_FATAL_FAILURE(device.run(0));
  const std::vector<float> got = device.out.read();
  const std::vector<std::byte> cache_after = device_cache.read();
  for (size_t g = 0; g < n_groups; ++g)
    for (size_t i = 0; i < as_size(c.groups[g].n_rows); ++i) {
      const size_t r = as_size(step.group_begin[g]) + i,
                   k_at = cache.k_at(step.sequence(g), c.groups[g].past + static_cast<int>(i)),
                   v_at = cache.v_at(step.sequence(g), c.groups[g].past + static_cast<int>(i));
      EXPECT_EQ(std::memcmp(&cache_after[k_at], want_k[r].data(), cache.k_slot), 0) << about(g, i);
      EXPECT_EQ(std::memcmp(&cache_after[v_at], want_v[r].data(), cache.v_slot), 0) << about(g, i);
      size_t first = 0;
      while (first < q_dim && std::memcmp(&got[r * q_dim + first], &want[r * q_dim + first], 4) == 0) ++first;
      ASSERT_EQ(first, q_dim) << got[r * q_dim + first] << " instead of " << want[r * q_dim + first] << ", "
                              << about(g, i);
    }
  ASSERT_TRUE(device.intact() && device_cache.intact());
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

}  // namespace
}  // namespace thermo
