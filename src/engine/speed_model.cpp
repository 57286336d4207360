#include "engine/speed_model.h"

#include <algorithm>
#include <cmath>

namespace thermo {
namespace {

// Of the processor: kDecodeShare is fitted to three runs of one thread (35B-A3B, dense and Laguna shapes of
// few layers), the others are estimates. Of a card: estimates after one H200, compared with no run. See
// docs/memory.md.
constexpr double kRegionsPerLayer = 6.0;   // fork and join
constexpr double kSerialPerLayer = 4e-6;   // norms, routing, sums between them
constexpr double kDecodeShare = 0.74;      // of the kernels' speed that a step reaches: borders, imbalance
constexpr double kPrefillShare = 0.80;     // likewise; what is not a product
constexpr double kCardReadShare = 0.72;    // of the card's bandwidth that decoding reaches
constexpr double kCardPerLayer = 20e-6;    // hand-overs between launches
constexpr double kCardMacsPerSm = 0.7e12;  // multiply-adds of a prompt, for each multiprocessor

void add(std::vector<TypeWork>& types, const Matrix& m, double times, bool expert) {
  if (m.empty()) return;
  auto at = std::find_if(types.begin(), types.end(), [&](const TypeWork& t) { return t.dtype == m.dtype; });
  if (at == types.end()) at = types.insert(types.end(), TypeWork{.dtype = m.dtype});
  const auto bytes = static_cast<uint64_t>(times * static_cast<double>(m.n_bytes()));
  const double macs = times * m.n_rows * static_cast<double>(m.n_cols);
  (expert ? at->expert_bytes : at->core_bytes) += bytes;
  (expert ? at->expert_macs : at->core_macs) += macs;
}

void add_block(TokenWork& work, const Block& block, const BlockWeights& weights) {
  for (const TensorSpec& spec : block.tensors)
    if (spec.form == TensorForm::Matrix) add(work.types, weights[spec.role], 1.0, false);
  if (weights.experts.empty()) return;
  const Ffn& expert = weights.experts.front();
  for (const Matrix* m : {&expert.gate, &expert.up, &expert.down})
    add(work.types, *m, block.route.n_expert_used, true);
  work.expert_share =
      static_cast<double>(block.route.n_expert_used) / static_cast<double>(weights.experts.size());
}

const TypeRates& rates_of(const MachineRates& machine, DType dtype) {
  const auto at = machine.types.find(dtype);
  return at != machine.types.end() ? at->second : machine.types.begin()->second;
}

// Bytes a second of weights from memory: not more than it was seen to deliver.
double one_row_rate(const MachineRates& machine, DType dtype) {
  return std::min(rates_of(machine, dtype).one_row, machine.read);
}

// Between the measured numbers of rows, on a scale of powers.
double macs_per_second(const TypeRates& rates, double bytes_per_mac, double n_rows) {
  const double one = rates.one_row / bytes_per_mac;
  const auto between = [](double a, double b, double t) {
    return a * std::pow(b / a, std::clamp(t, 0.0, 1.0));
  };
  if (n_rows <= kFewRows)
    return between(one, std::max(one, rates.few_rows),
                   std::log2(std::max(1.0, n_rows)) / std::log2(kFewRows));
  return between(rates.few_rows, std::max(rates.few_rows, rates.many_rows),
                 std::log2(n_rows / kFewRows) / std::log2(static_cast<double>(kManyRows) / kFewRows));
}

double bytes_per_mac(DType dtype) {
  const DTypeInfo& info = dtype_info(dtype);
  return static_cast<double>(info.block_bytes) / static_cast<double>(info.block_elements);
}

}  // namespace

TokenWork token_work(const ModelConfig& config, const Weights& weights) {
  TokenWork work;
  work.n_layers = config.n_layer;
  for_each_main_block(config, weights,
                      [&](const Block& block, const BlockWeights& w) { add_block(work, block, w); });
  for (size_t b = 0; b < weights.output.size(); ++b)
    add_block(work, config.network.output[b], weights.output[b]);
  const double heads = static_cast<double>(config.n_recurrent_layers()) * config.ssm_n_head_v;
  const double cells = heads * config.ssm_dim * config.ssm_dim;
  work.state_bytes = static_cast<uint64_t>(2.0 * sizeof(float) * cells);
  work.state_macs = 3.0 * cells;  // decay and read, update, query
  return work;
}

SpeedEstimate expected_speed(const TokenWork& work, const MachineRates& machine, int n_batch, bool cached) {
  const double gain = cached ? machine.cache_gain : 1.0;
  double decode = 0.0, prefill = 0.0;
  for (const TypeWork& type : work.types) {
    const TypeRates& rates = rates_of(machine, type.dtype);
    decode +=
        static_cast<double>(type.core_bytes + type.expert_bytes) / (one_row_rate(machine, type.dtype) * gain);
    const double density = bytes_per_mac(type.dtype);
    prefill += type.core_macs / macs_per_second(rates, density, n_batch);
    if (type.expert_macs > 0.0)
      prefill += type.expert_macs / macs_per_second(rates, density, n_batch * work.expert_share);
  }
  const double between = work.n_layers * (kRegionsPerLayer * machine.region_s + kSerialPerLayer);
  decode += static_cast<double>(work.state_bytes) / (machine.read * gain);
  prefill += work.state_macs / rates_of(machine, DType::F32).many_rows + between / n_batch;
  return {.prefill = kPrefillShare / prefill, .decode = 1.0 / (decode / kDecodeShare + between)};
}

SpeedEstimate expected_speed(const TokenWork& work, const MachineRates& machine, const CardRates& card) {
  double core = 0.0, experts = 0.0, macs = 0.0, cold_s_per_byte = 0.0, processor = 0.0, prefill = 0.0;
  for (const TypeWork& type : work.types) {
    core += static_cast<double>(type.core_bytes);
    experts += static_cast<double>(type.expert_bytes);
    macs += type.core_macs + type.expert_macs;
    processor += static_cast<double>(type.expert_bytes) / one_row_rate(machine, type.dtype);
  }
  const double cold = (1.0 - card.hot_share) * experts;
  // Both read main memory.
  if (cold > 0.0)
    cold_s_per_byte = 1.0 / std::min(machine.read, experts / processor * kDecodeShare + card.link);
  const double decode = (core + card.hot_share * experts + static_cast<double>(work.state_bytes)) /
                            (kCardReadShare * card.read) +
                        work.n_layers * kCardPerLayer + cold * cold_s_per_byte;
  prefill = macs / (kCardMacsPerSm * card.n_multiprocessors);
  // Copies run beside the products.
  if (cold > 0.0) prefill = std::max(prefill, cold / work.expert_share / (card.link * card.n_batch));
  return {.prefill = 1.0 / prefill, .decode = 1.0 / decode};
}

}  // namespace thermo
