/* A block of keys and values and a chunk of queries, with products in fp32: the inner part of cpu_attention.c where
 * the processor has none of bf16, or the numbers are fp16.
 *
 * Keys and values are widened once a block, and then serve all queries. Both products are one: numbers of a few rows
 * (scores) or dimensions (outputs), each times a vector of queries, added up in registers. So queries stay lanes from
 * beginning to end, and nothing is transposed. Meanwhile the next block is prefetched a few lines at a time.
 */
#include "cpu_shared.h"

typedef float packed;

enum {
    TILE = LANES,        /* queries of a vector */
    CHUNK = 64 / TILE,   /* tiles that go through the phases together */
    BLOCK = 64,          /* rows that do, at most */
    GAP = LINE / 4,      /* numbers between rows, so that a column does not lie in a few sets of the cache */
    SINGLE = 8,          /* rows of a product with one tile */
    TWIN = LANES / 2,    /* and with two: what registers hold */
};

/* Memory of one thread, for one block. */
typedef struct {
    float *scores;        /* [tiles, BLOCK, TILE], chances later */
    float *keys, *values; /* [BLOCK, dim + GAP] */
    Ahead ahead;
} Scratch;

static int64_t scratch_bytes(int dim) { return (CHUNK * TILE + 2 * (dim + GAP)) * BLOCK * sizeof(float); }

static inline Scratch scratch_of(char *memory, int dim) {
    float *scores = (float *)memory, *keys = scores + CHUNK * TILE * BLOCK;
    return (Scratch){.scores = scores, .keys = keys, .values = keys + (dim + GAP) * BLOCK};
}

static int ask_system(void) { return 0; }
static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}

static int block_of(int tiles) { return tiles <= CHUNK ? BLOCK / 2 : BLOCK; }

/* Queries, NULL where there are none, as [tiles, dim, TILE]. */
static void pack_chunk(const number *const *queries, int tiles, int dim, packed *out) {
    for (int t = 0; t < tiles; t++, out += TILE * dim)
        for (int i = 0; i < TILE; i++) {
            const number *query = queries[t * TILE + i];
            for (int d = 0; d < dim; d += LANES) {
                float numbers[LANES] = {0};
                if (query)
                    store(numbers, widened(query + d));
                for (int e = 0; e < LANES; e++)
                    out[(d + e) * TILE + i] = numbers[e];
            }
        }
}

/* Rows up to a multiple of SINGLE; those that are not there are 0. */
static void widen(const char *rows, int64_t stride, int count, int dim, float *out) {
    for (int row = 0; row < count; row++)
        for (int d = 0; d < dim; d += LANES)
            store(out + row * (dim + GAP) + d, widened((const number *)(rows + row * stride) + d));
    for (int row = count; row % SINGLE; row++)
        memset(out + row * (dim + GAP), 0, dim * sizeof(float));
}

static void begin_block(const char *keys, int64_t stride, int rows, int dim, Scratch *own) {
    widen(keys, stride, rows, dim, own->keys);
    widen(keys + stride / 2, stride, rows, dim, own->values);
}

/* c [rows, tile] = or += of a [rows, steps] and b [steps, tile]: ``tiles`` of 1 or 2, ``rows`` that registers hold. */
static inline __attribute__((always_inline)) void multiply(const float *a, int64_t row, int64_t step, const float *b,
                                                           int64_t b_tile, float *c, int64_t c_tile, int rows,
                                                           int tiles, int steps, int to_add) {
    vec sums[SINGLE][2];
#pragma GCC unroll 8
    for (int y = 0; y < rows; y++)
        for (int x = 0; x < tiles; x++)
            sums[y][x] = to_add ? load(c + y * TILE + x * c_tile) : all(0);
    for (int s = 0; s < steps; s++, a += step, b += TILE) {
        const vec first = load(b), second = tiles > 1 ? load(b + b_tile) : first;
#pragma GCC unroll 8
        for (int y = 0; y < rows; y++) {
            const vec left = all(a[y * row]);
            sums[y][0] = times_plus(left, first, sums[y][0]);
            if (tiles > 1)
                sums[y][1] = times_plus(left, second, sums[y][1]);
        }
    }
#pragma GCC unroll 8
    for (int y = 0; y < rows; y++)
        for (int x = 0; x < tiles; x++)
            store(c + y * TILE + x * c_tile, sums[y][x]);
}

/* The same for all rows, up to a multiple of SINGLE, and all tiles. */
static inline __attribute__((always_inline)) void product(const float *a, int64_t row, int64_t step, const float *b,
                                                          int64_t b_tile, float *c, int64_t c_tile, int rows,
                                                          int tiles, int steps, int to_add, Ahead *ahead) {
    for (int y = 0; y < rows; y += SINGLE)
        for (int t = 0; t < tiles; t += 2) {
            const float *left = a + y * row, *right = b + t * b_tile;
            float *out = c + t * c_tile + y * TILE;
            if (t + 1 == tiles)
                multiply(left, row, step, right, 0, out, 0, SINGLE, 1, steps, to_add);
            else
                for (int i = 0; i < SINGLE; i += TWIN)
                    multiply(left + i * row, row, step, right, b_tile, out + i * TILE, c_tile, TWIN, 2, steps, to_add);
            prefetch(ahead);
        }
}

/* From scores to chances, for one tile; where it must, its state takes a new maximum and shrinks. */
static void chances_of(float *scores, int rows, int dim, float scale, float *out, float *most, float *sum) {
    const Maximum by = maximum_of(scores, TILE, rows, most, scale);
    vec totals[2] = {all(0), all(0)};
    for (int row = 0; row < rows; row++) {
        const vec chance = chance_of(scores + row * TILE, &by);
        store(scores + row * TILE, chance);
        totals[row % 2] += chance;
    }
    const vec shrink = take_up(&by, totals[0] + totals[1], most, sum);
    if (by.moved)
        for (const float *end = out + dim * TILE; out < end; out += TILE)
            store(out, load(out) * shrink);
}

/* Add a block of rows, which has begun, to the state of some tiles of queries. */
static void add_block(const char *keys, int64_t stride, int rows, const packed *q, int tiles, int dim, float scale,
                      State state, Scratch *own) {
    (void)keys, (void)stride; /* They have been widened. */
    const int64_t wide = dim + GAP, tile = TILE * BLOCK;
    const int places = ((rows + SINGLE - 1) / SINGLE + dim / SINGLE) * ((tiles + 1) / 2);
    own->ahead.pace = (own->ahead.share + places - 1) / places;
    /* Scores [tiles, rows, TILE] = K Q^T. */
    product(own->keys, wide, 1, q, TILE * dim, own->scores, tile, rows, tiles, dim, 0, &own->ahead);
    for (int t = 0; t < tiles; t++)
        chances_of(own->scores + t * tile, rows, dim, scale, state.out + t * TILE * dim,
                   state.most + t * TILE, state.sum + t * TILE);
    /* Outputs [tiles, dim, TILE] += V^T P^T. */
    product(own->values, 1, wide, own->scores, tile, state.out, TILE * dim, dim, tiles, rows, 1, &own->ahead);
}

/* total [dim] += factor times the outputs of a query. */
static void add_query(const float *out, int query, int dim, float factor, float *total) {
    out += query / TILE * TILE * dim + query % TILE;
    for (int d = 0; d < dim; d++)
        total[d] += factor * out[d * TILE];
}
