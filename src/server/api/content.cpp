#include "server/api/content.h"

#include <fmt/format.h>

#include "server/api/turns.h"

namespace thermo {
namespace {

std::string text_of(const Json& part, const char* name, const std::string& path) {
  const auto found = part.find(name);
  if (found == part.end() || !found->is_string())
    throw invalid_value(path + "." + name, fmt::format("{}.{}: a string was expected", path, name));
  return found->get<std::string>();
}

std::string describe_image(const Json& part) {
  const Json* source = &part;
  for (const char* name : {"source", "image_url"})
    if (const auto found = part.find(name); found != part.end()) source = &*found;
  if (source->is_object() && source->contains("url")) source = &(*source)["url"];
  if (source->is_object()) {
    const auto type = source->find("media_type"), data = source->find("data");
    return image_placeholder(
        type != source->end() && type->is_string() ? type->get<std::string>() : "image",
        data != source->end() && data->is_string() ? data->get_ref<const std::string&>().size() * 3 / 4 : 0);
  }
  if (!source->is_string()) return image_placeholder("image", 0);
  const auto& url = source->get_ref<const std::string&>();
  if (!url.starts_with("data:")) return image_placeholder("image", 0);
  const size_t end = url.find_first_of(";,"), comma = url.find(',');
  return image_placeholder(url.substr(5, end - 5),
                           comma == std::string::npos ? 0 : (url.size() - comma - 1) * 3 / 4);
}

}  // namespace

std::string read_image(const Json& part, const std::string& path, Place place, ImagePolicy images) {
  if (images == ImagePolicy::Refuse || (images == ImagePolicy::Auto && place == Place::Question))
    throw unsupported(path + ".type", path + ".type: this model reads no images; send text only");
  return describe_image(part);
}

Content read_content(const Json* content, const std::string& path, Place place, ImagePolicy images) {
  Content out;
  if (content == nullptr || content->is_null()) return out;
  if (content->is_string()) {
    out.text = content->get<std::string>();
    return out;
  }
  if (!content->is_array()) throw invalid_value(path, path + ": a string or a list of parts was expected");
  for (size_t i = 0; i < content->size(); ++i) {
    const Json& part = (*content)[i];
    const std::string where = element_path(path, i);
    if (part.is_string()) {
      out.text += part.get<std::string>();
      continue;
    }
    Fields fields(part, where);
    const std::string type = fields.string("type").value_or("text");
    if (type == "text" || type == "input_text" || type == "output_text" || type == "summary_text") {
      out.text += text_of(part, "text", where);
    } else if (type == "refusal") {
      out.text += text_of(part, "refusal", where);
    } else if (type == "thinking" || type == "reasoning" || type == "reasoning_text") {
      out.reasoning += text_of(part, type == "thinking" ? "thinking" : "text", where);
    } else if (type == "redacted_thinking") {
      continue;
    } else if (type == "image_url" || type == "input_image" || type == "image") {
      out.text += read_image(part, where, place, images);
    } else {
      throw unsupported(
          where + ".type",
          fmt::format("{}.type: parts of type '{}' cannot be read; text was expected", where, type));
    }
  }
  return out;
}

}  // namespace thermo
