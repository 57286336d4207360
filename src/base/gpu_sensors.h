// What a card says of itself while it works: load, memory, power, heat. Asked through NVIDIA's management
// library (NVML), which comes with the driver and is looked for at run time: without it nothing is known.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

namespace thermo {

// Unknown: nullopt.
struct GpuReading {
  std::optional<double> utilization;                              // share of the time in which kernels ran
  std::optional<uint64_t> memory_used_bytes, memory_total_bytes;  // of all programs
  std::optional<double> power_watts, temperature_celsius;
  std::optional<double> pcie_received_per_s, pcie_sent_per_s;  // bytes, as the card sees it
};

// The part of NVML that is needed, with its own names, types and constants.
struct NvmlApi {
  using Device = void*;
  struct Utilization {
    unsigned gpu, memory;  // per cent
  };
  struct Memory {
    unsigned long long total, free, used;
  };
  static constexpr unsigned kSent = 0, kReceived = 1;  // counters of nvmlDeviceGetPcieThroughput

  int (*init)() = nullptr;
  int (*shutdown)() = nullptr;
  int (*device_by_bus_id)(const char*, Device*) = nullptr;
  int (*utilization)(Device, Utilization*) = nullptr;
  int (*memory)(Device, Memory*) = nullptr;
  int (*power)(Device, unsigned* milliwatts) = nullptr;
  int (*temperature)(Device, int sensor, unsigned* celsius) = nullptr;
  int (*pcie_throughput)(Device, unsigned counter, unsigned* kib_per_s) = nullptr;
};

// nullopt: there is no such library, or it lacks something.
std::optional<NvmlApi> load_nvml();

class GpuSensors {
 public:
  // The card with this PCI bus id ("0000:65:00.0"); nullptr: nothing is known about it.
  static std::unique_ptr<GpuSensors> open(const std::optional<NvmlApi>& api, const std::string& bus_id);
  ~GpuSensors();
  GpuSensors(const GpuSensors&) = delete;
  GpuSensors& operator=(const GpuSensors&) = delete;

  // Takes about 40 ms, in which the library counts bytes on the link. One thread at a time.
  GpuReading read();

 private:
  GpuSensors(const NvmlApi& api, NvmlApi::Device device) : api_(api), device_(device) {}

  NvmlApi api_;
  NvmlApi::Device device_;
};

}  // namespace thermo
