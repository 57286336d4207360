#include "model/sequence_layout.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "gguf/gguf_file.h"

namespace thermo {
namespace {

struct Piece {
  size_t begin, end;
};

// Sorted, none may touch another, and all lie below `limit`.
void expect_apart(std::vector<Piece> pieces, size_t limit) {
  std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
  for (size_t i = 0; i < pieces.size(); ++i) {
    EXPECT_LE(pieces[i].begin, pieces[i].end);
    EXPECT_LE(pieces[i].end, i + 1 < pieces.size() ? pieces[i + 1].begin : limit) << i;
    EXPECT_EQ(pieces[i].begin % SequenceLayout::kPartAlign, 0u) << i;
  }
}

class SequenceLayoutTest : public testing::TestWithParam<const char*> {
 protected:
  const ModelConfig config =
      read_model_config(GgufFile(std::string(THERMO_TEST_DATA) + "/" + GetParam() + "-f32.gguf"));
  const SequenceConfig options{
      .n_ctx = 77, .max_draft_rows = 5, .k_type = KvType::F16, .v_type = KvType::F32};
  static constexpr int kSequences = 3;
};
INSTANTIATE_TEST_SUITE_P(All, SequenceLayoutTest,
                         testing::Values("qwen35moe", "qwen35", "laguna", "qwen3moe"),
                         [](const auto& test) { return test.param; });

TEST_P(SequenceLayoutTest, GivesEveryPartItsOwnBytes) {
  const auto floats = [](auto... sizes) { return (static_cast<size_t>(sizes) * ...) * sizeof(float); };
  for (const bool gpu : {false, true}) {
    const SequenceLayout layout =
        gpu ? SequenceLayout::on_gpu(config, options) : SequenceLayout::on_cpu(config, options);
    const int stride = gpu ? config.ssm_channels() : config.ssm_channel_stride();
    std::map<KvKind, std::vector<Piece>> kv;
    std::vector<Piece> recurrent, tape;
    for (int s = 0; s < kSequences; ++s)
      for (int il = 0; il < config.n_layer; ++il) {
        if (!layout.is_recurrent(il)) {
          const auto at = layout.kv(il, s), end = layout.kv(il, s, kKvPage);  // pages 0, 1, 2
          std::vector<Piece>& pieces = kv[layout.kv_kind(il)];
          pieces.push_back({at.k, end.k});
          pieces.push_back({at.v, end.v});
          continue;
        }
        const auto memory = layout.recurrent(s, il);
        recurrent.push_back(
            {memory.state, memory.state + floats(config.ssm_n_head_v, config.ssm_dim, config.ssm_dim)});
        recurrent.push_back({memory.columns, memory.columns + floats(config.ssm_taps - 1, stride)});
        const auto rows = layout.tape(s, il);
        const int n = options.max_draft_rows;
        tape.push_back({rows.conv_input, rows.conv_input + floats(n, stride)});
        tape.push_back({rows.k, rows.k + floats(n, config.ssm_n_head_k, config.ssm_dim)});
        tape.push_back({rows.g, rows.g + floats(n, config.ssm_n_head_v)});
        tape.push_back({rows.delta, rows.delta + floats(n, config.ssm_inner())});
      }
    for (const KvKind kind : kEachKvKind) expect_apart(kv[kind], kSequences * layout.page_bytes(kind));
    expect_apart(recurrent, kSequences * layout.recurrent_bytes());
    expect_apart(tape, kSequences * layout.tape_bytes());
    EXPECT_EQ(recurrent.empty(), layout.recurrent_bytes() == 0);
  }
}

TEST_P(SequenceLayoutTest, StepsFromSlotToSlot) {
  const SequenceLayout layout = SequenceLayout::on_cpu(config, options);
  const auto kv_dim = static_cast<size_t>(config.n_kv_dim());
  EXPECT_EQ(layout.k_slot_bytes(), kv_dim * 2);
  EXPECT_EQ(layout.v_slot_bytes(), kv_dim * 4);
  for (int il = 0; il < config.n_layer; ++il) {
    if (layout.is_recurrent(il)) continue;
    EXPECT_EQ(layout.kv(il, 1, 9).k - layout.kv(il, 1).k, 9 * layout.k_slot_bytes());
    EXPECT_EQ(layout.kv(il, 1, 9).v - layout.kv(il, 1).v, 9 * layout.v_slot_bytes());
    EXPECT_EQ(layout.kv(il, 5).k - layout.kv(il, 4).k, layout.page_bytes(layout.kv_kind(il)));
  }
}

// What a checkpoint copies: the state, what sliding layers see, and the rest on request.
TEST_P(SequenceLayoutTest, ListsAllThatASequenceConsistsOf) {
  const SequenceLayout layout = SequenceLayout::on_gpu(config, options);
  const std::vector<int32_t> full = {3, 1, 4}, sliding = {2, 0, 5};
  const PageTables tables = {full.data(), sliding.data()};
  const size_t slot = layout.k_slot_bytes() + layout.v_slot_bytes();
  for (const int n_past : {0, 1, 10, 256, 300, 600})
    for (const bool with_kv : {false, true}) {
      std::map<SequenceLayout::Region, size_t> bytes;
      std::map<SequenceLayout::Region, std::vector<Piece>> pieces;
      layout.for_each_piece(2, tables, n_past, with_kv,
                            [&](SequenceLayout::Region region, size_t offset, size_t n) {
                              bytes[region] += n;
                              pieces[region].push_back({offset, offset + n});
                            });
      EXPECT_EQ(bytes[SequenceLayout::Region::Recurrent], layout.recurrent_bytes());
      const int seen = n_past - layout.sliding_begin(n_past);
      EXPECT_EQ(bytes[SequenceLayout::Region::Sliding],
                layout.n_layers(KvKind::Sliding) == 0
                    ? 0u
                    : static_cast<size_t>(layout.n_layers(KvKind::Sliding) * seen) * slot);
      EXPECT_EQ(bytes[SequenceLayout::Region::Full],
                !with_kv ? 0u : static_cast<size_t>(layout.n_layers(KvKind::Full) * n_past) * slot);
      size_t sum = 0;
      for (auto& [region, n] : bytes) sum += n;
      EXPECT_EQ(layout.piece_bytes(n_past, with_kv), sum);
      for (auto& [region, list] : pieces) {
        std::sort(list.begin(), list.end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
        for (size_t i = 1; i < list.size(); ++i) EXPECT_LE(list[i - 1].end, list[i].begin);
      }
    }
}

// What a cache copies: every byte of the positions once, at the same place of a block whatever is copied with
// it.
TEST_P(SequenceLayoutTest, ListsPositionsOfABlock) {
  const SequenceLayout layout = SequenceLayout::on_gpu(config, options);
  const std::vector<int32_t> pages = {3, 1, 4};
  const size_t slot = layout.k_slot_bytes() + layout.v_slot_bytes();
  // Of a page, a whole one, and (a drafter that is a token behind) parts of two.
  for (const auto& [position, first, n] :
       std::vector<std::array<int, 3>>{{259, 3, 7}, {256, 0, kKvPage}, {255, 0, kKvPage}, {255, 0, 9}}) {
    std::vector<Piece> from, to;
    size_t sum = 0;
    layout.for_each_block_piece(pages.data(), position, first, n,
                                [&](size_t offset, size_t at, size_t bytes) {
                                  from.push_back({offset, offset + bytes});
                                  to.push_back({at, at + bytes});
                                  sum += bytes;
                                });
    EXPECT_EQ(sum, static_cast<size_t>(n * layout.n_layers(KvKind::Full)) * slot);
    for (auto* list : {&from, &to}) {
      std::sort(list->begin(), list->end(), [](const Piece& a, const Piece& b) { return a.begin < b.begin; });
      for (size_t i = 1; i < list->size(); ++i) EXPECT_LE((*list)[i - 1].end, (*list)[i].begin);
    }
    EXPECT_LE(to.empty() ? 0 : to.back().end, layout.block_bytes());
  }
}

}  // namespace
}  // namespace thermo
