/* What every way of cpu_attention.c shares: vectors of fp32, running maxima of a softmax, prefetches.
 *
 * Queries are the lanes of a vector, in AVX-512 or AVX2. The compiler knows +, - and * of vectors.
 */
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t number; /* of keys, values, queries and outputs: bf16, or fp16 where FP16 is defined */

enum { LINE = 64, MOST_DIM = 256 }; /* bytes; dimensions */
static const float LEAST = -1e30f; /* of a maximum of nothing: differences stay finite */
/* Chances may be up to 2^8 before outputs are scaled down to a new maximum: nearly always the first one stays. */
static const float SLACK = 8.0f;

#ifdef __AVX512F__

enum { LANES = 16 };
typedef __m512 vec;
static inline vec load(const float *at) { return _mm512_loadu_ps(at); }
static inline void store(float *at, vec x) { _mm512_storeu_ps(at, x); }
static inline vec all(float x) { return _mm512_set1_ps(x); }
static inline vec times_plus(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
static inline vec times_minus(vec a, vec b, vec c) { return _mm512_fmsub_ps(a, b, c); }
static inline vec higher(vec a, vec b) { return _mm512_max_ps(a, b); }
/* x * 2^(the low bits of y, as a whole number). */
static inline vec shifted(vec x, vec y) {
    const __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(y), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), exponent));
}
/* Whether any lane is above, or no number. */
static inline int any_above(vec x, float most) { return _mm512_cmp_ps_mask(x, all(most), _CMP_NLE_UQ) != 0; }
/* ``x``, but ``same`` where a equals b. */
static inline vec unless_equal(vec a, vec b, vec same, vec x) {
    return _mm512_mask_mov_ps(same, _mm512_cmp_ps_mask(a, b, _CMP_NEQ_UQ), x);
}
static inline vec widened(const number *at) {
    const __m256i numbers = _mm256_loadu_si256((const __m256i *)at);
#ifdef FP16
    return _mm512_cvtph_ps(numbers);
#else
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(numbers), 16));
#endif
}

#else

enum { LANES = 8 };
typedef __m256 vec;
static inline vec load(const float *at) { return _mm256_loadu_ps(at); }
static inline void store(float *at, vec x) { _mm256_storeu_ps(at, x); }
static inline vec all(float x) { return _mm256_set1_ps(x); }
static inline vec times_plus(vec a, vec b, vec c) { return _mm256_fmadd_ps(a, b, c); }
static inline vec times_minus(vec a, vec b, vec c) { return _mm256_fmsub_ps(a, b, c); }
static inline vec higher(vec a, vec b) { return _mm256_max_ps(a, b); }
/* x * 2^(the low bits of y, as a whole number). */
static inline vec shifted(vec x, vec y) {
    const __m256i exponent = _mm256_slli_epi32(_mm256_castps_si256(y), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), exponent));
}
/* Whether any lane is above, or no number. */
static inline int any_above(vec x, float most) { return _mm256_movemask_ps(_mm256_cmp_ps(x, all(most), _CMP_NLE_UQ)); }
/* ``x``, but ``same`` where a equals b. */
static inline vec unless_equal(vec a, vec b, vec same, vec x) {
    return _mm256_blendv_ps(same, x, _mm256_cmp_ps(a, b, _CMP_NEQ_UQ));
}
static inline vec widened(const number *at) {
    const __m128i numbers = _mm_loadu_si128((const __m128i *)at);
#ifdef FP16
    return _mm256_cvtph_ps(numbers);
#else
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(numbers), 16));
#endif
}

#endif

static inline number rounded_to_number(float x) {
#ifdef FP16
    return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT);
#else
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* 2^x for x <= 0 to 3e-6 of it: the whole part goes into the exponent, a polynomial makes the rest. */
static inline vec exp2_of(vec x) {
    const vec shift = all(0x1.8p23f);
    x = higher(x, all(-126.0f));
    const vec whole = x + shift;
    const vec part = x - (whole - shift);
    vec y = all(0x1.3a02ccp-7f);
    y = times_plus(y, part, all(0x1.c9fc46p-5f));
    y = times_plus(y, part, all(0x1.ec0378p-3f));
    y = times_plus(y, part, all(0x1.62e12cp-1f));
    y = times_plus(y, part, all(1.0f));
    return shifted(y, whole);
}

/* Outputs of some tiles of queries in a block's own order, maxima and sums of their lanes. */
typedef struct {
    float *out, *most, *sum;
} State;

/* What a vector of queries goes by in a block of rows. */
typedef struct {
    vec old, most, factor, base; /* maxima before and now, scale, their product */
    int moved;
} Maximum;

/* Of scores in ``rows`` vectors, ``wide`` numbers apart. */
static inline Maximum maximum_of(const float *scores, int64_t wide, int rows, const float *most, float scale) {
    const vec old = load(most), factor = all(scale);
    vec highest[4] = {old, old, old, old};
    int row = 0;
    for (; row + 4 <= rows; row += 4)
        for (int i = 0; i < 4; i++)
            highest[i] = higher(highest[i], load(scores + (row + i) * wide));
    for (; row < rows; row++)
        highest[0] = higher(highest[0], load(scores + row * wide));
    const vec high = higher(higher(highest[0], highest[1]), higher(highest[2], highest[3]));
    const int moved = any_above((high - old) * factor, SLACK);
    const vec now = moved ? high : old;
    return (Maximum){.old = old, .most = now, .factor = factor, .base = now * factor, .moved = moved};
}

static inline vec chance_of(const float *score, const Maximum *by) {
    return exp2_of(times_minus(load(score), by->factor, by->base));
}

/* Take up a block's maximum and total; what outputs shrink by, if it moved. */
static inline vec take_up(const Maximum *by, vec total, float *most, float *sum) {
    if (!by->moved) {
        store(sum, load(sum) + total);
        return all(1);
    }
    /* Exactly 1 where a maximum stays: what rounding leaves of the difference would add up block by block. */
    const vec shrink =
        unless_equal(by->most, by->old, all(1), exp2_of(times_minus(by->old, by->factor, by->base)));
    store(sum, times_plus(load(sum), shrink, total));
    store(most, by->most);
    return shrink;
}

/* What of the next block has not been prefetched yet. */
typedef struct {
    const char *rows;
    int64_t stride;
    int left, at, width; /* rows; bytes of one row of a head, keys and values apart */
    int share, pace, owed; /* lines: in a chunk's phases, at each of many places in them, due by now */
} Ahead;

static inline void prefetch(Ahead *ahead) {
    for (ahead->owed += ahead->pace; ahead->owed > 0 && ahead->left; ahead->owed -= 2) {
        _mm_prefetch(ahead->rows + ahead->at, _MM_HINT_T1);
        _mm_prefetch(ahead->rows + ahead->stride / 2 + ahead->at, _MM_HINT_T1);
        ahead->at += LINE;
        if (ahead->at >= ahead->width) {
            ahead->at = 0;
            ahead->rows += ahead->stride;
            ahead->left--;
        }
    }
}
