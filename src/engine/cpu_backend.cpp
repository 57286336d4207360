#include "engine/cpu_backend.h"

#include "experts/sim_experts.h"
#include "experts/tiered_experts.h"
#include "model/model.h"

namespace thermo {
namespace {

std::unique_ptr<ExpertRunner> make_runner(const ModelConfig& config, const Weights& weights,
                                          const ModelOptions& o, ThreadPool& pool,
                                          const LoadProgressFn& progress) {
  ExpertCatalog catalog = expert_catalog(config, weights);
  HeatMap heat = o.experts.heat ? *o.experts.heat : HeatMap(catalog);
  const auto report = [&](uint64_t done, uint64_t total) {
    if (progress) progress({"experts", done, total});
  };
  if (o.stand_in)
    return std::make_unique<SimExperts>(std::move(catalog), std::move(heat),
                                        SimExpertsOptions{.split = o.experts,
                                                          .n_batch = o.n_batch,
                                                          .isa = o.isa,
                                                          .route = config.route,
                                                          .routers = router_views(config, weights)},
                                        pool, report);
  return std::make_unique<TieredExperts>(std::move(catalog), std::move(heat), o.experts, o.isa, pool, report);
}

}  // namespace

bool keeps_experts(const ModelOptions& options) {
  return !options.stand_in && options.experts.host_bytes == 0;
}

std::unique_ptr<Backend> make_cpu_backend(ModelConfig config, Weights weights, const ModelOptions& o,
                                          ThreadPool& pool, const LoadProgressFn& progress) {
  std::unique_ptr<ExpertRunner> runner;
  if (!keeps_experts(o)) runner = make_runner(config, weights, o, pool, progress);
  auto model = std::make_unique<Model>(std::move(config), std::move(weights), o, pool, std::move(runner));
  if (keeps_experts(o) && o.experts.heat && model->heat())
    model->heat()->set(o.experts.heat->values(), o.experts.heat->n_tokens());
  return model;
}

}  // namespace thermo
