// Where things of the user are: the environment and the folders of the XDG base directory specification.
#pragma once

#include <filesystem>
#include <string>

namespace thermo {

// The value of a variable; empty when it is not set.
std::string environment_variable(const std::string& name);

// A folder below the user's home; empty where there is no home.
std::filesystem::path in_home(const char* folder);

// A folder of one kind, with `name` in it. Empty where there is neither the variable nor a home.
std::filesystem::path in_user_cache(const char* name);   // XDG_CACHE_HOME, else ~/.cache
std::filesystem::path in_user_config(const char* name);  // XDG_CONFIG_HOME, else ~/.config
std::filesystem::path in_user_data(const char* name);    // XDG_DATA_HOME, else ~/.local/share
std::filesystem::path in_user_state(const char* name);   // XDG_STATE_HOME, else ~/.local/state

// False as well for a path that cannot be looked at: it is too long, or in a folder that is closed.
bool is_folder(const std::filesystem::path& path);

// What is kept between runs (heat, texts, rates, history): `name` in the folder of --state-dir, or
// `otherwise` where none was given. set_state_folder(): before anything is looked for.
void set_state_folder(std::filesystem::path folder);
std::filesystem::path in_state_folder(const char* name, std::filesystem::path otherwise);

}  // namespace thermo
