// exp and friends over the Vf of whichever simd_*.h was included before. Anonymous namespace: see
// simd_avx512.h.
#pragma once

namespace thermo {
namespace {

// std::min and std::max are templates with external linkage; in an unoptimised build the linker would keep
// one copy of them for all instruction sets.
inline int min_int(int a, int b) {
  return a < b ? a : b;
}
inline int max_int(int a, int b) {
  return a > b ? a : b;
}
inline int round_up(int a, int multiple) {
  return (a + multiple - 1) / multiple * multiple;
}

// e^x within 2 ulp; 0 below -87.3 (no subnormals), saturates near 2.4e38 above 88.37, NaN stays NaN.
inline Vf vexp(Vf x) {
  const Vf lowest = vset1(-87.336544f);
  const Vf t = vmin(vset1(88.37f), vmax(lowest, x));
  const Vf n = vround(t * vset1(1.44269504f));
  // r = t - n ln 2, in two parts: the first has few bits, so its product with n is exact.
  Vf r = vfma(n, vset1(-0.693359375f), t);
  r = vfma(n, vset1(2.12194440e-4f), r);
  Vf p = vset1(1.9875691500e-4f);
  p = vfma(p, r, vset1(1.3981999507e-3f));
  p = vfma(p, r, vset1(8.3334519073e-3f));
  p = vfma(p, r, vset1(4.1665795894e-2f));
  p = vfma(p, r, vset1(1.6666665459e-1f));
  p = vfma(p, r, vset1(5.0000001201e-1f));
  p = vfma(p, r * r, r) + vset1(1.0f);
  return vkeep_from(x, lowest, vscale2(p, n));
}

inline Vf vsigmoid(Vf x) {
  return vset1(1.0f) / (vset1(1.0f) + vexp(vzero() - x));
}
inline Vf vsilu(Vf x) {
  return x / (vset1(1.0f) + vexp(vzero() - x));
}

// f(i, count) over [0, n) in steps of a register; count < kWidth only for the last.
template <class Body>
inline void for_each_vec(int n, Body body) {
  int i = 0;
  for (; i + Vf::kWidth <= n; i += Vf::kWidth) body(i, Vf::kWidth);
  if (i < n) body(i, n - i);
}
inline Vf vload_part(const float* p, int count) {
  return count == Vf::kWidth ? vload(p) : vload_n(p, count);
}
inline void vstore_part(float* p, Vf a, int count) {
  if (count == Vf::kWidth)
    vstore(p, a);
  else
    vstore_n(p, a, count);
}

// Lane i of the result is the sum of the lanes of a[i].
inline Vf vsum_each(const Vf (&a)[Vf::kWidth]) {
  Vf fours[Vf::kWidth / 4];
#pragma GCC unroll 4
  for (int i = 0; i < Vf::kWidth / 4; ++i) {
    const Vf four[4] = {a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]};
    fours[i] = vsum_four(four);
  }
  return vsum_fours(fours);
}

inline float dot_floats(const float* a, const float* b, int n) {
  constexpr int W = Vf::kWidth;
  Vf sum[4] = {vzero(), vzero(), vzero(), vzero()};
  int i = 0;
  for (; i + 4 * W <= n; i += 4 * W)
    for (int u = 0; u < 4; ++u) sum[u] = vfma(vload(a + i + u * W), vload(b + i + u * W), sum[u]);
  for (; i + W <= n; i += W) sum[0] = vfma(vload(a + i), vload(b + i), sum[0]);
  if (i < n) sum[1] = vfma(vload_n(a + i, n - i), vload_n(b + i, n - i), sum[1]);
  return vsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

}  // namespace
}  // namespace thermo
