#include "engine/memory_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "base/process_watch.h"
#include "base/units.h"
#include "engine/engine.h"
#include "gguf/gguf_file.h"
#include "model/model_config.h"
#include "speculative/lookup_drafter.h"

namespace thermo {
namespace {

const GgufFile& plankton() {
  static const GgufFile file(std::string(THERMO_MODELS) + "/plankton-q4_k_m.gguf");
  return file;
}

TEST(MemoryPlan, HalvesTheContextUntilItFits) {
  const GgufFile dense(std::string(THERMO_TEST_DATA) + "/qwen35-f32.gguf");
  const ModelConfig config = read_model_config(dense);
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.min_ctx = 512;
  const MemoryPlan wide = plan_memory(config, dense, inputs);
  EXPECT_EQ(wide.n_ctx, 2048);
  inputs.available_bytes = wide.total_bytes - 1;
  EXPECT_EQ(plan_memory(config, dense, inputs).n_ctx, 1024);
  inputs.n_ctx = 2048;  // asked for: never silently less
  EXPECT_THROW(plan_memory(config, dense, inputs), MemoryError);
  uint64_t sum = 0;
  for (const MemoryPlanItem& item : wide.items) sum += item.bytes;
  EXPECT_EQ(sum, wide.total_bytes);
}

TEST(MemoryPlan, DoesNotGoBelowTheShortestContext) {
  const GgufFile dense(std::string(THERMO_TEST_DATA) + "/qwen35-f32.gguf");
  const ModelConfig config = read_model_config(dense);
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.available_bytes = plan_memory(config, dense, inputs).total_bytes - 1;
  inputs.min_ctx = 1024;
  EXPECT_EQ(plan_memory(config, dense, inputs).n_ctx, 1024);
  inputs.min_ctx = 2048;
  EXPECT_THROW(plan_memory(config, dense, inputs), MemoryError);
}

TEST(MemoryPlan, SaysWhatADrafterTakes) {
  const GgufFile dense(std::string(THERMO_TEST_DATA) + "/qwen35-f32.gguf");
  const ModelConfig config = read_model_config(dense);
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.n_ctx = 2048;
  inputs.available_bytes = plan_memory(config, dense, inputs).total_bytes;
  const auto refusal = [&] {
    try {
      plan_memory(config, dense, inputs);
    } catch (const MemoryError& error) {
      return std::string(error.what());
    }
    return std::string("it fits");
  };
  EXPECT_EQ(refusal(), "it fits");
  inputs.drafter_bytes = 1;
  EXPECT_NE(refusal().find("and its drafter need"), std::string::npos) << refusal();
  EXPECT_NE(refusal().find("without drafting it fits"), std::string::npos) << refusal();
  inputs.available_bytes -= 1;
  EXPECT_EQ(refusal().find("without drafting"), std::string::npos) << refusal();
  inputs.drafter_bytes = 0;
  EXPECT_EQ(refusal().find("drafter"), std::string::npos) << refusal();
}

// Nobody can work with a few hundred tokens: that is said, not chosen.
TEST(MemoryPlan, ChoosesAtLeast8192Tokens) {
  ModelConfig config = read_model_config(plankton());
  config.n_ctx_train = 32768;
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.expert_ram = 0;
  inputs.n_ctx = 8192;
  inputs.available_bytes = plan_memory(config, plankton(), inputs).total_bytes;
  inputs.n_ctx = 0;
  EXPECT_EQ(plan_memory(config, plankton(), inputs).n_ctx, 8192);
  inputs.available_bytes -= 1;
  EXPECT_THROW(plan_memory(config, plankton(), inputs), MemoryError);
}

// Reading every step's experts from the file costs more than a shorter context, up to a point.
TEST(MemoryPlan, ShortensALongContextBeforeExpertsMoveToTheFile) {
  const ModelConfig config = read_model_config(plankton());
  ModelConfig longer = config;
  longer.n_ctx_train = 32768;
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.min_ctx = 512;
  const MemoryPlan wide = plan_memory(longer, plankton(), inputs);
  EXPECT_EQ(wide.n_ctx, 32768);
  inputs.available_bytes = wide.total_bytes - 1;
  EXPECT_EQ(plan_memory(longer, plankton(), inputs).n_ctx, 16384);
  EXPECT_FALSE(plan_memory(longer, plankton(), inputs).experts_in_file());
  inputs.n_ctx = kRoomyContext;
  inputs.available_bytes = plan_memory(longer, plankton(), inputs).total_bytes - 1;
  inputs.n_ctx = 0;
  const MemoryPlan tight = plan_memory(longer, plankton(), inputs);
  EXPECT_EQ(tight.n_ctx, kRoomyContext);
  EXPECT_TRUE(tight.experts_in_file());
}

// Sequences share pages: with -c at least one whole context, otherwise some for each.
TEST(MemoryPlan, HasFewerPagesWhereNotAllContextsFit) {
  const ModelConfig config = read_model_config(plankton());
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.n_sequences = 8;
  inputs.n_ctx = 4096;
  const MemoryPlan all = plan_memory(config, plankton(), inputs);
  EXPECT_EQ(all.n_pages, 8 * 16);
  inputs.n_pages = 16;
  const MemoryPlan one = plan_memory(config, plankton(), inputs);
  EXPECT_EQ(one.n_pages, 16);
  EXPECT_LT(one.total_bytes, all.total_bytes);
  inputs.n_pages = 3;  // less than a context: that
  EXPECT_EQ(plan_memory(config, plankton(), inputs).n_pages, 16);
  inputs.n_pages = 0;
  for (const uint64_t share : {uint64_t{1}, uint64_t{2}, uint64_t{3}}) {
    inputs.available_bytes = one.total_bytes + (all.total_bytes - one.total_bytes) * share / 4;
    const MemoryPlan plan = plan_memory(config, plankton(), inputs);
    EXPECT_TRUE(plan.fits());
    EXPECT_FALSE(plan.experts_in_file());
    EXPECT_EQ(plan.n_ctx, 4096);
    EXPECT_GT(plan.n_pages, 16);
    EXPECT_LT(plan.n_pages, 8 * 16);
    const auto kv = std::find_if(plan.items.begin(), plan.items.end(),
                                 [](const MemoryPlanItem& item) { return item.name == "kv cache"; });
    ASSERT_NE(kv, plan.items.end());
    EXPECT_NE(kv->detail.find("shared by 8 sequences of up to 4096"), std::string::npos) << kv->detail;
  }
  // The context is ours to choose: shorter ones before too few pages.
  ModelConfig longer = config;
  longer.n_ctx_train = 32768;
  inputs.n_ctx = 0;
  inputs.available_bytes = 8 * GiB;
  const MemoryPlan wide = plan_memory(longer, plankton(), inputs);
  EXPECT_EQ(wide.n_ctx, 32768);
  inputs.available_bytes = wide.total_bytes / 2;
  const MemoryPlan tight = plan_memory(longer, plankton(), inputs);
  EXPECT_TRUE(tight.fits());
  EXPECT_GE(tight.n_pages, tight.n_ctx / 256 + 7 * 16);
}

TEST(MemoryPlan, HasFewerPagesOnADevice) {
  const ModelConfig config = read_model_config(plankton());
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.n_sequences = 4;
  inputs.n_ctx = 4096;
  const size_t page = SequenceLayout::on_gpu(config, {.n_ctx = 4096}).page_bytes(KvKind::Full);
  const auto items = [&](int, int n_pages) {
    return std::vector<MemoryPlanItem>{{"kv cache", static_cast<uint64_t>(n_pages) * page, ""}};
  };
  const uint64_t reserve = inputs.device_reserve;
  EXPECT_EQ(plan_device_memory(config, inputs, "card", reserve + 64 * page, items).n_pages, 64);
  const MemoryPlan some = plan_device_memory(config, inputs, "card", reserve + 40 * page, items);
  EXPECT_TRUE(some.fits());
  EXPECT_EQ(some.n_pages, 16 + 18);  // three quarters of the rest
  EXPECT_FALSE(plan_device_memory(config, inputs, "card", reserve + 15 * page, items).fits());
  inputs.device_reserve = 2 * reserve;
  EXPECT_FALSE(plan_device_memory(config, inputs, "card", reserve + 64 * page, items).fits());
  EXPECT_TRUE(plan_device_memory(config, inputs, "card", 2 * reserve + 64 * page, items).fits());
  inputs.device_reserve = reserve;
  // Beside experts that need the room more; here it is little.
  EXPECT_EQ(plan_device_memory(config, inputs, "card", reserve + 64 * page, items, true).n_pages, 64);
}

TEST(MemoryPlan, ChoosesAContextForADevice) {
  const ModelConfig config = read_model_config(plankton());
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.min_ctx = 512;
  const auto items = [](int n_ctx, int) {
    return std::vector<MemoryPlanItem>{{"kv cache", static_cast<uint64_t>(n_ctx) * MiB, ""}};
  };
  EXPECT_EQ(plan_device_memory(config, inputs, "card", 16 * GiB, items).n_ctx, 4096);
  EXPECT_EQ(plan_device_memory(config, inputs, "card", 3 * GiB, items).n_ctx, 2048);
  EXPECT_FALSE(plan_device_memory(config, inputs, "card", 512 * MiB, items).fits());
  inputs.min_ctx = 4096;
  EXPECT_FALSE(plan_device_memory(config, inputs, "card", 3 * GiB, items).fits());
  inputs.n_ctx = 4096;  // asked for: never silently less
  EXPECT_FALSE(plan_device_memory(config, inputs, "card", 3 * GiB, items).fits());
}

TEST(MemoryPlan, ComparesWhatWasTakenAtLoad) {
  const ModelConfig config = read_model_config(plankton());
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  const uint64_t alone = planned_at_load(plan_memory(config, plankton(), inputs).items);
  inputs.cache_bytes = 1 * GiB;
  MemoryPlan plan = plan_memory(config, plankton(), inputs);
  plan_checkpoints(plan, 1, 1 * MiB);
  EXPECT_EQ(planned_at_load(plan.items), alone);  // caches and checkpoints come later
  EXPECT_GT(plan.total_bytes, alone + 1 * GiB);
  EXPECT_EQ(plan_mistake(10 * GiB, 10 * GiB + 400 * MiB), "");
  EXPECT_EQ(plan_mistake(100 * MiB, 150 * MiB), "");  // what the plan rounds
  EXPECT_EQ(plan_mistake(10 * GiB, 11 * GiB), "10.00 GiB were planned and 11.00 GiB are taken, +10 %");
  EXPECT_EQ(plan_mistake(10 * GiB, 9 * GiB), "10.00 GiB were planned and 9.00 GiB are taken, -10 %");
}

// What an engine takes at load beyond its plan; nullopt: the system does not say.
std::optional<int64_t> beyond_plan(int n_batch, int n_sequences, DraftOptions::Kind kind) {
  static const GgufFile drafter(std::string(THERMO_MODELS) + "/plankton-draft-q8_0.gguf");
  EngineOptions options;
  options.n_ctx = 256;
  options.n_batch = n_batch;
  options.n_sequences = n_sequences;
  options.device.kind = DeviceChoice::Kind::Cpu;
  options.draft.kind = kind;
  options.draft.file = &drafter;
  const Engine engine(plankton(), options);
  if (!engine.info().host_taken_bytes) return std::nullopt;
  return static_cast<int64_t>(*engine.info().host_taken_bytes) -
         static_cast<int64_t>(planned_at_load(engine.plan().items));
}

// Rows of logits have address space from the beginning: 130 MiB in steps of 8192, which were taken for a
// mistake. States wait for a drafter in memory of each sequence: 240 MiB for 256, which were not planned.
TEST(MemoryPlan, IsWhatIsTakenAtLoad) {
  using Kind = DraftOptions::Kind;
  const auto small = beyond_plan(1, 1, Kind::None);
  if (!small) GTEST_SKIP() << "the system does not say what was taken";
  for (const auto& [n_batch, n_sequences] : {std::pair(8192, 1), {16, 256}})
    for (const Kind kind : {Kind::Mtp, Kind::File})
      EXPECT_LT(std::abs(beyond_plan(n_batch, n_sequences, kind).value() - *small),
                static_cast<int64_t>(20 * MiB))
          << n_batch << " rows, " << n_sequences << " sequences, drafter " << static_cast<int>(kind);
}

// It grew with the text, and no plan had it: 64 bytes a token.
TEST(MemoryPlan, HasTheIndexOfLookup) {
  EngineOptions options;
  options.n_ctx = 1 << 16;
  options.n_pages = options.n_ctx / kKvPage;
  options.n_sequences = 64;
  options.n_threads = 1;
  options.device.kind = DeviceChoice::Kind::Cpu;
  options.draft.kind = DraftOptions::Kind::Lookup;
  const auto n_tokens = static_cast<uint64_t>(options.n_ctx) * static_cast<uint64_t>(options.n_sequences);
  const MemoryPlan plan = Engine::plan_for(plankton(), options);
  const auto item = std::find_if(plan.items.begin(), plan.items.end(),
                                 [](const MemoryPlanItem& i) { return i.name == kDrafterItem; });
  ASSERT_NE(item, plan.items.end());
  EXPECT_EQ(item->bytes, LookupDrafter::kTokenBytes * n_tokens);
  EXPECT_FALSE(item->later);
  const std::optional<uint64_t> before = private_bytes();
  if (!before) GTEST_SKIP() << "the system does not say what was taken";
  const LookupDrafter drafter(options.n_sequences, options.n_ctx);
  const auto taken = static_cast<int64_t>(*private_bytes() - *before);
  // The allocator rounds each of its three parts up for every sequence.
  EXPECT_LT(std::abs(taken - static_cast<int64_t>(item->bytes)), static_cast<int64_t>(8 * MiB));
}

TEST(MemoryPlan, NamesWhatWouldFit) {
  const ModelConfig config = read_model_config(plankton());
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.n_ctx = 512;
  inputs.expert_ram = 0;  // as few experts as can do
  const uint64_t needed = plan_memory(config, plankton(), inputs).total_bytes;
  inputs.available_bytes = needed - 1 * MiB;
  try {
    plan_memory(config, plankton(), inputs);
    FAIL() << "must not fit";
  } catch (const MemoryError& error) {
    EXPECT_NE(std::string(error.what()).find("without repacking"), std::string::npos) << error.what();
    EXPECT_EQ(error.remedy(), Remedy::FileMapping);
  }
}

// Keys and values as q8_0 give another text, so they are named and not taken.
TEST(MemoryPlan, OffersASmallerCacheForAContextThatWasAskedFor) {
  ModelConfig config = read_model_config(plankton());
  config.n_ctx_train = 1 << 20;
  MemoryPlanInputs inputs;
  inputs.available_bytes = 64 * GiB;
  inputs.n_ctx = 1 << 20;
  inputs.repack = false;  // little else than the cache
  const uint64_t full = plan_memory(config, plankton(), inputs).total_bytes;
  MemoryPlanInputs smaller = inputs;
  smaller.k_type = smaller.v_type = KvType::Q8_0;
  const uint64_t least = plan_memory(config, plankton(), smaller).total_bytes;
  ASSERT_LT(least + 64 * MiB, full);
  const auto refusal = [&](uint64_t available) {
    inputs.available_bytes = available;
    try {
      plan_memory(config, plankton(), inputs);
    } catch (const MemoryError& error) {
      return std::pair(std::string(error.what()), error.remedy());
    }
    return std::pair(std::string(), Remedy::None);
  };
  const auto [offer, remedy] = refusal((full + least) / 2);
  EXPECT_NE(offer.find("with keys and values as q8_0 it fits"), std::string::npos) << offer;
  EXPECT_NE(offer.find("the largest context that fits is"), std::string::npos) << offer;
  EXPECT_EQ(remedy, Remedy::SmallerCache);
  EXPECT_EQ(refusal(least / 2).second, Remedy::SmallerContext) << "too little for q8_0 as well";
  inputs.k_type = inputs.v_type = KvType::Q4_0;
  EXPECT_FALSE(with_q8_cache(config, inputs));
  inputs.k_type = inputs.v_type = KvType::F16;
  inputs.n_ctx = 0;
  EXPECT_FALSE(with_q8_cache(config, inputs)) << "nobody asked for so long a context";
}

TEST(MemoryPlan, LeavesExpertsInTheFileWhereTheyDoNotFit) {
  const ModelConfig config = read_model_config(plankton());
  MemoryPlanInputs inputs;
  inputs.available_bytes = 8 * GiB;
  inputs.n_ctx = 1024;
  const MemoryPlan all = plan_memory(config, plankton(), inputs);
  EXPECT_FALSE(all.experts_in_file());
  EXPECT_EQ(all.note, "");
  inputs.available_bytes = all.total_bytes - 1;
  const MemoryPlan some = plan_memory(config, plankton(), inputs);
  EXPECT_TRUE(some.experts_in_file());
  EXPECT_TRUE(some.fits());
  EXPECT_EQ(some.n_ctx, 1024);
  EXPECT_LT(some.host_expert_bytes, some.expert_bytes);
  EXPECT_GT(some.host_expert_bytes, some.expert_bytes / 2);
  EXPECT_NE(some.note.find("the rest in the file"), std::string::npos) << some.note;
  uint64_t sum = 0;
  for (const MemoryPlanItem& item : some.items) sum += item.bytes;
  EXPECT_EQ(sum, some.total_bytes);
  // Asked for: as much as that, or the least that works.
  inputs.available_bytes = 8 * GiB;
  inputs.expert_ram = some.expert_bytes * 3 / 4;
  EXPECT_EQ(plan_memory(config, plankton(), inputs).host_expert_bytes, some.expert_bytes * 3 / 4);
  inputs.expert_ram = 0;
  const MemoryPlan least = plan_memory(config, plankton(), inputs);
  EXPECT_GT(least.host_expert_bytes, 0u);
  EXPECT_LT(least.host_expert_bytes, some.expert_bytes);
  EXPECT_NE(least.note, "");
}

}  // namespace
}  // namespace thermo
