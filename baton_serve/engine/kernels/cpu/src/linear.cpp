// Matrix products with packed weights, bf16 or quantized, for any number of rows.
//
// One kernel serves products of a few rows, which reading the weights bounds, and of many, which the dot products bound.
// It keeps up to 12 rows x 32 columns in registers. Weights are processed in pieces that stay in a near cache for all rows.
// Quantized codes are decoded to bf16 there: their values have at most 8 significant bits, so that nothing is rounded.
// Scales multiply the sums.
#include "linear.h"

#include "amx.h"
#include "linear_kernels.h"
#include "linear_scratch.h"
#include "rows.h"
#include "turns.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

#include <atomic>
#include <memory>
#include <new>

namespace baton {
namespace {

constexpr int BLOCK_ROWS = 96;    // their float32 sums stay in the first-level cache
constexpr int SLICE_ROWS = 512;   // their inputs stay in the last-level cache while all weights are read
constexpr int CODED_DEPTH = 64;   // of codes: 8 KiB once they are bf16
constexpr int FEW_ROWS = 4;        // whose codes become bf16 in registers
constexpr int MANY_ROWS = 64;      // whose products take longer than reading the weights
constexpr int64_t THREAD_WORK = 1 << 18;  // rows x inputs x outputs worth a thread

// `rows` of x as kernels take them; float32 ones stay in a buffer that the thread keeps.
struct Inputs {
  const Input* first;
  int64_t stride;
};
#ifdef BATON_WIDENS
// False: out of memory.
bool prepare(const bf16* x, int64_t x_stride, int64_t rows, int inputs, int num_threads, Inputs& to) {
  thread_local std::unique_ptr<float[]> buffer;
  thread_local int64_t room = 0;
  if (const int64_t wanted = std::min<int64_t>(rows, SLICE_ROWS) * inputs; wanted > room) {
    buffer.reset(new (std::nothrow) float[wanted]);
    room = buffer ? wanted : 0;
    if (!buffer) return false;
  }
  float* const first = buffer.get();
#pragma omp parallel for schedule(static) num_threads(num_threads) if (rows > MANY_ROWS)
  for (int64_t row = 0; row < rows; row++)
    for (int i = 0; i < inputs; i += W)
      store_elements(first + row * inputs + i, load_elements(x + row * x_stride + i, inputs - i), inputs - i);
  to = {first, inputs};
  return true;
}
#else
bool prepare(const bf16* x, int64_t x_stride, int64_t, int, int, Inputs& to) {
  to = {(const Input*)x, x_stride / 2};
  return true;
}
#endif

class Product {
 public:
  Product(const PackedMatrix& weights, Inputs inputs, const bf16* x, int64_t x_stride, bf16* y, int64_t y_stride,
          Epilogue epilogue, const float* totals)
      : m(weights),
        inputs(inputs),
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

#ifdef BATON_TILES
  int pieces() const { return (depth() + DEPTH - 1) / DEPTH; }
  // True if each panel would read all inputs of the rows through the near caches again.
  bool has_many(int64_t rows) const { return uses_tiles && rows >= MANY_ROWS && pieces() > 1; }

  // Panels [panel, end) of rows that `scratch` has room for. Inputs lie in a near cache in the order of the tiles, one piece
  // after another; each group of rows prefetches its share of the next weights.
  void compute_many(int panel, int end, int64_t first_row, int count, TiledScratch& scratch, tiles::Shape& shape) const {
    shape.set(tiles::ROWS);
    const int groups = (count + tiles::ROWS - 1) / tiles::ROWS;
    for (int k = 0; k < depth(); k += DEPTH) {
      const int n = std::min(DEPTH, depth() - k);
      scratch.fill(x, x_stride, first_row, count, k, n);
      for (int p = panel; p < end; p++) {
        const uint8_t* words = words_of(p) + (int64_t)k * bytes_per_pair();
        if (is_coded()) (m.bits == 8 ? expand<Codes8> : expand<Codes4>)(words, m.table, scratch.weights.get(), n);
        const uint32_t* b = is_coded() ? scratch.weights.get() : (const uint32_t*)words;
        const char* next = (const char*)(p + 1 < end ? words_of(p + 1) : words_of(panel) + DEPTH * bytes_per_pair());
        next += (int64_t)k * bytes_per_pair();
        for (int g = 0; g < groups; g++) {
          const int row = g * tiles::ROWS, height = std::min(tiles::ROWS, count - row);
          float* sums = scratch.sums.get() + ((p - panel) * groups + g) * tiles::ROWS * PANEL;
          const int step = is_coded() ? 0 : PANEL * (int)sizeof(uint32_t) / groups;
          multiply_group(p, first_row + row, height, k, n, scratch.group(g, n), b, sums, next + (int64_t)g * n * step, step);
        }
        const float* sums = scratch.sums.get() + (p - panel) * groups * tiles::ROWS * PANEL;
        for (int i = 0; k + n == depth() && i < count; i++) finish(sums + i * PANEL, p, first_row + i);
      }
    }
  }
#endif

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
      kernel_coded<Codes, ROWS>(inputs.first, inputs.stride, codes, source, sums, k, std::min(step, depth() - k));
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

  // One piece of a panel with all rows of a block; each group of rows prefetches its share of the next piece.
  void multiply(int panel, int64_t first_row, int count, int k, int n, const uint32_t* b, float* sums) const {
    const int num_groups = (count + KERNEL_ROWS - 1) / KERNEL_ROWS, least = count / num_groups, extra = count % num_groups;
    const int stride = PANEL * (int)sizeof(uint32_t) / num_groups;
    const Input* a = inputs.first + first_row * inputs.stride + k * INPUTS_OF_PAIR;
    const Kernel* kernels = is_coded() ? KERNELS<false> : KERNELS<true>;
    for (int g = 0, row = 0; g < num_groups; g++) {
      const int height = least + (g < extra);
      const char* ahead = (const char*)(b + n * PANEL) + (int64_t)g * n * stride;
      kernels[height](a + row * inputs.stride, inputs.stride, b, sums + row * PANEL, n, k == 0,
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
          a + row * x_stride / 2, 2 * x_stride, 64, b, width, to, width, n, k == 0 || scale.scales,
          (const char*)(b + n * PANEL) + (int64_t)g * n * step, step);
      if (scale.scales) add_scaled(of_group, scale, height, k == 0, whole);
      row += height;
    }
#endif
  }

#ifdef BATON_TILES
  // Inputs [k, k + n) of one group of packed rows.
  void multiply_group(int panel, int64_t row, int height, int k, int n, const uint32_t* a, const uint32_t* b, float* sums,
                      const char* ahead, int ahead_step) const {
    constexpr int width = PANEL * (int)sizeof(float), tile_pair = tiles::ROWS * (int)sizeof(uint32_t);
    if (!has_groups())
      return tiles::multiply<true>(a, 64, tile_pair * tiles::PAIRS, b, width, sums, width, n, k == 0, ahead, ahead_step);
    alignas(64) float of_group[tiles::ROWS * PANEL];
    for (int at = 0; at < n; at += piece()) {
      const int some = std::min(piece(), n - at);
      tiles::multiply<true>(a + at * tiles::ROWS, 64, tile_pair * tiles::PAIRS, b + at * PANEL, width, of_group, width, some,
                            true, nullptr, 0);
      const Scaling scale = scaling(panel, k + at, row);
      add_scaled(of_group, scale, height, k + at == 0, sums);
    }
  }
#endif

  static void add_scaled(const float* of_group, const Scaling& scale, int height, bool is_first, float* sums) {
    for (int i = 0; i < height; i++)
      for (int j = 0; j < PANEL; j += W) {
        float* sum = sums + i * PANEL + j;
        store(sum, rescaled(load(of_group + i * PANEL + j), scale, i, j / W, is_first ? vf{} : load(sum)));
      }
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
    if (epilogue == GELU) {
      low = gelu(rounded<bf16>(low)), high = gelu(rounded<bf16>(high));
    } else if (epilogue != PLAIN) {
      const vf gate = rounded<bf16>(low);
      const vf minus = vf{} - gate_argument(gate, epilogue == GELU_GATED ? GELU_TANH : SILU);
      const vf e = exp2_fast((minus > splat(80.f) ? splat(80.f) : minus) * 1.44269504088896341f);
      store_elements(row + panel * W, rounded<bf16>(gate / (1.f + e)) * rounded<bf16>(high));
      return;
    }
    store_elements(row + column, low, left);
    if (left > W) store_elements(row + column + W, high, left - W);
  }

  static vf gelu(vf x) {
    const vf minus = vf{} - gate_argument(x, GELU_TANH);
    return x / (1.f + exp2_fast((minus > splat(80.f) ? splat(80.f) : minus) * 1.44269504088896341f));
  }

  const PackedMatrix& m;
  const Inputs inputs;
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

#ifdef BATON_TILES
// A task is a stretch of panels for a slice of rows. Each thread takes the next free task, so that a thread whose core is
// taken away delays no other one.
bool compute_tiled(const Product& product, int64_t rows, int num_threads) {
  const int64_t slices = (rows + TILED_ROWS - 1) / TILED_ROWS;
  const int64_t height = ((rows + slices - 1) / slices + tiles::ROWS - 1) / tiles::ROWS * tiles::ROWS;
  const int panels = product.panels();
  const int stretch = std::min((panels + num_threads - 1) / num_threads, TILED_PANELS), stretches = (panels + stretch - 1) / stretch;
  std::atomic<int64_t> next{0};
  std::atomic<bool> has_failed{false};
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    thread_local TiledScratch scratch;
    tiles::Shape shape;
    if (!scratch.has_room()) has_failed = true;
    for (int64_t task; !has_failed && (task = next.fetch_add(1)) < slices * stretches;) {
      yield_to_others();
      const int panel = task % stretches * stretch;
      const int64_t first = task / stretches * height, count = std::min(height, rows - first);
      if (count > 0) product.compute_many(panel, std::min(panel + stretch, panels), first, count, scratch, shape);
    }
  }
  return !has_failed;
}
#endif

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
#ifdef BATON_TILES
  const Product whole(weights, {}, x, x_stride, y, y_stride, epilogue, totals.get());
  if (whole.has_many(rows)) return compute_tiled(whole, rows, num_threads);
#endif
  for (int64_t done = 0; done < rows; done += SLICE_ROWS) {
    const int64_t count = std::min<int64_t>(SLICE_ROWS, rows - done), blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const float* sums = totals ? totals.get() + done * ((weights.inputs + weights.group - 1) / weights.group) : nullptr;
    Inputs inputs;
    if (!prepare(x + done * x_stride, x_stride, count, weights.inputs, num_threads, inputs)) return false;
    const Product product(weights, inputs, x + done * x_stride, x_stride, y + done * y_stride, y_stride, epilogue, sums);
    const int64_t work = std::max<int64_t>(count, 4) * weights.inputs * weights.outputs;
    const int threads = std::clamp<int64_t>(work / THREAD_WORK, 1, num_threads);
    const bool few = product.has_few(count);
    const int64_t tasks = few ? (product.panels() + 1) / 2 : product.panels() * blocks;
    // With few rows, each thread reads one stretch of the weights, which the hardware's prefetchers follow. With many, threads
    // take tasks dynamically, so that a thread whose core is taken away delays no other one.
    const int64_t share = (tasks + threads - 1) / threads, callback = count < MANY_ROWS ? share : (share + 15) / 16;
    std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
      tiles::Shape shape;
      for (int64_t task; (task = next.fetch_add(callback)) < tasks;) {
        yield_to_others();
        for (const int64_t end = std::min(task + callback, tasks); task < end; task++) {
          const int64_t first = task % blocks * BLOCK_ROWS;
          if (few)
            product.compute_few(2 * task, count, shape);
          else
            product.compute(task / blocks, first, std::min<int64_t>(BLOCK_ROWS, count - first), shape);
        }
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

extern "C" int baton_linear_heads(const baton::PackedMatrix* weights, int32_t num_heads, const void* x, int64_t x_stride,
                                  int64_t x_head_stride, void* y, int64_t y_stride, int64_t y_head_stride, int64_t rows,
                                  int32_t num_threads) {
  constexpr int64_t WORK = 1 << 18;  // rows x inputs x outputs worth a second thread
  const int64_t outputs = weights->outputs / num_heads, words = outputs * weights->inputs * sizeof(baton::bf16);
  const int threads = rows * weights->inputs * weights->outputs < WORK ? 1 : num_threads;
  int status = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(| : status) if (threads > 1)
  for (int32_t head = 0; head < num_heads; head++) {
    baton::PackedMatrix own = *weights;
    own.words = (const char*)weights->words + head * words, own.outputs = (int32_t)outputs;
    const auto* from = (const baton::bf16*)x + head * x_head_stride;
    auto* to = (baton::bf16*)y + head * y_head_stride;
    if (!baton::linear(own, from, x_stride, to, y_stride, rows, baton::PLAIN, 1)) status = 2;
  }
  return status;
}

// 0: done; 2: out of memory.
extern "C" int baton_linear(const baton::PackedMatrix* weights, const void* x, int64_t x_stride, void* y, int64_t y_stride,
                            int64_t rows, int32_t num_threads) {
  return baton::linear(*weights, (const baton::bf16*)x, x_stride, (baton::bf16*)y, y_stride, rows, baton::PLAIN,
                       num_threads)
             ? 0
             : 2;
}
