#include <cmath>
#include <vector>

#include "kernels/delta_net/delta_net.h"

namespace thermo {

void delta_net_ref(const DeltaNetArgs& args) {
  const size_t dim = static_cast<size_t>(args.dim);
  const size_t n_rows = static_cast<size_t>(args.n_rows);
  const size_t n_head_v = static_cast<size_t>(args.n_head_v);
  for (size_t n = 0; n < n_head_v; ++n) {
    const size_t kh = n % static_cast<size_t>(args.n_head_k);
    float* state = args.state + n * dim * dim;
    // A tree keeps the state after every row; a chain only the last one.
    const bool tree = !args.ancestors.is_chain();
    std::vector<std::vector<double>> states(tree ? n_rows : 1);
    const std::vector<double> start(state, state + dim * dim);
    std::vector<double> s = start;
    for (size_t r = 0; r < n_rows; ++r) {
      const float* q = args.q + static_cast<int64_t>(r) * args.q_stride + kh * dim;
      const float* k = args.k + static_cast<int64_t>(r) * args.k_stride + kh * dim;
      const float* v = args.v + static_cast<int64_t>(r) * args.v_stride + n * dim;
      if (tree) {
        int parent = static_cast<int>(r) - 1;
        while (parent >= 0 && !args.ancestors.sees(static_cast<int>(r), parent)) --parent;
        s = parent < 0 ? start : states[static_cast<size_t>(parent)];
      }
      const double decay = std::exp(double{args.g[r * n_head_v + n]});
      const double beta = args.beta[r * n_head_v + n];
      for (size_t j = 0; j < dim; ++j) {
        double m = 0.0;
        for (size_t i = 0; i < dim; ++i) m += (s[j * dim + i] *= decay) * double{k[i]};
        const double delta = beta * (double{v[j]} - m);
        double o = 0.0;
        for (size_t i = 0; i < dim; ++i) o += (s[j * dim + i] += delta * double{k[i]}) * double{q[i]};
        args.out[(r * n_head_v + n) * dim + j] = static_cast<float>(o);
        if (args.delta != nullptr) args.delta[(r * n_head_v + n) * dim + j] = static_cast<float>(delta);
      }
      if (tree) states[r] = s;
    }
    if (!args.uncommitted)
      for (size_t i = 0; i < dim * dim; ++i) state[i] = static_cast<float>(s[i]);
  }
}

void delta_net_commit_ref(const DeltaNetCommitArgs& args) {
  const size_t dim = static_cast<size_t>(args.dim);
  const size_t n_head_v = static_cast<size_t>(args.n_head_v);
  for (size_t n = 0; n < n_head_v; ++n) {
    const size_t kh = n % static_cast<size_t>(args.n_head_k);
    float* state = args.state + n * dim * dim;
    std::vector<double> s(state, state + dim * dim);
    for (int32_t row : args.path) {
      const size_t r = static_cast<size_t>(row);
      const float* k = args.k + row * args.k_stride + kh * dim;
      const float* delta = args.delta + (r * n_head_v + n) * dim;
      const double decay = std::exp(double{args.g[r * n_head_v + n]});
      for (size_t j = 0; j < dim; ++j)
        for (size_t i = 0; i < dim; ++i)
          s[j * dim + i] = s[j * dim + i] * decay + double{delta[j]} * double{k[i]};
    }
    for (size_t i = 0; i < dim * dim; ++i) state[i] = static_cast<float>(s[i]);
  }
}

void conv_ref(const ConvArgs& args, int n_channels) {
  const size_t stride = static_cast<size_t>(args.stride);
  const size_t taps = static_cast<size_t>(args.taps);
  for (int r = args.first_row; r < args.n_rows; ++r) {
    for (size_t ch = 0; ch < static_cast<size_t>(n_channels); ++ch) {
      double sum = 0.0;
      int row = r;
      size_t column = taps - 1;
      for (size_t t = taps; t-- > 0;) {
        double u;
        if (row >= 0) {
          u = args.u[static_cast<size_t>(row) * stride + ch];
          row = args.parents == nullptr ? row - 1 : args.parents[row];
        } else {
          u = args.state[--column * stride + ch];
        }
        sum += double{args.weight[ch * taps + t]} * u;
      }
      args.out[static_cast<size_t>(r) * stride + ch] = static_cast<float>(sum / (1.0 + std::exp(-sum)));
    }
  }
}

void l2_normalize_ref(float* x, int n, int dim, float scale) {
  for (int h = 0; h < n; ++h, x += dim) {
    double sum = 0.0;
    for (int i = 0; i < dim; ++i) sum += double{x[i]} * double{x[i]};
    for (int i = 0; i < dim; ++i) x[i] = static_cast<float>(x[i] / std::sqrt(sum + 1e-6) * scale);
  }
}

void gated_norm_ref(float* o, const float* z, const float* weight, int n, int dim, float eps) {
  for (int h = 0; h < n; ++h, o += dim, z += dim) {
    double sum = 0.0;
    for (int i = 0; i < dim; ++i) sum += double{o[i]} * double{o[i]};
    const double scale = 1.0 / std::sqrt(sum / dim + double{eps});
    for (int i = 0; i < dim; ++i) {
      const double gate = double{z[i]} / (1.0 + std::exp(-double{z[i]}));
      o[i] = static_cast<float>(o[i] * scale * weight[i] * gate);
    }
  }
}

}  // namespace thermo
