// What `--list-devices` prints.
#pragma once

#include <string>

namespace thermo {

// A line for each device that --device can name, with its memory.
std::string device_list();

}  // namespace thermo
