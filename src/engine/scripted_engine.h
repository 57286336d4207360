// A token service without a model: it answers every request with given tokens, at a given speed. For tests of
// the layers above the engine.
#pragma once

#include <memory>

#include "engine/token_service.h"

namespace thermo {

struct ScriptedEngineOptions {
  // Behaviour.
  std::vector<std::vector<TokenId>> scripts;  // request i plays script i, counted round; a stop token ends it
  int n_ctx = 4096;
  int n_slots = 4;
  int max_waiting = 64;
  // Performance; 0: as fast as it goes.
  double tokens_per_second = 0.0;  // of each request
  double prompt_tokens_per_second = 0.0;
};

class ScriptedEngine : public TokenService {
 public:
  explicit ScriptedEngine(ScriptedEngineOptions options);
  ~ScriptedEngine() override;

  Result<RequestHandle> submit(TokenRequest request) override;
  void cancel(RequestHandle request) override;
  void pause(RequestHandle request, bool paused) override;
  TokenServiceState state() const override;
  void look_up(std::vector<TokenId>, std::function<void(int n_cached)> on_found) override { on_found(0); }
  int n_ctx() const override;
  int n_slots() const override;

  // While it is held, nothing is read or written.
  void hold(bool held);
  // From now on every request fails as if its device had.
  void break_down(std::string why);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace thermo
