/* A block of keys and values and a chunk of queries, with products in bf16: the inner part of cpu_attention.c.
 *
 * It goes through four phases, each in caches: values are paired for the second product, scores are computed
 * transposed (K Q^T: keys are read where they lie), probabilities are taken with a running maximum, and outputs
 * are added up. Queries are lanes of a vector until the probabilities are transposed into the second product.
 * Meanwhile the next block is prefetched a few lines at a time, so that memory never rests: it is the next head's,
 * which lies beside this one, so that hardware prefetches within the same pages as well.
 */
#include "cpu_tiles.h"

typedef bf16 packed;

enum {
    CHUNK = 4,   /* tiles of queries that go through the phases together */
    BLOCK = 128, /* rows that do, at most */
};

/* Memory of one thread, for one block. */
typedef struct {
    float *scores; /* [BLOCK, tiles * TILE] */
    bf16 *chances; /* tiles [tiles, BLOCK / PAIRED] of [TILE queries, PAIRED rows] */
    bf16 *values;  /* tiles [BLOCK / PAIRED, dim / TILE] of [TILE pairs of rows, PAIRED dimensions] */
    bf16 *rest;    /* [PAIRED, dim], keys of a step that rows do not fill */
    Ahead ahead;
} Scratch;

static int64_t scratch_bytes(int dim) {
    return BLOCK * CHUNK * TILE * (sizeof(float) + sizeof(bf16)) + (BLOCK + PAIRED) * dim * sizeof(bf16);
}

static inline Scratch scratch_of(char *memory, int dim) {
    float *scores = (float *)memory;
    bf16 *chances = (bf16 *)(scores + BLOCK * CHUNK * TILE), *values = chances + BLOCK * CHUNK * TILE;
    return (Scratch){.scores = scores, .chances = chances, .values = values, .rest = values + BLOCK * dim};
}

/* Rows of a block: few make the most of hardware's prefetches, more of them load and store outputs less often. */
static int block_of(int tiles) { return tiles <= CHUNK ? BLOCK / 4 : tiles <= 2 * CHUNK ? BLOCK / 2 : BLOCK; }

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

/* Queries, NULL where there are none, as tiles [dim / PAIRED, tiles] of [TILE pairs of dimensions, TILE queries]. */
static void pack_chunk(const bf16 *const *queries, int tiles, int dim, packed *out) {
    for (int d = 0; d < dim; d += PAIRED)
        for (int t = 0; t < tiles; t++, out += ELEMENTS) {
            __m512i words[TILE];
            for (int i = 0; i < TILE; i++) {
                const bf16 *query = queries[t * TILE + i];
                words[i] = query ? _mm512_loadu_si512(query + d) : _mm512_setzero_si512();
            }
            transpose(words, out);
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

static void begin_block(const char *keys, int64_t stride, int rows, int dim, Scratch *own) {
    const char *values = keys + stride / 2;
    bf16 *out = own->values;
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
    float *out = state.out + tile * TILE * dim;
    const Maximum by = maximum_of(scores, wide, rows, state.most + tile * TILE, scale);
    vec totals[2] = {all(0), all(0)};
    for (int s = 0; s < steps; s++) {
        __m512i pairs[TILE];
        const int filled = rows - s * PAIRED;
        for (int i = 0; i < TILE; i++) {
            vec p[2];
            for (int e = 0; e < 2; e++) {
                p[e] = chance_of(scores + (s * PAIRED + 2 * i + e) * wide, &by);
                if (2 * i + e >= filled)
                    p[e] = all(0);
                totals[e] += p[e];
            }
            pairs[i] = rounded(p[0], p[1]);
            if (i % 4 == 3)
                prefetch(&own->ahead);
        }
        transpose(pairs, own->chances + (tile * steps + s) * ELEMENTS);
    }
    float shrinks[LANES];
    store(shrinks, take_up(&by, totals[0] + totals[1], state.most + tile * TILE, state.sum + tile * TILE));
    if (by.moved)
        for (const float *end = out + TILE * dim; out < end; out += SQUARE)
            for (int query = 0; query < TILE; query++) {
                float *at = out + query * TILE;
                store(at, load(at) * all(shrinks[query]));
            }
}

/* Add a block of rows, which has begun, to the state of some tiles of queries: outputs [tiles, dim / TILE] of tiles. */
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

/* total [dim] += factor times the outputs of a query. */
static void add_query(const float *out, int query, int dim, float factor, float *total) {
    out += query / TILE * TILE * dim + query % TILE * TILE;
    for (int d = 0; d < dim; d += LANES)
        store(total + d, times_plus(all(factor), load(out + d * TILE), load(total + d)));
}
