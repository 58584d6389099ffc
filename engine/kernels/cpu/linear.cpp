// Products of a few rows are bounded by reading the weights, of many by the dot products: one kernel serves both. It keeps
// up to 12 rows x 32 columns in registers; weights pass in pieces that stay in a near cache for all rows. Codes of few bits
// become bf16 there, piece by piece: values of at most 8 significant bits, so nothing is rounded; scales come after the sums.
#include "linear.h"

#include "amx.h"
#include "rows.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

#include <atomic>
#include <memory>
#include <new>

namespace baton {
namespace {

constexpr int PANEL = 32;         // columns, two words
constexpr int KERNEL_ROWS = 12;   // 24 accumulators of 32 registers
constexpr int BLOCK_ROWS = 96;    // their float32 sums stay in the first-level cache
constexpr int SLICE_ROWS = 512;   // their inputs stay in the last-level cache while all weights pass
constexpr int DEPTH = 512;        // pairs of inputs at a time: 64 KiB of bf16
constexpr int CODED_DEPTH = 64;   // of codes: 8 KiB once they are bf16
constexpr int CODES_AHEAD = 4096;  // bytes
constexpr int FEW_ROWS = 4;        // whose codes become bf16 in registers
constexpr int MANY_ROWS = 64;      // whose products take longer than reading the weights
constexpr int64_t THREAD_WORK = 1 << 18;  // rows x inputs x outputs worth a thread

// What sums of one group of inputs become; null scales: what they are.
struct Scaling {
  const float *scales, *zeros;  // [32]
  const float* totals;          // of each row, its inputs' sum; read where there are zeros
  int64_t totals_stride;
};

// before + (sum - zero * total) * scale, of row i and word j.
inline vf rescaled(vf sum, const Scaling& scaling, int i, int j, vf before) {
  if (scaling.zeros) sum -= load(scaling.zeros + j * W) * scaling.totals[i * scaling.totals_stride];
  return fma(sum, load(scaling.scales + j * W), before);
}

// sums[ROWS][32] (+)= x[ROWS][depth] x b[depth][32]. `ahead`: memory to ask for meanwhile, `stride` bytes per step.
template <int ROWS, bool ASKS>
void kernel(const uint32_t* x, int64_t ldx, const uint32_t* b, float* sums, int depth, bool is_first, Scaling scaling,
            const char* ahead, int stride) {
  __m512 c[ROWS][2];
  const bool starts_at_zero = is_first || scaling.scales;
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++)
      c[i][j] = starts_at_zero ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + i * PANEL + j * W);
  for (int k = 0; k < depth; k++, b += PANEL) {
    const __m512bh low = (__m512bh)_mm512_loadu_si512(b), high = (__m512bh)_mm512_loadu_si512(b + W);
    if (ASKS) {
      __builtin_prefetch(ahead, 0, 2);
      __builtin_prefetch(ahead + 64, 0, 2);
      ahead += stride;
    }
    for (int i = 0; i < ROWS; i++) {
      const __m512bh a = (__m512bh)_mm512_set1_epi32((int)x[i * ldx + k]);
      c[i][0] = _mm512_dpbf16_ps(c[i][0], a, low);
      c[i][1] = _mm512_dpbf16_ps(c[i][1], a, high);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++) {
      float* to = sums + i * PANEL + j * W;
      vf sum = (vf)c[i][j];
      store(to, scaling.scales ? rescaled(sum, scaling, i, j, is_first ? vf{} : load(to)) : sum);
    }
}

using Kernel = void (*)(const uint32_t*, int64_t, const uint32_t*, float*, int, bool, Scaling, const char*, int);
template <bool ASKS>
constexpr Kernel KERNELS[] = {nullptr,         kernel<1, ASKS>, kernel<2, ASKS>,  kernel<3, ASKS>,  kernel<4, ASKS>,
                              kernel<5, ASKS>, kernel<6, ASKS>, kernel<7, ASKS>,  kernel<8, ASKS>,  kernel<9, ASKS>,
                              kernel<10, ASKS>, kernel<11, ASKS>, kernel<12, ASKS>};

// Codes of a panel as bf16: `PAIRS` pairs of inputs, two registers each, from 64 bytes.
struct Codes8 {
  static constexpr int PAIRS = 1;
  __m512i low[2], high[2];  // bytes of the table's numbers
  const __m512i sign = _mm512_set1_epi8((char)0x80);

  explicit Codes8(const uint16_t* table) {
    for (int i = 0; i < 2; i++) {
      const __m512i a = _mm512_loadu_si512(table + 64 * i), b = _mm512_loadu_si512(table + 64 * i + 32);
      low[i] = bytes(a, b), high[i] = bytes(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
    }
  }
  static __m512i bytes(__m512i a, __m512i b) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(a)), _mm512_cvtepi16_epi8(b), 1);
  }
  void expand(const uint8_t* codes, __m512i* to) const {
    const __m512i code = _mm512_loadu_si512(codes);
    const __m512i l = _mm512_permutex2var_epi8(low[0], code, low[1]);
    const __m512i magnitude = _mm512_permutex2var_epi8(high[0], code, high[1]);
    const __m512i h = _mm512_ternarylogic_epi32(magnitude, code, sign, 0xf8);  // magnitude | (code & sign)
    to[0] = _mm512_unpacklo_epi8(l, h), to[1] = _mm512_unpackhi_epi8(l, h);
  }
};

struct Codes4 {
  static constexpr int PAIRS = 2;
  __m512i values;  // 16 of them twice: the fifth bit of an index is another code's

  explicit Codes4(const uint16_t* table) : values(_mm512_loadu_si512(table)) {}
  void expand(const uint8_t* codes, __m512i* to) const {
    const __m512i word = _mm512_loadu_si512(codes);
    to[0] = _mm512_permutexvar_epi16(word, values);
    to[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 4), values);
    to[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 8), values);
    to[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(word, 12), values);
  }
};

// `depth` pairs of inputs as bf16 [depth][32].
template <class Codes> void expand(const uint8_t* codes, const uint16_t* table, uint32_t* to, int depth) {
  const Codes source(table);
  for (int k = 0; k < depth; k += Codes::PAIRS, codes += 64) {
    __builtin_prefetch(codes + CODES_AHEAD, 0, 2);
    __m512i words[2 * Codes::PAIRS];
    source.expand(codes, words);
    for (const __m512i& word : words) _mm512_storeu_si512(to, word), to += W;
  }
}

// sums[ROWS][2 panels][32] += x[ROWS][depth] x codes of two panels, for rows so few that bf16 in memory would cost more
// than the products. The same sums in the same order as of `kernel`.
template <class Codes, int ROWS>
void kernel_coded(const uint32_t* x, int64_t ldx, const uint8_t* const* codes, const Codes& source, float* sums, int at,
                  int depth) {
  __m512 c[ROWS][4];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 4; j++) c[i][j] = _mm512_loadu_ps(sums + (i * 4 + j) * W);
  for (int k = 0; k < depth; k += Codes::PAIRS) {
    const int64_t offset = (int64_t)(at + k) / Codes::PAIRS * 64;
    for (int p = 0; p < 2; p++) {
      __builtin_prefetch(codes[p] + offset + CODES_AHEAD, 0, 2);
      __m512i words[2 * Codes::PAIRS];
      source.expand(codes[p] + offset, words);
      for (int j = 0; j < Codes::PAIRS; j++)
        for (int i = 0; i < ROWS; i++) {
          const __m512bh a = (__m512bh)_mm512_set1_epi32((int)x[i * ldx + at + k + j]);
          c[i][2 * p] = _mm512_dpbf16_ps(c[i][2 * p], a, (__m512bh)words[2 * j]);
          c[i][2 * p + 1] = _mm512_dpbf16_ps(c[i][2 * p + 1], a, (__m512bh)words[2 * j + 1]);
        }
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 4; j++) _mm512_storeu_ps(sums + (i * 4 + j) * W, c[i][j]);
}

class Product {
 public:
  Product(const PackedMatrix& weights, const bf16* x, int64_t x_stride, bf16* y, int64_t y_stride, Epilogue epilogue,
          const float* totals)
      : m(weights),
        x(x),
        x_stride(x_stride),
        y(y),
        y_stride(y_stride),
        epilogue(epilogue),
        totals(totals),
        uses_tiles(tiles::are_on() && m.inputs % 32 == 0) {}

  int panels() const { return (m.outputs + PANEL - 1) / PANEL; }
  int depth() const { return m.inputs / 2; }
  int groups() const { return (m.inputs + m.group - 1) / m.group; }

  void compute(int panel, int64_t first_row, int count, tiles::Shape& shape) const {
    alignas(64) float sums[BLOCK_ROWS * PANEL];
    alignas(64) uint32_t expanded[CODED_DEPTH * PANEL];
    for (int k = 0; k < depth(); k += piece()) {
      const int n = std::min(piece(), depth() - k);
      const uint8_t* words = words_of(panel) + (int64_t)k * bytes_per_pair();
      if (is_coded()) (m.bits == 8 ? expand<Codes8> : expand<Codes4>)(words, m.table, expanded, n);
      const uint32_t* b = is_coded() ? expanded : (const uint32_t*)words;
      if (uses_tiles)
        multiply_tiles(panel, first_row, count, k, n, b, sums, shape);
      else
        multiply(panel, first_row, count, k, n, b, sums);
    }
    for (int row = 0; row < count; row++) finish(sums + row * PANEL, panel, first_row + row);
  }

  bool has_few(int64_t rows) const { return is_coded() && rows <= FEW_ROWS && !uses_tiles; }

  // Two panels; the second one may not exist.
  void compute_few(int panel, int count, tiles::Shape& shape) const {
    if (panel + 1 == panels()) return compute(panel, 0, count, shape);
    m.bits == 8 ? compute_few<Codes8>(panel, count) : compute_few<Codes4>(panel, count);
  }

 private:
  bool is_coded() const { return m.bits < 16; }
  bool has_groups() const { return is_coded() && m.group < m.inputs; }
  int piece() const { return !is_coded() ? DEPTH : has_groups() ? std::min(CODED_DEPTH, m.group / 2) : CODED_DEPTH; }
  int bytes_per_pair() const { return PANEL * 2 * m.bits / 8; }
  const uint8_t* words_of(int panel) const { return (const uint8_t*)m.words + (int64_t)panel * depth() * bytes_per_pair(); }

  template <class Codes> void compute_few(int panel, int count) const {
    switch (count) {
      case 1: return compute_few<Codes, 1>(panel);
      case 2: return compute_few<Codes, 2>(panel);
      case 3: return compute_few<Codes, 3>(panel);
      default: return compute_few<Codes, FEW_ROWS>(panel);
    }
  }

  template <class Codes, int ROWS> void compute_few(int panel) const {
    alignas(64) float sums[ROWS * 2 * PANEL] = {}, scaled[2][ROWS * PANEL];
    const Codes source(m.table);
    const uint8_t* const codes[2] = {words_of(panel), words_of(panel + 1)};
    const int step = has_groups() ? piece() : depth();
    for (int k = 0; k < depth(); k += step) {
      kernel_coded<Codes, ROWS>((const uint32_t*)x, x_stride / 2, codes, source, sums, k, std::min(step, depth() - k));
      for (int p = 0; p < 2; p++)
        for (int i = 0; i < ROWS; i++)
          for (int j = 0; j < 2; j++) {
            float *from = sums + (i * 4 + 2 * p + j) * W, *to = scaled[p] + i * PANEL + j * W;
            if (!has_groups()) {
              store(to, load(from));
              continue;
            }
            store(to, rescaled(load(from), scaling(panel + p, k, i), 0, j, k == 0 ? vf{} : load(to)));
            store(from, vf{});
          }
    }
    for (int p = 0; p < 2; p++)
      for (int i = 0; i < ROWS; i++) finish(scaled[p] + i * PANEL, panel + p, i);
  }

  // One piece of a panel with all rows of a block; each group of rows asks for its share of the next piece.
  void multiply(int panel, int64_t first_row, int count, int k, int n, const uint32_t* b, float* sums) const {
    const int num_groups = (count + KERNEL_ROWS - 1) / KERNEL_ROWS, least = count / num_groups, extra = count % num_groups;
    const int stride = PANEL * (int)sizeof(uint32_t) / num_groups;
    const uint32_t* a = (const uint32_t*)(x + first_row * x_stride) + k;
    const Kernel* kernels = is_coded() ? KERNELS<false> : KERNELS<true>;
    for (int g = 0, row = 0; g < num_groups; g++) {
      const int height = least + (g < extra);
      const char* ahead = (const char*)(b + n * PANEL) + (int64_t)g * n * stride;
      kernels[height](a + row * x_stride / 2, x_stride / 2, b, sums + row * PANEL, n, k == 0,
                      scaling(panel, k, first_row + row), ahead, stride);
      row += height;
    }
  }

  // The same in tiles.
  void multiply_tiles(int panel, int64_t first_row, int count, int k, int n, const uint32_t* b, float* sums,
                      tiles::Shape& shape) const {
#ifdef BATON_TILES
    alignas(64) float of_group[tiles::ROWS * PANEL];
    const int num_groups = (count + tiles::ROWS - 1) / tiles::ROWS, least = count / num_groups, extra = count % num_groups;
    const int width = PANEL * (int)sizeof(float), step = is_coded() ? 0 : width / num_groups;
    const uint32_t* a = (const uint32_t*)(x + first_row * x_stride) + k;
    for (int g = 0, row = 0; g < num_groups; g++) {
      const int height = least + (g < extra);
      const Scaling scale = scaling(panel, k, first_row + row);
      float *whole = sums + row * PANEL, *to = scale.scales ? of_group : whole;
      shape.set(height);
      (height > tiles::ROWS / 2 ? tiles::multiply<true> : tiles::multiply<false>)(
          a + row * x_stride / 2, 2 * x_stride, b, width, to, width, n, k == 0 || scale.scales,
          (const char*)(b + n * PANEL) + (int64_t)g * n * step, step);
      for (int i = 0; scale.scales && i < height; i++)
        for (int j = 0; j < PANEL; j += W) {
          float* sum = whole + i * PANEL + j;
          store(sum, rescaled(load(of_group + i * PANEL + j), scale, i, j / W, k == 0 ? vf{} : load(sum)));
        }
      row += height;
    }
#endif
  }

  Scaling scaling(int panel, int k, int64_t row) const {
    if (!has_groups()) return {};
    const int group = 2 * k / m.group;
    const int64_t at = ((int64_t)group * panels() + panel) * PANEL;
    const bool subtracts = m.zeros && 2 * k % m.group == 0;  // once per group, which may take several pieces
    return {m.scales + at, subtracts ? m.zeros + at : nullptr, totals + row * groups() + group, groups()};
  }

  void finish(const float* sums, int panel, int64_t number) const {
    vf low = load(sums), high = load(sums + W);
    bf16* row = y + number * y_stride;
    const int column = panel * PANEL, left = m.outputs - column;
    if (m.scales && m.group >= m.inputs) {
      if (m.zeros) low -= load(m.zeros + column) * totals[number], high -= load(m.zeros + column + W) * totals[number];
      low *= load(m.scales + column), high *= load(m.scales + column + W);
    }
    if (m.bias) {
      low += load_elements(m.bias + column, left);
      if (left > W) high += load_elements(m.bias + column + W, left - W);
    }
    if (epilogue == GATED) {
      const vf gate = rounded<bf16>(low), minus = vf{} - gate;
      const vf e = exp2_fast((minus > splat(80.f) ? splat(80.f) : minus) * 1.44269504088896341f);
      store_elements(row + panel * W, rounded<bf16>(gate / (1.f + e)) * rounded<bf16>(high));
      return;
    }
    store_elements(row + column, low, left);
    if (left > W) store_elements(row + column + W, high, left - W);
  }

  const PackedMatrix& m;
  const bf16* x;
  const int64_t x_stride;
  bf16* y;
  const int64_t y_stride;
  const Epilogue epilogue;
  const float* totals;  // [rows][groups] sums of inputs, where there are zeros
  const bool uses_tiles;
};

// Each row's inputs summed by group.
void add_up(const bf16* x, int64_t x_stride, int64_t rows, int inputs, int group, float* totals, int num_threads) {
  const int groups = (inputs + group - 1) / group;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows > 64)
  for (int64_t row = 0; row < rows; row++)
    for (int g = 0; g < groups; g++) {
      vf total{};
      const int end = std::min(inputs, (g + 1) * group);
      for (int i = g * group; i < end; i += W) total += load_elements(x + row * x_stride + i, end - i);
      totals[row * groups + g] = sum(total);
    }
}

}  // namespace

bool linear(const PackedMatrix& weights, const bf16* x, int64_t x_stride, bf16* y, int64_t y_stride, int64_t rows,
            Epilogue epilogue, int num_threads) {
  std::unique_ptr<float[]> totals;
  if (weights.zeros) {
    const int groups = (weights.inputs + weights.group - 1) / weights.group;
    totals.reset(new (std::nothrow) float[rows * groups]);
    if (!totals) return false;
    add_up(x, x_stride, rows, weights.inputs, weights.group, totals.get(), num_threads);
  }
  for (int64_t done = 0; done < rows; done += SLICE_ROWS) {
    const int64_t count = std::min<int64_t>(SLICE_ROWS, rows - done), blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const float* sums = totals ? totals.get() + done * ((weights.inputs + weights.group - 1) / weights.group) : nullptr;
    const Product product(weights, x + done * x_stride, x_stride, y + done * y_stride, y_stride, epilogue, sums);
    const int64_t work = std::max<int64_t>(count, 4) * weights.inputs * weights.outputs;
    const int threads = std::clamp<int64_t>(work / THREAD_WORK, 1, num_threads);
    const bool few = product.has_few(count);
    const int64_t tasks = few ? (product.panels() + 1) / 2 : product.panels() * blocks;
    // Few rows: each thread reads one stretch of the weights, the hardware's prefetchers follow it. Many: a thread whose
    // core is taken away holds nobody up.
    const int64_t share = (tasks + threads - 1) / threads, at_once = count < MANY_ROWS ? share : (share + 15) / 16;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      tiles::Shape shape;
      for (int64_t task; (task = next.fetch_add(at_once)) < tasks;)
        for (const int64_t end = std::min(task + at_once, tasks); task < end; task++) {
          const int64_t first = task % blocks * BLOCK_ROWS;
          if (few)
            product.compute_few(2 * task, count, shape);
          else
            product.compute(task / blocks, first, std::min<int64_t>(BLOCK_ROWS, count - first), shape);
        }
    }
  }
  return true;
}

}  // namespace baton

extern "C" int baton_has_packed_linear() { return 1; }

// Whether products use tiles from now on. Only a test changes it: sums of tiles have an order of their own.
extern "C" int baton_use_tiles(int is_wanted) {
#ifdef BATON_TILES
  baton::tiles::is_wanted = is_wanted;
#endif
  return baton::tiles::are_on();
}

#else

namespace baton {
bool linear(const PackedMatrix&, const bf16*, int64_t, bf16*, int64_t, int64_t, Epilogue, int) { return false; }
}  // namespace baton

extern "C" int baton_has_packed_linear() { return 0; }

extern "C" int baton_use_tiles(int) { return 0; }

#endif

// 0: done; 2: out of memory.
extern "C" int baton_linear(const baton::PackedMatrix* weights, const void* x, int64_t x_stride, void* y, int64_t y_stride,
                            int64_t rows, int32_t num_threads) {
  return baton::linear(*weights, (const baton::bf16*)x, x_stride, (baton::bf16*)y, y_stride, rows, baton::PLAIN,
                       num_threads)
             ? 0
             : 2;
}
