// Heat that outlives a run: a small JSON file. The format is in docs/experts.md.
//
// Heat belongs to a model, not to a file of it: another quantisation of the same model routes the same way
// and may use it. Another architecture, width, or number of layers, experts or active experts is another
// model.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/result.h"
#include "experts/catalog.h"
#include "experts/heat.h"

namespace thermo {

// Which model the heat is of.
struct HeatFileInfo {
  std::string architecture;  // "qwen35moe"
  std::string name;          // for people; not compared
  int n_active = 0;
  int n_embd = 0;
  std::vector<int> n_expert;  // of each layer; 0: dense

  static HeatFileInfo of(const ExpertCatalog& catalog, std::string architecture, std::string name);
  bool same_model(const HeatFileInfo& other) const;
  // "qwen35moe 'Qwen3.6-35B-A3B' (40 layers of 256 experts, 8 active, 2048 wide)".
  std::string describe() const;
};

// A file's content.
struct SavedHeat {
  HeatFileInfo info;
  uint64_t n_tokens = 0;
  std::vector<float> values;  // as HeatMap::values()
};

// Replaces the file in one step: a reader or an interrupted run finds the old one or the new one.
// REQUIRES: the heat map is that of info's catalog.
Status save_heat(const std::string& path, const HeatFileInfo& info, const HeatMap& heat);

// A program's heat and its file's when they were last brought together: what was read, or written, then.
struct HeatBase {
  HeatMap ours, file;
};

// The same for a program that has counted on since: where another program has written the file in the
// meantime, what this one counted is added to it. A file that is of another model by now is refused. May be
// called again and again: `base` is brought up to date.
Status add_heat(const std::string& path, const HeatFileInfo& info, const HeatMap& heat, HeatBase& base);

// The text of a file; `path` is for messages. Refused: not a heat file, another version, damaged.
Result<SavedHeat> parse_heat(const std::string& path, const std::string& text);

// Of whatever model. Refused: not readable, not a heat file, another version, damaged.
Result<SavedHeat> read_heat(const std::string& path);

// Fills `heat` (made for info's catalog) from the file; untouched when refused: as read_heat(), or a file of
// another model. After a refusal do not save to that path: the file is not ours.
Status load_heat(const std::string& path, const HeatFileInfo& info, HeatMap& heat);

}  // namespace thermo
