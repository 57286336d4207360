#include "engine/gpu_backend.h"

#include <fmt/format.h>

#include <charconv>

#include "base/check.h"
#include "base/error.h"

#ifdef THERMO_HAS_CUDA
#include "device/device_info.h"
#include "device/read_bandwidth.h"
#include "model/gpu/gpu_model.h"
#endif

namespace thermo {
namespace {

// The N of "cuda:N"; 0 for "cuda"; nullopt for what is no GPU at all.
std::optional<int> gpu_index(const std::string& device) {
  if (device == "cuda" || device == "gpu") return 0;
  if (!device.starts_with("cuda:") && !device.starts_with("CUDA:")) return std::nullopt;
  const std::string_view digits = std::string_view(device).substr(5);
  int index = -1;
  const auto [end, code] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  if (code != std::errc{} || end != digits.data() + digits.size() || index < 0) return std::nullopt;
  return index;
}

}  // namespace

#ifdef THERMO_HAS_CUDA

std::optional<GpuChoice> choose_gpu(const std::string& device, std::string& note) {
  if (device == "cpu" || device == "none") return std::nullopt;
  const std::optional<int> wanted = gpu_index(device);
  if (!wanted && device != "auto")
    throw ConfigError(fmt::format("--device: '{}' is not known, use auto, cpu or cuda:N", device));
  std::string why;
  const std::vector<DeviceInfo> devices = list_devices(&why);
  for (const DeviceInfo& info : devices) {
    if (wanted ? info.index != *wanted : !info.usable()) continue;
    if (!info.usable()) {
      why = fmt::format("{} has compute capability {}.{}, 7.5 or newer is needed", info.name,
                        info.compute_capability / 10, info.compute_capability % 10);
      break;
    }
    const DeviceInfo used = use_device(info.index);  // only a device in use tells what is free
    return GpuChoice{used.index, used.name, used.free_bytes, used.total_bytes, used.n_multiprocessors};
  }
  if (why.empty()) why = fmt::format("there are {} usable GPUs", devices.size());
  if (wanted)
    throw ThermoError(ExitCode::Device, fmt::format("--device {}: {}; use --device cpu", device, why));
  note = "no usable GPU: " + why + "; the CPU does everything";
  return std::nullopt;
}

std::vector<MemoryPlanItem> plan_gpu_memory(const ModelConfig& config, const Weights& weights,
                                            const GpuChoice& gpu, const ModelOptions& options) {
  std::vector<MemoryPlanItem> items;
  for (const GpuMemoryItem& item : GpuModel::plan(config, weights, options, gpu.n_multiprocessors))
    items.push_back({item.name, item.bytes, ""});
  return items;
}

double measure_gpu_read_bandwidth() {
  return measure_device_read_bandwidth();
}

std::unique_ptr<Backend> make_gpu_backend(ModelConfig config, const Weights& weights,
                                          const ModelOptions& options, ThreadPool& pool,
                                          const LoadProgressFn& progress) {
  return std::make_unique<GpuModel>(std::move(config), weights, options, pool, progress);
}

#else

std::optional<GpuChoice> choose_gpu(const std::string& device, std::string&) {
  if (device == "cpu" || device == "none" || device == "auto") return std::nullopt;
  if (!gpu_index(device))
    throw ConfigError(fmt::format("--device: '{}' is not known, use auto or cpu", device));
  throw ThermoError(ExitCode::Device,
                    fmt::format("--device {}: this build has no CUDA; use --device cpu, or build with "
                                "-DTHERMO_CUDA=ON on a machine with the CUDA toolkit",
                                device));
}

std::vector<MemoryPlanItem> plan_gpu_memory(const ModelConfig&, const Weights&, const GpuChoice&,
                                            const ModelOptions&) {
  return {};
}

double measure_gpu_read_bandwidth() {
  return 0.0;
}

std::unique_ptr<Backend> make_gpu_backend(ModelConfig, const Weights&, const ModelOptions&, ThreadPool&,
                                          const LoadProgressFn&) {
  check_failed(__FILE__, __LINE__, "THERMO_HAS_CUDA", "a GPU was chosen in a build without CUDA");
}

#endif

}  // namespace thermo
