// The assembler copies the files into a read-only section. THERMO_MODELS_DIR is set by the build file, which
// also makes this object depend on the two files.
#include "embedded/embedded_model.h"

#define THERMO_EMBED(symbol, file)             \
  __asm__(                                     \
      ".pushsection .rodata\n"                 \
      ".balign 64\n"                           \
      ".hidden " #symbol                       \
      "_begin\n"                               \
      ".globl " #symbol "_begin\n" #symbol     \
      "_begin:\n"                              \
      ".incbin \"" THERMO_MODELS_DIR "/" file  \
      "\"\n"                                   \
      ".hidden " #symbol                       \
      "_end\n"                                 \
      ".globl " #symbol "_end\n" #symbol       \
      "_end:\n"                                \
      ".byte 0\n"                              \
      ".popsection\n");                        \
  extern "C" const std::byte symbol##_begin[]; \
  extern "C" const std::byte symbol##_end[];

THERMO_EMBED(thermo_plankton, "plankton-q4_k_m.gguf")
THERMO_EMBED(thermo_plankton_draft, "plankton-draft-q8_0.gguf")

namespace thermo {

std::span<const std::byte> embedded_model() {
  return {thermo_plankton_begin, thermo_plankton_end};
}
std::span<const std::byte> embedded_drafter() {
  return {thermo_plankton_draft_begin, thermo_plankton_draft_end};
}

}  // namespace thermo
