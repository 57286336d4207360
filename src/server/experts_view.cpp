#include "server/experts_view.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "base/base64.h"
#include "base/clock.h"
#include "server/operations.h"

namespace thermo {
namespace {

constexpr double kLayerWindow = 60.0;  // seconds

// Seconds; 0: all of the time.
double window_seconds(const std::string& window) {
  if (window == "1s") return 1.0;
  if (window == "60s") return 60.0;
  if (window == "all") return 0.0;
  throw invalid_value("window",
                      fmt::format("window: '{}' is not known; 1s, 60s or all was expected", window));
}

// What was counted of each expert in the window. A reset begins again.
std::vector<uint64_t> uses_in(const ServerState& server, const ExpertHeat& heat, double seconds) {
  std::vector<uint64_t> uses = *heat.uses;
  if (seconds <= 0.0) return uses;
  const auto before = server.history.uses_before(seconds);
  for (size_t i = 0; before != nullptr && i < std::min(uses.size(), before->size()); ++i)
    if (uses[i] >= (*before)[i]) uses[i] -= (*before)[i];
  return uses;
}

Json promoted_ms(const ExpertPlace& place) {
  if (place.promoted_ns == 0) return nullptr;
  return (now_ns() - place.promoted_ns) / 1'000'000;
}

Json hits_json(const std::vector<std::optional<double>>& hits) {
  Json list = Json::array();
  for (const std::optional<double>& hit : hits) list.push_back(hit ? Json(*hit) : Json(nullptr));
  return list;
}

Json layers_json(const ServerState& server, const ExpertHeat& heat, double seconds) {
  const std::vector<uint64_t> uses = uses_in(server, heat, seconds);
  const std::vector<std::optional<double>> hits = server.history.layer_hits(kLayerWindow);
  Json layers = Json::array();
  size_t at = 0;
  for (size_t layer = 0; layer < heat.n_expert.size(); ++layer) {
    Json one = {{"hit_ratio", layer < hits.size() && hits[layer] ? Json(*hits[layer]) : Json(nullptr)},
                {"uses", Json::array()},
                {"heat", Json::array()},
                {"tier", Json::array()},
                {"last_promoted_ms", Json::array()}};
    for (int e = 0; e < heat.n_expert[layer]; ++e, ++at) {
      one["uses"].push_back(uses[at]);
      one["heat"].push_back(heat.heat[at]);
      one["tier"].push_back(tier_name(heat.places[at].tier));
      one["last_promoted_ms"].push_back(promoted_ms(heat.places[at]));
    }
    layers.push_back(std::move(one));
  }
  return layers;
}

Json experts_json(const ServerState& server, const ExpertHeat* heat, double seconds) {
  const ExpertCounts experts = server.model->service->state().experts;
  const uint64_t n_cold = experts.n_uses - experts.hot_uses;
  const auto ratio = [](uint64_t hot, uint64_t all) {
    return all == 0 ? Json(nullptr) : Json(static_cast<double>(hot) / static_cast<double>(all));
  };
  const uint64_t decode_uses = experts.n_uses - experts.prompt_uses,
                 decode_hot = experts.hot_uses - experts.prompt_hot_uses;
  Json json = {
      {"uses",
       {{"device", experts.on_device ? experts.hot_uses : 0},
        {"host", experts.on_device ? n_cold : experts.hot_uses},
        {"file", experts.on_device ? 0 : n_cold}}},
      {"lanes",
       {{"device", experts.on_device ? experts.hot_uses : 0},
        {"cpu", experts.cpu_uses},
        {"fetched", experts.fetched_uses()}}},
      {"phases",
       {{"prefill",
         {{"uses", experts.prompt_uses}, {"hit_ratio", ratio(experts.prompt_hot_uses, experts.prompt_uses)}}},
        {"decode", {{"uses", decode_uses}, {"hit_ratio", ratio(decode_hot, decode_uses)}}}}},
      {"hit_ratio", experts.hot_ratio()},
      {"moved", experts.moved},
      {"moved_bytes", experts.moved_bytes},
      {"evicted", experts.evicted},
      {"stall_seconds", static_cast<double>(experts.stall_ns) * 1e-9},
      {"cpu_seconds", static_cast<double>(experts.cpu_ns) * 1e-9},
      {"file_wait_seconds", static_cast<double>(experts.disk_wait_ns) * 1e-9},
      {"hot_bytes", experts.hot_bytes},
      {"total_bytes", experts.total_bytes},
      {"n_tokens", nullptr},
      {"layers", nullptr}};
  if (heat == nullptr) return json;
  json["n_tokens"] = heat->n_tokens;
  json["layers"] = layers_json(server, *heat, seconds);
  return json;
}

std::string experts_csv(const ServerState& server, const ExpertHeat* heat, double seconds) {
  std::string text = "layer,expert,uses,heat,tier\n";
  if (heat == nullptr) return text;
  const std::vector<uint64_t> uses = uses_in(server, *heat, seconds);
  size_t at = 0;
  for (size_t layer = 0; layer < heat->n_expert.size(); ++layer)
    for (int e = 0; e < heat->n_expert[layer]; ++e, ++at)
      text += fmt::format("{},{},{},{},{}\n", layer, e, uses[at], heat->heat[at],
                          tier_name(heat->places[at].tier));
  return text;
}

// Sixteen bytes for each expert, layer after layer: uses, heat, tier, three zeros.
std::string experts_bin(const ServerState& server, const ExpertHeat* heat, double seconds) {
  struct Record {
    uint64_t uses;
    float heat;
    uint8_t tier, zeros[3];
  };
  static_assert(sizeof(Record) == 16);
  if (heat == nullptr) return {};
  const std::vector<uint64_t> uses = uses_in(server, *heat, seconds);
  std::string bytes(uses.size() * sizeof(Record), '\0');
  for (size_t i = 0; i < uses.size(); ++i) {
    const Record record{uses[i], heat->heat[i], static_cast<uint8_t>(heat->places[i].tier), {}};
    std::memcpy(bytes.data() + i * sizeof(Record), &record, sizeof(Record));
  }
  return bytes;
}

std::string base64_of(const std::vector<uint8_t>& bytes) {
  return base64_encode({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
}

}  // namespace

const char* tier_name(ExpertTier tier) {
  switch (tier) {
    case ExpertTier::File:
      return "file";
    case ExpertTier::Host:
      return "host";
    case ExpertTier::Device:
      return "device";
    case ExpertTier::Moving:
      break;
  }
  return "moving";
}

HttpReply experts_reply(const ServerState& server, const std::string& format, const std::string& window) {
  require_model(server);
  const double seconds = window_seconds(window);
  const auto heat = server.model->service->expert_heat();
  if (format == "json") return json_reply(experts_json(server, heat.get(), seconds));
  HttpReply reply;
  if (format == "csv") {
    reply.content_type = "text/csv; charset=utf-8";
    reply.body = experts_csv(server, heat.get(), seconds);
  } else if (format == "bin") {
    reply.content_type = "application/octet-stream";
    reply.body = experts_bin(server, heat.get(), seconds);
  } else {
    throw invalid_value("format",
                        fmt::format("format: '{}' is not known; json, csv or bin was expected", format));
  }
  return reply;
}

Json heat_event(const ServerState& server, const ExpertHeat& heat) {
  float max = 0.0f;
  const std::vector<uint8_t> bytes = heat_bytes(heat.heat, &max);
  const std::vector<std::optional<double>> hits = server.history.layer_hits(kLayerWindow);
  return {{"w", base64_of(bytes)},
          {"max", max},
          {"n_expert", heat.n_expert},
          {"n_tokens", heat.n_tokens},
          {"r", base64_of(tier_bits(heat.places))},
          {"layer_hit", heat.layers.empty() ? Json(nullptr) : hits_json(hits)}};
}

std::vector<uint8_t> heat_bytes(std::span<const float> heat, float* max) {
  *max = heat.empty() ? 0.0f : *std::max_element(heat.begin(), heat.end());
  std::vector<uint8_t> bytes;
  const double top = std::log1p(static_cast<double>(*max));
  for (const float value : heat)
    bytes.push_back(
        top > 0.0 ? static_cast<uint8_t>(std::lround(255.0 * std::log1p(static_cast<double>(value)) / top))
                  : uint8_t{0});
  return bytes;
}

std::vector<uint8_t> tier_bits(std::span<const ExpertPlace> places) {
  std::vector<uint8_t> bytes((places.size() + 3) / 4);
  for (size_t i = 0; i < places.size(); ++i)
    bytes[i / 4] |= static_cast<uint8_t>(static_cast<unsigned>(places[i].tier) << (2 * (i % 4)));
  return bytes;
}

}  // namespace thermo
