#include "chat/message.h"

#include "grammar/schema_merge.h"

namespace thermo {

const Json& Tool::declared() const {
  constexpr int kMaxReferences = 16;
  const Json* at = &parameters;
  for (int i = 0; i < kMaxReferences && at->is_object() && !at->contains("properties"); ++i) {
    const auto reference = at->find("$ref");
    if (reference == at->end() || !reference->is_string()) break;
    const Json* const target = resolve_reference(parameters, reference->get_ref<const std::string&>());
    if (target == nullptr) break;
    at = target;
  }
  return *at;
}

const Json* Tool::property(const std::string& key) const {
  const Json& schema = declared();
  if (!schema.is_object()) return nullptr;
  const auto properties = schema.find("properties");
  if (properties == schema.end() || !properties->is_object()) return nullptr;
  const auto found = properties->find(key);
  return found == properties->end() ? nullptr : &*found;
}

}  // namespace thermo
