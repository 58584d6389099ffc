// The memory in which a thread prepares products of many rows in tiles.
#pragma once

#include "amx.h"
#include "linear_kernels.h"

#ifdef BATON_TILES

#include <cstdlib>
#include <memory>

namespace baton {

constexpr int TILED_ROWS = 384, TILED_PANELS = 16;  // their sums and their inputs of a piece fit a second-level cache

// Memory of one thread for products of many rows. It lives as long as the thread.
struct TiledScratch {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  template <class T> using Buffer = std::unique_ptr<T[], Free>;
  Buffer<uint32_t> inputs, weights;  // [group of rows][16 pairs][row][pair]; [pair][32]
  Buffer<float> sums;                // [panel][group of rows][row][32]

  // False: out of memory.
  bool has_room() {
    constexpr int64_t IN = TILED_ROWS * DEPTH, PIECE = DEPTH * PANEL, OUT = TILED_PANELS * TILED_ROWS * PANEL;
    if (!inputs) inputs.reset((uint32_t*)std::aligned_alloc(4096, IN * 4));
    if (!weights) weights.reset((uint32_t*)std::aligned_alloc(4096, PIECE * 4));
    if (!sums) sums.reset((float*)std::aligned_alloc(4096, OUT * 4));
    return inputs && weights && sums;
  }

  const uint32_t* group(int number, int depth) const { return inputs.get() + (int64_t)number * tiles::ROWS * depth; }

  // Rows that fill up the last group are not initialized, because their sums are not read.
  void fill(const bf16* x, int64_t x_stride, int64_t first_row, int count, int k, int depth) {
    for (int row = 0; row < count; row++) {
      const bf16* from = x + (first_row + row) * x_stride + 2 * k;
      uint32_t* to = inputs.get() + (int64_t)(row / tiles::ROWS) * tiles::ROWS * depth + row % tiles::ROWS * tiles::PAIRS;
      for (int pair = 0; pair < depth; pair += tiles::PAIRS, from += 32, to += tiles::ROWS * tiles::PAIRS)
        _mm512_store_si512(to, _mm512_loadu_si512(from));
    }
  }
};

}  // namespace baton

#endif
