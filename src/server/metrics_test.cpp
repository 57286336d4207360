#include "server/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace thermo {
namespace {

using ::testing::HasSubstr;

TEST(Metrics, AddsUpCountersOverLabels) {
  Metrics metrics;
  EXPECT_EQ(metrics.sum("thermocline_prompt_tokens_total"), 0.0);
  metrics.count("thermocline_prompt_tokens_total", "source=\"computed\"", 5);
  metrics.count("thermocline_prompt_tokens_total", "source=\"cached\"", 2);
  EXPECT_EQ(metrics.sum("thermocline_prompt_tokens_total"), 7.0);
  EXPECT_EQ(metrics.sum("thermocline_prompt_tokens_total", "source=\"cached\""), 2.0);
}

TEST(Metrics, ShowsAHistogramUnderAnotherName) {
  Metrics metrics;
  metrics.observe("thermocline_queue_wait_seconds", 0.05);
  metrics.observe("thermocline_queue_wait_seconds", 2.0);
  std::string text;
  metrics.write_histogram(text, "thermocline_queue_wait_seconds", "vllm:request_queue_time_seconds", "Help.",
                          "model_name=\"m\"");
  EXPECT_THAT(text, HasSubstr("# TYPE vllm:request_queue_time_seconds histogram\n"));
  EXPECT_THAT(text, HasSubstr("vllm:request_queue_time_seconds_bucket{model_name=\"m\",le=\"0.1\"} 1\n"));
  EXPECT_THAT(text, HasSubstr("vllm:request_queue_time_seconds_count{model_name=\"m\"} 2\n"));

  std::string empty;
  metrics.write_histogram(empty, "thermocline_request_duration_seconds", "x", "Help.", "");
  EXPECT_THAT(empty, HasSubstr("x_bucket{le=\"+Inf\"} 0\nx_sum 0\nx_count 0\n"));
}

}  // namespace
}  // namespace thermo
