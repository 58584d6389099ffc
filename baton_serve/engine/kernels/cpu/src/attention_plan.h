// Cuts the rows of a step into pieces of work. The cut does not change the results.
#pragma once

#include "arguments.h"

#include <algorithm>
#include <vector>

namespace baton {

constexpr int PART_KEYS = 512;  // keys of a part, whose sums are formed separately; parts start at multiples of it
constexpr int MAX_TILE_ROWS = 384, MIN_TILE_ROWS = 48;
constexpr int MAX_SPLIT_ROWS = 32;
constexpr int64_t THREAD_WORK = 1 << 19;  // rows x keys x head_dim worth a thread: about 25 us
constexpr int64_t MAX_PARTIAL_FLOATS = 16 << 20;

// The queries of consecutive tokens of one sequence that share a KV head.
struct Tile {
  int sequence, kv_head, first_token, num_tokens;  // tokens counted within the step's tokens of the sequence
  int position;                                    // of the first token
  int first_key, end_key;                          // seen by any of its rows
  int64_t partial;                                 // place of a split tile's parts; -1 if it is not split

  int first_part() const { return first_key / PART_KEYS; }
  int end_part() const { return (end_key + PART_KEYS - 1) / PART_KEYS; }
};
struct Task {
  int tile, first_part, end_part;
};
// A row of a tile whose parts were computed apart.
struct SplitRow {
  int tile, row;
};

class Plan {
 public:
  Plan(const AttendArguments& a, int columns) : group(a.num_heads / a.num_kv_heads), columns(columns) {
    int64_t total_rows = 0;
    for (int s = 0; s < a.num_seqs; s++) {
      const int n = a.query_starts[s + 1] - a.query_starts[s];
      if (n > 1) total_rows += (int64_t)n * a.num_heads;
    }
    const int64_t wanted = std::clamp<int64_t>(total_rows / (4 * a.num_threads), MIN_TILE_ROWS, MAX_TILE_ROWS);
    const int tile_tokens = std::max<int>(1, wanted / group);
    for (int s = 0; s < a.num_seqs; s++) {
      const int n = a.query_starts[s + 1] - a.query_starts[s], start = a.context_lens[s] - n;
      for (int t = (n - 1) / tile_tokens * tile_tokens; t >= 0 && n > 0; t -= tile_tokens) {  // the longest first
        const int num = std::min(tile_tokens, n - t), position = start + t, end = position + num;
        const int first = a.sliding_window > 0 ? std::max(0, position - a.sliding_window + 1) : 0;
        for (int h = 0; h < a.num_kv_heads; h++) tiles.push_back({s, h, t, num, position, first, end, -1});
      }
    }
    int64_t total = 0;
    for (const Tile& t : tiles) total += cost(t), max_rows = std::max(max_rows, rows_of(t));
    num_threads = std::clamp<int64_t>(total * columns / THREAD_WORK, 1, a.num_threads);
    for (size_t i = 0; i < tiles.size(); i++) schedule(i, total / (4 * num_threads));
  }

  int rows_of(const Tile& t) const { return t.num_tokens * group; }
  int64_t sums_size(int rows) const { return (int64_t)rows * (columns + 2); }

  const int group;  // query heads per KV head
  std::vector<Tile> tiles;
  std::vector<Task> tasks;
  std::vector<SplitRow> split_rows;
  int64_t num_partial_floats = 0;
  int max_rows = 1, num_threads = 1;

 private:
  int64_t cost(const Tile& t) const { return (int64_t)std::max(rows_of(t), 4) * (t.end_key - t.first_key); }

  void schedule(size_t index, int64_t share) {
    Tile& t = tiles[index];
    const int num_parts = t.end_part() - t.first_part();
    const int64_t size = num_parts * sums_size(rows_of(t));
    if (num_parts < 2 || cost(t) <= share || (t.num_tokens > 1 && rows_of(t) > MAX_SPLIT_ROWS) ||
        num_partial_floats + size > MAX_PARTIAL_FLOATS) {
      tasks.push_back({(int)index, t.first_part(), t.end_part()});
      return;
    }
    t.partial = num_partial_floats;
    num_partial_floats += size;
    for (int r = 0; r < rows_of(t); r++) split_rows.push_back({(int)index, r});
    for (int p = t.first_part(); p < t.end_part(); p++) tasks.push_back({(int)index, p, p + 1});
  }

  const int columns;
};

}  // namespace baton
