// Which build this is.
#pragma once

#include <string>

#include "base/json.h"

namespace thermo {

const char* version_number();     // "0.1.0"
const char* build_commit();       // "1a2b3c4", or "unknown" when it was not built in a repository
std::string build_fingerprint();  // "thermocline-0.1.0-1a2b3c4", for replies
Json version_facts();             // the same for machines
std::string version_line();       // "thermocline 0.1.0 (1a2b3c4), GCC 12.2, x86_64, CPU"

}  // namespace thermo
