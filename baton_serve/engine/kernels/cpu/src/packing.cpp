// Pack weights into the panels that products read (linear.h), once, when a model is loaded: one pass over memory that is
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

}  // namespace

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
