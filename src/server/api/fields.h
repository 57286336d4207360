// Reading a JSON object of a request: typed values with their ranges, and which members nobody asked for.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "server/api/api_error.h"

namespace thermo {

// The body of a request. Throws ApiError 400 invalid_json: no JSON, wrong UTF-8, no object, or beyond the
// limits of base/json_limits.h.
Json parse_body(std::string_view body);

class Fields {
 public:
  // `object` must outlive this. `path`: of the object, empty for the body.
  explicit Fields(const Json& object, std::string path = {});

  // nullptr when it is absent or null. What was asked for once is known.
  const Json* find(const std::string& name);
  bool has(const std::string& name) { return find(name) != nullptr; }
  // nullopt when absent or null; 400 when of another type or out of range.
  std::optional<double> number(const std::string& name, double low, double high);
  std::optional<int64_t> integer(const std::string& name, int64_t low, int64_t high);
  std::optional<bool> boolean(const std::string& name);
  std::optional<std::string> string(const std::string& name);
  const Json* array(const std::string& name);
  const Json* object(const std::string& name);
  // 400 missing_required_parameter when absent.
  const Json& require(const std::string& name);

  // Known, without an effect.
  void accept(std::initializer_list<const char*> names);
  // 400 unsupported_parameter when present and not null, false or empty.
  void refuse(const std::string& name, const std::string& why);

  std::string path(const std::string& name) const;
  // Members that nobody asked for.
  std::vector<std::string> unknown() const;

 private:
  const Json& object_;
  std::string path_;
  std::set<std::string> known_;
};

// "messages[3].content".
std::string element_path(const std::string& path, size_t index);

}  // namespace thermo
