// Skips a test, with a message, if there is no GPU; otherwise makes the first one the device of this thread.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "device/device_info.h"

#define SKIP_WITHOUT_GPU()                                                            \
  do {                                                                                \
    std::string why;                                                                  \
    if (thermo::list_devices(&why).empty()) GTEST_SKIP() << "no usable GPU: " << why; \
    thermo::use_device(0);                                                            \
  } while (false)
