// What the parts of a server share. All of it belongs to the thread of the sockets, but for what says
// otherwise.
#pragma once

#include <atomic>
#include <boost/asio/io_context.hpp>
#include <boost/asio/thread_pool.hpp>
#include <list>
#include <map>
#include <memory>
#include <optional>

#include "base/gpu_sensors.h"
#include "server/live_request.h"
#include "server/load_history.h"
#include "server/metrics.h"
#include "server/server_options.h"
#include "server/turn_store.h"

namespace thermo {

struct ServerState {
  explicit ServerState(ServerOptions o)
      : options(std::move(o)),
        access(options.access),
        workers(static_cast<size_t>(options.n_workers)),
        turns(std::make_unique<TurnStore>(options.turn_store_bytes)) {}

  const ServerOptions options;
  Access access;
  asio::io_context io{1};
  asio::thread_pool workers;
  std::unique_ptr<TurnStore> turns;                                                     // any thread
  std::unique_ptr<DryBreakerCache> dry_breakers = std::make_unique<DryBreakerCache>();  // likewise
  Metrics metrics;                                                                      // any thread
  std::unique_ptr<ServedModel> model;  // set once, when it is ready; then workers may read it, too
  std::string load_stage = "open";
  double load_progress = 0.0;
  bool draining = false;
  std::atomic<bool> cancelling{false};  // the grace is over; any thread
  int n_preparing = 0;                  // requests that workers deal with: they are not live yet
  std::list<std::shared_ptr<LiveRequest>> live;
  std::map<std::string, int> by_key;          // live requests of a key
  asio::steady_timer sampler{io};             // of the next one
  LoadHistory history;                        // a sample each second
  std::shared_ptr<const ExpertHeat> experts;  // as of then; nullptr: not known
  std::unique_ptr<GpuSensors> sensors;        // nullptr: none; read by one worker at a time
  bool reading_sensors = false;
  std::optional<GpuReading> gpu;  // of late
  int n_viewers = 0;              // of /thermo/live
  int64_t started_at = 0;         // seconds since 1970

  // "thermocline/0.1.0".
  std::string server_name() const { return "thermocline/" + options.version.value("version", "?"); }
};

const char* dialect_name(Dialect dialect);

}  // namespace thermo
