// Products of whole tiles (AMX), where the CPU has them and the system lets this process use them.
//
// Tiles sum a row in another order than the other kernels: even and odd inputs separately, 32 inputs at a time. Therefore
// the use of tiles must depend on the weights only, never on the number of rows, or a row's result would change with it.
#pragma once

#include <cstdint>

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define BATON_TILES 1

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>

namespace baton::tiles {

constexpr int ROWS = 32;   // most rows of a product: two tiles
constexpr int PAIRS = 16;  // pairs of inputs of one tile

inline std::atomic<bool> is_wanted{true};

// The permission is requested once: the state of tiles is large, so Linux gives it only to a process that requests it.
inline bool are_on() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
  static const bool is_allowed = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return is_allowed && is_wanted.load(std::memory_order_relaxed);
}

// GCC 12 does not know that the instructions below read and write memory.
inline void memory_is_written() { __asm__ volatile("" ::: "memory"); }

// The shape of this thread's tiles while it lives; 0 and 1 hold the sums of the first 16 rows, 2 and 3 of the rest, 4 and
// 5 the rows' inputs, 6 and 7 weights. Another library on the same thread finds the tiles as it left them: none.
class Shape {
 public:
  ~Shape() {
    if (rows > 0) _tile_release();
  }
  void set(int wanted) {
    if (wanted == rows) return;
    rows = wanted;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    const int first = rows < 16 ? rows : 16, second = rows - first;
    const int heights[8] = {first, first, second, second, first, second, 16, 16};
    for (int i = 0; i < 8; i++) config.rows[i] = heights[i], config.row_bytes[i] = heights[i] > 0 ? 64 : 0;
    memory_is_written();
    _tile_loadconfig(&config);
  }

 private:
  int rows = 0;
};

// sums[rows][32] (+)= x[rows][depth] x b[depth][32] of pairs; depth is a multiple of PAIRS, `rows` those of the shape,
// strides in bytes, `x_step` bytes from PAIRS of a row to the next. `ahead` is prefetched, `ahead_step` bytes for each pair.
template <bool HAS_SECOND>
inline void multiply(const uint32_t* x, int64_t x_stride, int64_t x_step, const uint32_t* b, int64_t b_stride, float* sums,
                     int64_t sums_stride, int depth, bool starts_at_zero, const char* ahead, int ahead_step) {
  char *first = (char*)sums, *second = first + 16 * sums_stride;
  memory_is_written();
  if (starts_at_zero) {
    _tile_zero(0);
    _tile_zero(1);
    if (HAS_SECOND) {
      _tile_zero(2);
      _tile_zero(3);
    }
  } else {
    _tile_loadd(0, first, sums_stride);
    _tile_loadd(1, first + 64, sums_stride);
    if (HAS_SECOND) {
      _tile_loadd(2, second, sums_stride);
      _tile_loadd(3, second + 64, sums_stride);
    }
  }
  const char *rows = (const char*)x, *weights = (const char*)b;
  for (int k = 0; k < depth; k += PAIRS, rows += x_step, weights += PAIRS * b_stride) {
    for (int line = 0; line < PAIRS * ahead_step; line += 64) __builtin_prefetch(ahead + line, 0, 2);
    ahead += PAIRS * ahead_step;
    _tile_loadd(6, weights, b_stride);
    _tile_loadd(4, rows, x_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 64, b_stride);
    _tile_dpbf16ps(1, 4, 7);
    if (HAS_SECOND) {
      _tile_loadd(5, rows + 16 * x_stride, x_stride);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, first, sums_stride);
  _tile_stored(1, first + 64, sums_stride);
  if (HAS_SECOND) {
    _tile_stored(2, second, sums_stride);
    _tile_stored(3, second + 64, sums_stride);
  }
  memory_is_written();
}

}  // namespace baton::tiles

#else

namespace baton::tiles {
inline bool are_on() { return false; }
struct Shape {};
}  // namespace baton::tiles

#endif
