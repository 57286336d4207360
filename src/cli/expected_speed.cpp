#include "cli/expected_speed.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <set>

#include "base/cpu_info.h"
#include "base/error.h"
#include "base/log.h"
#include "base/thread_pool.h"
#include "cli/bench/bandwidth.h"
#include "cli/bench/kernel_rates.h"
#include "cli/input.h"
#include "cli/user_folders.h"
#include "engine/gpu_backend.h"
#include "kernels/isa.h"
#include "model/dense_parts.h"
#include "model/weights.h"

namespace thermo {

namespace fs = std::filesystem;

namespace {

constexpr int kVersion = 3;           // of the file; the kernels' speed changes with the program, too
constexpr double kSmallShare = 0.03;  // types below this share of the bytes count as the most frequent one
constexpr double kCardLink = 24e9;    // PCIe 4 x16, where it cannot be measured
constexpr double kAlike = 0.1;        // two measurements that differ by less are believed
constexpr int kMostCalls = 4;         // that measure, on a machine whose measurements never agree

// What is kept: rates by processor, instruction set and threads.
class RatesFile {
 public:
  RatesFile() : path_(in_state_folder("rates.json", in_user_cache("thermocline/rates.json"))) {
    try {
      content_ = Json::parse(read_text_file(path_.string(), kLargestPrompt), nullptr,
                             /*allow_exceptions=*/false);
    } catch (const ConfigError&) {
      // There is none yet, or it cannot be read: what it would say is measured.
    }
    if (!content_.is_object() || content_.value("version", Json()) != Json(kVersion))
      content_ = {{"version", kVersion}, {"machines", Json::object()}};
    if (!content_["machines"].is_object()) content_["machines"] = Json::object();
  }

  // What was measured of a thing, the better half of it: the best, and the one after it.
  static std::vector<double> numbers(const Json& object, const std::string& key) {
    std::vector<double> numbers;
    const auto at = object.find(key);
    if (at == object.end() || !at->is_array()) return numbers;
    for (const Json& value : *at)
      if (value.is_number() && value.get<double>() > 0.0) numbers.push_back(value.get<double>());
    return numbers;
  }

  Json& machine(const std::string& key) {
    Json& machine = content_["machines"][key];
    if (!machine.is_object()) machine = Json::object();
    return machine;
  }

  // A cache: where it cannot be written, the next run measures again.
  void save() const {
    if (path_.empty()) return;
    std::error_code error;
    fs::create_directories(path_.parent_path(), error);
    const fs::path beside = fmt::format("{}.{}.tmp", path_.string(), getpid());
    {
      std::ofstream out(beside);
      out << content_.dump(1, ' ', false, Json::error_handler_t::replace) << "\n";
      if (!out.flush()) {
        log_info("cli", "{} cannot be written; the next run measures again", path_.string());
        fs::remove(beside, error);
        return;
      }
    }
    fs::rename(beside, path_, error);
  }

 private:
  fs::path path_;
  Json content_;
};

// Thrown where a rate is not known and may not be measured.
struct NothingKept {};

// The types that matter for these weights, the most frequent one first.
std::vector<DType> types_to_know(const TokenWork& work) {
  std::vector<std::pair<double, DType>> shares;
  double all = 0.0;
  for (const TypeWork& type : work.types) {
    shares.push_back({static_cast<double>(type.core_bytes + type.expert_bytes), type.dtype});
    all += shares.back().first;
  }
  std::sort(shares.rbegin(), shares.rend());
  std::vector<DType> types;
  for (const auto& [bytes, dtype] : shares)
    if (types.empty() || bytes >= kSmallShare * all) types.push_back(dtype);
  if (std::find(types.begin(), types.end(), DType::F32) == types.end()) types.push_back(DType::F32);
  return types;
}

// Reads what is known and measures the rest. Other programs only make it slower, so of several measurements
// the best is what the machine can do; until two of them agree, each call measures once more, up to
// kMostCalls. Throws NothingKept, and MemoryError where there is no memory to measure with.
MachineRates rates_here(const std::vector<DType>& types, Isa isa, int n_threads, Measuring measuring) {
  RatesFile file;
  Json& known = file.machine(fmt::format("{}, {}, {} threads", cpu_info().name, isa_name(isa), n_threads));
  const Json calls = known.value("calls", Json());
  const int n_calls = calls.is_number_integer() ? calls.get<int>() : 0;
  std::optional<ThreadPool> pool;
  const auto threads = [&]() -> ThreadPool& {
    if (!pool) pool.emplace(ThreadPoolOptions{.n_threads = n_threads});
    return *pool;
  };
  const auto get = [&](const std::string& key, bool larger_is_better, const auto& measure) {
    std::vector<double> values = RatesFile::numbers(known, key);
    const bool settled =
        values.size() > 1 && (n_calls >= kMostCalls || std::abs(values[0] - values[1]) <= kAlike * values[0]);
    if (settled && measuring != Measuring::Again) return values[0];
    if (measuring == Measuring::Never) {
      if (values.empty()) throw NothingKept{};
      return values[0];
    }
    values.push_back(measure());
    std::sort(values.begin(), values.end());
    if (larger_is_better) std::reverse(values.begin(), values.end());
    if (values.size() > 2) values.erase(values.begin() + 2, values.end());
    known[key] = values;
    return values[0];
  };
  const auto collect = [&] {
    MachineRates rates;
    rates.read = get("read", true, [&] { return measure_read_bandwidth(threads()); });
    for (const DType dtype : types) {
      const std::string name = dtype_name(dtype);
      std::optional<TypeRates> now;
      const auto rate = [&](const char* what, double TypeRates::*member) {
        return get(name + "_" + what, true, [&] {
          if (!now) now = measure_matmul(dtype, isa, threads());
          return (*now).*member;
        });
      };
      rates.types[dtype] = {.one_row = rate("one_row", &TypeRates::one_row),
                            .few_rows = rate("few_rows", &TypeRates::few_rows),
                            .many_rows = rate("many_rows", &TypeRates::many_rows)};
    }
    const DType first = types.front();
    rates.small_s = get("small_s", false, [&] { return measure_small_product(first, isa, threads()); });
    rates.cache_gain = get("cache_gain", true, [&] {
      return measure_cache_gain(first, isa, rates.types[first].one_row, threads());
    });
    return rates;
  };
  MachineRates rates = collect();
  if (pool && measuring != Measuring::Again) rates = collect();  // what was measured now, once more
  if (pool) {
    known["calls"] = n_calls + 1;
    file.save();
  }
  return rates;
}

// Types that were not measured are taken for the most frequent one.
void fill_in(MachineRates& rates, const TokenWork& work, DType most) {
  for (const TypeWork& type : work.types) rates.types.try_emplace(type.dtype, rates.types[most]);
}

uint64_t bytes_of(const std::vector<MemoryPlanItem>& items, const std::string& name) {
  for (const MemoryPlanItem& item : items)
    if (item.name == name) return item.bytes;
  return 0;
}

}  // namespace

std::optional<SpeedEstimate> expected_speed(const GgufFile& file, ModelConfig config,
                                            const EngineOptions& options, const MemoryPlan& plan,
                                            Measuring measuring) {
  if (plan.ffn_parts > 0) cut_dense(config, plan.ffn_parts);
  if (options.device.kind == DeviceChoice::Kind::StandIn || plan.experts_in_file()) return std::nullopt;
  if (!options.repack && plan.device_items.empty())
    return std::nullopt;  // measured is the layout of the kernels
  if (measuring == Measuring::Never && !plan.device_items.empty())
    return std::nullopt;  // nothing is kept of cards
  const TokenWork work = token_work(config, Weights::bind(config, file));
  const std::vector<DType> types = types_to_know(work);
  const Isa isa = options.isa.value_or(best_isa());
  const int n_threads = options.n_threads > 0 ? options.n_threads : cpu_info().n_cores;
  try {
    MachineRates rates = rates_here(types, isa, n_threads, measuring);
    if (rates.read == 0.0) return std::nullopt;
    fill_in(rates, work, types.front());
    if (!plan.device_items.empty()) {
      std::string note;
      const std::optional<GpuChoice> gpu = choose_gpu(options.device, note);
      if (!gpu) return std::nullopt;
      const uint64_t hot = bytes_of(plan.device_items, plan.ffn_parts > 0 ? "FFN parts" : "hot experts");
      const double measured = measure_gpu_link_bandwidth(), link = measured > 0.0 ? measured : kCardLink;
      return expected_speed(
          work, rates,
          CardRates{
              .read = measure_gpu_read_bandwidth(),
              .n_multiprocessors = gpu->n_multiprocessors,
              .warpgroups = gpu->compute_capability == 90,
              .link = options.link_limit > 0 ? std::min(link, static_cast<double>(options.link_limit)) : link,
              .hot_share = plan.expert_bytes == 0
                               ? 1.0
                               : static_cast<double>(hot) / static_cast<double>(plan.expert_bytes),
              .parts = plan.ffn_parts > 0,
              .n_batch = plan.n_batch});
    }
    const uint64_t weights = file.total_tensor_bytes();
    const bool cached = weights <= cpu_info().l3_bytes;
    return expected_speed(work, rates, plan.n_batch, cached);
  } catch (const MemoryError&) {
    return std::nullopt;
  } catch (const NothingKept&) {
    return std::nullopt;
  }
}

std::string describe(const SpeedEstimate& speed) {
  const auto round = [](double x) { return x < 100.0 ? fmt::format("{:.1f}", x) : fmt::format("{:.0f}", x); };
  return fmt::format("prefill {}, decode {} tokens/s", round(speed.prefill), round(speed.decode));
}

Json speed_json(const std::optional<SpeedEstimate>& speed) {
  if (!speed) return nullptr;
  return {{"prefill_tokens_per_second", speed->prefill}, {"decode_tokens_per_second", speed->decode}};
}

}  // namespace thermo
