#include "engine/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>

#include "base/error.h"
#include "base/units.h"
#include "gguf/gguf_file.h"
#include "kernels/quant_matmul/quant_matmul.h"
#include "model/model.h"
#include "model/weights.h"

namespace thermo {
namespace {

// What `auto` never goes beyond without being asked: a long context costs memory for every sequence.
constexpr int kAutoContext = 32768;
constexpr int kMinContext = 512;
constexpr uint64_t kProgramBytes = 64 * MiB;    // code, stacks, vocabulary, small vectors
constexpr uint64_t kDeviceReserve = 512 * MiB;  // the driver's context and other programs

size_t largest_panel(const GgufFile& file) {
  size_t most = 0;
  for (const GgufTensor& tensor : file.tensors())
    if (dtype_info(tensor.dtype).is_weight && tensor.dims[0] < (1u << 24))
      most = std::max(most, panel_bytes(tensor.dtype, static_cast<int>(tensor.dims[0])));
  return most;
}

MemoryPlan plan_at(const ModelConfig& config, const GgufFile& file, const MemoryPlanInputs& in,
                   uint64_t packed_bytes, int n_ctx) {
  const SequenceConfig sequence{
      .n_ctx = n_ctx, .max_draft_rows = in.max_draft_rows, .k_type = in.k_type, .v_type = in.v_type};
  const uint64_t n_seq = static_cast<uint64_t>(in.n_sequences);
  ModelOptions options;
  options.n_batch = in.n_batch;

  MemoryPlan plan;
  plan.n_ctx = n_ctx;
  plan.available_bytes = in.available_bytes;
  plan.mapped_bytes =
      in.repack ? file.require_tensor("token_embd.weight").n_bytes : file.total_tensor_bytes();
  const auto add = [&](std::string name, uint64_t bytes, std::string detail) {
    if (bytes > 0) plan.items.push_back({std::move(name), bytes, std::move(detail)});
    plan.total_bytes += bytes;
  };
  if (in.repack) add("weights", packed_bytes, "repacked for the processor");
  add("kv cache", n_seq * SequenceState::kv_bytes(config, sequence),
      fmt::format("{} tokens x {}, k {}, v {}", n_ctx, in.n_sequences, kv_type_name(in.k_type),
                  kv_type_name(in.v_type)));
  add("recurrent state", n_seq * SequenceState::recurrent_bytes(config),
      fmt::format("{} DeltaNet layers", config.n_recurrent_layers()));
  add("draft tape", n_seq * SequenceState::tape_bytes(config, sequence),
      fmt::format("{} rows", in.max_draft_rows));
  add("activations",
      Model::workspace_bytes(config, options, in.n_threads, in.repack ? 0 : largest_panel(file)),
      fmt::format("{} rows", in.n_batch));
  add("program", kProgramBytes, "code, vocabulary, stacks");
  return plan;
}

}  // namespace

MemoryPlan plan_memory(const ModelConfig& config, const GgufFile& file, const MemoryPlanInputs& in) {
  const uint64_t packed = in.repack ? Weights::planned_packed_bytes(config, file) : 0;
  if (in.n_ctx > 0) {
    MemoryPlan plan = plan_at(config, file, in, packed, in.n_ctx);
    if (plan.fits()) return plan;
  }
  // Chosen for the user: the training length up to the automatic limit, halved until it fits.
  int n_ctx = in.n_ctx > 0 ? 0 : std::min(config.n_ctx_train, kAutoContext);
  for (; n_ctx >= std::min(kMinContext, config.n_ctx_train); n_ctx /= 2) {
    MemoryPlan plan = plan_at(config, file, in, packed, n_ctx);
    if (plan.fits()) return plan;
  }
  const int shown_ctx = in.n_ctx > 0 ? in.n_ctx : kMinContext;
  const MemoryPlan plan = plan_at(config, file, in, packed, shown_ctx);
  MemoryPlanInputs mapped = in;
  mapped.repack = false;
  const uint64_t mapped_total = plan_at(config, file, mapped, 0, shown_ctx).total_bytes;
  const uint64_t short_total = plan_at(config, file, in, packed, kMinContext).total_bytes;
  std::string remedy = "close other programs or use a smaller quantisation";
  if (in.repack && mapped_total <= in.available_bytes)
    remedy = fmt::format("--no-repack would take {} and read the rest through the file mapping",
                         format_bytes(mapped_total));
  else if (short_total <= in.available_bytes)
    remedy = fmt::format("--ctx-size {} would take {}", kMinContext, format_bytes(short_total));
  throw MemoryError(fmt::format("{} needs {} of memory with a context of {}, but {} are available; {}",
                                file.path(), format_bytes(plan.total_bytes), shown_ctx,
                                format_bytes(in.available_bytes), remedy));
}

MemoryPlan plan_device_memory(const ModelConfig& config, const MemoryPlanInputs& in,
                              const std::string& device_name, uint64_t free_bytes,
                              const DeviceItemsFn& items) {
  const auto plan_with = [&](int n_ctx) {
    MemoryPlan plan;
    plan.n_ctx = n_ctx;
    plan.available_bytes = in.available_bytes;
    plan.items = {{"program", kProgramBytes, "code, vocabulary, staging"}};
    plan.total_bytes = kProgramBytes;
    plan.device_name = device_name;
    plan.device_available_bytes = free_bytes;
    plan.device_items = items(n_ctx);
    plan.device_items.push_back({"reserve", kDeviceReserve, "driver and other programs"});
    for (const MemoryPlanItem& item : plan.device_items) plan.device_total_bytes += item.bytes;
    return plan;
  };
  if (in.n_ctx > 0) return plan_with(in.n_ctx);
  const int smallest = std::min(kMinContext, config.n_ctx_train);
  int n_ctx = std::min(config.n_ctx_train, kAutoContext);
  MemoryPlan plan = plan_with(n_ctx);
  while (!plan.fits() && n_ctx / 2 >= smallest) plan = plan_with(n_ctx /= 2);
  return plan;
}

}  // namespace thermo
