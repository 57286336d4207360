#include "base/gpu_sensors.h"

#include <gtest/gtest.h>

#include <cstring>

namespace thermo {
namespace {

constexpr int kNotSupported = 3;
int g_open = 0;  // inits without a shutdown

// A card that does not tell its power.
NvmlApi fake_nvml() {
  NvmlApi api;
  api.init = [] { return ++g_open, 0; };
  api.shutdown = [] { return --g_open, 0; };
  api.device_by_bus_id = [](const char* id, NvmlApi::Device* device) {
    *device = &g_open;
    return std::strcmp(id, "0000:65:00.0") == 0 ? 0 : 6;
  };
  api.utilization = [](NvmlApi::Device, NvmlApi::Utilization* u) { return *u = {75, 20}, 0; };
  api.memory = [](NvmlApi::Device, NvmlApi::Memory* m) { return *m = {1000, 400, 600}, 0; };
  api.power = [](NvmlApi::Device, unsigned*) { return kNotSupported; };
  api.temperature = [](NvmlApi::Device, int sensor, unsigned* c) { return *c = sensor == 0 ? 55 : 99, 0; };
  api.pcie_throughput = [](NvmlApi::Device, unsigned counter, unsigned* kib) {
    return *kib = counter == NvmlApi::kReceived ? 2048 : 1, 0;
  };
  return api;
}

TEST(GpuSensors, TellWhatTheCardKnows) {
  auto sensors = GpuSensors::open(fake_nvml(), "0000:65:00.0");
  ASSERT_NE(sensors, nullptr);
  EXPECT_EQ(g_open, 1);
  const GpuReading reading = sensors->read();
  EXPECT_EQ(reading.utilization, 0.75);
  EXPECT_EQ(reading.memory_used_bytes, 600u);
  EXPECT_EQ(reading.memory_total_bytes, 1000u);
  EXPECT_EQ(reading.power_watts, std::nullopt);
  EXPECT_EQ(reading.temperature_celsius, 55.0);
  EXPECT_EQ(reading.pcie_received_per_s, 2048.0 * 1024.0);
  EXPECT_EQ(reading.pcie_sent_per_s, 1024.0);
  sensors.reset();
  EXPECT_EQ(g_open, 0);
}

TEST(GpuSensors, AreNoneWithoutALibraryOrWithAnotherCard) {
  EXPECT_EQ(GpuSensors::open(std::nullopt, "0000:65:00.0"), nullptr);
  EXPECT_EQ(GpuSensors::open(fake_nvml(), "0000:66:00.0"), nullptr);
  EXPECT_EQ(g_open, 0);
}

}  // namespace
}  // namespace thermo
