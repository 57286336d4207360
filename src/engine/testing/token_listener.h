// For tests: gathers what a request says.
#pragma once

#include <gtest/gtest.h>

#include <climits>
#include <condition_variable>
#include <cstdint>
#include <mutex>

#include "engine/token_service.h"

namespace thermo {

class TokenListener {
 public:
  std::function<void(TokenEvent)> callback() {
    return [this](TokenEvent event) {
      std::unique_lock lock(mutex_);
      if (auto* written = std::get_if<TokensWritten>(&event))
        for (const GeneratedToken& token : written->tokens) {
          text_.push_back(token.id);
          for (const TokenLogprob& entry : token.logprobs) logprobs_.push_back(entry.logprob);
        }
      if (auto* read = std::get_if<PromptRead>(&event)) n_read_ = read->done;
      if (auto* prompt = std::get_if<PromptTokens>(&event))
        prompt_.insert(prompt_.end(), prompt->tokens.begin(), prompt->tokens.end());
      if (auto* ended = std::get_if<TokensEnded>(&event)) {
        EXPECT_FALSE(ended_) << "an event after the last one";
        ended_ = std::move(*ended);
      }
      changed_.notify_all();
      changed_.wait(lock, [this] { return !held(); });
    };
  }
  // From so many tokens on, of the prompt or of the answer, the engine waits until release(): a test that
  // does something to a request in between finds it there, however late it comes.
  void hold_at_prompt(int n) {
    const std::lock_guard lock(mutex_);
    hold_prompt_ = n;
  }
  void hold_at_tokens(size_t n) {
    const std::lock_guard lock(mutex_);
    hold_tokens_ = n;
  }
  void hold_at_next_token() {
    const std::lock_guard lock(mutex_);
    hold_tokens_ = text_.size() + 1;
    changed_.notify_all();  // an engine that is held goes on to it
  }
  void wait_until_held() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return held() || ended_; });
  }
  void release() {
    const std::lock_guard lock(mutex_);
    hold_prompt_ = INT_MAX;
    hold_tokens_ = SIZE_MAX;
    changed_.notify_all();
  }
  TokensEnded wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_.has_value(); });
    return *ended_;
  }
  void wait_for_tokens(size_t n) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return text_.size() >= n || ended_; });
  }
  std::vector<TokenId> text() const {
    const std::lock_guard lock(mutex_);
    return text_;
  }
  // Of each token, the chosen one's first.
  std::vector<float> logprobs() const {
    const std::lock_guard lock(mutex_);
    return logprobs_;
  }
  std::vector<GeneratedToken> prompt() const {
    const std::lock_guard lock(mutex_);
    return prompt_;
  }
  int n_read() const {
    const std::lock_guard lock(mutex_);
    return n_read_;
  }

 private:
  bool held() const { return !ended_ && (text_.size() >= hold_tokens_ || n_read_ >= hold_prompt_); }

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<TokenId> text_;
  std::vector<float> logprobs_;
  std::vector<GeneratedToken> prompt_;
  int n_read_ = 0;  // of the prompt
  int hold_prompt_ = INT_MAX;
  size_t hold_tokens_ = SIZE_MAX;
  std::optional<TokensEnded> ended_;
};

inline TokenRequest request_of(TokenListener& listener, std::vector<TokenId> prompt, int max_tokens) {
  TokenRequest request;
  request.prompt = std::move(prompt);
  request.options.max_tokens = max_tokens;
  request.options.sampling.temperature = 0.0f;
  request.on_event = listener.callback();
  return request;
}

}  // namespace thermo
