// Decodes quantized weights, in the layouts of linear.h, to bf16 in registers.
#pragma once

#include "vector.h"

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)

namespace baton {

constexpr int CODES_AHEAD = 4096;  // bytes

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
  __m512i values;  // 16 values, twice: the fifth bit of an index belongs to another code and must not matter

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

}  // namespace baton

#endif
