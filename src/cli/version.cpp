#include "cli/version.h"

#include <fmt/format.h>

#include "base/cpu_info.h"
#include "base/json.h"
#include "cli/commands.h"

namespace thermo {
namespace {

#if defined(__clang__)
constexpr const char* kCompiler = "Clang " __clang_version__;
#else
constexpr const char* kCompiler = "GCC " __VERSION__;
#endif
#if defined(__x86_64__)
constexpr const char* kProcessor = "x86_64";
#elif defined(__aarch64__)
constexpr const char* kProcessor = "aarch64";
#else
constexpr const char* kProcessor = "other";
#endif

#ifdef THERMO_HAS_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif
#ifdef NDEBUG
constexpr const char* kBuildType = "release";
#else
constexpr const char* kBuildType = "debug";
#endif

class VersionCommand : public Command {
 public:
  CommandText text() const override { return {"version", "version [--json]", "which build this is", "", ""}; }

  void declare(OptionSet& set) override {
    set.section("Output");
    set.flag("--json", json_, "print one JSON object");
  }

  ExitCode run(const Terminal&) override {
    if (!json_) {
      write_stdout(version_line() + "\n");
      return ExitCode::Ok;
    }
    write_stdout(version_facts().dump() + "\n");
    return ExitCode::Ok;
  }

 private:
  bool json_ = false;
};

}  // namespace

const char* version_number() {
  return THERMO_VERSION;
}
const char* build_commit() {
  return THERMO_COMMIT;
}

std::string build_fingerprint() {
  return fmt::format("thermocline-{}-{}", version_number(), build_commit());
}

Json version_facts() {
  Json out;
  out["version"] = version_number();
  out["commit"] = build_commit();
  out["build_type"] = kBuildType;
  out["compiler"] = kCompiler;
  out["processor"] = kProcessor;
  out["cuda"] = kHasCuda;
  out["backends"] = Json::array({"cpu"});
  if (kHasCuda) out["backends"].push_back("cuda");
  const CpuInfo& cpu = cpu_info();
  out["cpu_features"] = Json::array();
  for (const auto& [name, has] : {std::pair("avx2", cpu.avx2),
                                  {"avx_vnni", cpu.avx_vnni},
                                  {"avx512", cpu.avx512},
                                  {"amx_int8", cpu.amx_int8}})
    if (has) out["cpu_features"].push_back(name);
  return out;
}

std::string version_line() {
  constexpr const char* kBackends = kHasCuda ? "CPU and CUDA" : "CPU";
  return fmt::format("thermocline {} ({}), {}, {}, {}", version_number(), build_commit(), kCompiler,
                     kProcessor, kBackends);
}

std::unique_ptr<Command> make_version_command() {
  return std::make_unique<VersionCommand>();
}

}  // namespace thermo
