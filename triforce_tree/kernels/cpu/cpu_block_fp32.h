/* Attention of a chunk of queries to a block of keys and values, with products in fp32: included by cpu_attention.c
 * where the processor has no bf16 products, or the elements are fp16.
 *
 * Keys and values are converted to fp32 once per block for all queries. Both products multiply elements of a few rows
 * (scores) or dimensions (outputs) by a vector of queries and accumulate in registers. So the elements of a vector are
 * always different queries, and no matrix is transposed. Meanwhile a few cache lines of the next block are prefetched
 * at a time.
 */
#include "cpu_shared.h"

typedef float packed;

enum {
    TILE = LANES,        /* queries per vector */
    CHUNK = 64 / TILE,   /* tiles that are processed together */
    BLOCK = 64,          /* most rows that are processed together */
    GAP = LINE / 4,      /* padding between rows, so that a column does not map to a few cache sets */
    SINGLE = 8,          /* rows of a product with one tile of queries */
    TWIN = LANES / 2,    /* rows of a product with two tiles */
};

/* Scratch memory of one thread, for one block. */
typedef struct {
    float *scores;        /* [tiles, BLOCK, TILE], later probabilities */
    float *keys, *values; /* [BLOCK, dim + GAP] and [BLOCK, value_dim + GAP] */
    Prefetcher prefetcher;
} Scratch;

static int64_t scratch_bytes(int dim, int value_dim) {
    return (CHUNK * TILE + dim + value_dim + 2 * GAP) * BLOCK * sizeof(float);
}

static inline Scratch scratch_of(char *memory, int dim, int value_dim) {
    (void)value_dim;
    float *scores = (float *)memory, *keys = scores + CHUNK * TILE * BLOCK;
    return (Scratch){.scores = scores, .keys = keys, .values = keys + (dim + GAP) * BLOCK};
}

static int ask_system(void) { return 0; }
static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}

static int block_of(int tiles) { return tiles <= CHUNK ? BLOCK / 2 : BLOCK; }

/* Packs queries (NULL for padding) as [tiles, dim, TILE]. */
static void pack_chunk(const element *const *queries, int tiles, int dim, packed *out) {
    for (int t = 0; t < tiles; t++, out += TILE * dim)
        for (int i = 0; i < TILE; i++) {
            const element *query = queries[t * TILE + i];
            for (int d = 0; d < dim; d += LANES) {
                float elements[LANES] = {0};
                if (query)
                    store(elements, widened(query + d));
                for (int e = 0; e < LANES; e++)
                    out[(d + e) * TILE + i] = elements[e];
            }
        }
}

/* Converts rows to fp32, padded with zeros to a multiple of SINGLE. */
static void widen(const char *rows, int64_t stride, int count, int dim, float *out) {
    for (int row = 0; row < count; row++)
        for (int d = 0; d < dim; d += LANES)
            store(out + row * (dim + GAP) + d, widened((const element *)(rows + row * stride) + d));
    for (int row = count; row % SINGLE; row++)
        memset(out + row * (dim + GAP), 0, dim * sizeof(float));
}

static void begin_block(const char *keys, const char *values, int64_t stride, int rows, int dim, int value_dim,
                        Scratch *scratch) {
    widen(keys, stride, rows, dim, scratch->keys);
    widen(values, stride, rows, value_dim, scratch->values);
}

/* Sets c [rows, tile] to a [rows, steps] b [steps, tile], or adds it, for ``tiles`` 1 or 2 and rows in registers. */
static inline __attribute__((always_inline)) void multiply(const float *a, int64_t row, int64_t step, const float *b,
                                                           int64_t b_tile, float *c, int64_t c_tile, int rows,
                                                           int tiles, int steps, int to_add) {
    vec sums[SINGLE][2];
#pragma GCC unroll 8
    for (int y = 0; y < rows; y++)
        for (int x = 0; x < tiles; x++)
            sums[y][x] = to_add ? load(c + y * TILE + x * c_tile) : broadcast(0);
    for (int s = 0; s < steps; s++, a += step, b += TILE) {
        const vec first = load(b), second = tiles > 1 ? load(b + b_tile) : first;
#pragma GCC unroll 8
        for (int y = 0; y < rows; y++) {
            const vec left = broadcast(a[y * row]);
            sums[y][0] = fmadd(left, first, sums[y][0]);
            if (tiles > 1)
                sums[y][1] = fmadd(left, second, sums[y][1]);
        }
    }
#pragma GCC unroll 8
    for (int y = 0; y < rows; y++)
        for (int x = 0; x < tiles; x++)
            store(c + y * TILE + x * c_tile, sums[y][x]);
}

/* Calls multiply for all rows, rounded up to a multiple of SINGLE, and all tiles. */
static inline __attribute__((always_inline)) void product(const float *a, int64_t row, int64_t step, const float *b,
                                                          int64_t b_tile, float *c, int64_t c_tile, int rows,
                                                          int tiles, int steps, int to_add, Prefetcher *prefetcher) {
    for (int y = 0; y < rows; y += SINGLE)
        for (int t = 0; t < tiles; t += 2) {
            const float *left = a + y * row, *right = b + t * b_tile;
            float *out = c + t * c_tile + y * TILE;
            if (t + 1 == tiles)
                multiply(left, row, step, right, 0, out, 0, SINGLE, 1, steps, to_add);
            else
                for (int i = 0; i < SINGLE; i += TWIN)
                    multiply(left + i * row, row, step, right, b_tile, out + i * TILE, c_tile, TWIN, 2, steps, to_add);
            prefetch(prefetcher);
        }
}

/* Computes probabilities of one tile from scores, and updates its state; rescales outputs if the maximum changed. */
static void softmax_tile(float *scores, int rows, int value_dim, float scale, float *out, float *max, float *sum) {
    const Max by = block_max(scores, TILE, rows, max, scale);
    vec totals[2] = {broadcast(0), broadcast(0)};
    for (int row = 0; row < rows; row++) {
        const vec prob = prob_of(scores + row * TILE, &by);
        store(scores + row * TILE, prob);
        totals[row % 2] += prob;
    }
    const vec rescale = update_max_and_sum(&by, totals[0] + totals[1], max, sum);
    if (by.changed)
        for (const float *end = out + value_dim * TILE; out < end; out += TILE)
            store(out, load(out) * rescale);
}

/* Adds a block of rows to the state of some tiles of queries, after begin_block. */
static void add_block(const char *keys, int64_t stride, int rows, const packed *q, int tiles, int dim, int value_dim,
                      float scale, State state, Scratch *scratch) {
    (void)keys, (void)stride; /* begin_block has converted the keys. */
    const int64_t tile = TILE * BLOCK;
    const int prefetch_calls = ((rows + SINGLE - 1) / SINGLE + value_dim / SINGLE) * ((tiles + 1) / 2);
    scratch->prefetcher.pace = (scratch->prefetcher.share + prefetch_calls - 1) / prefetch_calls;
    /* Scores [tiles, rows, TILE] = K Q^T. */
    product(scratch->keys, dim + GAP, 1, q, TILE * dim, scratch->scores, tile, rows, tiles, dim, 0,
            &scratch->prefetcher);
    for (int t = 0; t < tiles; t++)
        softmax_tile(scratch->scores + t * tile, rows, value_dim, scale, state.out + t * TILE * value_dim,
                   state.max + t * TILE, state.sum + t * TILE);
    /* Outputs [tiles, value_dim, TILE] += V^T P^T. */
    product(scratch->values, 1, value_dim + GAP, scratch->scores, tile, state.out, TILE * value_dim, value_dim, tiles,
            rows, 1, &scratch->prefetcher);
}

/* Adds ``factor`` times the outputs of a query to ``total``, [value_dim]. */
static void add_query(const float *out, int query, int value_dim, float factor, float *total) {
    out += query / TILE * TILE * value_dim + query % TILE;
    for (int d = 0; d < value_dim; d++)
        total[d] += factor * out[d * TILE];
}
