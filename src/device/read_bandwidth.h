// How fast the GPU in use reads its memory, the bound that decoding is measured against, and how fast main
// memory reaches it.
#pragma once

namespace thermo {

// Bytes per second, best of several passes over 2 GiB, or over half of what is free when that is less. 0 when
// there is not enough to outgrow the cache, or the device fails.
double measure_device_read_bandwidth() noexcept;

// Bytes per second of copies from page-locked main memory, best of several. 0 when the device fails.
double measure_device_link_bandwidth() noexcept;

}  // namespace thermo
