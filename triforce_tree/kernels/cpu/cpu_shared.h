/* fp32 vectors, the online softmax and prefetching for all instruction sets of cpu_attention.c.
 *
 * The elements of a vector (AVX-512 or AVX2) are different queries. The compiler provides +, - and * of vectors.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t element; /* element of keys, values, queries and outputs: fp16 if FP16 is defined, else bf16 */

enum { LINE = 64, MAX_DIM = 512 }; /* bytes of a cache line; most elements of a key or value */
static const float NO_MAX = -1e30f; /* initial maximum, finite so that differences are finite */
/* Unnormalised probabilities may reach 2^8 before the maximum is updated and outputs are rescaled, which is rare. */
static const float SLACK = 8.0f;

#ifdef __AVX512F__

enum { LANES = 16 };
typedef __m512 vec;
static inline vec load(const float *at) { return _mm512_loadu_ps(at); }
static inline void store(float *at, vec x) { _mm512_storeu_ps(at, x); }
static inline vec broadcast(float x) { return _mm512_set1_ps(x); }
static inline vec fmadd(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec fmsub(vec a, vec b, vec c) { return _mm512_fmsub_ps(a, b, c); }
static inline vec max_of(vec a, vec b) { return _mm512_max_ps(a, b); }
/* Returns x * 2^n, with n the integer in the low bits of y. */
static inline vec scaled_by_exp2(vec x, vec y) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(y), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), exponent));
}
/* Returns whether any element is above max, or NaN. */
static inline int any_above(vec x, float max) { return _mm512_cmp_ps_mask(x, broadcast(max), _CMP_NLE_UQ) != 0; }
/* Returns ``if_equal`` where a equals b, else ``x``. */
static inline vec unless_equal(vec a, vec b, vec if_equal, vec x) {
    return _mm512_mask_mov_ps(if_equal, _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ), x);
}
static inline vec widened(const element *at) {
    const __m256i elements = _mm256_loadu_si256((const __m256i *)at);
#ifdef FP16
    return _mm512_cvtph_ps(elements);
#else
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(elements), 16));
#endif
}

#else

enum { LANES = 8 };
typedef __m256 vec;
static inline vec load(const float *at) { return _mm256_loadu_ps(at); }
static inline void store(float *at, vec x) { _mm256_storeu_ps(at, x); }
static inline vec broadcast(float x) { return _mm256_set1_ps(x); }
static inline vec fmadd(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec fmsub(vec a, vec b, vec c) { return _mm256_fmsub_ps(a, b, c); }
static inline vec max_of(vec a, vec b) { return _mm256_max_ps(a, b); }
/* Returns x * 2^n, with n the integer in the low bits of y. */
static inline vec scaled_by_exp2(vec x, vec y) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(y), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
}
/* Returns whether any element is above max, or NaN. */
static inline int any_above(vec x, float max) {
    return _mm256_movemask_ps(_mm256_cmp_ps(x, broadcast(max), _CMP_NLE_UQ));
}
/* Returns ``if_equal`` where a equals b, else ``x``. */
static inline vec unless_equal(vec a, vec b, vec if_equal, vec x) {
    return _mm256_blendv_ps(if_equal, x, _mm256_cmp_ps(a, b, _CMP_NEQ_UQ));
}
static inline vec widened(const element *at) {
    const __m128i elements = _mm_loadu_si128((const __m128i *)at);
#ifdef FP16
    return _mm256_cvtph_ps(elements);
#else
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(elements), 16));
#endif
}

#endif

static inline element round_to_element(float x) {
#ifdef FP16
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}

static inline int64_t min_of(int64_t a, int64_t b) { return a < b ? a : b; }

/* Returns 2^x for x <= 8 with a relative error of 3e-6, by exponent bits for the integer part and a polynomial. */
static inline vec exp2_of(vec x) {
    const vec shift = broadcast(0x1.8p23f);
    x = max_of(x, broadcast(-126.0f));
    const vec whole = x + shift;
    const vec part = x - (whole - shift);
    vec y = broadcast(0x1.3a02ccp-7f);
    y = fmadd(y, part, broadcast(0x1.c9fc46p-5f));
    y = fmadd(y, part, broadcast(0x1.ec0378p-3f));
    y = fmadd(y, part, broadcast(0x1.62e12cp-1f));
    y = fmadd(y, part, broadcast(1.0f));
    return scaled_by_exp2(y, whole);
}

/* Softmax state of some tiles of queries: outputs in the block header's layout, maxima and sums per query. */
typedef struct {
    float *out, *max, *sum;
} State;

/* The maxima of a vector of queries over a block of rows. */
typedef struct {
    vec old, max, factor, base; /* maxima before and after, scale, and scale * max */
    int changed;
} Max;

/* Returns the maxima over ``rows`` vectors of scores, which are ``row_stride`` floats apart. */
static inline Max block_max(const float *scores, int64_t row_stride, int rows, const float *max, float scale) {
    const vec old = load(max), factor = broadcast(scale);
    vec highest[4] = {old, old, old, old};
    int row = 0;
    for (; row + 4 <= rows; row += 4)
        for (int i = 0; i < 4; i++)
            highest[i] = max_of(highest[i], load(scores + (row + i) * row_stride));
    for (; row < rows; row++)
        highest[0] = max_of(highest[0], load(scores + row * row_stride));
    const vec high = max_of(max_of(highest[0], highest[1]), max_of(highest[2], highest[3]));
    const int changed = any_above((high - old) * factor, SLACK);
    const vec now = changed ? high : old;
    return (Max){.old = old, .max = now, .factor = factor, .base = now * factor, .changed = changed};
}

static inline vec prob_of(const float *score, const Max *by) {
    return exp2_of(fmsub(load(score), by->factor, by->base));
}

/* Updates maxima and sums after a block; returns the factor on earlier outputs, which is 1 unless ``changed``. */
static inline vec update_max_and_sum(const Max *by, vec total, float *max, float *sum) {
    if (!by->changed) {
        store(sum, load(sum) + total);
        return broadcast(1);
    }
    /* The factor is exactly 1 for an unchanged maximum, because rounding errors would accumulate over blocks. */
    const vec rescale =
        unless_equal(by->max, by->old, broadcast(1), exp2_of(fmsub(by->old, by->factor, by->base)));
    store(sum, fmadd(load(sum), rescale, total));
    store(max, by->max);
    return rescale;
}

/* The part of the next block that has not been prefetched yet. */
typedef struct {
    const char *keys, *values;
    int64_t stride;
    int left, at;           /* rows left; byte offset in a row */
    int width, value_width; /* bytes of one head's key, and of its value up to this width */
    int share, pace, owed;  /* cache lines: per chunk of queries, per call of prefetch, and due now */
} Prefetcher;

static inline void prefetch(Prefetcher *prefetcher) {
    for (prefetcher->owed += prefetcher->pace; prefetcher->owed > 0 && prefetcher->left; prefetcher->owed--) {
        _mm_prefetch(prefetcher->keys + prefetcher->at, _MM_HINT_T1);
        if (prefetcher->at < prefetcher->value_width) {
            _mm_prefetch(prefetcher->values + prefetcher->at, _MM_HINT_T1);
            prefetcher->owed--;
        }
        prefetcher->at += LINE;
        if (prefetcher->at >= prefetcher->width) {
            prefetcher->at = 0;
            prefetcher->keys += prefetcher->stride;
            prefetcher->values += prefetcher->stride;
            prefetcher->left--;
        }
    }
}
