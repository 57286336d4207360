// Every architecture against recorded outputs of the reference implementation, on every instruction set, and
// every way to cut the same tokens into steps against each other.
#include "model/model.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <map>
#include <random>

#include "base/error.h"
#include "gguf/gguf_file.h"
#include "model/testing/edited_file.h"
#include "model/testing/model_checks.h"
#include "model/testing/quantised_file.h"
#include "model/testing/recorded_model.h"

namespace thermo {
namespace {

std::unique_ptr<Model> make_model(const GgufFile& file, ThreadPool& pool, Isa isa, bool repack = true,
                                  int n_sequences = 2, bool taps = true) {
  ModelConfig config = read_model_config(file);
  if (taps) insert_all_taps(config.network, config.n_layer);
  Weights weights = Weights::load(config, file, repack, pool, {});
  ModelOptions options;
  options.n_batch = 128;
  options.n_sequences = n_sequences;
  options.isa = isa;
  options.sequence = {.n_ctx = 160, .max_draft_rows = 64, .k_type = KvType::F32, .v_type = KvType::F32};
  return std::make_unique<Model>(std::move(config), std::move(weights), options, pool);
}

constexpr double kTolerance = 1e-4;  // the recorded outputs agree among implementations to a few 1e-5

class ArchitectureTest : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(All, ArchitectureTest, testing::Values("qwen35moe", "qwen35", "laguna", "qwen3moe"),
                         [](const auto& test) { return test.param; });

TEST_P(ArchitectureTest, MatchesTheReferenceOnEveryPathAndChunkLength) {
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  for (Isa isa : available_isas()) {
    const auto model = make_model(fixture.file, pool, isa);
    for (size_t chunk : {size_t{100}, size_t{1}, size_t{7}, size_t{63}, size_t{64}, size_t{65}}) {
      const Outputs got = run_in_chunks(*model, fixture.ids, chunk, true);
      EXPECT_LT(error_of(got.logits, fixture.reference("logits")), kTolerance)
          << isa_name(isa) << " chunk " << chunk;
      for (size_t l = 0; l < got.hidden.size(); ++l)
        EXPECT_LT(error_of(got.hidden[l], fixture.reference("hidden." + std::to_string(l))), kTolerance)
            << isa_name(isa) << " chunk " << chunk << " layer " << l;
    }
  }
}

TEST_P(ArchitectureTest, LeavesTheHiddenStatesThatWereAskedFor) {
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  ModelConfig config = read_model_config(fixture.file);
  const int last = config.n_layer;
  const float eps = config.norm_eps;
  const auto width = static_cast<size_t>(config.n_embd);
  insert_taps(config.network, config.n_layer, {0, 2, last, last_stream(last)});
  Weights weights = Weights::load(config, fixture.file, true, pool, {});
  ModelOptions options;
  options.n_batch = 128;
  options.isa = best_isa();
  options.sequence = {.n_ctx = 160, .max_draft_rows = 0, .k_type = KvType::F32, .v_type = KvType::F32};
  Model model(std::move(config), std::move(weights), options, pool);
  Outputs got = run_in_chunks(model, fixture.ids, 33, true);
  ASSERT_EQ(got.hidden.size(), 4u);
  EXPECT_LT(error_of(got.hidden[0], fixture.reference("hidden.0")), kTolerance);
  EXPECT_LT(error_of(got.hidden[1], fixture.reference("hidden.2")), kTolerance);
  EXPECT_LT(error_of(got.hidden[2], fixture.reference("hidden." + std::to_string(last))), kTolerance);
  // The last one is the same before the norm.
  const float* const norm = model.weights().output.front().floats(Role::Norm);
  for (size_t at = 0; at < got.hidden[3].size(); at += width) {
    float* const row = got.hidden[3].data() + at;
    row_op_kernels_ref().rms_norm(row, norm, static_cast<int>(width), eps, row);
  }
  EXPECT_LT(error_of(got.hidden[3], fixture.reference("hidden." + std::to_string(last))), kTolerance);
}

// Eight bits of weights and activations, carried through a few layers of 64 columns: up to 0.2 in the typical
// row; a missing part of the network is one or more.
TEST_P(ArchitectureTest, MatchesTheReferenceWithQuantisedWeights) {
  const RecordedModel fixture(GetParam());
  const QuantisedFile quantised(fixture.file);
  const GgufFile file = quantised.open();
  ThreadPool pool({.n_threads = 2});
  const auto model = make_model(file, pool, best_isa());
  for (const size_t chunk : {size_t{1}, size_t{64}}) {
    const Outputs got = run_in_chunks(*model, fixture.ids, chunk);
    EXPECT_LT(median_error_of_rows(got.logits, fixture.reference("logits"),
                                   static_cast<size_t>(model->config().n_vocab)),
              0.3)
        << "chunk " << chunk;
  }
}

TEST_P(ArchitectureTest, GivesTheSameWithoutRepacking) {
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  const auto packed = make_model(fixture.file, pool, best_isa(), true);
  const auto mapped = make_model(fixture.file, pool, best_isa(), false);
  const Outputs a = run_in_chunks(*packed, fixture.ids, 64), b = run_in_chunks(*mapped, fixture.ids, 64);
  EXPECT_EQ(a.logits, b.logits);
}

TEST_P(ArchitectureTest, ComputesTheSameLogitsForSomeRowsAsForAll) {
  const RecordedModel fixture(GetParam());
  const QuantisedFile quantised(fixture.file);
  const GgufFile file = quantised.open();
  ThreadPool pool({.n_threads = 2});
  for (const Isa isa : available_isas()) {
    SCOPED_TRACE(isa_name(isa));
    expect_logits_of_any_rows(*make_model(fixture.file, pool, isa, true, 1, false), fixture.ids, 0.0);
    expect_logits_of_any_rows(*make_model(file, pool, isa, true, 1, false), fixture.ids, 0.0);
  }
}

TEST_P(ArchitectureTest, KeepsSequencesApart) {
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_sequences_apart(*make_model(fixture.file, pool, best_isa()), fixture.ids, kTolerance);
}

TEST_P(ArchitectureTest, EvaluatesAndCommitsTreesLikeTheirPaths) {
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  for (const Isa isa : available_isas()) {
    SCOPED_TRACE(isa_name(isa));
    expect_trees_like_their_paths(*make_model(fixture.file, pool, isa), fixture.ids, kTolerance);
  }
}

TEST_P(ArchitectureTest, RunsPrefillDecodeAndTreesInOneStep) {
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  const auto model = make_model(fixture.file, pool, best_isa(), true, 4);
  expect_mixed_steps_like_single_ones(*model, fixture.ids, 80, 0.0);
  expect_mixed_steps_like_single_ones(*model, fixture.ids, 2, 0.0);
}

TEST_P(ArchitectureTest, ComesBackToACheckpoint) {
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_return_to_a_checkpoint(*make_model(fixture.file, pool, best_isa()), fixture.ids, kTolerance);
}

TEST_P(ArchitectureTest, RestoresACheckpointInAnotherSequence) {
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_checkpoints_in_other_sequences(*make_model(fixture.file, pool, best_isa()), fixture.ids, 0.0);
}

TEST_P(ArchitectureTest, LoadsBlocksOfKeysAndValuesInAnotherSequence) {
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  expect_blocks_in_other_sequences(*make_model(fixture.file, pool, best_isa()), fixture.ids, 0.0);
}

TEST_P(ArchitectureTest, RunsWithEveryCacheType) {
  const RecordedModel fixture(GetParam());
  ThreadPool pool({.n_threads = 2});
  // Rounding of the cache: half a unit of 11 or 8 bits, and of 7 or 3 bits relative to the block's largest
  // value, carried through a few layers. A row whose router was near a tie may choose another expert, so the
  // bound is on the typical row.
  const std::pair<KvType, double> cases[] = {
      {KvType::F16, 0.005}, {KvType::BF16, 0.04}, {KvType::Q8_0, 0.1}, {KvType::Q4_0, 0.8}};
  for (const auto& [type, bound] : cases) {
    ModelConfig config = read_model_config(fixture.file);
    Weights weights = Weights::load(config, fixture.file, true, pool, {});
    ModelOptions options;
    options.n_batch = 128;
    options.isa = best_isa();
    options.sequence = {.n_ctx = 160, .max_draft_rows = 0, .k_type = type, .v_type = type};
    Model model(std::move(config), std::move(weights), options, pool);
    const Outputs got = run_in_chunks(model, fixture.ids, 33);
    const std::vector<float> want = fixture.reference("logits");
    const auto n_vocab = static_cast<size_t>(model.config().n_vocab);
    const double error = median_error_of_rows(got.logits, want, n_vocab);
    EXPECT_LT(error, bound) << kv_type_name(type);
    EXPECT_GT(error, 0.0) << kv_type_name(type);
  }
}

std::vector<float> logits_of_file(const GgufFile& file, std::span<const TokenId> ids) {
  ThreadPool pool({.n_threads = 2});
  const auto model = make_model(file, pool, best_isa());
  return run_in_chunks(*model, ids, 64).logits;
}

TEST(ModelFiles, MayHoldGateAndUpOfTheExpertsInOneTensor) {
  const RecordedModel fixture("qwen35moe");
  const auto is_gate_or_up = [](const GgufTensor& tensor) {
    return tensor.name.ends_with("ffn_gate_exps.weight") || tensor.name.ends_with("ffn_up_exps.weight");
  };
  const EditedFile fused(
      fixture.file,
      [&](GgufWriter& writer, EditedFile& edited) {
        for (const GgufTensor& gate : fixture.file.tensors()) {
          if (!gate.name.ends_with("ffn_gate_exps.weight")) continue;
          const std::string block(gate.name.substr(0, gate.name.find("ffn_")));
          const GgufTensor& up = fixture.file.require_tensor(block + "ffn_up_exps.weight");
          const size_t expert = gate.n_bytes / gate.dims[2];
          std::vector<std::byte>& data = edited.owned.emplace_back();
          for (size_t e = 0; e < gate.dims[2]; ++e) {
            data.insert(data.end(), gate.data + e * expert, gate.data + (e + 1) * expert);
            data.insert(data.end(), up.data + e * expert, up.data + (e + 1) * expert);
          }
          writer.add_tensor(block + "ffn_gate_up_exps.weight", gate.dtype,
                            {gate.dims[0], 2 * gate.dims[1], gate.dims[2]}, data);
        }
      },
      [&](const GgufTensor& tensor) { return !is_gate_or_up(tensor); });
  EXPECT_EQ(logits_of_file(fused.open(), fixture.ids), logits_of_file(fixture.file, fixture.ids));
}

TEST(ModelFiles, MayUseTheEmbeddingAsHead) {
  const RecordedModel fixture("qwen35");
  const GgufTensor& embedding = fixture.file.require_tensor("token_embd.weight");
  const auto not_head = [](const GgufTensor& tensor) { return tensor.name != "output.weight"; };
  const EditedFile tied(fixture.file, {}, not_head);
  const EditedFile copied(
      fixture.file,
      [&](GgufWriter& writer, EditedFile&) {
        writer.add_tensor("output.weight", embedding.dtype, {embedding.dims[0], embedding.dims[1]},
                          std::span(embedding.data, embedding.n_bytes));
      },
      not_head);
  EXPECT_EQ(logits_of_file(tied.open(), fixture.ids), logits_of_file(copied.open(), fixture.ids));
}

// The first rows and columns of the tensors whose shape the size of a head decides, for a smaller one.
EditedFile with_smaller_heads(const GgufFile& source, const std::map<std::string_view, uint64_t>& sizes,
                              const std::vector<std::pair<std::string_view, uint32_t>>& keys) {
  const auto part_of = [](std::string_view name) { return name.substr(name.find('.', 4) + 1); };
  const auto is_smaller = [&](const GgufTensor& tensor) {
    return tensor.name.starts_with("blk.") && sizes.contains(part_of(tensor.name));
  };
  return EditedFile(
      source,
      [&](GgufWriter& writer, EditedFile& edited) {
        for (const auto& [key, value] : keys) writer.set(key, value);
        for (const GgufTensor& tensor : source.tensors()) {
          if (!is_smaller(tensor)) continue;
          const uint64_t size = sizes.at(part_of(tensor.name));
          std::vector<uint64_t> dims{tensor.dims.begin(), tensor.dims.begin() + tensor.n_dims};
          // Norms, and columns of what reads heads; rows of all else.
          const bool columns =
              tensor.n_dims == 1 || part_of(tensor.name).find("out") != std::string_view::npos;
          dims[columns ? 0 : 1] = size;
          std::vector<std::byte>& data = edited.owned.emplace_back();
          for (uint64_t r = 0; r < (tensor.n_dims == 1 ? 1 : dims[1]); ++r) {
            const std::byte* const row = tensor.data + r * tensor.dims[0] * sizeof(float);
            data.insert(data.end(), row, row + dims[0] * sizeof(float));
          }
          writer.add_tensor(tensor.name, tensor.dtype, dims, data);
        }
      },
      [&](const GgufTensor& tensor) { return !is_smaller(tensor); });
}

// Kernels take heads that are no multiple of their vectors; so do caches, states, trees and commits.
void expect_the_same_on_every_path(const GgufFile& file, std::span<const TokenId> ids) {
  ThreadPool pool({.n_threads = 2});
  const Outputs want = run_in_chunks(*make_model(file, pool, Isa::Portable), ids, 1);
  for (const Isa isa : available_isas()) {
    SCOPED_TRACE(isa_name(isa));
    const auto model = make_model(file, pool, isa, true, 4);
    for (const size_t chunk : {size_t{1}, size_t{7}, size_t{100}})
      EXPECT_LT(error_of(run_in_chunks(*model, ids, chunk).logits, want.logits), kTolerance) << chunk;
    expect_trees_like_their_paths(*model, ids, kTolerance);
    expect_return_to_a_checkpoint(*model, ids, kTolerance);
    expect_mixed_steps_like_single_ones(*model, ids, 40, 0.0);
  }
}

// With one and three of them, rows of all heads together are no multiple of 16 either.
TEST(ModelFiles, MayHaveHeadsOfAnyMultipleOfEight) {
  const RecordedModel fixture("qwen3moe");
  struct Case {
    uint32_t dim, n_head, n_head_kv;
  };
  for (const Case& c : {Case{8, 4, 2}, {24, 4, 2}, {24, 3, 1}}) {
    SCOPED_TRACE(c.dim * c.n_head);
    const uint32_t q = c.n_head * c.dim, kv = c.n_head_kv * c.dim;
    const EditedFile edited = with_smaller_heads(fixture.file,
                                                 {{"attn_q.weight", q},
                                                  {"attn_k.weight", kv},
                                                  {"attn_v.weight", kv},
                                                  {"attn_output.weight", q},
                                                  {"attn_q_norm.weight", c.dim},
                                                  {"attn_k_norm.weight", c.dim}},
                                                 {{"qwen3moe.attention.key_length", c.dim},
                                                  {"qwen3moe.attention.value_length", c.dim},
                                                  {"qwen3moe.attention.head_count", c.n_head},
                                                  {"qwen3moe.attention.head_count_kv", c.n_head_kv}});
    expect_the_same_on_every_path(edited.open(), fixture.ids);
  }
}

TEST(ModelFiles, MayHaveStatesOfAnyMultipleOfEight) {
  const RecordedModel fixture("qwen35");
  struct Case {
    uint32_t n_head_k, n_head_v;
  };
  for (const Case& c : {Case{2, 4}, {1, 3}, {1, 1}}) {
    SCOPED_TRACE(c.n_head_v);
    const uint32_t dim = 8, inner = c.n_head_v * dim, channels = 2 * c.n_head_k * dim + inner;
    const EditedFile edited = with_smaller_heads(fixture.file,
                                                 {{"attn_qkv.weight", channels},
                                                  {"attn_gate.weight", inner},
                                                  {"ssm_conv1d.weight", channels},
                                                  {"ssm_norm.weight", dim},
                                                  {"ssm_alpha.weight", c.n_head_v},
                                                  {"ssm_beta.weight", c.n_head_v},
                                                  {"ssm_a", c.n_head_v},
                                                  {"ssm_dt.bias", c.n_head_v},
                                                  {"ssm_out.weight", inner}},
                                                 {{"qwen35.ssm.state_size", dim},
                                                  {"qwen35.ssm.group_count", c.n_head_k},
                                                  {"qwen35.ssm.time_step_rank", c.n_head_v},
                                                  {"qwen35.ssm.inner_size", inner}});
    expect_the_same_on_every_path(edited.open(), fixture.ids);
  }
}

TEST(ModelFiles, MayLeaveOutTheBiasOfARouter) {
  const RecordedModel fixture("laguna");
  const auto no_bias = [](const GgufTensor& tensor) { return !tensor.name.ends_with("exp_probs_b.bias"); };
  const EditedFile without(fixture.file, {}, no_bias);
  const EditedFile zeros(
      fixture.file,
      [](GgufWriter& writer, EditedFile& edited) {
        for (int il = 1; il < 5; ++il)
          edited.add_zeros(writer, "blk." + std::to_string(il) + ".exp_probs_b.bias", {16});
      },
      no_bias);
  EXPECT_EQ(logits_of_file(without.open(), fixture.ids), logits_of_file(zeros.open(), fixture.ids));
}

// Zero logits of an element's gate are those of a head's gate.
TEST(ModelFiles, MayHaveGatesByHeadAndByElement) {
  const RecordedModel fixture("laguna");
  const auto gates_of = [&](uint64_t n_outputs) {
    return EditedFile(
        fixture.file,
        [&](GgufWriter& writer, EditedFile& edited) {
          edited.add_zeros(writer, "blk.1.attn_gate.weight", {64, n_outputs});
        },
        [](const GgufTensor& tensor) { return tensor.name != "blk.1.attn_gate.weight"; });
  };
  EXPECT_LT(error_of(logits_of_file(gates_of(6 * 32).open(), fixture.ids),
                     logits_of_file(gates_of(6).open(), fixture.ids)),
            1e-6);
}

TEST(ModelFiles, AreNotRunWithMoreRowsThanTheirMemoryIsFor) {
  const RecordedModel fixture("qwen35");
  ThreadPool pool({.n_threads = 1});
  const auto model = make_model(fixture.file, pool, best_isa());
  const std::vector<TokenId> ids(129, 1);
  EXPECT_DEATH(step_rows(*model, chain(ids)), "more rows than its memory");
}

// The sentence of a failed load.
std::string load_error(const EditedFile& edited) {
  try {
    const GgufFile file = edited.open();
    const ModelConfig config = read_model_config(file);
    Weights::bind(config, file);
  } catch (const LoadError& error) {
    return error.what();
  }
  return "";
}

TEST(ModelFiles, AreRefusedWithTheNameOfTheTensorThatIsWrong) {
  const RecordedModel fixture("laguna");
  const auto without = [](std::string_view name) {
    return [name](const GgufTensor& tensor) { return tensor.name != name; };
  };
  EXPECT_NE(load_error(EditedFile(fixture.file, {}, without("blk.1.ffn_up_exps.weight")))
                .find("blk.1.ffn_up_exps.weight"),
            std::string::npos);

  const std::vector<std::byte> zeros(64 * 15 * sizeof(float));
  const std::string shape = load_error(EditedFile(
      fixture.file,
      [&](GgufWriter& writer, EditedFile&) {
        writer.add_tensor("blk.1.ffn_gate_inp.weight", DType::F32, {64, 15}, zeros);
      },
      without("blk.1.ffn_gate_inp.weight")));
  EXPECT_NE(shape.find("[64, 15]"), std::string::npos) << shape;
  EXPECT_NE(shape.find("[64, 16]"), std::string::npos) << shape;

  const std::string block = load_error(EditedFile(
      fixture.file,
      [&](GgufWriter& writer, EditedFile&) {
        writer.add_tensor("blk.9.attn_norm.weight", DType::F32, {64}, std::span(zeros).first(256));
      },
      [](const GgufTensor&) { return true; }));
  EXPECT_NE(block.find("blk.9.attn_norm.weight"), std::string::npos) << block;
}

// A size that a file leaves out has the bound of one that it names: products of sizes fit into their type.
TEST(ModelFiles, AreRefusedWithHeadsThatAreTooWide) {
  const RecordedModel fixture("qwen3moe");
  const EditedFile edited(
      fixture.file,
      [](GgufWriter& writer, EditedFile&) {
        writer.set("qwen3moe.embedding_length", uint32_t{1} << 20);
        writer.set_array("qwen3moe.attention.head_count", std::vector<uint32_t>{1, 4096, 4096});
        writer.set("qwen3moe.attention.head_count_kv", uint32_t{1});
      },
      {}, {"qwen3moe.attention.key_length", "qwen3moe.attention.value_length"});
  EXPECT_NE(load_error(edited).find("taken as 1048576"), std::string::npos) << load_error(edited);
}

// Names are anybody's text: a sentence with them stays one line, and a short one.
TEST(ModelFiles, AreRefusedInOneSentenceWhateverTheirNamesHold) {
  const RecordedModel fixture("laguna");
  const std::string name = std::string("a\0b\n\x1b[31m", 9) + std::string(500, 'c');
  const std::string shown = "a\\x00b\\n\\x1b[31mccc";
  const auto with_key = [&](const char* key) {
    return load_error(
        EditedFile(fixture.file, [&](GgufWriter& writer, EditedFile&) { writer.set(key, name); }));
  };
  const auto with_tensor = [&](const std::string& tensor) {
    return load_error(EditedFile(fixture.file, [&](GgufWriter& writer, EditedFile& edited) {
      edited.add_zeros(writer, tensor, {4});
    }));
  };
  for (const std::string& error :
       {with_key("general.architecture"), with_key("laguna.rope.scaling.type"),
        with_tensor(name.substr(0, 40) + ".scale"), with_tensor("blk.9" + name.substr(0, 40))}) {
    EXPECT_NE(error.find(shown), std::string::npos) << error;
    EXPECT_LT(error.size(), 400u);
  }
}

}  // namespace
}  // namespace thermo
