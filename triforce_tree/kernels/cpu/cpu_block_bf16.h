/* Attention of a chunk of queries to a block of keys and values, with products in bf16: included by cpu_attention.c.
 *
 * There are four phases, whose data stay in caches. First, values are interleaved in pairs for the second product.
 * Second, scores are computed transposed (K Q^T), so that keys are read in place. Third, probabilities are computed
 * with a running maximum. Fourth, outputs are accumulated. The elements of a vector are different queries until the
 * probabilities are transposed for the second product. Meanwhile a few cache lines of the next block are prefetched at
 * a time, so that memory is always busy. The next block is the adjacent head's, so that the hardware also prefetches
 * within the same memory pages.
 */
#include "cpu_tiles.h"

typedef bf16 packed;

enum {
    CHUNK = 4,   /* tiles of queries that are processed together */
    BLOCK = 128, /* most rows that are processed together */
};

/* Scratch memory of one thread, for one block. */
typedef struct {
    float *scores; /* [BLOCK, tiles * TILE] */
    bf16 *probs;   /* [tiles, BLOCK / PAIRED] tiles of [TILE queries, PAIRED rows] */
    bf16 *values;  /* [BLOCK / PAIRED, value_dim / TILE] tiles of [TILE pairs of rows, PAIRED dimensions] */
    bf16 *rest;    /* [PAIRED, dim], keys of the last, partial step, padded with zeros */
    Prefetcher prefetcher;
} Scratch;

static int64_t scratch_bytes(int dim, int value_dim) {
    const int64_t scores = BLOCK * CHUNK * TILE;
    return scores * (sizeof(float) + sizeof(bf16)) + (BLOCK * value_dim + PAIRED * dim) * sizeof(bf16);
}

static inline Scratch scratch_of(char *memory, int dim, int value_dim) {
    (void)dim;
    float *scores = (float *)memory;
    bf16 *probs = (bf16 *)(scores + BLOCK * CHUNK * TILE), *values = probs + BLOCK * CHUNK * TILE;
    return (Scratch){.scores = scores, .probs = probs, .values = values, .rest = values + BLOCK * value_dim};
}

/* Returns the rows of a block. Fewer rows use hardware prefetching better, more rows load and store outputs less. */
static int block_of(int tiles) { return tiles <= CHUNK ? BLOCK / 4 : tiles <= 2 * CHUNK ? BLOCK / 2 : BLOCK; }

/* Transposes 16 x 16 32-bit words. */
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

/* Packs queries (NULL for padding) as [dim / PAIRED, tiles] tiles of [TILE pairs of dimensions, TILE queries]. */
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

/* Interleaves the elements of two rows. */
static inline void pair(__m512i upper, __m512i lower, bf16 *first, bf16 *second) {
    static const uint16_t ORDER[32] = {0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
                                       8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
    const __m512i order = _mm512_loadu_si512(ORDER);
    const __m512i further = _mm512_add_epi16(order, _mm512_set1_epi16(TILE));
    _mm512_store_si512(first, _mm512_permutex2var_epi16(upper, order, lower));
    _mm512_store_si512(second, _mm512_permutex2var_epi16(upper, further, lower));
}

static void begin_block(const char *keys, const char *values, int64_t stride, int rows, int dim, int value_dim,
                        Scratch *scratch) {
    (void)keys, (void)dim; /* Keys are read in place. */
    bf16 *out = scratch->values;
    const __m512i none = _mm512_setzero_si512();
    for (int row = 0; row < rows; row += 2) {
        const bf16 *upper = (const bf16 *)(values + row * stride), *lower = (const bf16 *)(values + (row + 1) * stride);
        bf16 *to = out + (row / PAIRED) * (value_dim / TILE) * ELEMENTS + row % PAIRED / 2 * PAIRED;
        for (int d = 0; d < value_dim; d += PAIRED, to += 2 * ELEMENTS)
            pair(_mm512_loadu_si512(upper + d), row + 1 < rows ? _mm512_loadu_si512(lower + d) : none, to,
                 to + ELEMENTS);
    }
    /* Padding rows have probability 0, and 0 times their values must be 0, not NaN. */
    for (int row = (rows + 1) / 2 * 2; row % PAIRED; row += 2) {
        bf16 *to = out + (row / PAIRED) * (value_dim / TILE) * ELEMENTS + row % PAIRED / 2 * PAIRED;
        for (int d = 0; d < value_dim; d += TILE, to += ELEMENTS)
            _mm512_store_si512(to, none);
    }
}

/* Computes the scores of PAIRED rows: out [PAIRED, tiles * TILE] = K Q^T. */
static void scores_of(const char *keys, int64_t stride, const bf16 *q, int tiles, int dim, float *out,
                      Prefetcher *prefetcher) {
    for (int t = 0; t < tiles; t += 2) {
        const Left left = {.at = keys, .row = stride, .step = LINE, .lower = TILE * stride};
        const Right right = {.at = q + t * ELEMENTS, .step = tiles * ELEMENTS, .beside = ELEMENTS};
        const Result result = {
            .at = out + t * TILE, .row = tiles * TILE, .lower = TILE * tiles * TILE, .beside = TILE};
        multiply(left, right, result, dim / PAIRED, 2, t + 1 < tiles ? 2 : 1, 0, prefetcher);
    }
}

/* Adds P V to out, [tiles, value_dim / TILE] tiles. */
static void add_outputs(Scratch *scratch, int tiles, int steps, int value_dim, float *out) {
    const int dims = value_dim / TILE;
    for (int t = 0; t < tiles; t += 2) {
        const Left left = {.at = (const char *)(scratch->probs + t * steps * ELEMENTS),
                           .row = LINE, .step = TILE * LINE, .lower = steps * TILE * LINE};
        for (int d = 0; d < dims; d += 2) {
            const Right right = {.at = scratch->values + d * ELEMENTS, .step = dims * ELEMENTS, .beside = ELEMENTS};
            const Result result = {
                .at = out + (t * dims + d) * SQUARE, .row = TILE, .lower = dims * SQUARE, .beside = SQUARE};
            multiply(left, right, result, steps, t + 1 < tiles ? 2 : 1, 2, 1, &scratch->prefetcher);
        }
    }
}

/* Rounds two rows of probabilities to bf16 and interleaves them. */
static inline __m512i rounded(__m512 upper, __m512 lower) {
    const __m512i half = _mm512_set1_epi32(0x8000);
    __m512i a = _mm512_add_epi32(_mm512_castps_si512(upper), half);
    __m512i b = _mm512_add_epi32(_mm512_castps_si512(lower), half);
    return _mm512_mask_blend_epi16(0xaaaaaaaa, _mm512_srli_epi32(a, 16), b);
}

/* Computes probabilities of one tile of queries from scores, and updates ``state``; rescales outputs if needed. */
static void softmax_tile(Scratch *scratch, int tile, int tiles, int rows, int value_dim, float scale, State state) {
    const int steps = (rows + PAIRED - 1) / PAIRED, row_stride = tiles * TILE;
    const float *scores = scratch->scores + tile * TILE;
    float *out = state.out + tile * TILE * value_dim;
    const Max by = block_max(scores, row_stride, rows, state.max + tile * TILE, scale);
    vec totals[2] = {broadcast(0), broadcast(0)};
    for (int s = 0; s < steps; s++) {
        __m512i pairs[TILE];
        const int filled = rows - s * PAIRED;
        for (int i = 0; i < TILE; i++) {
            vec p[2];
            for (int e = 0; e < 2; e++) {
                p[e] = prob_of(scores + (s * PAIRED + 2 * i + e) * row_stride, &by);
                if (2 * i + e >= filled)
                    p[e] = broadcast(0);
                totals[e] += p[e];
            }
            pairs[i] = rounded(p[0], p[1]);
            if (i % 4 == 3)
                prefetch(&scratch->prefetcher);
        }
        transpose(pairs, scratch->probs + (tile * steps + s) * ELEMENTS);
    }
    float rescales[LANES];
    store(rescales, update_max_and_sum(&by, totals[0] + totals[1], state.max + tile * TILE, state.sum + tile * TILE));
    if (by.changed)
        for (const float *end = out + TILE * value_dim; out < end; out += SQUARE)
            for (int query = 0; query < TILE; query++) {
                float *at = out + query * TILE;
                store(at, load(at) * broadcast(rescales[query]));
            }
}

/* Adds a block of rows to the state of some tiles of queries, after begin_block. */
static void add_block(const char *keys, int64_t stride, int rows, const bf16 *q, int tiles, int dim, int value_dim,
                      float scale, State state, Scratch *scratch) {
    const int steps = (rows + PAIRED - 1) / PAIRED, dims = value_dim / TILE;
    const int prefetch_calls = steps * (TILE / 4 * tiles + (tiles + 1) / 2 * (dim / PAIRED + dims / 2));
    scratch->prefetcher.pace = (scratch->prefetcher.share + prefetch_calls - 1) / prefetch_calls;
    for (int s = 0; s < steps; s++) {
        const char *at = keys + s * PAIRED * stride;
        const int filled = rows - s * PAIRED;
        int64_t apart = stride;
        if (filled < PAIRED) {
            for (int row = 0; row < filled; row++)
                memcpy(scratch->rest + row * dim, at + row * stride, dim * sizeof(bf16));
            memset(scratch->rest + filled * dim, 0, (PAIRED - filled) * dim * sizeof(bf16));
            at = (const char *)scratch->rest;
            apart = dim * sizeof(bf16);
        }
        scores_of(at, apart, q, tiles, dim, scratch->scores + s * PAIRED * tiles * TILE, &scratch->prefetcher);
    }
    for (int t = 0; t < tiles; t++)
        softmax_tile(scratch, t, tiles, rows, value_dim, scale, state);
    add_outputs(scratch, tiles, steps, value_dim, state.out);
}

/* Adds ``factor`` times the outputs of a query to ``total``, [value_dim]. */
static void add_query(const float *out, int query, int value_dim, float factor, float *total) {
    out += query / TILE * TILE * value_dim + query % TILE * TILE;
    for (int d = 0; d < value_dim; d += LANES)
        store(total + d, fmadd(broadcast(factor), load(out + d * TILE), load(total + d)));
}
