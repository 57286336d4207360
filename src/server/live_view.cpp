#include "server/live_view.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <map>

#include "base/log.h"
#include "base/log_control.h"
#include "base/process_watch.h"
#include "base/utf8.h"
#include "server/api/reply_writer.h"
#include "server/experts_view.h"
#include "server/operations.h"

namespace thermo {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kMaxViewers = 16;
constexpr size_t kMaxUnsent = 1 << 20;  // a viewer that has so much to read does not read

double query_number(const HttpRequest& request, std::string_view name, double low, double high,
                    double standard) {
  const std::string text = request.query_value(name);
  if (text.empty()) return standard;
  double value = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= low && value <= high))
    throw invalid_value(std::string(name), fmt::format("{} is '{}', expected a number from {} to {}", name,
                                                       printable(text), low, high));
  return value;
}

Json hello(const ServerState& server) {
  const ServedModel& model = *server.model;
  const auto meta = [&](const char* name) {
    return model.meta.contains(name) ? model.meta[name] : Json(nullptr);
  };
  return {{"model", model.id},
          {"arch", meta("arch")},
          {"n_layer", meta("n_layer")},
          {"n_expert", meta("n_expert")},
          {"n_expert_used", meta("n_expert_used")},
          {"devices", Json::array({meta("device")})},
          {"version", server.options.version.value("version", "")}};
}

template <class T>
Json known_or_null(const std::optional<T>& value) {
  return value ? Json(*value) : Json(nullptr);
}

// Warnings and errors that came after `seen`, as events.
std::string log_events(uint64_t& seen) {
  std::string out;
  for (const LogLine& line : recent_warnings(seen)) {
    seen = line.number;
    out += sse_event("log", {{"ts", line.time},
                             {"level", level_name(line.level)},
                             {"component", line.component},
                             {"msg", line.message}});
  }
  return out;
}

Json tick(const ServerState& server, Clock::time_point begin) {
  const TokenServiceState state = server.model->service->state();
  const LoadHistory::Window last = server.history.window(1.0), minute = server.history.window(60.0);
  const auto known = [](const LoadHistory::Window& w, double value) {
    return w.seconds > 0.0 ? Json(value) : Json(nullptr);
  };
  const auto ratio = [](const LoadHistory::Window& w) {
    return w.n_uses > 0 ? Json(w.hot_ratio) : Json(nullptr);
  };
  int64_t used = 0;
  Json slots = Json::array();
  for (const SlotState& slot : state.slots) {
    used += slot.n_held;
    slots.push_back({{"busy", slot.busy},
                     {"prompt_n", slot.n_prompt},
                     {"prompt_done", slot.n_prompt_done},
                     {"cache_n", slot.n_cached},
                     {"generated", slot.n_written},
                     {"held", slot.n_held}});
  }
  const bool split = state.experts.total_bytes > 0;
  const ExpertHeat* const all = server.experts.get();
  const int64_t n_hot = all != nullptr ? all->n_in(all->hot_tier) : 0;
  Json experts = {
      {"hot", all != nullptr ? Json(n_hot) : Json(nullptr)},
      {"cold", all != nullptr ? Json(static_cast<int64_t>(all->places.size()) - n_hot) : Json(nullptr)},
      {"hot_bytes", split ? Json(state.experts.hot_bytes) : Json(nullptr)},
      {"total_bytes", split ? Json(state.experts.total_bytes) : Json(nullptr)},
      {"hit_ratio_1s", ratio(last)},
      {"hit_ratio_60s", ratio(minute)},
      {"migrations_s", known(last, last.moved_per_s)},
      {"bytes_s", known(last, last.moved_bytes_per_s)},
      {"stall_ms_s", known(last, last.stall_share * 1e3)}};
  Json spec = nullptr;
  if (!state.draft.drafter.empty())
    spec = {{"drafter", state.draft.drafter},
            {"rounds_s", known(last, last.rounds_per_s)},
            {"accept_len", state.draft.n_rounds > 0 ? Json(state.draft.accept_length()) : Json(nullptr)}};
  return {{"t_ms", std::lround(std::chrono::duration<double>(Clock::now() - begin).count() * 1e3)},
          {"decode_tps", known(last, last.written_per_s)},
          {"prefill_tps", known(last, last.prompt_per_s)},
          {"running", state.n_running},
          {"waiting", state.n_waiting},
          {"slots", std::move(slots)},
          {"kv_used_tokens", used},
          {"kv_capacity_tokens", static_cast<int64_t>(state.slots.size()) * state.n_ctx},
          {"cache", {{"hits", state.n_prompt_cached}, {"misses", state.n_prompt_computed}}},
          {"gpu", gpu_json(server.gpu)},
          {"cpu",
           {{"util", known(last, last.cpu)},
            {"threads_busy", known_or_null(server.history.newest().busy_threads)},
            {"rss", resident_bytes()},
            {"mem_bw_bps", known_or_null(last.memory_bytes_per_s)}}},
          {"experts", std::move(experts)},
          {"spec", std::move(spec)}};
}

}  // namespace

Json gpu_json(const std::optional<GpuReading>& gpu) {
  if (!gpu) return Json::array();
  const auto known = [](const auto& value) { return known_or_null(value); };
  return Json::array({{{"util", known(gpu->utilization)},
                       {"mem_used", known(gpu->memory_used_bytes)},
                       {"mem_total", known(gpu->memory_total_bytes)},
                       {"power_w", known(gpu->power_watts)},
                       {"temp_c", known(gpu->temperature_celsius)},
                       {"pcie_rx_bps", known(gpu->pcie_received_per_s)},
                       {"pcie_tx_bps", known(gpu->pcie_sent_per_s)}}});
}

namespace {

struct Viewer {
  explicit Viewer(int& count) : n(count) { ++n; }
  ~Viewer() { --n; }
  Viewer(const Viewer&) = delete;
  int& n;
};

}  // namespace

void sample_load(ServerState& server) {
  if (server.model == nullptr) return;
  const TokenServiceState state = server.model->service->state();
  // What is shown is the copy after the one that is asked for. An engine at rest is left alone.
  if (server.history.stirs(state.steps.n())) server.experts = server.model->service->expert_heat();
  const ExpertHeat* const experts = server.experts.get();
  server.history.add({.time = Clock::now(),
                      .n_written = state.n_written,
                      .n_prompt = state.n_prompt_computed,
                      .n_steps = state.steps.n(),
                      .experts = state.experts,
                      .draft = state.draft,
                      .cpu_seconds = process_cpu_seconds(),
                      // Only a viewer asks for these, and they take a moment.
                      .busy_threads = server.n_viewers > 0 ? n_running_threads() : std::nullopt,
                      .memory_bytes = server.n_viewers > 0 ? memory_traffic_bytes() : std::nullopt,
                      .uses = experts != nullptr ? experts->uses : nullptr,
                      .layers = experts != nullptr ? experts->layers : std::vector<LayerUses>()});
}

namespace {

// The events, until nobody looks any more.
asio::awaitable<void> tell(ServerState& server, HttpExchange& exchange, bool with_log, double hz, bool heat) {
  const auto signal = std::make_shared<Signal>(server.io.get_executor());
  exchange.notify([signal] { signal->raise(); });
  exchange.write(sse_event("hello", hello(server)));
  const Clock::time_point begin = Clock::now();
  const auto period = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(1.0 / hz));
  Clock::time_point next = begin, next_heat = begin;
  std::map<std::string, std::string> states;  // of requests, as they were shown
  uint64_t n_log_seen = n_recent_warnings();
  while (!exchange.gone() && !server.draining && exchange.unsent_bytes() < kMaxUnsent) {
    std::map<std::string, std::string> now;
    for (const auto& live : server.live) {
      const std::string& state = now[live->id] = live->shown_state();
      if (const auto before = states.find(live->id); before == states.end() || before->second != state)
        exchange.write(sse_event("request", request_json(server, *live)));
    }
    for (const auto& [id, state] : states)
      if (!now.contains(id)) exchange.write(sse_event("request", {{"id", id}, {"state", "ended"}}));
    states = std::move(now);
    if (with_log) exchange.write(log_events(n_log_seen));
    exchange.write(sse_event("tick", tick(server, begin)));
    if (heat && Clock::now() >= next_heat)
      if (const auto copy = server.model->service->expert_heat()) {
        exchange.write(sse_event("heat", heat_event(server, *copy)));
        next_heat = Clock::now() + std::chrono::seconds(1);
      }
    next = std::max(next + period, Clock::now());
    while (Clock::now() < next && !exchange.gone() && !server.draining) {
      const bool raised = co_await signal->wait_until(next);
      if (!raised) break;
    }
  }
}

}  // namespace

asio::awaitable<void> show_live(ServerState& server, HttpExchange& exchange, bool with_log,
                                std::vector<std::pair<std::string, std::string>> headers) {
  require_model(server);
  const double hz = query_number(exchange.request(), "hz", 0.2, 5.0, 2.0);
  const bool heat = query_number(exchange.request(), "heat", 0.0, 1.0, 0.0) > 0.0;
  if (server.n_viewers >= kMaxViewers)
    throw ApiError(503, "server_is_overloaded", "as many as may are watching already");
  const Viewer viewer(server.n_viewers);
  exchange.begin_stream(stream_head(std::move(headers)));
  try {
    if (exchange.request().method != "HEAD") co_await tell(server, exchange, with_log, hz, heat);
  } catch (const std::exception& error) {
    log_error("server", "req={} the live view failed: {}", exchange.request().id, error.what());
  }
  exchange.end_stream();
}

}  // namespace thermo
