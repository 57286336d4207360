#include "server/server.h"

#include <atomic>
#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/post.hpp>
#include <boost/system/system_error.hpp>
#include <ctime>
#include <future>
#include <system_error>
#include <thread>
#include <utility>

#include "base/log.h"
#include "server/api_handler.h"
#include "server/live_view.h"
#include "server/stdio/pipe_server.h"

namespace thermo {
namespace {

// On a worker: the card takes its time to answer.
void read_sensors(ServerState& state) {
  if (state.sensors == nullptr || std::exchange(state.reading_sensors, true)) return;
  asio::post(state.workers, [&state] {
    asio::post(state.io, [&state, reading = state.sensors->read()] {
      state.gpu = reading;
      state.reading_sensors = false;
    });
  });
}

void sample_every_second(ServerState& state) {
  sample_load(state);
  read_sensors(state);
  state.sampler.expires_after(std::chrono::seconds(1));
  state.sampler.async_wait([&state](const boost::system::error_code& error) {
    if (!error) sample_every_second(state);
  });
}

}  // namespace

struct Server::Impl {
  ServerState state;
  std::atomic<bool> shutdown_requested{false};
  ApiHandler handler;
  std::optional<HttpServer> http;
  asio::executor_work_guard<asio::io_context::executor_type> work;
  std::unique_ptr<PipeServer> pipe;  // set once, by the owner
  std::atomic<TokenService*> service{nullptr};
  std::thread thread;

  explicit Impl(ServerOptions options)
      : state(std::move(options)),
        handler(state, [this] { shutdown_requested = true; }),
        work(state.io.get_executor()) {}

  // Runs it on the thread of the sockets and waits.
  template <class Function>
  void on_io(Function function) {
    std::promise<void> done;
    asio::post(state.io, [&] {
      function();
      done.set_value();
    });
    done.get_future().wait();
  }

  // A worker cannot be stopped half way. False: one goes on after the grace.
  bool join_workers() {
    const auto ended = std::make_shared<std::promise<void>>();
    std::future<void> end = ended->get_future();
    std::thread([this, ended] {
      state.workers.join();
      ended->set_value();
    }).detach();
    return end.wait_for(state.options.shutdown_grace) == std::future_status::ready;
  }
};

Server::Server(ServerOptions options) {
  try {
    impl_ = std::make_unique<Impl>(std::move(options));
  } catch (const boost::system::system_error& error) {
    // A thread that cannot be started is told as the standard library tells it.
    throw std::system_error(std::error_code(error.code()));
  }
  impl_->state.started_at = static_cast<int64_t>(std::time(nullptr));
  impl_->http.emplace(impl_->state.io, impl_->state.options.http, impl_->handler);
  impl_->thread = std::thread([this] { impl_->state.io.run(); });
}

Server::~Server() {
  stop();
}

bool Server::stop() {
  if (!impl_) return false;
  Impl& m = *impl_;
  if (!m.thread.joinable()) return true;
  m.on_io([&] {
    m.state.draining = m.state.cancelling = true;
    m.http->stop_listening();
    m.http->close_all();
    if (m.pipe) m.pipe->close_all();
    for (const auto& live : m.state.live) live->signal.raise();
  });
  // What still runs notices that its client is gone; connections end one by one.
  for (int i = 0; i < 500; ++i) {
    bool empty = false;
    m.on_io([&] { empty = m.http->n_connections() == 0 && (!m.pipe || m.pipe->n_running() == 0); });
    if (empty) break;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  m.pipe.reset();
  m.on_io([&] { m.state.sampler.cancel(); });
  if (!m.join_workers()) {
    log_warning("server", "a request is still being prepared after {} s; it is given up",
                std::chrono::duration_cast<std::chrono::seconds>(m.state.options.shutdown_grace).count());
    impl_.release();  // its threads go on until the program ends
    return false;
  }
  m.work.reset();
  m.state.io.stop();
  m.thread.join();
  return true;
}

std::vector<std::string> Server::urls() const {
  return impl_->http->urls();
}

void Server::set_progress(std::string stage, double ratio) {
  asio::post(impl_->state.io, [m = impl_.get(), stage = std::move(stage), ratio]() mutable {
    m->state.load_stage = std::move(stage);
    m->state.load_progress = ratio;
  });
}

void Server::set_ready(ServedModel model) {
  impl_->service = model.service;
  impl_->on_io([&] {
    impl_->state.model = std::make_unique<ServedModel>(std::move(model));
    if (const std::string& bus_id = impl_->state.model->gpu_bus_id; !bus_id.empty())
      impl_->state.sensors = GpuSensors::open(load_nvml(), bus_id);
    sample_every_second(impl_->state);
  });
}

void Server::set_access(const AccessOptions& access) {
  impl_->on_io([&] { impl_->state.access = Access(access); });
}

void Server::serve_pipe(int in, int out) {
  impl_->pipe = std::make_unique<PipeServer>(impl_->state, impl_->handler, in, out);
}

bool Server::pipe_ended() const {
  return impl_->pipe && impl_->pipe->ended();
}

void Server::shut_down(const std::function<bool()>& hurry) {
  Impl& m = *impl_;
  const auto end = std::chrono::steady_clock::now() + m.state.options.shutdown_grace;
  m.on_io([&] {
    m.state.draining = true;
    m.http->stop_listening();
    for (const auto& live : m.state.live) live->signal.raise();
  });
  const auto quiet = [&m] {
    bool empty = false;
    m.on_io([&] { empty = m.state.live.empty() && m.state.n_preparing == 0; });
    return empty;
  };
  while (!quiet() && std::chrono::steady_clock::now() < end && !(hurry && hurry()))
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  m.on_io([&] {
    m.state.cancelling = true;
    for (const auto& live : m.state.live) live->signal.raise();
  });
  // Errors of streams that were cut reach their clients.
  for (int i = 0; i < 100; ++i) {
    bool empty = false;
    m.on_io([&] { empty = m.http->n_connections() == 0; });
    if (empty) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

bool Server::shutdown_requested() const {
  return impl_->shutdown_requested;
}

std::string Server::fault() const {
  TokenService* const service = impl_->service;
  return service == nullptr ? std::string() : service->state().fault;
}

}  // namespace thermo
