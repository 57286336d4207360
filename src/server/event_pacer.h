// Puts pieces of an answer that come shortly after each other into one event. Without an interval everything
// goes out at once.
//
// What comes after a pause of at least the interval goes out at once, too, so that the first piece never
// waits; what follows waits until the interval is over.
#pragma once

#include <chrono>
#include <iterator>
#include <optional>
#include <utility>

#include "chat/answer_parser.h"

namespace thermo {

class EventPacer {
 public:
  using Clock = std::chrono::steady_clock;

  explicit EventPacer(std::chrono::milliseconds interval) : interval_(interval) {}

  void add(AnswerParser::Events events) {
    held_.insert(held_.end(), std::make_move_iterator(events.begin()), std::make_move_iterator(events.end()));
  }
  // When something is to be sent; nullopt: there is nothing.
  std::optional<Clock::time_point> due() const {
    if (held_.empty()) return std::nullopt;
    return last_ + interval_;
  }
  AnswerParser::Events take(Clock::time_point now) {
    last_ = now;
    return std::exchange(held_, {});
  }

 private:
  std::chrono::milliseconds interval_;
  Clock::time_point last_ = {};  // of the last event
  AnswerParser::Events held_;
};

}  // namespace thermo
