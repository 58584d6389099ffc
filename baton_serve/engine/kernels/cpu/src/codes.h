// K and V in one byte for each element: a code times a scale of its token and head, as in
// baton_serve/engine/kernels/quantized_kv.py. The scales of a head's tokens follow its codes in a block, in bf16. bf16 and float16
// represent every code exactly.
#pragma once

#include "rows.h"

namespace baton {

enum KvCode : int32_t { NO_CODE = 0, E4M3 = 1, E5M2 = 2, INT8 = 3 };

// The value that the largest element of a row is scaled to.
inline float largest_code(int kind) { return kind == INT8 ? 127.f : 448.f; }

// The value of every code.
class CodeBook {
 public:
  explicit CodeBook(int kind) : kind(kind) {
    for (int code = 0; code < 256; code++) values[code] = value_of(code);
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    alignas(64) uint8_t bytes[2][128];
    for (int code = 0; code < 128; code++) {
      const uint16_t bits = round_to_bf16(values[code]);
      bytes[0][code] = (uint8_t)bits, bytes[1][code] = (uint8_t)(bits >> 8);
    }
    for (int i = 0; i < 2; i++)
      low[i] = _mm512_load_si512(bytes[0] + 64 * i), high[i] = _mm512_load_si512(bytes[1] + 64 * i);
#endif
  }

  template <class T> void expand(const uint8_t* codes, int count, T* to) const {
    for (int i = 0; i < count; i += W) {
      vf some{};
      const int n = std::min(W, count - i);
      for (int j = 0; j < n; j++) some[j] = values[codes[i + j]];
      store_elements(to + i, some, n);
    }
  }

#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  void expand(const uint8_t* codes, int count, bf16* to) const {
    alignas(64) static constexpr uint64_t ORDER[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // interleaving within lanes undoes this order
    const __m512i order = _mm512_load_si512(ORDER), sign = _mm512_set1_epi8((char)0x80);
    for (int i = 0; i < count; i += 64) {
      const int n = std::min(64, count - i);
      __m512i code = _mm512_maskz_loadu_epi8(n == 64 ? ~0ull : (1ull << n) - 1, codes + i);
      if (kind == INT8) code = _mm512_ternarylogic_epi32(_mm512_abs_epi8(code), code, sign, 0xf8);
      code = _mm512_permutexvar_epi64(order, code);
      const __m512i l = _mm512_permutex2var_epi8(low[0], code, low[1]);
      const __m512i magnitude = _mm512_permutex2var_epi8(high[0], code, high[1]);
      const __m512i h = _mm512_ternarylogic_epi32(magnitude, code, sign, 0xf8);  // magnitude | (code & sign)
      const __mmask32 first = n >= 32 ? ~0u : (1u << n) - 1;
      _mm512_mask_storeu_epi16(to + i, first, _mm512_unpacklo_epi8(l, h));
      if (n > 32) _mm512_mask_storeu_epi16(to + i + 32, n == 64 ? ~0u : (1u << (n - 32)) - 1, _mm512_unpackhi_epi8(l, h));
    }
  }
#endif

 private:
  float value_of(int code) const {
    if (kind == INT8) return (float)(int8_t)code;
    const int fraction_bits = kind == E4M3 ? 3 : 2, bias = kind == E4M3 ? 7 : 15;
    const int exponent = (code & 127) >> fraction_bits, fraction = code & ((1 << fraction_bits) - 1);
    const bool is_special = kind == E4M3 ? (code & 127) == 127 : exponent == 31;
    float value = exponent == 0 ? std::ldexp((float)fraction, 1 - bias - fraction_bits)
                                : std::ldexp((float)(fraction + (1 << fraction_bits)), exponent - bias - fraction_bits);
    if (is_special) value = kind == E5M2 && fraction == 0 ? -NEG_INF : std::numeric_limits<float>::quiet_NaN();
    return code & 128 ? -value : value;
  }

  const int kind;
  float values[256];
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
  __m512i low[2], high[2];  // bytes of 128 magnitudes
#endif
};

// One of each kind, made at the first use.
inline const CodeBook& code_book(int kind) {
  static const CodeBook books[] = {CodeBook(E4M3), CodeBook(E5M2), CodeBook(INT8)};
  return books[kind - E4M3];
}

// Rounded to nearest, ties to even; |x| <= largest_code(kind).
inline vu encoded(vf x, int kind) {
  const vu bits = (vu)x, sign = bits >> 24 & 0x80;
  if (kind == INT8) return (vu)__builtin_convertvector(round(x), vi) & 0xff;
  const int fraction = kind == E4M3 ? 3 : 2, shift = 23 - fraction, bias = kind == E4M3 ? 7 : 15;
  const vu magnitude = bits & 0x7fffffff;
  const vu normal = (magnitude + ((magnitude >> shift) & 1) + ((1u << (shift - 1)) - 1) - ((127u - bias) << 23)) >> shift;
  // Below the smallest normal number, add a number whose last place is worth the smallest code: this rounds to whole codes.
  const float unit = std::ldexp(1.f, 23 + 1 - bias - fraction);
  const vu small = (vu)((vf)magnitude + unit) - (vu)splat(unit);
  const vu is_small = (vu)((vf)magnitude < splat(std::ldexp(1.f, 1 - bias)));
  return ((is_small & small) | (~is_small & normal)) | sign;
}

// `size` elements as codes; returns their scale.
template <class T> bf16 encode_row(const T* row, int size, int kind, uint8_t* codes) {
  vf top{};
  for (int i = 0; i < size; i += W) {
    const vf x = load_elements(row + i, size - i);
    top = max(top, (vf)((vu)x & 0x7fffffff));
  }
  const float largest = largest_code(kind);
  const bf16 scale{round_to_bf16(maximum(top) * (float)(1.0 / largest))};
  uint32_t bits = (uint32_t)scale.bits << 16;
  float divisor;
  std::memcpy(&divisor, &bits, sizeof divisor);
  const float inverse = divisor > 0 ? 1.f / divisor : 0.f;
  for (int i = 0; i < size; i += W) {
    vf x = load_elements(row + i, size - i) * inverse;
    x = x > splat(largest) ? splat(largest) : x < splat(-largest) ? splat(-largest) : x;
    const vu code = encoded(x, kind);
    for (int j = 0; j < std::min(W, size - i); j++) codes[i + j] = (uint8_t)code[j];
  }
  return scale;
}

}  // namespace baton
