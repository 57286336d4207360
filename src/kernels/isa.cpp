#include "kernels/isa.h"

#include <fmt/format.h>

#include <cstdlib>

#include "base/cpu_info.h"
#include "base/error.h"

namespace thermo {
namespace {

constexpr Isa kAll[] = {Isa::Portable, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Amx};

Isa highest_isa() {
  static const Isa highest = [] {
    const char* const name = std::getenv("THERMO_MAX_ISA");
    if (name == nullptr || *name == '\0') return Isa::Amx;
    if (const std::optional<Isa> isa = isa_from_name(name)) return *isa;
    throw ConfigError(
        fmt::format("THERMO_MAX_ISA is '{}', expected {}; unset it for no limit", name, kIsaNames));
  }();
  return highest;
}

}  // namespace

bool isa_available(Isa isa) {
  if (isa > highest_isa()) return false;
  switch (isa) {
    case Isa::Portable:
      return true;
    case Isa::Avx2:
      return cpu_info().avx2;
    case Isa::AvxVnni:
      return cpu_info().avx_vnni;
    case Isa::Avx512:
      return cpu_info().avx512;
    case Isa::Amx:
      return cpu_info().amx_int8;
  }
  return false;
}

std::vector<Isa> available_isas() {
  std::vector<Isa> isas;
  for (Isa isa : kAll)
    if (isa_available(isa)) isas.push_back(isa);
  return isas;
}

Isa best_isa() {
  return available_isas().back();
}

const char* isa_name(Isa isa) {
  switch (isa) {
    case Isa::Portable:
      return "portable";
    case Isa::Avx2:
      return "avx2";
    case Isa::AvxVnni:
      return "avxvnni";
    case Isa::Avx512:
      return "avx512";
    case Isa::Amx:
      return "amx";
  }
  return "?";
}

std::optional<Isa> isa_from_name(std::string_view name) {
  for (Isa isa : kAll)
    if (name == isa_name(isa)) return isa;
  return std::nullopt;
}

}  // namespace thermo
