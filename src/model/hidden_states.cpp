#include "model/hidden_states.h"

#include <algorithm>

namespace thermo {

HostStates::HostStates(int n_rows, int n_taps, int n_embd)
    : StateBuffer(n_taps, n_embd),
      memory_(static_cast<size_t>(n_rows) * static_cast<size_t>(n_taps) * static_cast<size_t>(n_embd) *
              sizeof(float)) {
  data_ = memory_.as<float>();
}

void HostStates::put(int at, const StateRows& from) noexcept {
  for (int i = 0; i < from.n; ++i)
    for (int tap = 0; tap < n_taps_; ++tap)
      std::copy_n(from.at(tap, i), n_embd_, row(at + i) + static_cast<int64_t>(tap) * n_embd_);
}

void HostStates::read(int i, std::span<float> to) const noexcept {
  std::copy_n(row(i), to.size(), to.data());
}

void HostStates::write(int i, std::span<const float> from) noexcept {
  std::copy(from.begin(), from.end(), row(i));
}

}  // namespace thermo
