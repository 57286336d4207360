#include "server/load_history.h"

#include <algorithm>

namespace thermo {

// The oldest one of about the last so many seconds, and never the newest; nullptr: there are no two.
const LoadHistory::Sample* LoadHistory::sample_before(double seconds) const {
  if (samples_.size() < 2) return nullptr;
  const auto age = [&](const Sample& s) {
    return std::chrono::duration<double>(samples_.back().time - s.time).count();
  };
  const Sample* then = &samples_[samples_.size() - 2];
  for (auto s = samples_.rbegin() + 1; s != samples_.rend() && age(*s) < seconds + 0.5; ++s) then = &*s;
  return then;
}

LoadHistory::Window LoadHistory::window(double seconds) const {
  Window out;
  const Sample* const then = sample_before(seconds);
  if (then == nullptr) return out;
  const Sample& now = samples_.back();
  out.seconds = std::chrono::duration<double>(now.time - then->time).count();
  if (out.seconds <= 0.0) return {};
  const auto rate = [&](uint64_t before, uint64_t after) {
    return after < before ? 0.0 : static_cast<double>(after - before) / out.seconds;
  };
  out.written_per_s = rate(then->n_written, now.n_written);
  out.prompt_per_s = rate(then->n_prompt, now.n_prompt);
  out.cpu = (now.cpu_seconds - then->cpu_seconds) / out.seconds;
  const ExpertCounts &a = then->experts, &b = now.experts;
  out.moved_per_s = rate(a.moved, b.moved);
  out.moved_bytes_per_s = rate(a.moved_bytes, b.moved_bytes);
  out.stall_share = rate(a.stall_ns, b.stall_ns) * 1e-9;
  out.rounds_per_s =
      rate(static_cast<uint64_t>(then->draft.n_rounds), static_cast<uint64_t>(now.draft.n_rounds));
  if (then->memory_bytes && now.memory_bytes)
    out.memory_bytes_per_s = rate(*then->memory_bytes, *now.memory_bytes);
  out.n_uses = b.n_uses - a.n_uses;
  if (out.n_uses > 0)
    out.hot_ratio = static_cast<double>(b.hot_uses - a.hot_uses) / static_cast<double>(out.n_uses);
  return out;
}

std::shared_ptr<const std::vector<uint64_t>> LoadHistory::uses_before(double seconds) const {
  const Sample* const then = sample_before(seconds);
  return then == nullptr ? nullptr : then->uses;
}

std::vector<std::optional<double>> LoadHistory::layer_hits(double seconds) const {
  const Sample* const then = sample_before(seconds);
  if (then == nullptr) return {};
  const std::vector<LayerUses>& now = samples_.back().layers;
  std::vector<std::optional<double>> hits(now.size());
  for (size_t i = 0; i < now.size(); ++i) {
    const LayerUses before = i < then->layers.size() ? then->layers[i] : LayerUses{};
    if (now[i].all > before.all)
      hits[i] = static_cast<double>(now[i].hot - before.hot) / static_cast<double>(now[i].all - before.all);
  }
  return hits;
}

}  // namespace thermo
