#include <zstd.h>

#include <algorithm>
#include <memory>

#include "server/http/compressed_body.h"

namespace thermo {
namespace {

constexpr size_t kPiece = 64 * 1024;
constexpr int kWindowLog = 23;

struct FreeStream {
  void operator()(ZSTD_DStream* stream) const { ZSTD_freeDStream(stream); }
};

}  // namespace

Unpacked unzstd(std::string_view bytes, size_t max_bytes, std::string& out) {
  const std::unique_ptr<ZSTD_DStream, FreeStream> stream(ZSTD_createDStream());
  if (stream == nullptr ||
      ZSTD_isError(ZSTD_DCtx_setParameter(stream.get(), ZSTD_d_windowLogMax, kWindowLog)))
    return Unpacked::Broken;
  ZSTD_inBuffer in{bytes.data(), bytes.size(), 0};
  size_t rest = 1;  // of a frame; 0: it is whole
  while (rest != 0 || in.pos < in.size) {
    if (out.size() >= max_bytes) return Unpacked::TooLarge;
    const size_t before = out.size();
    out.resize(std::min(before + kPiece, max_bytes));
    ZSTD_outBuffer piece{out.data() + before, out.size() - before, 0};
    rest = ZSTD_decompressStream(stream.get(), &piece, &in);
    out.resize(before + piece.pos);
    if (ZSTD_isError(rest)) return Unpacked::Broken;
    if (rest != 0 && in.pos == in.size && piece.pos < piece.size) return Unpacked::Broken;  // it is cut off
  }
  return Unpacked::Ok;
}

}  // namespace thermo
