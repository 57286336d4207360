// How many files and sockets the process may have open.
#pragma once

#include <cstdint>

namespace thermo {

// Raises the limit as far as the system lets this process, and returns it.
uint64_t raise_open_file_limit();

}  // namespace thermo
