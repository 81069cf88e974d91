/* A block of keys and values and a chunk of queries: the inner part of cpu_attention.c.
 *
 * It goes through four phases, each in caches: values are paired for the second product, scores are computed
 * transposed (K Q^T: keys are read where they lie), probabilities are taken with a running maximum, and outputs
 * are added up. Queries are lanes of a vector until the probabilities are transposed into the second product.
 * Meanwhile the next block is prefetched a few lines at a time, so that memory never rests: it is the next head's,
 * which lies beside this one, so that hardware prefetches within the same pages as well.
 */
#include "cpu_tiles.h"

enum {
    CHUNK = 4,   /* tiles of queries that go through the phases together */
    BLOCK = 128, /* rows that do, at most */
    MOST_DIM = 256,
};
static const float LEAST = -1e30f; /* of a maximum of nothing: differences stay finite */
/* Chances may be up to 2^8 before outputs are scaled down to a new maximum: nearly always the first one stays. */
static const float SLACK = 8.0f;

/* Memory of one thread, for one block. */
typedef struct {
    float *scores; /* [BLOCK, tiles * TILE] */
    bf16 *chances; /* tiles [tiles, BLOCK / PAIRED] of [TILE queries, PAIRED rows] */
    bf16 *values;  /* tiles [BLOCK / PAIRED, dim / TILE] of [TILE pairs of rows, PAIRED dimensions] */
    bf16 *rest;    /* [PAIRED, dim], keys of a step that rows do not fill */
    Ahead ahead;
} Scratch;

/* Outputs as tiles [tiles, dim / TILE], maxima and sums [tiles * TILE] of some tiles of queries. */
typedef struct {
    float *out, *most, *sum;
} State;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* 2^x for x <= 0 to 3e-6 of it: the whole part goes into the exponent, a polynomial makes the rest. */
static inline __m512 exp2_of(__m512 x) {
    const __m512 shift = _mm512_set1_ps(0x1.8p23f);
    x = _mm512_max_ps(x, _mm512_set1_ps(-126.0f));
    __m512 whole = _mm512_add_ps(x, shift);
    __m512 part = _mm512_sub_ps(x, _mm512_sub_ps(whole, shift));
    __m512 y = _mm512_set1_ps(0x1.3a02ccp-7f);
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0x1.c9fc46p-5f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0x1.ec0378p-3f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(0x1.62e12cp-1f));
    y = _mm512_fmadd_ps(y, part, _mm512_set1_ps(1.0f));
    __m512i exponent = _mm512_slli_epi32(_mm512_castps_si512(whole), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(y), exponent));
}

/* 16 x 16 words. */
static inline void transpose(const __m512i *in, bf16 *out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 + i] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[8 + i] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[12 + i] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    /* b[4c + i] holds column c of every quarter of rows 4i to 4i + 3. */
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(b[4 * c], b[4 * c + 1], 0x88);
        __m512i low_odd = _mm512_shuffle_i32x4(b[4 * c], b[4 * c + 1], 0xdd);
        __m512i high = _mm512_shuffle_i32x4(b[4 * c + 2], b[4 * c + 3], 0x88);
        __m512i high_odd = _mm512_shuffle_i32x4(b[4 * c + 2], b[4 * c + 3], 0xdd);
        _mm512_store_si512(out + PAIRED * c, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_store_si512(out + PAIRED * (c + 4), _mm512_shuffle_i32x4(low_odd, high_odd, 0x88));
        _mm512_store_si512(out + PAIRED * (c + 8), _mm512_shuffle_i32x4(low, high, 0xdd));
        _mm512_store_si512(out + PAIRED * (c + 12), _mm512_shuffle_i32x4(low_odd, high_odd, 0xdd));
    }
}

/* Numbers of two rows, dimension by dimension. */
static inline void pair(__m512i upper, __m512i lower, bf16 *first, bf16 *second) {
    static const uint16_t ORDER[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i order = _mm512_loadu_si512(ORDER);
    const __m512i further = _mm512_add_epi16(order, _mm512_set1_epi16(TILE));
    _mm512_store_si512(first, _mm512_permutex2var_epi16(upper, order, lower));
    _mm512_store_si512(second, _mm512_permutex2var_epi16(upper, further, lower));
}

static void pair_values(const char *values, int64_t stride, int rows, int dim, bf16 *out) {
    const __m512i none = _mm512_setzero_si512();
    for (int row = 0; row < rows; row += 2) {
        const bf16 *upper = (const bf16 *)(values + row * stride), *lower = (const bf16 *)(values + (row + 1) * stride);
        bf16 *to = out + (row / PAIRED) * (dim / TILE) * ELEMENTS + row % PAIRED / 2 * PAIRED;
        for (int d = 0; d < dim; d += PAIRED, to += 2 * ELEMENTS)
            pair(_mm512_loadu_si512(upper + d), row + 1 < rows ? _mm512_loadu_si512(lower + d) : none, to,
                 to + ELEMENTS);
    }
    /* Their chances are 0, and 0 times what lies here must be 0. */
    for (int row = (rows + 1) / 2 * 2; row % PAIRED; row += 2) {
        bf16 *to = out + (row / PAIRED) * (dim / TILE) * ELEMENTS + row % PAIRED / 2 * PAIRED;
        for (int d = 0; d < dim; d += TILE, to += ELEMENTS)
            _mm512_store_si512(to, none);
    }
}

/* Of PAIRED rows: out [PAIRED, tiles * TILE] = K Q^T. */
static void scores_of(const char *keys, int64_t stride, const bf16 *q, int tiles, int dim, float *out, Ahead *ahead) {
    for (int t = 0; t < tiles; t += 2) {
        const Left left = {.at = keys, .row = stride, .step = LINE, .lower = TILE * stride};
        const Right right = {.at = q + t * ELEMENTS, .step = tiles * ELEMENTS, .beside = ELEMENTS};
        const Result result = {
            .at = out + t * TILE, .row = tiles * TILE, .lower = TILE * tiles * TILE, .beside = TILE};
        multiply(left, right, result, dim / PAIRED, 2, t + 1 < tiles ? 2 : 1, 0, ahead);
    }
}

/* out [tiles, dim / TILE] of tiles += P V. */
static void add_outputs(Scratch *own, int tiles, int steps, int dim, float *out) {
    const int dims = dim / TILE;
    for (int t = 0; t < tiles; t += 2) {
        const Left left = {.at = (const char *)(own->chances + t * steps * ELEMENTS),
                           .row = LINE, .step = TILE * LINE, .lower = steps * TILE * LINE};
        for (int d = 0; d < dims; d += 2) {
            const Right right = {.at = own->values + d * ELEMENTS, .step = dims * ELEMENTS, .beside = ELEMENTS};
            const Result result = {
                .at = out + (t * dims + d) * SQUARE, .row = TILE, .lower = dims * SQUARE, .beside = SQUARE};
            multiply(left, right, result, steps, t + 1 < tiles ? 2 : 1, 2, 1, &own->ahead);
        }
    }
}

/* Two rows of chances, to bf16 and next to each other, query by query. */
static inline __m512i rounded(__m512 upper, __m512 lower) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    __m512i a = _mm512_add_epi32(_mm512_castps_si512(upper), half);
    __m512i b = _mm512_add_epi32(_mm512_castps_si512(lower), half);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b);
}

/* From scores to chances, for one tile of queries; where it must, ``state`` takes a new maximum and shrinks. */
static void chances_of(Scratch *own, int tile, int tiles, int rows, int dim, float scale, State state) {
    const int steps = (rows + PAIRED - 1) / PAIRED, wide = tiles * TILE;
    const float *scores = own->scores + tile * TILE;
    float *most = state.most + tile * TILE, *sum = state.sum + tile * TILE, *out = state.out + tile * TILE * dim;
    const __m512 factor = _mm512_set1_ps(scale), old = _mm512_load_ps(most);
    __m512 highest[4] = {old, old, old, old};
    int row = 0;
    for (; row + 4 <= rows; row += 4)
        for (int i = 0; i < 4; i++)
            highest[i] = _mm512_max_ps(highest[i], _mm512_load_ps(scores + (row + i) * wide));
    for (; row < rows; row++)
        highest[0] = _mm512_max_ps(highest[0], _mm512_load_ps(scores + row * wide));
    __m512 high = _mm512_max_ps(_mm512_max_ps(highest[0], highest[1]), _mm512_max_ps(highest[2], highest[3]));
    const __m512 rise = _mm512_mul_ps(_mm512_sub_ps(high, old), factor);
    const int moved = _mm512_cmp_ps_mask(rise, _mm512_set1_ps(SLACK), _CMP_NLE_UQ) != 0;
    if (!moved)
        high = old;
    const __m512 base = _mm512_mul_ps(high, factor);
    __m512 totals[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    for (int s = 0; s < steps; s++) {
        __m512i pairs[TILE];
        const int filled = rows - s * PAIRED;
        for (int i = 0; i < TILE; i++) {
            __m512 p[2];
            for (int e = 0; e < 2; e++) {
                __m512 x = _mm512_load_ps(scores + (s * PAIRED + 2 * i + e) * wide);
                p[e] = exp2_of(_mm512_fmsub_ps(x, factor, base));
                if (2 * i + e >= filled)
                    p[e] = _mm512_setzero_ps();
                totals[e] = _mm512_add_ps(totals[e], p[e]);
            }
            pairs[i] = rounded(p[0], p[1]);
            if (i % 4 == 3)
                prefetch(&own->ahead);
        }
        transpose(pairs, own->chances + (tile * steps + s) * ELEMENTS);
    }
    const __m512 total = _mm512_add_ps(totals[0], totals[1]);
    if (!moved) {
        _mm512_store_ps(sum, _mm512_add_ps(_mm512_load_ps(sum), total));
        return;
    }
    /* Exactly 1 where a maximum stays: what rounding leaves of the difference would add up block by block. */
    const __mmask16 risen = _mm512_cmp_ps_mask(high, old, _CMP_NEQ_UQ);
    const __m512 shrink = _mm512_mask_mov_ps(_mm512_set1_ps(1), risen, exp2_of(_mm512_fmsub_ps(old, factor, base)));
    _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), shrink, total));
    _mm512_store_ps(most, high);
    float shrinks[LANES];
    _mm512_storeu_ps(shrinks, shrink);
    for (const float *end = out + TILE * dim; out < end; out += SQUARE)
        for (int query = 0; query < TILE; query++) {
            float *at = out + query * TILE;
            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), _mm512_set1_ps(shrinks[query])));
        }
}

/* Add a block of rows to the state of some tiles of queries. */
static void add_block(const char *keys, int64_t stride, int rows, const bf16 *q, int tiles, int dim, float scale,
                      State state, Scratch *own) {
    const int steps = (rows + PAIRED - 1) / PAIRED, dims = dim / TILE;
    const int places = steps * (TILE / 4 * tiles + (tiles + 1) / 2 * (dim / PAIRED + dims / 2));
    own->ahead.pace = (own->ahead.share + places - 1) / places;
    for (int s = 0; s < steps; s++) {
        const char *at = keys + s * PAIRED * stride;
        const int filled = rows - s * PAIRED;
        int64_t apart = stride;
        if (filled < PAIRED) {
            for (int row = 0; row < filled; row++)
                memcpy(own->rest + row * dim, at + row * stride, dim * sizeof(bf16));
            memset(own->rest + filled * dim, 0, (PAIRED - filled) * dim * sizeof(bf16));
            at = (const char *)own->rest;
            apart = dim * sizeof(bf16);
        }
        scores_of(at, apart, q, tiles, dim, own->scores + s * PAIRED * tiles * TILE, &own->ahead);
    }
    for (int t = 0; t < tiles; t++)
        chances_of(own, t, tiles, rows, dim, scale, state);
    add_outputs(own, tiles, steps, dim, state.out);
}
