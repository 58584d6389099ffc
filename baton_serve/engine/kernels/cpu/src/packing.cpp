// Pack weights into the panels that products read (linear.h), once, when a model is loaded. This is one pass over memory that is
// often a mapped file, into memory that was never written.
#include "linear.h"

using namespace baton;

namespace {

constexpr int PANEL = 32;
static_assert(PANEL % W == 0);

typedef uint32_t pair_word __attribute__((aligned(2), may_alias));  // a file's weights begin at any even address

// Words [first, end) of `count` rows, one by one; outputs beyond the rows are zero.
void pack_words(const pair_word* const* rows, int count, int64_t first, int64_t end, uint32_t* words) {
  for (int64_t pair = first; pair < end; pair++)
    for (int output = 0; output < PANEL; output++) words[pair * PANEL + output] = output < count ? rows[output][pair] : 0;
}

// Pack the words of a panel's rows that fill squares of W x W. Returns their number.
int64_t pack_squares(const pair_word* const* rows, int64_t pairs, uint32_t* words) {
  int64_t k = 0;
  for (; k + W <= pairs; k += W)
    for (int output = 0; output < PANEL; output += W) {
      vf square[W];
      for (int i = 0; i < W; i++) square[i] = load_as<vf>(rows[output + i] + k);
      transpose(square);
      for (int i = 0; i < W; i++) store(words + (k + i) * PANEL + output, square[i]);
    }
  return k;
}

constexpr int STRETCH = 128;  // inputs whose codes lie together in a row (baton_serve/engine/kernels/quantized_weights.py)
constexpr int LOW_WORDS = 16, HIGH_WORDS = 8;
constexpr int64_t THREAD_CODES = 1 << 21;  // codes worth a thread: starting one on a busy host takes milliseconds

// One stretch of a row as a byte for each code.
void unpack_stretch(const uint32_t* words, int bits, uint8_t* codes) {
  for (int i = 0; i < STRETCH / LOW_WORDS; i++)
    for (int j = 0; j < LOW_WORDS; j++) codes[LOW_WORDS * i + j] = words[j] >> 4 * i & 15;
  if (bits == 4) return;
  for (int field = 0; field < 16; field++)
    for (int j = 0; j < HIGH_WORDS; j++)
      codes[LOW_WORDS * (field % 8) + HIGH_WORDS * (field / 8) + j] |= (words[LOW_WORDS + j] >> 2 * field & 3) << 4;
}

// The codes [first, first + count) of a row, in the form that products read.
void read_codes(const uint8_t* row, int bits, const uint8_t* meaning, int64_t first, int64_t count, uint8_t* codes) {
  if (bits == 8)
    std::memcpy(codes, row + first, count);
  else
    unpack_stretch((const uint32_t*)row + first / STRETCH * (bits == 4 ? LOW_WORDS : LOW_WORDS + HIGH_WORDS), bits, codes);
  if (meaning)
    for (int64_t i = 0; i < count; i++) codes[i] = meaning[codes[i]];
}

typedef uint8_t Codes[PANEL][STRETCH];

// `count` inputs, a multiple of four, of a panel in each layout of linear.h.
void pack_codes4(const Codes& codes, int64_t count, uint32_t* to) {
  for (int output = 0; output < PANEL / 2; output++)
    for (int64_t k = 0; k < count / 4; k++) {
      uint32_t low, high;
      std::memcpy(&low, codes[output] + 4 * k, sizeof low);
      std::memcpy(&high, codes[output + PANEL / 2] + 4 * k, sizeof high);
      const uint32_t both = low | high << 4;  // bytes of inputs 0 to 3; the words of 0 and 1 have pairs 0 and 2, 1 and 3
      to[k * (PANEL / 2) + output] = (both & 0xff0000ff) | (both & 0xff00) << 8 | (both >> 8 & 0xff00);
    }
}

void pack_codes8(const Codes& codes, int64_t count, uint16_t* to) {
  for (int output = 0; output < PANEL; output++) {
    const int place = output % 16 / 4 * 8 + output / 16 * 4 + output % 4;
    for (int64_t k = 0; k < count / 2; k++) std::memcpy(to + k * PANEL + place, codes[output] + 2 * k, sizeof *to);
  }
}

}  // namespace

// rows: [num_rows] of codes of `bits` bits in the layout of quantized.py; meaning: null, or the code that products read for
// each code; words: codes of four bits if `bits` is 4, else of eight, outputs beyond the rows are zero. `inputs` is a
// multiple of four.
extern "C" void baton_pack_codes(const uint8_t* const* rows, int64_t num_rows, int64_t inputs, int32_t bits,
                                 const uint8_t* meaning, uint8_t* words, int32_t num_threads) {
  const int64_t panels = (num_rows + PANEL - 1) / PANEL, kept_bits = bits == 4 ? 4 : 8;
  const int threads = (int)std::clamp<int64_t>(num_rows * inputs / THREAD_CODES, 1, num_threads);
#pragma omp parallel for schedule(dynamic) num_threads(threads) if (threads > 1)
  for (int64_t panel = 0; panel < panels; panel++) {
    alignas(64) Codes codes{};
    const int64_t count = std::min<int64_t>(num_rows - panel * PANEL, PANEL);
    for (int64_t first = 0; first < inputs; first += STRETCH) {
      const int64_t some = std::min<int64_t>(inputs - first, STRETCH);
      for (int64_t output = 0; output < count; output++)
        read_codes(rows[panel * PANEL + output], bits, meaning, first, some, codes[output]);
      uint8_t* to = words + (panel * inputs + first) * PANEL * kept_bits / 8;
      if (bits == 4)
        pack_codes4(codes, some, (uint32_t*)to);
      else
        pack_codes8(codes, some, (uint16_t*)to);
    }
  }
}

// rows: [num_rows] of `pairs` words each; words: [panel][pair][output], outputs beyond the rows are zero.
extern "C" void baton_pack(const pair_word* const* rows, int64_t num_rows, int64_t pairs, uint32_t* words,
                           int32_t num_threads) {
  const int64_t panels = (num_rows + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (panels > 1)
  for (int64_t panel = 0; panel < panels; panel++) {
    const pair_word* const* from = rows + panel * PANEL;
    uint32_t* to = words + panel * PANEL * pairs;
    const int count = (int)std::min<int64_t>(num_rows - panel * PANEL, PANEL);
    pack_words(from, count, count < PANEL ? 0 : pack_squares(from, pairs, to), pairs, to);
  }
}
