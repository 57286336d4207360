#include "jinja/template.h"

#include <algorithm>
#include <new>
#include <optional>

#include "jinja/interpreter.h"
#include "jinja/parser.h"

namespace thermo::jinja {

struct ParsedTemplate {
  Block body;
};

namespace {

constexpr int kMaxJsonNesting = 150;

Value string_from(Heap& heap, const std::string& s, bool untrusted) {
  return heap.string(untrusted ? Text::all_marked(s) : Text(s));
}

Value from_json(Heap& heap, const Json& json, bool untrusted, int depth = 0) {
  if (depth > kMaxJsonNesting) {
    fail("the input is nested more than " + std::to_string(kMaxJsonNesting) + " levels deep");
  }
  switch (json.type()) {
    case Json::value_t::boolean:
      return Value::boolean(json.get<bool>());
    case Json::value_t::number_integer:
      return Value::integer(json.get<int64_t>());
    case Json::value_t::number_unsigned:
      return Value::integer(static_cast<Int>(json.get<uint64_t>()));
    case Json::value_t::number_float:
      return Value::real(json.get<double>());
    case Json::value_t::string:
      return string_from(heap, json.get_ref<const std::string&>(), untrusted);
    case Json::value_t::array: {
      std::vector<Value> items;
      items.reserve(json.size());
      for (const Json& item : json) items.push_back(from_json(heap, item, untrusted, depth + 1));
      return heap.list(std::move(items));
    }
    case Json::value_t::object: {
      Value dict = heap.dict();
      for (const auto& [key, value] : json.items()) {
        dict.dict().set(string_from(heap, key, untrusted), from_json(heap, value, untrusted, depth + 1));
      }
      return dict;
    }
    default:
      return Value::none();
  }
}

Error to_error(const TemplateError& e, int line) {
  const int at = e.line != 0 ? e.line : line;
  const std::string where = at == 0 ? "template: " : "template line " + std::to_string(at) + ": ";
  return {e.for_any_input ? ErrorCode::Unsupported : ErrorCode::InvalidArgument, where + e.message};
}

}  // namespace

Result<Template> Template::parse(const std::string& source) {
  try {
    auto parsed = std::make_shared<ParsedTemplate>();
    parsed->body = parse_template(source);
    return Template(std::move(parsed));
  } catch (const TemplateError& e) {
    return to_error(e, 1);
  }
}

Result<Rendered> Template::render(const Json& context, const RenderOptions& options) const {
  if (!context.is_object())
    return Error{ErrorCode::InvalidArgument, "the context of a template must be a JSON object"};
  std::optional<Interpreter> vm;
  try {
    vm.emplace(options.limits);
    vm->now = options.now;
    for (const auto& [name, value] : context.items()) {
      const bool untrusted = std::find(options.untrusted_names.begin(), options.untrusted_names.end(),
                                       name) != options.untrusted_names.end();
      vm->define(name, from_json(vm->heap, value, untrusted));
    }
    Text out = vm->run(parsed_->body);
    return Rendered{std::move(out.bytes), std::move(out.marks)};
  } catch (const TemplateError& e) {
    return to_error(e, vm ? vm->line : 0);
  } catch (const std::bad_alloc&) {
    return Error{ErrorCode::OutOfMemory, "there is not enough memory to render the template"};
  }
}

}  // namespace thermo::jinja
