// Attention over the paged, block-major KV cache: prompts with a cached prefix and decode tokens in one pass that
// streams K and V once per tile of queries.
//
// The result of a row depends on its query, its visible keys and its position, but not on batch, chunks, tiles or threads:
// keys are processed in tiles and parts that start at fixed positions, the sums of a part are formed in the order of its
// tiles, and parts are merged in order. Any thread may compute a part, so long contexts of small batches use all cores.
#include "amx.h"
#include "attention_plan.h"
#include "codes.h"
#include "latent.h"
#include "tile.h"
#include "turns.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include <omp.h>

using namespace baton;

namespace {

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

// Sums over some keys for all rows of a tile: maximum and total of each row, and the weighted V.
struct Sums {
  float *maxima, *totals, *values;
};

// Append `part` to this, row by row. Parts are merged here only.
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
        columns(round_up(a.head_dim, W)),
        words(round_up(a.head_dim, W) / M::PAIR),
        cell(a.codes ? 1 : sizeof(Element)),
        uses_tiles(M::PAIR == 2 && tiles::are_on() && a.head_dim % 32 == 0),
        has_latents(a.cache_value_offset == 0 && !uses_tiles && a.head_dim % (2 * W) == 0 && a.value_dim % (2 * W) == 0 &&
                    a.sliding_window == 0 && !a.alibi),
        rule{a.softcap > 0 ? a.scale : a.scale * M::UNIT, a.softcap},
        plan(a, columns),
        group(plan.group) {}

  void run() {
    Buffer<float> partials = allocate<float>(plan.num_partial_floats + 1);
    std::vector<Scratch> scratches;  // allocated here, because an exception must not leave a parallel region
    for (int i = 0; i < plan.num_threads; i++) scratches.emplace_back(*this);
#pragma omp parallel num_threads(plan.num_threads)
    {
      tiles::Shape shape;
      Scratch& scratch = scratches[omp_get_thread_num()];
      scratch.shape = &shape;
#pragma omp for schedule(dynamic, 1)
      for (size_t i = 0; i < plan.tasks.size(); i++) {
        yield_to_others();
        compute(plan.tasks[i], scratch, partials.get());
      }
#pragma omp for schedule(dynamic, 4)
      for (size_t i = 0; i < plan.split_rows.size(); i++) combine(plan.split_rows[i], scratch, partials.get());
    }
  }

 private:
  // Addresses of K and V of the keys [start, start + TILE_KEYS), or of zeros for keys outside [first, end). Codes are
  // decoded to elements in a scratch buffer; their scales are applied after the products.
  struct KeyRows {
    const void *keys[TILE_KEYS], *values[TILE_KEYS];
    float key_scales[TILE_KEYS], value_scales[TILE_KEYS];
  };
  struct Scratch {
    Buffer<Element> zeros;  // replaces keys that no row of the tile may see
    Buffer<Element> expanded;
    Buffer<Word> queries, keys, values, probabilities;
    Buffer<float> scores, row_sums, part, whole;
    Buffer<Word> latent_queries, latent_rows;  // for latent.h: [words][rows], [TILE_KEYS][words]
    Buffer<float> maxima, factors;
    std::unique_ptr<KeyRows> now = std::make_unique<KeyRows>(), next = std::make_unique<KeyRows>();
    int packed_tile = -1;  // whose queries lie in `queries`
    int prefetched = TILE_KEYS, prefetch_step = 0;  // rows of `next` that were prefetched; how many to prefetch for each query row
    Ahead ahead_keys{}, ahead_values{};  // used instead if few rows share a tile
    tiles::Shape* shape = nullptr;
    explicit Scratch(const Attention& t)
        : zeros(allocate<Element>(t.columns * 2)),
          expanded(allocate<Element>(t.a.codes ? 2 * TILE_KEYS * t.columns : 1)),
          queries(allocate<Word>((int64_t)t.plan.max_rows * t.words)),
          keys(allocate<Word>((int64_t)t.words * TILE_KEYS)),
          values(allocate<Word>((int64_t)TILE_KEYS / M::PAIR * t.columns)),
          probabilities(allocate<Word>(std::max(t.rows_at_once(), t.latent_rows()) * TILE_KEYS / M::PAIR)),
          scores(allocate<float>(std::max(t.rows_at_once(), t.latent_rows()) * TILE_KEYS)),
          row_sums(allocate<float>((int64_t)std::max(t.plan.max_rows, t.latent_rows()) * W)),
          part(allocate<float>(t.plan.sums_size(t.plan.max_rows))),
          whole(allocate<float>(t.plan.sums_size(t.plan.max_rows))),
          latent_queries(allocate<Word>((int64_t)t.latent_rows() * t.words)),
          latent_rows(allocate<Word>(t.latent_rows() > 0 && !READS_WORDS<M> ? TILE_KEYS * t.words : 0)),
          maxima(allocate<float>(t.latent_rows())),
          factors(allocate<float>(t.latent_rows())) {
      std::memset((void*)zeros.get(), 0, t.columns * 2 * sizeof(Element));
    }
  };

  int rows_at_once() const {
#ifdef BATON_TILES
    if (uses_tiles) return tiles::ROWS;
#endif
    return M::MAX_ROWS;
  }
  int latent_rows() const { return has_latents ? round_up(std::min(plan.max_rows, MAX_LATENT_ROWS), W) : 0; }
  bool is_latent(int rows) const { return has_latents && rows <= MAX_LATENT_ROWS; }
  bool packs_values(int rows) const { return !M::READS_ROWS || rows > M::MAX_ROWS || a.head_dim % (2 * W) != 0; }
  bool reads_codes() const { return M::READS_ROWS && a.codes == INT8; }  // otherwise they are decoded to elements first
  int rows_of(const Tile& t) const { return plan.rows_of(t); }
  int64_t sums_size(int rows) const { return plan.sums_size(rows); }
  Sums sums_at(float* p, int rows) const { return {p + (int64_t)rows * columns, p + (int64_t)rows * (columns + 1), p}; }
  void compute(Task task, Scratch& scratch, float* partials) {
    const Tile& t = plan.tiles[task.tile];
    const int rows = rows_of(t);
    if (scratch.packed_tile != task.tile) {
      pack_queries(t, scratch.queries.get());
      if (is_latent(rows)) turn_queries(rows, scratch);
      scratch.packed_tile = task.tile;
    }
    if (t.partial >= 0) {
      const int64_t at = t.partial + (task.first_part - t.first_part()) * sums_size(rows);
      compute_part(t, task.first_part, task.end_part, scratch, sums_at(partials + at, rows));
      return;
    }
    Sums whole = sums_at(scratch.whole.get(), rows);
    compute_part(t, task.first_part, task.end_part, scratch, whole);
    for (int p = task.first_part + 1; p < task.end_part; p++) {
      Sums part = sums_at(scratch.part.get(), rows);
      compute_part(t, p, task.end_part, scratch, part);
      merge<M>(whole, part, rows, columns);
    }
    for (int r = 0; r < rows; r++) write(t, r, row_of(whole, r));
  }

  void combine(SplitRow split, Scratch& scratch, float* partials) {
    const Tile& t = plan.tiles[split.tile];
    const int rows = rows_of(t);
    Sums whole = sums_at(scratch.whole.get(), 1);
    *whole.maxima = NEG_INF;
    for (int p = 0; p < t.end_part() - t.first_part(); p++)
      merge<M>(whole, row_of(sums_at(partials + t.partial + p * sums_size(rows), rows), split.row), 1, columns);
    write(t, split.row, whole);
  }

  Sums row_of(Sums sums, int row) const { return {sums.maxima + row, sums.totals + row, sums.values + (int64_t)row * columns}; }

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

  // Queries as words of rows; the rows that fill up the last word are zeros.
  void turn_queries(int rows, Scratch& scratch) const {
    const int stride = round_up(rows, W);
    for (int r = 0; r < rows; r += W)
      for (int w = 0; w < words; w += W) {
        vf square[W] = {};
        for (int i = 0; i < std::min(W, rows - r); i++)
          square[i] = load_as<vf>(scratch.queries.get() + (int64_t)(r + i) * words + w);
        transpose(square);
        for (int i = 0; i < W; i++) store(scratch.latent_queries.get() + (w + i) * stride + r, square[i]);
      }
  }

  void find_rows(const Tile& t, int start, int first, int end, const Element* zeros, KeyRows& rows) const {
    const char* cache = static_cast<const char*>(a.cache) + t.kv_head * a.cache_head_stride * cell;
    const int32_t* table = a.block_tables + t.sequence * a.table_stride;
    for (int i = 0; i < TILE_KEYS; i++) rows.keys[i] = rows.values[i] = zeros;
    if (a.codes) std::fill(rows.key_scales, rows.key_scales + TILE_KEYS, 0.f);
    if (a.codes) std::fill(rows.value_scales, rows.value_scales + TILE_KEYS, 0.f);
    for (int key = std::max(start, first); key < std::min(start + TILE_KEYS, end);) {
      const int offset = key % a.block_tokens;
      const int run = std::min({a.block_tokens - offset, start + TILE_KEYS - key, end - key});
      const char* head = cache + table[key / a.block_tokens] * a.cache_block_stride * cell;
      const char* row = head + offset * a.cache_token_stride * cell;
      if (a.codes) find_scales(head, offset, run, key - start, rows);
      for (int i = 0; i < run; i++, row += a.cache_token_stride * cell) {
        rows.keys[key - start + i] = row;
        rows.values[key - start + i] = row + a.cache_value_offset * cell;
      }
      key += run;
    }
  }

  void find_scales(const char* head, int offset, int run, int at, KeyRows& rows) const {
    const bf16* scales = (const bf16*)(head + (int64_t)a.block_tokens * a.head_dim) + offset;
    for (int i = 0; i < run; i += W) {
      store_elements(rows.key_scales + at + i, load_elements(scales + i, run - i), run - i);
      store_elements(rows.value_scales + at + i, load_elements(scales + a.cache_value_offset / 2 + i, run - i), run - i);
    }
  }

  // Decode the codes of the tile to elements, without their scales.
  void expand(KeyRows& rows, Scratch& scratch, bool has_values = true) const {
    const CodeBook& book = code_book(a.codes);
    Element* to = scratch.expanded.get();
    for (const void** row : {rows.keys, rows.values})
      for (int i = 0; (has_values || row == rows.keys) && i < TILE_KEYS; i++, to += columns) {
        if (row[i] == scratch.zeros.get()) continue;
        book.expand((const uint8_t*)row[i], a.head_dim, to);
        row[i] = to;
      }
  }

  // Pack rows of elements of `Source` in the form that M multiplies.
  template <class Source> void pack(int rows, const KeyRows& from, Scratch& scratch) const {
    using Row = const typename Source::Element*;
    pack_keys<Source>((const Row*)from.keys, a.head_dim, words, scratch.keys.get());
    if (packs_values(rows)) Source::pack_values((const Row*)from.values, a.head_dim, columns, scratch.values.get());
  }

  // Prefetch the keys of the parts before `end_part`.
  void compute_part(const Tile& t, int part, int end_part, Scratch& scratch, Sums sums) const {
    const int rows = rows_of(t);
    if (is_latent(rows)) return compute_latents(t, part, end_part, scratch, sums);
    std::fill(sums.maxima, sums.maxima + rows, NEG_INF);
    std::memset(sums.values, 0, (size_t)rows * columns * sizeof(float));
    std::memset(scratch.row_sums.get(), 0, (size_t)rows * W * sizeof(float));
    const int first = std::max(t.first_key, part * PART_KEYS), end = std::min(t.end_key, (part + 1) * PART_KEYS);
    const int follows = std::min(t.end_key, end_part * PART_KEYS);
    int start = first / TILE_KEYS * TILE_KEYS;
    find_rows(t, start, first, end, scratch.zeros.get(), *scratch.next);
    for (; start < end; start += TILE_KEYS) {
      std::swap(scratch.now, scratch.next);
      KeyRows& from = *scratch.now;
      scratch.prefetched = TILE_KEYS;
      scratch.ahead_keys = scratch.ahead_values = {};
      if (start + TILE_KEYS < follows) {
        find_rows(t, start + TILE_KEYS, first, follows, scratch.zeros.get(), *scratch.next);
        const int bytes = a.head_dim * cell;
        if (packs_values(rows)) {
          scratch.prefetched = 0;
          scratch.prefetch_step = (TILE_KEYS + rows - 1) / rows;
        } else {
          scratch.ahead_keys = {scratch.next->keys, bytes}, scratch.ahead_values = {scratch.next->values, bytes};
        }
      }
      if (reads_codes()) {
#ifdef BATON_WIDENS
        if constexpr (M::READS_ROWS) pack<WidenedInt8>(rows, from, scratch);
#endif
      } else {
        if (a.codes) expand(from, scratch);
        pack<M>(rows, from, scratch);
      }
      const int most = rows_at_once(), num_groups = (rows + most - 1) / most, base = rows / num_groups;
      const int extra = rows % num_groups;
      for (int g = 0, r = 0; g < num_groups; g++) {
        const int n = base + (g < extra);
        dispatch(t, start, r, n, scratch, sums);
        r += n;
      }
    }
    for (int r = 0; r < rows; r++) sums.totals[r] = sum(load(scratch.row_sums.get() + (int64_t)r * W));
  }

  // The same by latent.h.
  void compute_latents(const Tile& t, int part, int end_part, Scratch& scratch, Sums sums) const {
    const int rows = rows_of(t), stride = round_up(rows, W);
    const LatentSums state{scratch.maxima.get(), scratch.row_sums.get(), scratch.factors.get(), stride};
    std::fill(state.maxima, state.maxima + stride, NEG_INF);
    std::memset(state.totals, 0, (size_t)W * stride * sizeof(float));
    std::memset(sums.values, 0, (size_t)rows * columns * sizeof(float));
    const int end = std::min(t.end_key, (part + 1) * PART_KEYS), follows = std::min(t.end_key, end_part * PART_KEYS);
    int start = part * PART_KEYS;
    find_rows(t, start, start, end, scratch.zeros.get(), *scratch.next);
    for (; start < end; start += TILE_KEYS) {
      std::swap(scratch.now, scratch.next);
      const bool has_next = start + TILE_KEYS < follows;
      if (has_next) find_rows(t, start + TILE_KEYS, start, follows, scratch.zeros.get(), *scratch.next);
      if (a.codes) expand(*scratch.now, scratch, false);
      attend_latents(t, start, rows, has_next, scratch, state, sums);
    }
    add_totals(state);
    std::copy(state.maxima, state.maxima + rows, sums.maxima);
    std::copy(state.totals, state.totals + rows, sums.totals);
  }

  // The first row of totals becomes their sum, in the order of `sum`.
  static void add_totals(LatentSums state) {
    for (int half = W / 2; half > 0; half /= 2)
      for (int i = 0; i < half * state.stride; i += W)
        store(state.totals + i, load(state.totals + i) + load(state.totals + half * state.stride + i));
  }

  void attend_latents(const Tile& t, int start, int rows, bool has_next, Scratch& scratch, LatentSums state, Sums sums) const {
    const int stride = state.stride;
    const Word* keys[TILE_KEYS];
    for (int i = 0; i < TILE_KEYS; i++) keys[i] = words_of(scratch.now->keys[i], i, scratch);
    const float* scores = scratch.scores.get();
    for (int r = 0; r < stride; r += 2 * W)
      score_keys(keys, r, stride, has_next && r == 0 ? a.head_dim * cell : 0, scratch);
    for (int r = 0; r < stride; r += W) {
      // All rows are of one token most of the time: a division for each of them would be slow.
      vi ends = vi{} + t.position + 1 - start;
      if (rows > group)
        for (int i = 0; i < W; i++) ends[i] += (r + i) / group;
      soften_latents<M>(scores, scratch.probabilities.get(), rule, ends, state, r, a.codes ? scratch.now->key_scales : nullptr);
    }
    const int num_groups = (rows + LATENT_VALUE_ROWS - 1) / LATENT_VALUE_ROWS, base = rows / num_groups;
    for (int d = 0; d < a.value_dim; d += 2 * W)
      for (int g = 0, r = 0; g < num_groups; g++) {
        const int n = base + (g < rows % num_groups);
        add_values(n, scratch.probabilities.get() + r, stride, keys, sums.values + (int64_t)r * columns, d, state.factors + r);
        r += n;
      }
  }

  // Scores of the tile's keys for query rows [r, r + 2 W), or for the last word of them.
  void score_keys(const Word* const* keys, int r, int stride, int ahead_bytes, Scratch& scratch) const {
    const Word* queries = scratch.latent_queries.get() + r;
    const void* const* ahead = scratch.next->keys;
    const auto score = r + W < stride ? score_latents<M, 2> : score_latents<M, 1>;
    for (int key = 0; key < TILE_KEYS; key += EVEN_KEYS) {
      float* to = scratch.scores.get() + key * stride + r;
      if (const int64_t spacing = W == 16 && stride == W ? spacing_of(keys + key) : 0) {
        score_even_latents<M>(keys[key], spacing, queries, words, to, ahead + key, ahead_bytes);
        continue;
      }
      for (int i = 0; i < EVEN_KEYS; i += LATENT_KEYS)
        score(keys + key + i, queries, words, stride, to + i * stride, ahead + key + i, ahead_bytes);
    }
  }

  // The bytes from each of EVEN_KEYS rows to the next; 0 if they differ.
  static int64_t spacing_of(const Word* const* rows) {
    const int64_t spacing = rows[1] - rows[0];
    for (int i = 2; i < EVEN_KEYS; i++)
      if (rows[i] - rows[i - 1] != spacing) return 0;
    return spacing * (int64_t)sizeof(Word);
  }

  // A row of the cache, number `i` of the tile, as words.
  const Word* words_of(const void* row, int i, Scratch& scratch) const {
    if constexpr (READS_WORDS<M>) return static_cast<const Word*>(row);
    Word* to = scratch.latent_rows.get() + i * words;
    for (int d = 0; d < words; d += W) store(to + d, load_elements(static_cast<const Element*>(row) + d));
    return to;
  }

  void add_values(int n, const Word* probabilities, int stride, const Word* const* rows, float* c, int d,
                  const float* factors) const {
    using Add = void (*)(const Word*, int, const Word* const*, float*, int, int, const float*);
    static constexpr Add KINDS[] = {add_latents<M, 1>, add_latents<M, 2>, add_latents<M, 3>, add_latents<M, 4>,
                                    add_latents<M, 5>, add_latents<M, 6>, add_latents<M, 7>, add_latents<M, 8>};
    KINDS[n - 1](probabilities, stride, rows, c, columns, d, factors);
  }

  void dispatch(const Tile& t, int start, int r, int n, Scratch& scratch, Sums sums) const {
    const int last = t.position + (r + n - 1) / group;
    if (start > last) return;  // no row sees these keys
    if (a.sliding_window > 0 && start + TILE_KEYS <= t.position + r / group - a.sliding_window + 1) return;
    if (uses_tiles) return attend_tiles(t, start, r, n, scratch, sums);
    switch (n) {
      case 1: return attend_rows<1>(t, start, r, scratch, sums);
      case 2: return attend_rows<2>(t, start, r, scratch, sums);
      case 3: return attend_rows<3>(t, start, r, scratch, sums);
      case 4: return attend_rows<4>(t, start, r, scratch, sums);
      case 5: return attend_rows<5>(t, start, r, scratch, sums);
      case 6: return attend_rows<6>(t, start, r, scratch, sums);
      default: return attend_rows<M::MAX_ROWS>(t, start, r, scratch, sums);
    }
  }

  template <int ROWS> void attend_rows(const Tile& t, int start, int r, Scratch& scratch, Sums sums) const {
    float factors[ROWS];
    constexpr int stride = TILE_KEYS / M::PAIR;
    multiply<M, ROWS>(scratch.queries.get() + (int64_t)r * words, words, scratch.keys.get(), TILE_KEYS,
                      scratch.scores.get(), TILE_KEYS, TILE_KEYS, words, nullptr, scratch.ahead_keys);
    for (int i = 0; i < ROWS; i++) factors[i] = soften_row(t, start, r + i, i, scratch, sums);
    float* values = sums.values + (int64_t)r * columns;
    if constexpr (M::READS_ROWS)
      if (!packs_values(rows_of(t))) {
        const void* const* rows = scratch.now->values;
        if (reads_codes())
          return multiply_rows<ROWS>(scratch.probabilities.get(), (const int8_t* const*)rows, values, columns, factors, scratch.ahead_values);
        return multiply_rows<ROWS>(scratch.probabilities.get(), (const Element* const*)rows, values, columns, factors, scratch.ahead_values);
      }
    multiply<M, ROWS>(scratch.probabilities.get(), stride, scratch.values.get(), columns, values, columns, columns, stride, factors);
  }

  void attend_tiles(const Tile& t, int start, int r, int n, Scratch& scratch, Sums sums) const {
#ifdef BATON_TILES
    constexpr int stride = TILE_KEYS / 2, word = 4;
    const auto multiply = n > tiles::ROWS / 2 ? tiles::multiply<true> : tiles::multiply<false>;
    scratch.shape->set(n);
    const uint32_t* queries = (const uint32_t*)scratch.queries.get() + (int64_t)r * words;
    for (int j = 0; j < TILE_KEYS; j += 32)
      multiply(queries, words * word, 64, (const uint32_t*)scratch.keys.get() + j, TILE_KEYS * word, scratch.scores.get() + j,
               TILE_KEYS * word, words, true, nullptr, 0);
    for (int i = 0; i < n; i++) {
      const float factor = soften_row(t, start, r + i, i, scratch, sums);
      float* values = sums.values + (int64_t)(r + i) * columns;
      if (factor != 1.f)
        for (int d = 0; d < columns; d += W) store(values + d, load(values + d) * factor);
    }
    for (int d = 0; d < columns; d += 32)
      multiply((const uint32_t*)scratch.probabilities.get(), stride * word, 64, (const uint32_t*)scratch.values.get() + d,
               columns * word, sums.values + (int64_t)r * columns + d, columns * word, stride, false, nullptr, 0);
#endif
  }

  // Row `r` of the tile, whose scores are the `i`-th of the scratch buffer.
  float soften_row(const Tile& t, int start, int r, int i, Scratch& scratch, Sums sums) const {
    prefetch(scratch);
    const int position = t.position + r / group;
    const int first = a.sliding_window > 0 ? position - a.sliding_window + 1 - start : 0;
    float* scores = scratch.scores.get() + i * TILE_KEYS;
    if (a.codes)
      for (int j = 0; j < TILE_KEYS; j += W) store(scores + j, load(scores + j) * load(scratch.now->key_scales + j));
    if (a.alibi) lower(scores, a.alibi[t.kv_head * group + r % group], start - position);
    return soften<M>(scores, scratch.probabilities.get() + i * TILE_KEYS / M::PAIR, rule, first, position + 1 - start,
                     sums.maxima + r, scratch.row_sums.get() + (int64_t)r * W,
                     a.codes ? scratch.now->value_scales : nullptr);
  }

  void lower(float* scores, float slope, int distance) const {
    for (int j = 0; j < TILE_KEYS; j++) scores[j] += slope * (distance + j);
  }

  // Prefetch a few rows of the next tile at a time, while the processor multiplies. Blocks may lie anywhere, and the
  // hardware's own prefetchers stop at the end of a block.
  void prefetch(Scratch& scratch) const {
    const int end = std::min(scratch.prefetched + scratch.prefetch_step, TILE_KEYS);
    for (int i = scratch.prefetched; i < end; i++)
      for (int d = 0; d < a.head_dim * cell; d += 64) {
        __builtin_prefetch((const char*)scratch.next->keys[i] + d, 0, 2);
        __builtin_prefetch((const char*)scratch.next->values[i] + d, 0, 2);
      }
    scratch.prefetched = end;
  }

  // Row `r` of the tile, whose sums these are.
  void write(const Tile& t, int r, Sums sums) const {
    const int64_t token = a.query_starts[t.sequence] + t.first_token + r / group;
    const int head = t.kv_head * group + r % group;
    float total = *sums.totals;
    if (a.sinks) total += M::exponential(splat(std::min(a.sinks[head] * M::UNIT - *sums.maxima, 88.f)))[0];
    Element* to = static_cast<Element*>(a.output) + (token * a.num_heads + head) * a.value_dim;
    for (int d = 0; d < a.value_dim; d += W) store_elements(to + d, load(sums.values + d) / total, a.value_dim - d);
  }

  const AttendArguments& a;
  const int columns;  // head_dim rounded up to whole SIMD words
  const int words;    // packed words of a row
  const int cell;     // bytes of an element in the cache
  const bool uses_tiles;
  const bool has_latents;  // tiles of few rows are computed by latent.h
  const ScoreRule rule;
  const Plan plan;
  const int group;  // query heads per KV head
};

}  // namespace

// 0: done; 1: this build has no code for the dtype; 2: out of memory.
extern "C" int baton_attend(const AttendArguments* arguments) {
  try {
    switch (arguments->dtype) {
      case 0: Attention<Widening<float>>(*arguments).run(); return 0;
      case 1: Attention<Bf16>(*arguments).run(); return 0;
#ifdef __FLT16_MAX__
      case 2: Attention<Widening<_Float16>>(*arguments).run(); return 0;
#endif
      default: return 1;
    }
  } catch (const std::bad_alloc&) {
    return 2;
  }
}
