#include "base/gpu_sensors.h"

#include <dlfcn.h>

namespace thermo {
namespace {

constexpr int kSuccess = 0;
constexpr int kGpuSensor = 0;  // NVML_TEMPERATURE_GPU

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

}  // namespace

std::optional<NvmlApi> load_nvml() {
  // It stays loaded: threads of the driver may be in it.
  void* const library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return std::nullopt;
  NvmlApi api;
  const bool complete = find(library, "nvmlInit_v2", api.init) &&
                        find(library, "nvmlShutdown", api.shutdown) &&
                        find(library, "nvmlDeviceGetHandleByPciBusId_v2", api.device_by_bus_id) &&
                        find(library, "nvmlDeviceGetUtilizationRates", api.utilization) &&
                        find(library, "nvmlDeviceGetMemoryInfo", api.memory) &&
                        find(library, "nvmlDeviceGetPowerUsage", api.power) &&
                        find(library, "nvmlDeviceGetTemperature", api.temperature) &&
                        find(library, "nvmlDeviceGetPcieThroughput", api.pcie_throughput);
  return complete ? std::optional(api) : std::nullopt;
}

std::unique_ptr<GpuSensors> GpuSensors::open(const std::optional<NvmlApi>& api, const std::string& bus_id) {
  if (!api || api->init() != kSuccess) return nullptr;
  NvmlApi::Device device = nullptr;
  if (api->device_by_bus_id(bus_id.c_str(), &device) == kSuccess)
    return std::unique_ptr<GpuSensors>(new GpuSensors(*api, device));
  api->shutdown();
  return nullptr;
}

GpuSensors::~GpuSensors() {
  api_.shutdown();
}

GpuReading GpuSensors::read() {
  GpuReading reading;
  NvmlApi::Utilization utilization{};
  if (api_.utilization(device_, &utilization) == kSuccess) reading.utilization = utilization.gpu / 100.0;
  NvmlApi::Memory memory{};
  if (api_.memory(device_, &memory) == kSuccess) {
    reading.memory_used_bytes = memory.used;
    reading.memory_total_bytes = memory.total;
  }
  unsigned value = 0;
  if (api_.power(device_, &value) == kSuccess) reading.power_watts = value / 1000.0;
  if (api_.temperature(device_, kGpuSensor, &value) == kSuccess) reading.temperature_celsius = value;
  if (api_.pcie_throughput(device_, NvmlApi::kReceived, &value) == kSuccess)
    reading.pcie_received_per_s = value * 1024.0;
  if (api_.pcie_throughput(device_, NvmlApi::kSent, &value) == kSuccess)
    reading.pcie_sent_per_s = value * 1024.0;
  return reading;
}

}  // namespace thermo
