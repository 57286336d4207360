#include "base/process_watch.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/sanitized.h"

namespace thermo {
namespace {

namespace fs = std::filesystem;

struct Pages {
  uint64_t all = 0, resident = 0;
};

Pages pages() {
  Pages p;
  std::ifstream("/proc/self/statm") >> p.all >> p.resident;
  return p;
}

uint64_t page_size() {
  return static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

}  // namespace

uint64_t resident_bytes() {
  return pages().resident * page_size();
}

uint64_t virtual_bytes() {
  return pages().all * page_size();
}

double process_cpu_seconds() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  const auto seconds = [](const timeval& t) {
    return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

std::optional<uint64_t> private_bytes() {
  if (kSanitized) return std::nullopt;
  std::ifstream status("/proc/self/status");
  uint64_t data = 0, threads = 0;
  for (std::string word; status >> word;) {
    if (word == "VmData:" && status >> data) data *= 1024;
    if (word == "Threads:") status >> threads;
  }
  pthread_attr_t attributes;
  size_t stack = 0;
  if (data == 0 || threads == 0 || pthread_attr_init(&attributes) != 0) return std::nullopt;
  pthread_attr_getstacksize(&attributes, &stack);
  pthread_attr_destroy(&attributes);
  const uint64_t stacks = (threads - 1) * stack;
  return data > stacks ? std::optional<uint64_t>(data - stacks) : std::nullopt;
}

std::optional<int> n_running_threads() {
  std::error_code error;
  int n = 0;
  fs::directory_iterator tasks("/proc/self/task", error);
  if (error) return std::nullopt;
  for (; tasks != fs::directory_iterator(); tasks.increment(error)) {
    if (error) return std::nullopt;
    std::string line;
    std::getline(std::ifstream(tasks->path() / "stat"), line);
    const size_t name_end = line.rfind(')');  // a name may have anything in it
    if (name_end != std::string::npos && name_end + 2 < line.size()) n += line[name_end + 2] == 'R';
  }
  return n;
}

std::optional<uint64_t> memory_traffic_bytes(const std::string& resctrl) {
  std::error_code error;
  std::optional<uint64_t> sum;
  fs::directory_iterator domains(fs::path(resctrl) / "mon_data", error);
  if (error) return std::nullopt;
  for (; domains != fs::directory_iterator(); domains.increment(error)) {
    if (error) return std::nullopt;
    if (!domains->path().filename().string().starts_with("mon_L3_")) continue;
    uint64_t bytes = 0;
    if (!(std::ifstream(domains->path() / "mbm_total_bytes") >> bytes)) return std::nullopt;  // "Unavailable"
    sum = sum.value_or(0) + bytes;
  }
  return sum;
}

}  // namespace thermo
