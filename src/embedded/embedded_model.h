// The small model inside the program (models/README.md): a first run, tests and examples need no download.
#pragma once

#include <cstddef>
#include <span>

namespace thermo {

// GGUF files, 64-byte aligned, read-only for the life of the program.
std::span<const std::byte> embedded_model();    // Plankton
std::span<const std::byte> embedded_drafter();  // the DFlash drafter for it

}  // namespace thermo
