// Products of a few rows are bounded by reading the weights, of many by the dot products: one kernel serves both. It keeps
// up to 12 rows x 32 columns in registers; weights pass in pieces that stay in the second-level cache for all rows.
#include "linear.h"

#include "rows.h"

#ifdef __AVX512BF16__

namespace baton {
namespace {

constexpr int PANEL = 32;        // columns, two words
constexpr int KERNEL_ROWS = 12;  // 24 accumulators of 32 registers
constexpr int BLOCK_ROWS = 96;   // their float32 sums stay in the first-level cache
constexpr int DEPTH = 512;       // pairs of inputs: 64 KiB of weights at a time
constexpr int SLICE_ROWS = 512;  // their inputs stay in the last-level cache while all weights pass
constexpr int64_t THREAD_WORK = 1 << 18;  // rows x inputs x outputs worth a thread

// sums[ROWS][32] (+)= x[ROWS][depth] x b[depth][32]. `ahead`: weights to ask for meanwhile, `stride` bytes per step.
template <int ROWS>
void kernel(const uint32_t* x, int64_t ldx, const uint32_t* b, float* sums, int depth, bool is_first, const char* ahead,
            int stride) {
  __m512 c[ROWS][2];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++) c[i][j] = is_first ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + i * PANEL + j * W);
  for (int k = 0; k < depth; k++, b += PANEL) {
    const __m512bh low = (__m512bh)_mm512_loadu_si512(b), high = (__m512bh)_mm512_loadu_si512(b + W);
    __builtin_prefetch(ahead, 0, 2);
    __builtin_prefetch(ahead + 64, 0, 2);
    ahead += stride;
    for (int i = 0; i < ROWS; i++) {
      const __m512bh a = (__m512bh)_mm512_set1_epi32((int)x[i * ldx + k]);
      c[i][0] = _mm512_dpbf16_ps(c[i][0], a, low);
      c[i][1] = _mm512_dpbf16_ps(c[i][1], a, high);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < 2; j++) _mm512_storeu_ps(sums + i * PANEL + j * W, c[i][j]);
}

using Kernel = void (*)(const uint32_t*, int64_t, const uint32_t*, float*, int, bool, const char*, int);
constexpr Kernel KERNELS[KERNEL_ROWS + 1] = {nullptr,    kernel<1>, kernel<2>, kernel<3>,  kernel<4>,  kernel<5>, kernel<6>,
                                             kernel<7>, kernel<8>, kernel<9>, kernel<10>, kernel<11>, kernel<12>};

struct Product {
  const PackedMatrix& weights;
  const bf16* x;
  int64_t x_stride;
  bf16* y;
  int64_t y_stride;
  Epilogue epilogue;

  int panels() const { return (weights.outputs + PANEL - 1) / PANEL; }
  int depth() const { return weights.inputs / 2; }

  void compute(int panel, int64_t first_row, int count) const {
    alignas(64) float sums[BLOCK_ROWS * PANEL];
    const int groups = (count + KERNEL_ROWS - 1) / KERNEL_ROWS, least = count / groups, extra = count % groups;
    const uint32_t* b = weights.words + (int64_t)panel * depth() * PANEL;
    const uint32_t* a = (const uint32_t*)(x + first_row * x_stride);
    const int stride = PANEL * sizeof(uint32_t) / groups;  // each group of rows asks for its share of the next weights
    for (int k = 0; k < depth(); k += DEPTH) {
      const int n = std::min(DEPTH, depth() - k);
      for (int g = 0, row = 0; g < groups; g++) {
        const int height = least + (g < extra);
        const char* ahead = (const char*)(b + (int64_t)(k + n) * PANEL) + (int64_t)g * n * stride;
        KERNELS[height](a + row * x_stride / 2 + k, x_stride / 2, b + (int64_t)k * PANEL, sums + row * PANEL, n, k == 0,
                        ahead, stride);
        row += height;
      }
    }
    for (int row = 0; row < count; row++) finish(sums + row * PANEL, panel, y + (first_row + row) * y_stride);
  }

  void finish(const float* sums, int panel, bf16* to) const {
    vf low = load(sums), high = load(sums + W);
    const int column = panel * PANEL, left = weights.outputs - column;
    if (weights.bias) {
      low += load_elements(weights.bias + column, left);
      if (left > W) high += load_elements(weights.bias + column + W, left - W);
    }
    if (epilogue == GATED) {
      const vf gate = rounded<bf16>(low), minus = vf{} - gate;
      const vf e = exp2_fast((minus > splat(80.f) ? splat(80.f) : minus) * 1.44269504088896341f);
      store_elements(to + panel * W, rounded<bf16>(gate / (1.f + e)) * rounded<bf16>(high));
      return;
    }
    store_elements(to + column, low, left);
    if (left > W) store_elements(to + column + W, high, left - W);
  }
};

}  // namespace

void linear(const PackedMatrix& weights, const bf16* x, int64_t x_stride, bf16* y, int64_t y_stride, int64_t rows,
            Epilogue epilogue, int num_threads) {
  for (int64_t done = 0; done < rows; done += SLICE_ROWS) {
    const int64_t count = std::min<int64_t>(SLICE_ROWS, rows - done), blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const Product product{weights, x + done * x_stride, x_stride, y + done * y_stride, y_stride, epilogue};
    const int64_t work = std::max<int64_t>(count, 4) * weights.inputs * weights.outputs;
    const int threads = std::clamp<int64_t>(work / THREAD_WORK, 1, num_threads);
    // Each thread reads one stretch of the weights: the hardware's prefetchers follow it.
#pragma omp parallel for schedule(static) num_threads(threads) if (threads > 1)
    for (int64_t task = 0; task < product.panels() * blocks; task++) {
      const int64_t first = task % blocks * BLOCK_ROWS;
      product.compute(task / blocks, first, std::min<int64_t>(BLOCK_ROWS, count - first));
    }
  }
}

}  // namespace baton

extern "C" int baton_has_packed_linear() { return 1; }

#else

namespace baton {
void linear(const PackedMatrix&, const bf16*, int64_t, bf16*, int64_t, int64_t, Epilogue, int) {}
}  // namespace baton

extern "C" int baton_has_packed_linear() { return 0; }

#endif

extern "C" void baton_linear(const baton::PackedMatrix* weights, const void* x, int64_t x_stride, void* y, int64_t y_stride,
                             int64_t rows, int32_t epilogue, int32_t num_threads) {
  baton::linear(*weights, (const baton::bf16*)x, x_stride, (baton::bf16*)y, y_stride, rows, (baton::Epilogue)epilogue,
                num_threads);
}
