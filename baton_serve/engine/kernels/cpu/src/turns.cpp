// Threads pause and resume by the turns that turns.h describes, and the clock with which they wait.
#include "turns.h"

#include <time.h>

#include <atomic>
#include <cstdint>

namespace {

constexpr int64_t LOOK_AGAIN_NS = 200'000;

// As in baton_serve/engine/kernels/cpu/time_slicing.py: the words of processes that map the same memory, one row each. The
// first word of a row is the time (CLOCK_MONOTONIC, ns) at which the turn of its process ends, or 0 after its end.
struct Rows {
  const int64_t* words;
  int64_t count, width;
};
Rows rows{};
std::atomic<bool> is_told{false};

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000LL + now.tv_nsec;
}

bool is_other_s_turn() {
  for (int64_t row = 0; row < rows.count; row++) {
    const int64_t until = __atomic_load_n(rows.words + row * rows.width, __ATOMIC_RELAXED);
    if (until != 0 && until > now_ns()) return true;
  }
  return false;
}

}  // namespace

namespace baton {

void yield_to_others() {
  if (!is_told.load(std::memory_order_acquire)) return;
  while (is_other_s_turn()) {
    const timespec while_ns{0, LOOK_AGAIN_NS};
    nanosleep(&while_ns, nullptr);
  }
}

}  // namespace baton

// Call once, before the first product; `words` stay mapped while the process lives.
extern "C" void baton_give_way_to(const int64_t* words, int64_t count, int64_t width) {
  rows = {words, count, width};
  is_told.store(count > 0, std::memory_order_release);
}
