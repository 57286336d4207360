#include "server/load_history.h"

namespace thermo {

LoadHistory::Window LoadHistory::window(double seconds) const {
  Window out;
  if (samples_.size() < 2) return out;
  const Sample& now = samples_.back();
  const auto age = [&](const Sample& s) { return std::chrono::duration<double>(now.time - s.time).count(); };
  const Sample* then = &samples_[samples_.size() - 2];
  for (auto s = samples_.rbegin() + 1; s != samples_.rend() && age(*s) < seconds + 0.5; ++s) then = &*s;
  out.seconds = age(*then);
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
  const uint64_t hot = b.hot_uses - a.hot_uses,
                 cold = b.cpu_uses + b.fetched_uses - a.cpu_uses - a.fetched_uses;
  out.n_uses = hot + cold;
  if (out.n_uses > 0) out.hot_ratio = static_cast<double>(hot) / static_cast<double>(out.n_uses);
  return out;
}

}  // namespace thermo
