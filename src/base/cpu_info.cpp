#include "base/cpu_info.h"

#include <sched.h>
#include <sys/syscall.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <utility>

#include "base/memory_nodes.h"
#include "base/units.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace thermo {
namespace {

std::string read_word(const std::string& path) {
  std::ifstream file(path);
  std::string word;
  file >> word;
  return word;
}

std::vector<int> allowed_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof(set), &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  if (cores.empty()) cores.push_back(0);
  return cores;
}

// Allowed cores split into the first of each physical core and the rest.
std::pair<std::vector<int>, std::vector<int>> split_siblings() {
  std::pair<std::vector<int>, std::vector<int>> split;
  std::set<std::string> seen;
  for (int core : allowed_cores()) {
    const std::string siblings =
        read_word("/sys/devices/system/cpu/cpu" + std::to_string(core) + "/topology/thread_siblings_list");
    const bool first = siblings.empty() || seen.insert(siblings).second;
    (first ? split.first : split.second).push_back(core);
  }
  return split;
}

// What a call of the system says where /proc cannot be read: no such folder, or no descriptor left. Free
// means unused there, without what caches would give back.
uint64_t sysinfo_bytes(const std::string& key) {
  struct sysinfo info {};
  if (::sysinfo(&info) != 0) return 0;
  return (key == "MemTotal" ? info.totalram : info.freeram + info.bufferram) * info.mem_unit;
}

uint64_t meminfo_bytes(const std::string& key) {
  std::ifstream file("/proc/meminfo");
  std::string line;
  while (std::getline(file, line)) {
    if (line.rfind(key, 0) == 0) {
      std::istringstream fields(line.substr(key.size() + 1));
      uint64_t kib = 0;
      fields >> kib;
      return kib * 1024;
    }
  }
  return sysinfo_bytes(key);
}

// Size of the first core's cache of a level, as the kernel lists it ("32768K"). sysconf() asks the processor,
// which in a virtual machine may answer for the whole host.
uint64_t cache_bytes(int level) {
  for (int index = 0; index < 8; ++index) {
    const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index);
    if (read_word(folder + "/level") != std::to_string(level)) continue;
    return parse_bytes(read_word(folder + "/size")).value_or(0);
  }
  return 0;
}

// The tightest memory limit of the cgroups this process is in; 0 when there is none.
struct CgroupMemory {
  uint64_t limit = 0;
  uint64_t used = 0;  // without pages of files, which the system takes back when it needs them
};

// A number of a "key value" file, 0 when it is not there.
uint64_t keyed_number(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string name;
  uint64_t value = 0;
  while (file >> name >> value)
    if (name == key) return value;
  return 0;
}

// What the two versions of the interface call things.
struct CgroupNames {
  std::string root;
  const char *limit, *used, *inactive_file, *active_file;
};

CgroupMemory cgroup_memory() {
  const CgroupNames v2{"/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file", "active_file"};
  const CgroupNames v1{"/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                       "total_inactive_file", "total_active_file"};
  CgroupMemory tightest;
  // From our group up to the root: any of them may be the limit.
  const auto look = [&](const CgroupNames& names, std::string path) {
    while (!path.empty()) {
      const std::string folder = names.root + (path == "/" ? "" : path) + "/";
      const std::string limit = read_word(folder + names.limit);
      const uint64_t bytes = limit.empty() || limit == "max" ? 0 : std::strtoull(limit.c_str(), nullptr, 10);
      if (bytes > 0 && (tightest.limit == 0 || bytes < tightest.limit)) {
        const uint64_t used = std::strtoull(read_word(folder + names.used).c_str(), nullptr, 10);
        const uint64_t files = keyed_number(folder + "memory.stat", names.inactive_file) +
                               keyed_number(folder + "memory.stat", names.active_file);
        tightest = {bytes, used - std::min(used, files)};
      }
      if (path == "/") break;
      path = path.substr(0, path.rfind('/'));
      if (path.empty()) path = "/";
    }
  };
  std::ifstream file("/proc/self/cgroup");
  std::string line;
  while (std::getline(file, line)) {  // "0::/path" or "4:memory:/path"
    if (line.rfind("0::", 0) == 0) look(v2, line.substr(3));
    if (const size_t at = line.find(":memory:"); at != std::string::npos) look(v1, line.substr(at + 8));
  }
  return tightest;
}

#if defined(__x86_64__)

uint64_t enabled_state() {
  uint32_t low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (static_cast<uint64_t>(high) << 32) | low;
}

// Tile registers are granted per process on request.
bool request_amx() {
  constexpr long kArchReqXcompPerm = 0x1023;
  constexpr long kTileData = 18;
  return ::syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

void read_x86(CpuInfo& info) {
  uint32_t a = 0, b = 0, c = 0, d = 0;
  char brand[49] = {};
  for (uint32_t leaf = 0; leaf < 3; ++leaf) {
    if (!__get_cpuid(0x80000002u + leaf, &a, &b, &c, &d)) break;
    const uint32_t words[4] = {a, b, c, d};
    for (int i = 0; i < 16; ++i)
      brand[leaf * 16 + static_cast<uint32_t>(i)] = static_cast<char>(words[i / 4] >> (8 * (i % 4)));
  }
  info.name = brand;
  while (!info.name.empty() && (info.name.back() == ' ' || info.name.back() == '\0')) info.name.pop_back();

  if (!__get_cpuid(1, &a, &b, &c, &d)) return;
  const bool osxsave = c & (1u << 27);
  const bool fma = c & (1u << 12);
  const bool f16c = c & (1u << 29);
  if (!osxsave) return;
  const uint64_t state = enabled_state();
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = (state & 0xe6) == 0xe6;
  const bool tiles = (state & 0x60000) == 0x60000;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return;
  const uint32_t last_part = a;
  info.avx2 = ymm && fma && f16c && (b & (1u << 5)) && (b & (1u << 8));
  const uint32_t f = 1u << 16, dq = 1u << 17, bw = 1u << 30, vl = 1u << 31;
  const uint32_t vnni = 1u << 11;
  info.avx512 = info.avx2 && zmm && (b & f) && (b & dq) && (b & bw) && (b & vl) && (c & vnni);
  const uint32_t amx_tile = 1u << 24, amx_int8 = 1u << 25;
  info.amx_int8 = info.avx512 && tiles && (d & amx_tile) && (d & amx_int8) && request_amx();
  if (last_part >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) info.avx_vnni = info.avx2 && (a & (1u << 4));
}

#endif

CpuInfo read_cpu_info() {
  CpuInfo info;
#if defined(__x86_64__)
  read_x86(info);
#endif
  if (info.name.empty()) info.name = "unknown processor";
  info.n_cores = static_cast<int>(usable_physical_cores().size());
  info.n_numa_nodes = std::max(static_cast<int>(memory_nodes().size()), 1);
  info.memory_bytes = meminfo_bytes("MemTotal");
  const CgroupMemory group = cgroup_memory();
  if (group.limit != 0) info.memory_bytes = std::min(info.memory_bytes, group.limit);
  if (const uint64_t l2 = cache_bytes(2); l2 > 0) info.l2_bytes = l2;
  info.l3_bytes = cache_bytes(3);
  return info;
}

}  // namespace

const CpuInfo& cpu_info() {
  static const CpuInfo info = read_cpu_info();
  return info;
}

std::vector<int> usable_cores() {
  auto [first, rest] = split_siblings();
  first.insert(first.end(), rest.begin(), rest.end());
  return first;
}

std::vector<int> usable_physical_cores() {
  return split_siblings().first;
}

uint64_t available_memory_bytes() {
  uint64_t available = meminfo_bytes("MemAvailable");
  const CgroupMemory group = cgroup_memory();
  if (group.limit != 0) available = std::min(available, group.limit - std::min(group.limit, group.used));
  return available;
}

}  // namespace thermo
