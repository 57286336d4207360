#include "server/request_metrics.h"

#include <gtest/gtest.h>

namespace thermo {
namespace {

TEST(RequestMetrics, CountsEveryTokenOnce) {
  Metrics metrics;
  Answer answer;
  answer.stats.n_completion = 100;
  answer.n_reasoning_tokens = 50;
  answer.n_call_tokens = 20;
  answer.n_forced_tokens = 13;  // a sentence that ends the reasoning, the marker after it, and the end
  answer.n_forced_reasoning_tokens = 10;
  count_answer(metrics, {}, answer);
  const auto n = [&](const char* kind) { return metrics.sum("thermocline_generated_tokens_total", kind); };
  EXPECT_EQ(n("reasoning"), 40.0);
  EXPECT_EQ(n("tool"), 20.0);
  EXPECT_EQ(n("forced"), 13.0);
  EXPECT_EQ(n("content"), 27.0);
  EXPECT_EQ(n("kind"), 100.0);
}

TEST(RequestMetrics, TellsDamagedCallsFromGoodOnes) {
  Metrics metrics;
  Answer answer;
  answer.tool_calls = {{.id = "", .name = "a", .arguments = "{}"},
                       {.id = "", .name = "b", .arguments = "{}", .complete = true, .repaired = true},
                       {.id = "", .name = "c", .arguments = "{", .complete = false}};
  answer.repairs.calls_closed = 1;
  answer.repairs.unknown_tools = 2;
  count_answer(metrics, {}, answer);
  const auto n = [&](const char* result) { return metrics.sum("thermocline_tool_calls_total", result); };
  EXPECT_EQ(n("\"ok\""), 1.0);
  EXPECT_EQ(n("recovered"), 1.0);
  EXPECT_EQ(n("truncated"), 1.0);
  EXPECT_EQ(n("unknown_name"), 2.0);
  EXPECT_EQ(metrics.sum("thermocline_tool_call_repairs_total", "call_closed"), 1.0);
  EXPECT_EQ(metrics.sum("thermocline_tool_call_repairs_total"), 1.0);
}

TEST(RequestMetrics, CountsMembersThatHadNoEffect) {
  Metrics metrics;
  GenerationRequest request;
  const HttpRequest http;
  const auto end = [&] {
    count_request(metrics, {},
                  {.request = request,
                   .http = http,
                   .key_name = "",
                   .outcome = "ok",
                   .phase = "",
                   .seconds = 0.0,
                   .answers = {}});
  };
  end();
  EXPECT_EQ(metrics.sum("thermocline_ignored_fields_total"), 0.0);
  request.ignored_fields = {"a", "b.c"};
  end();
  EXPECT_EQ(metrics.sum("thermocline_ignored_fields_total"), 2.0);
}

}  // namespace
}  // namespace thermo
