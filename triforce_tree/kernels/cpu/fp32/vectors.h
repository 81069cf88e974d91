/* Loads of weights in 16 and 8 bits, sums over a vector, and exponentials for the kernels of fp32.c. */
#include "../cpu_shared.h"

#include <math.h>
#include <stddef.h>

#define INLINE static inline __attribute__((always_inline))

/* How the rows of a matrix are stored, in the order of ``linear.py``: elements, or blocks of a GGUF file (blocks.h). All
 * are converted to fp32 exactly. */
enum { FLOAT32, BFLOAT16, HALF, INT8, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K };

#ifdef __AVX512F__
enum { MOST_LEFT = 6 }; /* rows of x that are multiplied together: 24 sums, 4 rows of weights and one of x in registers */
#else
enum { MOST_LEFT = 2 };
#endif
enum { RIGHT = 4 }; /* rows of weights that are multiplied together */

INLINE int element_bytes(int kind) { return kind == FLOAT32 ? 4 : kind == INT8 ? 1 : 2; }

INLINE vec load_as(const char *at, int kind) {
    if (kind == FLOAT32)
        return load((const float *)at);
#ifdef __AVX512F__
    if (kind == INT8)
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at)));
    const __m256i x = _mm256_loadu_si256((const __m256i *)at);
    return kind == HALF ? _mm512_cvtph_ps(x) : _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
#else
    if (kind == INT8)
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at)));
    const __m128i x = _mm_loadu_si128((const __m128i *)at);
    return kind == HALF ? _mm256_cvtph_ps(x) : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
#endif
}

/* Returns how many of ``rows`` are processed together, at most ``most``, so that parts are about equal. */
static inline int64_t equal_parts(int64_t rows, int64_t most) {
    const int64_t parts = (rows + most - 1) / most;
    return (rows + parts - 1) / parts;
}

/* Loads the first ``count`` elements, followed by zeros. */
static inline vec load_part(const char *at, int kind, int count) {
    char padded[LANES * 4] = {0};
    memcpy(padded, at, count * element_bytes(kind));
    return load_as(padded, kind);
}

static inline float sum_of(vec x) {
    float lanes[LANES], sum = 0;
    store(lanes, x);
    for (int i = 0; i < LANES; i++)
        sum += lanes[i];
    return sum;
}

static inline float max_in(vec x) {
    float lanes[LANES], most = -INFINITY;
    store(lanes, x);
    for (int i = 0; i < LANES; i++)
        most = fmaxf(most, lanes[i]);
    return most;
}

/* Returns the sum over the elements of each of four vectors. */
INLINE __m128 sums_of(vec a, vec b, vec c, vec d) {
#ifdef __AVX512F__
    const vec ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
    const vec cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
    const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
    const vec each = _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
    const __m256 half = _mm512_castps512_ps256(each) + _mm512_extractf32x8_ps(each, 1);
#else
    const vec ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
    const vec cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
    const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
    const __m256 half = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y)) + _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
#endif
    return _mm256_castps256_ps128(half) + _mm256_extractf128_ps(half, 1);
}

/* Returns e^x to within two units of the last place for x clamped to -87 ... 88; NaN gives NaN. */
static inline vec exp_of(vec x) {
    const vec shift = broadcast(0x1.8p23f);
    x = max_of(broadcast(-87.0f), x);
    x = broadcast(0) - max_of(broadcast(-88.0f), broadcast(0) - x);
    const vec whole = fmadd(x, broadcast(0x1.715476p0f), shift), count = whole - shift;
    vec part = fmadd(count, broadcast(-0x1.62e4p-1f), x);
    part = fmadd(count, broadcast(-0x1.7f7d1cp-20f), part);
    vec y = broadcast(1.0f / 5040);
    y = fmadd(y, part, broadcast(1.0f / 720));
    y = fmadd(y, part, broadcast(1.0f / 120));
    y = fmadd(y, part, broadcast(1.0f / 24));
    y = fmadd(y, part, broadcast(1.0f / 6));
    y = fmadd(y, part, broadcast(0.5f));
    y = fmadd(y, part, broadcast(1.0f));
    y = fmadd(y, part, broadcast(1.0f));
    return scaled_by_exp2(y, whole);
}
