// Attention over the paged, block-major KV cache: prompts with a cached prefix and decode tokens in one pass that
// streams K and V once per tile of queries.
//
// A row's result depends on its query, the keys it sees and its position, never on batch, chunking, tiles or threads:
// keys are taken in tiles and parts that start at fixed positions, a part's sums are formed in order of its tiles, and
// parts merge in order. So a part may be computed by any thread (long contexts of small batches use all cores).
#include "arguments.h"
#include "tile.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include <omp.h>

using namespace baton;

namespace {

constexpr int PART_KEYS = 512;  // keys whose sums are formed by themselves; parts start at multiples of it
constexpr int MAX_TILE_ROWS = 384, MIN_TILE_ROWS = 48;
constexpr int MAX_SPLIT_ROWS = 32;
constexpr int64_t THREAD_WORK = 1 << 19;  // rows x keys x head_dim worth a thread: about 25 us
constexpr int64_t MAX_PARTIAL_FLOATS = 16 << 20;

struct Free {
  void operator()(void* p) const { std::free(p); }
};
template <class T> using Buffer = std::unique_ptr<T[], Free>;
template <class T> Buffer<T> allocate(int64_t count) {
  void* p = std::aligned_alloc(64, (count * sizeof(T) + 127) / 64 * 64);
  if (p == nullptr) throw std::bad_alloc();
  return Buffer<T>(static_cast<T*>(p));
}

inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// The queries of consecutive tokens of one sequence that share a KV head.
struct Tile {
  int sequence, kv_head, first_token, num_tokens;  // tokens counted within the step's tokens of the sequence
  int position;                                    // of the first token
  int first_key, end_key;                          // seen by any of its rows
  int64_t partial;                                 // where a split tile's parts go, -1: not split

  int first_part() const { return first_key / PART_KEYS; }
  int end_part() const { return (end_key + PART_KEYS - 1) / PART_KEYS; }
};
struct Task {
  int tile, first_part, end_part;
};

// Sums over some keys for all rows of a tile: maximum and total of each row, and the weighted V.
struct Sums {
  float *maxima, *totals, *values;
};

// this = this followed by `part`, row by row. The only place where parts meet.
template <class M>
__attribute__((noinline)) void merge(Sums whole, Sums part, int rows, int columns) {
  for (int r = 0; r < rows; r++) {
    if (part.maxima[r] == NEG_INF) continue;
    float* to = whole.values + (int64_t)r * columns;
    const float* from = part.values + (int64_t)r * columns;
    if (whole.maxima[r] == NEG_INF) {
      whole.maxima[r] = part.maxima[r];
      whole.totals[r] = part.totals[r];
      std::memcpy(to, from, columns * sizeof(float));
      continue;
    }
    const float top = std::max(whole.maxima[r], part.maxima[r]);
    const vf a = M::exponential(splat(whole.maxima[r] - top)), b = M::exponential(splat(part.maxima[r] - top));
    whole.maxima[r] = top;
    whole.totals[r] = fma(splat(whole.totals[r]), a, splat(part.totals[r]) * b)[0];
    for (int d = 0; d < columns; d += W) store(to + d, fma(load(to + d), a, load(from + d) * b));
  }
}

template <class M> class Attention {
  using Element = typename M::Element;
  using Word = typename M::Word;

 public:
  explicit Attention(const AttendArguments& arguments)
      : a(arguments),
        group(a.num_heads / a.num_kv_heads),
        columns(round_up(a.head_dim, W)),
        words(round_up(a.head_dim, W) / M::PAIR),
        rule{a.softcap > 0 ? a.scale : a.scale * M::UNIT, a.softcap} {}

  void run() {
    plan();
    Buffer<float> partials = allocate<float>(num_partial_floats + 1);
    std::vector<Scratch> scratches;  // made here: an exception cannot leave a parallel region
    for (int i = 0; i < num_threads; i++) scratches.emplace_back(*this);
#pragma omp parallel num_threads(num_threads)
    {
      Scratch& scratch = scratches[omp_get_thread_num()];
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < tasks.size(); i++) compute(tasks[i], scratch, partials.get());
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < split_tiles.size(); i++) combine(tiles[split_tiles[i]], scratch, partials.get());
    }
  }

 private:
  // Where K and V of the keys [start, start + TILE_KEYS) lie; zeros for those outside [first, end).
  struct KeyRows {
    const Element *keys[TILE_KEYS], *values[TILE_KEYS];
  };
  struct Scratch {
    Buffer<Element> zeros;  // stands for keys that no row of the tile may see
    Buffer<Word> queries, keys, values, probabilities;
    Buffer<float> scores, row_sums, part, whole;
    KeyRows now, next;
    int prefetched = TILE_KEYS, prefetch_step = 0;  // rows of `next` already asked for; how many to ask for per query row
    explicit Scratch(const Attention& t)
        : zeros(allocate<Element>(t.columns * 2)),
          queries(allocate<Word>((int64_t)t.max_rows * t.words)),
          keys(allocate<Word>((int64_t)t.words * TILE_KEYS)),
          values(allocate<Word>((int64_t)TILE_KEYS / M::PAIR * t.columns)),
          probabilities(allocate<Word>(MAX_ROWS * TILE_KEYS / M::PAIR)),
          scores(allocate<float>(MAX_ROWS * TILE_KEYS)),
          row_sums(allocate<float>((int64_t)t.max_rows * W)),
          part(allocate<float>(t.sums_size(t.max_rows))),
          whole(allocate<float>(t.sums_size(t.max_rows))) {
      std::memset((void*)zeros.get(), 0, t.columns * 2 * sizeof(Element));
    }
  };

  int64_t sums_size(int rows) const { return (int64_t)rows * (columns + 2); }
  Sums sums_at(float* p, int rows) const { return {p + (int64_t)rows * columns, p + (int64_t)rows * (columns + 1), p}; }
  int rows_of(const Tile& t) const { return t.num_tokens * group; }

  void plan() {
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

  int64_t cost(const Tile& t) const { return (int64_t)std::max(rows_of(t), 4) * (t.end_key - t.first_key); }

  void schedule(size_t index, int64_t share) {
    Tile& t = tiles[index];
    const int num_parts = t.end_part() - t.first_part();
    const int64_t size = num_parts * sums_size(rows_of(t));
    if (num_parts < 2 || cost(t) <= share || rows_of(t) > MAX_SPLIT_ROWS ||
        num_partial_floats + size > MAX_PARTIAL_FLOATS) {
      tasks.push_back({(int)index, t.first_part(), t.end_part()});
      return;
    }
    t.partial = num_partial_floats;
    num_partial_floats += size;
    split_tiles.push_back(index);
    for (int p = t.first_part(); p < t.end_part(); p++) tasks.push_back({(int)index, p, p + 1});
  }

  void compute(Task task, Scratch& scratch, float* partials) {
    const Tile& t = tiles[task.tile];
    const int rows = rows_of(t);
    pack_queries(t, scratch.queries.get());
    if (t.partial >= 0) {
      const int64_t at = t.partial + (task.first_part - t.first_part()) * sums_size(rows);
      compute_part(t, task.first_part, scratch, sums_at(partials + at, rows));
      return;
    }
    Sums whole = sums_at(scratch.whole.get(), rows);
    compute_part(t, task.first_part, scratch, whole);
    for (int p = task.first_part + 1; p < task.end_part; p++) {
      Sums part = sums_at(scratch.part.get(), rows);
      compute_part(t, p, scratch, part);
      merge<M>(whole, part, rows, columns);
    }
    write(t, whole);
  }

  void combine(const Tile& t, Scratch& scratch, float* partials) {
    const int rows = rows_of(t);
    Sums whole = sums_at(scratch.whole.get(), rows);
    std::fill(whole.maxima, whole.maxima + rows, NEG_INF);
    for (int p = 0; p < t.end_part() - t.first_part(); p++)
      merge<M>(whole, sums_at(partials + t.partial + p * sums_size(rows), rows), rows, columns);
    write(t, whole);
  }

  void pack_queries(const Tile& t, Word* packed) const {
    const Element* query = static_cast<const Element*>(a.query);
    query += (a.query_starts[t.sequence] + t.first_token) * a.query_token_stride;
    for (int r = 0; r < rows_of(t); r++) {
      const Element* row = query + r / group * a.query_token_stride +
                           (int64_t)(t.kv_head * group + r % group) * a.query_head_stride;
      for (int w = 0; w < words; w += W) {
        alignas(64) Word chunk[W];
        store(chunk, load_row<M>(row + w * M::PAIR, a.head_dim - w * M::PAIR));
        std::memcpy(packed + (int64_t)r * words + w, chunk, std::min(W, words - w) * sizeof(Word));
      }
    }
  }

  void find_rows(const Tile& t, int start, int first, int end, const Element* zeros, KeyRows& rows) const {
    const Element* cache = static_cast<const Element*>(a.cache) + t.kv_head * a.cache_head_stride;
    const int32_t* table = a.block_tables + t.sequence * a.table_stride;
    for (int i = 0; i < TILE_KEYS; i++) rows.keys[i] = rows.values[i] = zeros;
    for (int key = std::max(start, first); key < std::min(start + TILE_KEYS, end);) {
      const int offset = key % a.block_tokens;
      const int run = std::min({a.block_tokens - offset, start + TILE_KEYS - key, end - key});
      const Element* row = cache + table[key / a.block_tokens] * a.cache_block_stride + offset * a.cache_token_stride;
      for (int i = 0; i < run; i++, row += a.cache_token_stride) {
        rows.keys[key - start + i] = row;
        rows.values[key - start + i] = row + a.cache_value_offset;
      }
      key += run;
    }
  }

  void compute_part(const Tile& t, int part, Scratch& scratch, Sums sums) const {
    const int rows = rows_of(t);
    std::fill(sums.maxima, sums.maxima + rows, NEG_INF);
    std::memset(sums.values, 0, (size_t)rows * columns * sizeof(float));
    std::memset(scratch.row_sums.get(), 0, (size_t)rows * W * sizeof(float));
    const int first = std::max(t.first_key, part * PART_KEYS), end = std::min(t.end_key, (part + 1) * PART_KEYS);
    int start = first / TILE_KEYS * TILE_KEYS;
    find_rows(t, start, first, end, scratch.zeros.get(), scratch.next);
    for (; start < end; start += TILE_KEYS) {
      std::swap(scratch.now, scratch.next);
      const KeyRows& from = scratch.now;
      scratch.prefetched = TILE_KEYS;
      if (start + TILE_KEYS < end) {
        find_rows(t, start + TILE_KEYS, first, end, scratch.zeros.get(), scratch.next);
        scratch.prefetched = 0;
        scratch.prefetch_step = (TILE_KEYS + rows - 1) / rows;
      }
      pack_keys<M>(from.keys, a.head_dim, words, scratch.keys.get());
      M::pack_values(from.values, a.head_dim, columns, scratch.values.get());
      const int num_groups = (rows + MAX_ROWS - 1) / MAX_ROWS, base = rows / num_groups, extra = rows % num_groups;
      for (int g = 0, r = 0; g < num_groups; g++) {
        const int n = base + (g < extra);
        dispatch(t, start, r, n, scratch, sums);
        r += n;
      }
    }
    for (int r = 0; r < rows; r++) sums.totals[r] = sum(load(scratch.row_sums.get() + (int64_t)r * W));
  }

  void dispatch(const Tile& t, int start, int r, int n, Scratch& scratch, Sums sums) const {
    const int last = t.position + (r + n - 1) / group;
    if (start > last) return;  // no row sees these keys
    if (a.sliding_window > 0 && start + TILE_KEYS <= t.position + r / group - a.sliding_window + 1) return;
    switch (n) {
      case 1: return attend_rows<1>(t, start, r, scratch, sums);
      case 2: return attend_rows<2>(t, start, r, scratch, sums);
      case 3: return attend_rows<3>(t, start, r, scratch, sums);
      case 4: return attend_rows<4>(t, start, r, scratch, sums);
      case 5: return attend_rows<5>(t, start, r, scratch, sums);
      default: return attend_rows<6>(t, start, r, scratch, sums);
    }
  }

  template <int ROWS> void attend_rows(const Tile& t, int start, int r, Scratch& scratch, Sums sums) const {
    float factors[ROWS];
    Word* probabilities = scratch.probabilities.get();
    float* scores = scratch.scores.get();
    constexpr int stride = TILE_KEYS / M::PAIR;
    multiply<M, ROWS>(scratch.queries.get() + (int64_t)r * words, words, scratch.keys.get(), TILE_KEYS, scores,
                      TILE_KEYS, TILE_KEYS, words, nullptr);
    for (int i = 0; i < ROWS; i++) {
      prefetch(scratch);
      const int position = t.position + (r + i) / group;
      const int first = a.sliding_window > 0 ? position - a.sliding_window + 1 - start : 0;
      if (a.alibi) lower(scores + i * TILE_KEYS, a.alibi[t.kv_head * group + (r + i) % group], start - position);
      factors[i] = soften<M>(scores + i * TILE_KEYS, probabilities + i * stride, rule, first, position + 1 - start,
                             sums.maxima + r + i, scratch.row_sums.get() + (int64_t)(r + i) * W);
    }
    multiply<M, ROWS>(probabilities, stride, scratch.values.get(), columns, sums.values + (int64_t)r * columns, columns,
                      columns, stride, factors);
  }

  void lower(float* scores, float slope, int distance) const {
    for (int j = 0; j < TILE_KEYS; j++) scores[j] += slope * (distance + j);
  }

  // Memory answers while the processor multiplies: a few rows of the next tile at a time, for blocks lie anywhere
  // and the hardware's own prefetchers stop at their ends.
  void prefetch(Scratch& scratch) const {
    const int end = std::min(scratch.prefetched + scratch.prefetch_step, TILE_KEYS);
    for (int i = scratch.prefetched; i < end; i++)
      for (int d = 0; d < a.head_dim; d += 64 / (int)sizeof(Element)) {
        __builtin_prefetch(scratch.next.keys[i] + d, 0, 2);
        __builtin_prefetch(scratch.next.values[i] + d, 0, 2);
      }
    scratch.prefetched = end;
  }

  void write(const Tile& t, Sums sums) const {
    const int64_t token = a.query_starts[t.sequence] + t.first_token;
    for (int r = 0; r < rows_of(t); r++) {
      const int head = t.kv_head * group + r % group;
      float total = sums.totals[r];
      if (a.sinks) total += M::exponential(splat(std::min(a.sinks[head] * M::UNIT - sums.maxima[r], 88.f)))[0];
      Element* to = static_cast<Element*>(a.output) + ((token + r / group) * a.num_heads + head) * a.head_dim;
      const float* from = sums.values + (int64_t)r * columns;
      for (int d = 0; d < a.head_dim; d += W) store_elements(to + d, load(from + d) / total, a.head_dim - d);
    }
  }

  const AttendArguments& a;
  const int group;    // query heads per KV head
  const int columns;  // head_dim rounded up to whole SIMD words
  const int words;    // packed words of a row
  const ScoreRule rule;
  std::vector<Tile> tiles;
  std::vector<Task> tasks;
  std::vector<size_t> split_tiles;
  int64_t num_partial_floats = 0;
  int max_rows = 1, num_threads = 1;
};

}  // namespace

// 0: done; 1: this build has no code for the dtype; 2: out of memory.
extern "C" int baton_attend(const AttendArguments* arguments) {
  try {
    switch (arguments->dtype) {
      case 0: Attention<Widening<float>>(*arguments).run(); return 0;
#ifdef __AVX512BF16__
      case 1: Attention<PairsOfBf16>(*arguments).run(); return 0;
#else
      case 1: Attention<Widening<bf16>>(*arguments).run(); return 0;
#endif
#ifdef __FLT16_MAX__
      case 2: Attention<Widening<_Float16>>(*arguments).run(); return 0;
#endif
      default: return 1;
    }
  } catch (const std::bad_alloc&) {
    return 2;
  }
}
