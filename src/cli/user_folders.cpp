#include "cli/user_folders.h"

#include <cstdlib>

namespace thermo {

namespace fs = std::filesystem;

namespace {

fs::path g_state_folder;  // empty: none was given

fs::path in_user_folder(const char* variable, const char* below_home, const char* name) {
  const std::string folder = environment_variable(variable);
  const fs::path base = folder.empty() ? in_home(below_home) : fs::path(folder);
  return base.empty() ? base : base / name;
}

}  // namespace

std::string environment_variable(const std::string& name) {
  const char* const value = std::getenv(name.c_str());
  return value != nullptr ? value : "";
}

fs::path in_home(const char* folder) {
  const std::string home = environment_variable("HOME");
  return home.empty() ? fs::path() : fs::path(home) / folder;
}

fs::path in_user_cache(const char* name) {
  return in_user_folder("XDG_CACHE_HOME", ".cache", name);
}
fs::path in_user_config(const char* name) {
  return in_user_folder("XDG_CONFIG_HOME", ".config", name);
}
fs::path in_user_data(const char* name) {
  return in_user_folder("XDG_DATA_HOME", ".local/share", name);
}
fs::path in_user_state(const char* name) {
  return in_user_folder("XDG_STATE_HOME", ".local/state", name);
}

bool is_folder(const fs::path& path) {
  std::error_code ignored;
  return fs::is_directory(path, ignored);
}

void set_state_folder(fs::path folder) {
  g_state_folder = std::move(folder);
}
fs::path in_state_folder(const char* name, fs::path otherwise) {
  return g_state_folder.empty() ? otherwise : g_state_folder / name;
}

}  // namespace thermo
