// Copy and XXH3 (64 bits, seed 0, default secret) of a range in one pass, and the hash alone.
// Specification: https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md, inputs of more than 240 bytes.
// Each stripe is loaded once: what is hashed is what is stored. Nothing here allocates or fails.

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr size_t STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES, AHEAD = 2048;
constexpr uint64_t P32_1 = 0x9E3779B1, P32_2 = 0x85EBCA77, P32_3 = 0xC2B2AE3D;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87, P64_2 = 0xC2B2AE3D27D4EB4F, P64_3 = 0x165667B19E3779F9,
                   P64_4 = 0x85EBCA77C2B2AE63, P64_5 = 0x27D4EB2F165667C5;

alignas(64) constexpr uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

uint64_t word(const uint8_t* at) {
    uint64_t value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

// Eight sums of 64 bits, and a stripe of eight words, for the widest registers that the compiler was told of.
#if defined(__AVX512F__)

struct Stripe {
    __m512i words;
    explicit Stripe(const uint8_t* at) : words(_mm512_loadu_si512(at)) {}
    void store(uint8_t* at) const { _mm512_storeu_si512(at, words); }
    void stream(uint8_t* at) const { _mm512_stream_si512(reinterpret_cast<__m512i*>(at), words); }
};

struct Sums {
    __m512i sums;
    explicit Sums(const uint64_t* from) : sums(_mm512_loadu_si512(from)) {}
    void add(const Stripe& stripe, const uint8_t* secret) {
        const __m512i key = _mm512_xor_si512(stripe.words, _mm512_loadu_si512(secret));
        const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
        const __m512i swapped = _mm512_shuffle_epi32(stripe.words, _MM_PERM_ENUM(0x4E));
        sums = _mm512_add_epi64(sums, _mm512_add_epi64(product, swapped));
    }
    void scramble(const uint8_t* secret) {
        const __m512i mixed = _mm512_xor_si512(sums, _mm512_srli_epi64(sums, 47));
        const __m512i key = _mm512_xor_si512(mixed, _mm512_loadu_si512(secret)), prime = _mm512_set1_epi64(P32_1);
        const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(key, 32), prime);
        sums = _mm512_add_epi64(_mm512_mul_epu32(key, prime), _mm512_slli_epi64(high, 32));
    }
    void get(uint64_t* into) const { _mm512_storeu_si512(into, sums); }
};

#elif defined(__AVX2__)

struct Stripe {
    __m256i words[2];
    explicit Stripe(const uint8_t* at) {
        for (int i = 0; i < 2; ++i) words[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at) + i);
    }
    void store(uint8_t* at) const {
        for (int i = 0; i < 2; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(at) + i, words[i]);
    }
    void stream(uint8_t* at) const {
        for (int i = 0; i < 2; ++i) _mm256_stream_si256(reinterpret_cast<__m256i*>(at) + i, words[i]);
    }
};

struct Sums {
    __m256i sums[2];
    explicit Sums(const uint64_t* from) {
        for (int i = 0; i < 2; ++i) sums[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from) + i);
    }
    void add(const Stripe& stripe, const uint8_t* secret) {
        for (int i = 0; i < 2; ++i) {
            const __m256i mask = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + i);
            const __m256i key = _mm256_xor_si256(stripe.words[i], mask);
            const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
            const __m256i swapped = _mm256_shuffle_epi32(stripe.words[i], 0x4E);
            sums[i] = _mm256_add_epi64(sums[i], _mm256_add_epi64(product, swapped));
        }
    }
    void scramble(const uint8_t* secret) {
        for (int i = 0; i < 2; ++i) {
            const __m256i mask = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(secret) + i);
            const __m256i mixed = _mm256_xor_si256(sums[i], _mm256_srli_epi64(sums[i], 47));
            const __m256i key = _mm256_xor_si256(mixed, mask), prime = _mm256_set1_epi64x(P32_1);
            const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(key, 32), prime);
            sums[i] = _mm256_add_epi64(_mm256_mul_epu32(key, prime), _mm256_slli_epi64(high, 32));
        }
    }
    void get(uint64_t* into) const {
        for (int i = 0; i < 2; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(into) + i, sums[i]);
    }
};

#else

struct Stripe {
    uint64_t words[8];
    explicit Stripe(const uint8_t* at) { std::memcpy(words, at, STRIPE); }
    void store(uint8_t* at) const { std::memcpy(at, words, STRIPE); }
    void stream(uint8_t* at) const {
#if defined(__SSE2__)
        for (int i = 0; i < 8; ++i) _mm_stream_si64(reinterpret_cast<long long*>(at) + i, static_cast<long long>(words[i]));
#else
        store(at);
#endif
    }
};

struct Sums {
    uint64_t sums[8];
    explicit Sums(const uint64_t* from) { std::memcpy(sums, from, sizeof sums); }
    void add(const Stripe& stripe, const uint8_t* secret) {
        for (int i = 0; i < 8; ++i) {
            const uint64_t key = stripe.words[i] ^ word(secret + 8 * i);
            sums[i ^ 1] += stripe.words[i];
            sums[i] += (key & 0xFFFFFFFF) * (key >> 32);
        }
    }
    void scramble(const uint8_t* secret) {
        for (int i = 0; i < 8; ++i) sums[i] = (sums[i] ^ (sums[i] >> 47) ^ word(secret + 8 * i)) * P32_1;
    }
    void get(uint64_t* into) const { std::memcpy(into, sums, sizeof sums); }
};

#endif

struct HashOnly {
    void put(const Stripe&, size_t) const {}
};

struct Into {
    uint8_t* target;
    void put(const Stripe& stripe, size_t offset) const { stripe.store(target + offset); }
};

struct PastTheCache {
    uint8_t* target;
    void put(const Stripe& stripe, size_t offset) const { stripe.stream(target + offset); }
};

uint64_t folded(uint64_t left, uint64_t right) {
    const unsigned __int128 product = static_cast<unsigned __int128>(left) * right;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t merged(const Sums& sums, uint64_t size) {
    uint64_t all[8], result = size * P64_1;
    sums.get(all);
    for (int i = 0; i < 4; ++i)
        result += folded(all[2 * i] ^ word(SECRET + 11 + 16 * i), all[2 * i + 1] ^ word(SECRET + 19 + 16 * i));
    result = (result ^ (result >> 37)) * 0x165667919E3779F9;
    return result ^ (result >> 32);
}

// `size` is a multiple of a stripe and more than 240.
template <class Sink>
uint64_t pass(const uint8_t* source, size_t size, const Sink& sink) {
    static const uint64_t START[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    Sums sums(START);
    const size_t full = (size - 1) / BLOCK * BLOCK;
    size_t offset = 0;
    for (; offset < full; offset += BLOCK) {
        for (size_t i = 0; i < STRIPES; ++i) {
            const size_t at = offset + i * STRIPE;
            __builtin_prefetch(source + at + AHEAD);
            const Stripe stripe(source + at);
            sink.put(stripe, at);
            sums.add(stripe, SECRET + 8 * i);
        }
        sums.scramble(SECRET + sizeof SECRET - STRIPE);
    }
    for (size_t i = 0; offset < size - STRIPE; ++i, offset += STRIPE) {
        const Stripe stripe(source + offset);
        sink.put(stripe, offset);
        sums.add(stripe, SECRET + 8 * i);
    }
    const Stripe last(source + offset);
    sink.put(last, offset);
    sums.add(last, SECRET + sizeof SECRET - STRIPE - 7);
    return merged(sums, size);
}

}  // namespace

extern "C" void baton_hash(uint64_t* sums, const uint64_t* sources, size_t count, size_t size) {
    for (size_t i = 0; i < count; ++i) sums[i] = pass(reinterpret_cast<const uint8_t*>(sources[i]), size, HashOnly{});
}

extern "C" void baton_copy_past_the_cache(const uint64_t* targets, const uint64_t* sources, size_t count, size_t size) {
    for (size_t i = 0; i < count; ++i) {
        uint8_t* const target = reinterpret_cast<uint8_t*>(targets[i]);
        const uint8_t* const source = reinterpret_cast<const uint8_t*>(sources[i]);
        if (targets[i] % STRIPE != 0) {
            std::memcpy(target, source, size);
            continue;
        }
        for (size_t offset = 0; offset < size; offset += STRIPE) {
            __builtin_prefetch(source + offset + AHEAD);
            Stripe(source + offset).stream(target + offset);
        }
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

extern "C" void baton_copy_and_hash(uint64_t* sums, const uint64_t* targets, const uint64_t* sources, size_t count,
                                    size_t size, int past_the_cache) {
    for (size_t i = 0; i < count; ++i) {
        uint8_t* const target = reinterpret_cast<uint8_t*>(targets[i]);
        const uint8_t* const source = reinterpret_cast<const uint8_t*>(sources[i]);
        if (past_the_cache && targets[i] % STRIPE == 0)
            sums[i] = pass(source, size, PastTheCache{target});
        else
            sums[i] = pass(source, size, Into{target});
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
}
