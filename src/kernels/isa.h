// Instruction-set paths of the CPU kernels. Chosen once, when the engine is built; every operation then
// hands out its table of functions for that path (`xxx_kernels(isa)`), and no loop asks again.
//
// The environment variable THERMO_MAX_ISA=portable|avx2|avxvnni|avx512|amx hides better paths than that from
// everybody, so that any machine can test the paths below its own. It is read here, once, because it limits
// tests as well.
#pragma once

#include <optional>
#include <string_view>
#include <vector>

namespace thermo {

// Each one needs the ones before it, but for AvxVnni (VPDPBUSD on 32-byte vectors): some processors know the
// instruction from AVX-512 only.
enum class Isa { Portable, Avx2, AvxVnni, Avx512, Amx };
inline constexpr const char* kIsaNames = "portable, avx2, avxvnni, avx512 or amx";

// The best path this machine runs. These three throw ConfigError when THERMO_MAX_ISA names no path.
Isa best_isa();
bool isa_available(Isa isa);
// Every path this machine runs, plainest first: tests loop over it.
std::vector<Isa> available_isas();

const char* isa_name(Isa isa);
std::optional<Isa> isa_from_name(std::string_view name);  // one of kIsaNames

}  // namespace thermo
