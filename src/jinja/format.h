// Python's two ways to fill values into text.
#pragma once

#include "jinja/value.h"

namespace thermo::jinja {

// `format % values`: %s %r %d %i %u %x %X %o %f %e %g %c %%, flags, width, precision, %(name)s.
Text format_percent(Heap& heap, const Text& format, const Value& values);

// format.format(...): {} {0} {name} {name.attr} {name[key]}, !r !s, and
// [[fill]align][sign][0][width][,][.precision][type].
Text format_braces(Heap& heap, const Text& format, const CallArgs& args);

}  // namespace thermo::jinja
