// `thermocline doctor`: what this machine has, and what would make it faster. Every line is ok, warn or fail;
// what is not ok says what to do.
#include <dlfcn.h>
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>

#include "base/cpu_info.h"
#include "base/json.h"
#include "base/thread_pool.h"
#include "base/units.h"
#include "cli/bench/bandwidth.h"
#include "cli/commands.h"
#include "cli/json_text.h"
#include "cli/version.h"
#include "engine/gpu_backend.h"
#include "kernels/isa.h"

namespace thermo {
namespace {

enum class Verdict { Ok, Warn, Fail };

struct Finding {
  Verdict verdict;
  std::string name;
  std::string value;
  std::string remedy = {};  // empty when ok
};

const char* verdict_name(Verdict verdict) {
  return verdict == Verdict::Ok ? "ok" : verdict == Verdict::Warn ? "warn" : "fail";
}

std::string first_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

Finding check_gpu() {
  const std::string name = "gpu";
  if (access("/proc/driver/nvidia/version", R_OK) != 0)
    return {Verdict::Ok, name, "no NVIDIA driver, the CPU does everything"};
#ifdef THERMO_HAS_CUDA
  std::string note;
  if (const std::optional<GpuChoice> gpu = choose_gpu({}, note))
    return {Verdict::Ok, name,
            fmt::format("cuda:{} {}, {} free of {}, {:.0f} GB/s read", gpu->index, gpu->name,
                        format_bytes(gpu->free_bytes), format_bytes(gpu->total_bytes),
                        1e-9 * measure_gpu_read_bandwidth())};
  return {Verdict::Warn, name, first_line("/proc/driver/nvidia/version"), note};
#else
  return {Verdict::Warn, name, first_line("/proc/driver/nvidia/version"),
          "this build has no CUDA and uses the CPU only; build with -DTHERMO_CUDA=ON to use the GPU"};
#endif
}

Finding check_cuda() {
  // Looked for by name, so that the program runs where there is none.
  void* library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return {Verdict::Ok, "cuda", "no CUDA library; not needed by this build"};
  dlclose(library);
  return {Verdict::Ok, "cuda", "libcuda.so.1 is there"};
}

Finding check_isa() {
  std::string paths;
  for (Isa isa : available_isas()) paths += fmt::format("{}{}", paths.empty() ? "" : " ", isa_name(isa));
  Isa best = best_isa();
  if (best == Isa::Portable)
    return {Verdict::Warn, "kernels", paths,
            "without AVX2, decoding is several times slower; use a CPU from 2013 or later"};
  return {Verdict::Ok, "kernels", fmt::format("{} (used: {})", paths, isa_name(best))};
}

Finding check_cpu() {
  const CpuInfo& cpu = cpu_info();
  std::string features;
  if (cpu.avx2) features += " avx2";
  if (cpu.avx_vnni) features += " avx-vnni";
  if (cpu.avx512) features += " avx512";
  if (cpu.amx_int8) features += " amx-int8";
  return {Verdict::Ok, "processor",
          fmt::format("{}, L2 {}, L3 {}, features:{}", cpu.name.empty() ? "unknown" : cpu.name,
                      format_bytes(cpu.l2_bytes), format_bytes(cpu.l3_bytes),
                      features.empty() ? " none" : features)};
}

Finding check_cores() {
  const int n_cores = cpu_info().n_cores;
  const long configured = sysconf(_SC_NPROCESSORS_ONLN);
  std::string value =
      fmt::format("{} physical cores for this process, {} logical in the machine", n_cores, configured);
  const std::string governor = first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor");
  if (governor == "powersave" &&
      first_line("/sys/devices/system/cpu/cpu0/cpufreq/scaling_driver") != "intel_pstate")
    return {Verdict::Warn, "cores", value + ", governor powersave", "cpupower frequency-set -g performance"};
  double loads[1] = {0.0};
  if (getloadavg(loads, 1) == 1 && loads[0] > n_cores + 0.5)
    return {Verdict::Warn, "cores", fmt::format("{}, load {:.1f}", value, loads[0]),
            "other programs are using the cores; stop them, or choose fewer threads with -t"};
  return {Verdict::Ok, "cores", value};
}

Finding check_numa() {
  const int nodes = cpu_info().n_numa_nodes;
  if (nodes <= 1) return {Verdict::Ok, "numa", "one memory node"};
  return {Verdict::Warn, "numa", fmt::format("{} memory nodes", nodes),
          "memory of another node is slower; --numa isolate keeps to one if the model fits"};
}

Finding check_huge_pages() {
  const std::string line = first_line("/sys/kernel/mm/transparent_hugepage/enabled");
  if (line.empty())
    return {Verdict::Warn, "huge pages", "not offered by this kernel", "decoding is a few percent slower"};
  const size_t open = line.find('['), close = line.find(']');
  const std::string mode = open == std::string::npos ? line : line.substr(open + 1, close - open - 1);
  if (mode == "never")
    return {Verdict::Warn, "huge pages", mode,
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled"};
  return {Verdict::Ok, "huge pages", mode};
}

Finding check_memlock() {
  rlimit limit{};
  if (getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return {Verdict::Warn, "memlock", "unknown", "see ulimit -l"};
  if (limit.rlim_cur == RLIM_INFINITY) return {Verdict::Ok, "memlock", "unlimited"};
  return {Verdict::Ok, "memlock",
          fmt::format("{}; enough for a build without a GPU", format_bytes(limit.rlim_cur))};
}

Finding check_memory() {
  const CpuInfo& cpu = cpu_info();
  const uint64_t available = available_memory_bytes();
  const std::string value =
      fmt::format("{} available of {}", format_bytes(available), format_bytes(cpu.memory_bytes));
  if (available < 256 * MiB)
    return {Verdict::Fail, "memory", value,
            "too little for any model but the smallest; close other programs"};
  if (available < 2 * GiB)
    return {Verdict::Warn, "memory", value, "enough for small models only; close other programs"};
  return {Verdict::Ok, "memory", value};
}

Finding check_cgroup() {
  const uint64_t physical =
      static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  if (cpu_info().memory_bytes < physical - physical / 64)
    return {Verdict::Ok, "cgroup", fmt::format("limits memory to {}", format_bytes(cpu_info().memory_bytes))};
  return {Verdict::Ok, "cgroup", "no memory limit"};
}

Finding check_bandwidth(int n_threads) {
  ThreadPool pool(ThreadPoolOptions{.n_threads = n_threads});
  const double rate = measure_read_bandwidth(pool) / 1e9;
  if (rate == 0.0)
    return {Verdict::Warn, "bandwidth", "not measured: the system gives this process too little memory",
            "raise its limit with ulimit -v"};
  const std::string value = fmt::format("{:.1f} GB/s read by {} threads", rate, pool.size());
  if (rate < 8.0)
    return {Verdict::Warn, "bandwidth", value,
            "decoding is bound by this; check that all memory channels are filled"};
  return {Verdict::Ok, "bandwidth", value};
}

Finding check_disk() {
  struct statvfs info {};
  if (statvfs(".", &info) != 0)
    return {Verdict::Warn, "disk", "unknown", "the current folder cannot be read"};
  const uint64_t free_bytes = static_cast<uint64_t>(info.f_bavail) * info.f_frsize;
  return {Verdict::Ok, "disk", fmt::format("{} free here", format_bytes(free_bytes))};
}

class DoctorCommand : public Command {
 public:
  CommandText text() const override {
    return {"doctor", "doctor [options]", "what this machine has, and what would make it faster",
            "Measures the memory bandwidth, which takes about a second.\nExits with 1 when a line says fail.",
            "thermocline doctor --json"};
  }

  void declare(OptionSet& set) override {
    set.section("Output");
    set.flag("--json", json_, "print one JSON object");
    set.section("Engine");
    set.value("-t,--threads", "N", n_threads_,
              "threads of the measurement (default: one for each physical core)")
        .range(0, 1024);
  }

  ExitCode run(const Terminal& terminal) override {
    const std::vector<Finding> findings = {check_cpu(),        check_isa(),     check_cores(),
                                           check_numa(),       check_memory(),  check_cgroup(),
                                           check_huge_pages(), check_memlock(), check_bandwidth(n_threads_),
                                           check_disk(),       check_gpu(),     check_cuda()};
    bool failed = false;
    std::string out = json_ ? "" : version_line() + "\n";
    Json list = Json::array();
    for (const Finding& finding : findings) {
      failed |= finding.verdict == Verdict::Fail;
      if (json_) {
        Json line = {
            {"name", finding.name}, {"verdict", verdict_name(finding.verdict)}, {"value", finding.value}};
        if (!finding.remedy.empty()) line["remedy"] = finding.remedy;
        list.push_back(line);
        continue;
      }
      const Style style = finding.verdict == Verdict::Ok     ? Style::Green
                          : finding.verdict == Verdict::Warn ? Style::Yellow
                                                             : Style::Red;
      out += fmt::format("{}  {:<11} {}\n",
                         terminal.on_stdout(style, fmt::format("{:<4}", verdict_name(finding.verdict))),
                         finding.name, finding.value);
      if (!finding.remedy.empty()) out += fmt::format("                  -> {}\n", finding.remedy);
    }
    if (json_) out = json_text({{"version", version_number()}, {"ok", !failed}, {"findings", list}});
    write_stdout(out);
    if (failed) throw ThermoError(ExitCode::Internal, "a check failed: the lines above say what to do");
    return ExitCode::Ok;
  }

 private:
  bool json_ = false;
  int n_threads_ = 0;
};

}  // namespace

std::unique_ptr<Command> make_doctor_command() {
  return std::make_unique<DoctorCommand>();
}

}  // namespace thermo
