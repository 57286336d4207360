#include "engine/gpu_backend.h"

#include <fmt/format.h>

#include "base/check.h"
#include "base/error.h"
#include "base/units.h"

#ifdef THERMO_HAS_CUDA
#include "device/device_info.h"
#include "device/read_bandwidth.h"
#include "model/gpu/gpu_model.h"
#endif

namespace thermo {
#ifdef THERMO_HAS_CUDA

std::optional<GpuChoice> choose_gpu(const DeviceChoice& device, std::string& note) {
  using Kind = DeviceChoice::Kind;
  if (device.kind != Kind::Auto && device.kind != Kind::Gpu) return std::nullopt;
  const bool asked = device.kind == Kind::Gpu;
  std::string why;
  const std::vector<DeviceInfo> devices = list_devices(&why);
  for (const DeviceInfo& info : devices) {
    if (asked ? info.index != device.gpu : !info.usable()) continue;
    if (!info.usable()) {
      why = fmt::format("{} has compute capability {}.{}, 7.5 or newer is needed", info.name,
                        info.compute_capability / 10, info.compute_capability % 10);
      break;
    }
    const DeviceInfo used = use_device(info.index);  // only a device in use tells what is free
    return GpuChoice{used.index,
                     used.name,
                     used.free_bytes,
                     used.total_bytes,
                     used.n_multiprocessors,
                     used.compute_capability,
                     used.bus_id};
  }
  if (why.empty()) why = fmt::format("there are {} usable GPUs", devices.size());
  if (asked)
    throw ThermoError(ExitCode::Device,
                      fmt::format("GPU {} cannot be used: {}; use the CPU", device.gpu, why),
                      Remedy::Processor);
  note = "no usable GPU: " + why + "; the CPU does everything";
  return std::nullopt;
}

uint64_t gpu_free_bytes(int index) {
  return use_device(index).free_bytes;
}

std::optional<GpuChoice> imagined_gpu(uint64_t bytes) {
  constexpr int kMultiprocessors = 60, kCapability = 86;
  return GpuChoice{.name = fmt::format("a card with {}", format_bytes(bytes)),
                   .free_bytes = bytes,
                   .total_bytes = bytes,
                   .n_multiprocessors = kMultiprocessors,
                   .compute_capability = kCapability};
}

std::string gpu_refusal(const ModelConfig& config) {
  return GpuModel::refusal(config);
}

std::vector<MemoryPlanItem> plan_gpu_memory(const ModelConfig& config, const Weights& weights,
                                            const GpuChoice& gpu, const ModelOptions& options) {
  std::vector<MemoryPlanItem> items;
  for (const GpuMemoryItem& item : GpuModel::plan(config, weights, options, gpu.n_multiprocessors))
    items.push_back({item.name, item.bytes, ""});
  for (const KvKind kind : kEachKvKind)
    for (MemoryPlanItem& item : items)
      if (item.name == kv_pool_name(kind))
        item.detail = kv_item_detail(kind, options.sequence, options.n_sequences);
  std::erase_if(items, [](const MemoryPlanItem& item) { return item.bytes == 0; });
  return items;
}

uint64_t plan_gpu_drafter(const ModelConfig& config, const Weights& weights, const GpuChoice& gpu,
                          const ModelOptions& options, const ModelConfig& target,
                          const Weights& target_weights) {
  return GpuModel::drafter_bytes(config, weights, options, gpu.n_multiprocessors, target, target_weights);
}

int max_gpu_draft_rows(const ModelConfig& config) {
  return GpuModel::max_draft_rows(config);
}

double measure_gpu_read_bandwidth() {
  return measure_device_read_bandwidth();
}

double measure_gpu_link_bandwidth() {
  return measure_device_link_bandwidth();
}

std::unique_ptr<Backend> make_gpu_backend(ModelConfig config, const Weights& weights,
                                          const ModelOptions& options, ThreadPool& pool,
                                          const LoadProgressFn& progress) {
  return std::make_unique<GpuModel>(std::move(config), weights, options, pool, progress);
}

std::unique_ptr<Backend> make_gpu_drafter(ModelConfig config, const Weights& weights,
                                          const ModelOptions& options, const Backend* target,
                                          ThreadPool& pool) {
  return std::make_unique<GpuModel>(std::move(config), weights, options, pool, LoadProgressFn{},
                                    static_cast<const GpuModel*>(target));
}

#else

std::optional<GpuChoice> choose_gpu(const DeviceChoice& device, std::string&) {
  if (device.kind != DeviceChoice::Kind::Gpu) return std::nullopt;
  throw ThermoError(ExitCode::Device,
                    "this build has no CUDA; use the CPU, or build with -DTHERMO_CUDA=ON on a machine "
                    "with the CUDA toolkit",
                    Remedy::Processor);
}

uint64_t gpu_free_bytes(int) {
  return 0;
}

std::optional<GpuChoice> imagined_gpu(uint64_t) {
  return std::nullopt;
}

std::string gpu_refusal(const ModelConfig&) {
  return "";
}

std::vector<MemoryPlanItem> plan_gpu_memory(const ModelConfig&, const Weights&, const GpuChoice&,
                                            const ModelOptions&) {
  return {};
}

uint64_t plan_gpu_drafter(const ModelConfig&, const Weights&, const GpuChoice&, const ModelOptions&,
                          const ModelConfig&, const Weights&) {
  return 0;
}

int max_gpu_draft_rows(const ModelConfig&) {
  return 0;
}

double measure_gpu_read_bandwidth() {
  return 0.0;
}

double measure_gpu_link_bandwidth() {
  return 0.0;
}

std::unique_ptr<Backend> make_gpu_backend(ModelConfig, const Weights&, const ModelOptions&, ThreadPool&,
                                          const LoadProgressFn&) {
  check_failed(__FILE__, __LINE__, "THERMO_HAS_CUDA", "a GPU was chosen in a build without CUDA");
}

std::unique_ptr<Backend> make_gpu_drafter(ModelConfig, const Weights&, const ModelOptions&, const Backend*,
                                          ThreadPool&) {
  check_failed(__FILE__, __LINE__, "THERMO_HAS_CUDA", "a GPU was chosen in a build without CUDA");
}

#endif

}  // namespace thermo
