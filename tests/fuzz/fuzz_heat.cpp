// Heat files: any bytes give either a refusal with a sentence, or numbers that placement can use.
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <numeric>
#include <string>

#include "experts/heat_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const thermo::Result<thermo::SavedHeat> saved = thermo::parse_heat("fuzz", text);
  if (!saved) {
    if (saved.error().message.empty()) std::abort();
    return 0;
  }
  const std::vector<int>& n_expert = saved->info.n_expert;
  if (std::accumulate(n_expert.begin(), n_expert.end(), size_t{0}) != saved->values.size()) std::abort();
  for (const float heat : saved->values)
    if (!std::isfinite(heat) || heat < 0.0f) std::abort();
  if (saved->info.describe().empty()) std::abort();
  return 0;
}
