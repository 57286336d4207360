// Whether this is a build with a sanitizer, which is slower and keeps freed memory for a while.
#pragma once

namespace thermo {

inline constexpr bool kSanitized =
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
    true;
#else
    false;
#endif

}  // namespace thermo
