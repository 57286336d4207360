#include "cli/bench/bench_plan.h"

#include <gtest/gtest.h>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/sha256.h"
#include "cli/bench/bench_report.h"

namespace thermo {
namespace {

std::vector<int> ints(std::vector<std::string> texts) {
  return parse_int_lists("-p", texts);
}

TEST(BenchPlan, ReadsListsRangesAndRepeats) {
  EXPECT_EQ(ints({"512"}), (std::vector<int>{512}));
  EXPECT_EQ(ints({"512,2048", "7"}), (std::vector<int>{512, 2048, 7}));
  EXPECT_EQ(ints({"1-4"}), (std::vector<int>{1, 2, 3, 4}));
  EXPECT_EQ(ints({"128-512+128"}), (std::vector<int>{128, 256, 384, 512}));
  EXPECT_EQ(ints({"1-20*2,3"}), (std::vector<int>{1, 2, 4, 8, 16, 3}));
}

TEST(BenchPlan, RefusesWhatIsNoList) {
  for (const char* text :
       {"", "x", "1,", "-1", "4-1", "1-4+0", "1-4*1", "0-8*2", "1-", "99999999999", "0-16000000"})
    EXPECT_THROW(ints({text}), ConfigError) << text;
}

TEST(BenchPlan, SweepsTheShareOfHotExperts) {
  const auto caches = [](const BenchLists& lists) {
    std::vector<std::string> texts;
    for (const BenchSetup& setup : make_bench_plan(lists).setups) texts.push_back(setup.expert_cache);
    return texts;
  };
  BenchLists lists;
  EXPECT_EQ(caches(lists), (std::vector<std::string>{"auto"}));
  lists.expert_sweep = {"0,20-60+20,100%"};
  EXPECT_EQ(caches(lists), (std::vector<std::string>{"0%", "20%", "40%", "60%", "100%"}));
  lists.n_cpu_moe = {"8"};
  EXPECT_THROW(make_bench_plan(lists), ConfigError);
  lists.expert_sweep.clear();
  EXPECT_EQ(make_bench_plan(lists).setups[0].n_cpu_moe, 8);
  lists.n_cpu_moe.clear();
  lists.expert_cache = {"4G,60%,auto"};
  EXPECT_EQ(caches(lists), (std::vector<std::string>{"4G", "60%", "auto"}));
  for (const char* text : {"150%", "-4G", "much", ""}) {
    lists.expert_cache = {text};
    EXPECT_THROW(make_bench_plan(lists), ConfigError) << text;
  }
  lists.expert_cache.clear();
  for (const char* text : {"150", "-1", "x", "0,"}) {
    lists.expert_sweep = {text};
    EXPECT_THROW(make_bench_plan(lists), ConfigError) << text;
  }
}

TEST(BenchPlan, TakesTheLoadModesOfLlamaBench) {
  BenchLists lists;
  const auto repacked = [&lists] {
    std::vector<bool> values;
    for (const BenchSetup& setup : make_bench_plan(lists).setups) values.push_back(setup.repack);
    return values;
  };
  EXPECT_EQ(repacked(), std::vector<bool>{true});
  lists.load_mode = {"none,mmap", "auto"};
  EXPECT_EQ(repacked(), (std::vector<bool>{true, false, true}));
  lists.repack = {false};
  EXPECT_THROW(repacked(), ConfigError);
  lists.load_mode.clear();
  EXPECT_EQ(repacked(), std::vector<bool>{false});
  lists.repack.clear();
  lists.load_mode = {"dio"};
  EXPECT_THROW(repacked(), ConfigError);
}

TEST(BenchPlan, RunsEveryCombination) {
  BenchLists lists;
  lists.n_prompt = {"16,32"};
  lists.n_gen = {"8"};
  lists.prompt_gen = {"16,4"};
  lists.n_depth = {"0,64"};
  lists.n_threads = {"1,2"};
  lists.k_type = {"f16,q8_0"};
  const BenchPlan plan = make_bench_plan(lists);
  EXPECT_EQ(plan.setups.size(), 4u);
  ASSERT_EQ(plan.tests.size(), 8u);
  EXPECT_EQ(plan.tests[0].name(), "pp16");
  EXPECT_EQ(plan.tests[2].name(), "tg8");
  EXPECT_EQ(plan.tests[3].name(), "pp16+tg4");
  EXPECT_EQ(plan.tests[7].name(), "pp16+tg4 @ d64");
  EXPECT_EQ(plan.max_tokens(), 96);
}

TEST(BenchPlan, MeasuresOnlyRowsWhenAskedForRows) {
  BenchLists lists;
  lists.n_rows = {"1-64*2"};
  lists.n_depth = {"0,32"};
  const BenchPlan plan = make_bench_plan(lists);
  ASSERT_EQ(plan.tests.size(), 14u);
  EXPECT_EQ(plan.tests[0].name(), "rows1");
  EXPECT_EQ(plan.tests[13].name(), "rows64 @ d32");
  EXPECT_EQ(plan.max_rows(), 64);
  EXPECT_EQ(plan.max_tokens(), 96);
  lists.n_gen = {"8"};
  EXPECT_EQ(make_bench_plan(lists).tests[0].name(), "tg8");
  lists.n_rows = {"65"};
  EXPECT_THROW(make_bench_plan(lists), ConfigError);
}

TEST(BenchPlan, HasTheDefaultsOfLlamaBench) {
  const BenchPlan plan = make_bench_plan({});
  ASSERT_EQ(plan.tests.size(), 2u);
  EXPECT_EQ(plan.tests[0].name(), "pp512");
  EXPECT_EQ(plan.tests[1].name(), "tg128");
  BenchLists nothing;
  nothing.n_prompt = nothing.n_gen = {"0"};
  EXPECT_THROW(make_bench_plan(nothing), ConfigError);
}

TEST(BenchSha256, AgreesWithTheStandard) {
  const auto of = [](std::string_view text) { return sha256_hex(std::as_bytes(std::span(text))); };
  EXPECT_EQ(of(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(of("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(of(std::string(1000, 'a')), "41edece42d63e8d9bf515a9ba6932e1c20cbc9f5a5d134645adb5db1b9737ea3");
}

TEST(BenchPlan, SeveralSequencesAreGenerationAlone) {
  BenchLists lists;
  lists.n_parallel = {"1,4", "16"};
  const BenchPlan plan = make_bench_plan(lists);
  ASSERT_EQ(plan.tests.size(), 3u);
  EXPECT_EQ(plan.tests[0].name(), "tg128");
  EXPECT_EQ(plan.tests[2].name(), "tg128 x 16");
  EXPECT_EQ(plan.tests[2].n_tokens(), 16 * 128);
  EXPECT_EQ(plan.max_tokens(), 128);
  EXPECT_EQ(plan.max_parallel(), 16);
  lists.n_prompt = {"32"};
  EXPECT_EQ(make_bench_plan(lists).tests.size(), 4u);
  for (const char* text : {"0", "x", "5000"}) {
    lists.n_parallel = {text};
    EXPECT_THROW(make_bench_plan(lists), ConfigError) << text;
  }
}

TEST(BenchReport, WritesRowsThatParse) {
  const auto model_table = [](BenchPrinter::Sink sink) { return make_model_table({}, std::move(sink)); };
  const Json row = {
      {"n", 1}, {"quoted", "a \"b\" 'c'"}, {"none", nullptr}, {"x", 0.5}, {"samples_ns", {1, 2}}};
  const auto print = [&](const char* format) {
    std::string out;
    const auto printer = make_bench_printer(format, model_table, [&](std::string_view text) { out += text; });
    printer->begin();
    printer->row(row);
    printer->row(row);
    printer->finish();
    return out;
  };
  EXPECT_EQ(Json::parse(print("json")), Json::array({row, row}));
  EXPECT_EQ(Json::parse(print("jsonl").substr(0, print("jsonl").find('\n'))), row);
  EXPECT_EQ(print("csv").substr(0, 59),
            "\"n\",\"quoted\",\"none\",\"x\"\n\"1\",\"a \"\"b\"\" 'c'\",\"\",\"0.500000\"\n\"1\"");
  EXPECT_NE(print("sql").find("VALUES (1, 'a \"b\" ''c''', NULL, 0.500000);"), std::string::npos);
}

// Weights that the caches hold are not read from memory: 232 % of its bandwidth says nothing.
TEST(BenchFields, HaveNoShareOfTheBandwidthWhereTheCachesHoldTheWeights) {
  BenchContext context;
  context.read_bytes_per_s = 1e10;
  context.engine.device = "cpu";
  context.engine.n_threads = 1;
  BenchResult result;
  result.test.n_gen = 4;
  result.samples_ns = {1'000'000};
  const uint64_t caches = cpu_info().l3_bytes + cpu_info().l2_bytes;
  for (const uint64_t bytes : {caches, caches + 1}) {
    context.engine.bytes_per_token = bytes;
    const Json fields = bench_fields(context, result);
    EXPECT_FALSE(fields["read_gb_s"].is_null());
    EXPECT_EQ(fields["bandwidth_share"].is_null(), bytes == caches);
  }
}

}  // namespace
}  // namespace thermo
