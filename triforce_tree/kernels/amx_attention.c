/* Attention of a few query rows to many rows of keys and values, on a CPU with AMX and AVX-512.
 *
 * A block of rows goes through four phases, each in caches: values are paired for the second product, scores
 * are computed transposed (K Q^T: keys are read where they lie), probabilities are taken with a running
 * maximum, and outputs are added up. Queries are lanes of a vector until the probabilities are transposed into
 * the second product. Meanwhile the next block is prefetched a few lines at a time, so that memory never rests.
 *
 * A task is a run of rows for a group of heads. It ends in a state (output, maximum, sum) of its own, and the
 * states are merged in their order: the same rows give the same bits, whatever the number of threads.
 */
#include <errno.h>
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef uint16_t bf16;

enum {
    TILE = 16,                   /* rows of a tile register; it has 64 bytes a row */
    PAIRED = 2 * TILE,           /* bf16 numbers in a row of a tile */
    ELEMENTS = TILE * PAIRED,    /* of a tile in bf16 */
    LANES = 16,                  /* of fp32 in a vector */
    BLOCK = 256,                 /* rows that go through the phases together */
    RUN = 2048,                  /* rows of a task, a multiple of BLOCK */
    GROUP = 4,                   /* heads of a task: neighbours in memory */
    CHUNK = 4,                   /* tiles of queries that go through the phases together */
    LINE = 64,
    MOST_DIM = 256,
    ARCH_REQ_XCOMP_PERM = 0x1023, /* of arch_prctl */
    XFEATURE_XTILEDATA = 18,
};
static const float LEAST = -1e30f; /* of a maximum of nothing: differences stay finite */

/* What of the next block has not been prefetched yet. */
typedef struct {
    const char *rows;
    int64_t stride;
    int left, at, width; /* rows; bytes of one row of a head, keys and values apart */
} Ahead;

/* Memory of one thread, for one block. */
typedef struct {
    float *scores; /* [BLOCK, tiles * TILE] */
    bf16 *chances; /* tiles [tiles, BLOCK / PAIRED] of [TILE queries, PAIRED rows] */
    bf16 *values;  /* tiles [BLOCK / PAIRED, dim / TILE] of [TILE pairs of rows, PAIRED dimensions] */
    bf16 *rest;    /* [PAIRED, dim], keys of a step that rows do not fill */
    Ahead ahead;
} Scratch;

/* Outputs [tiles * TILE, dim], maxima and sums [tiles * TILE] of some tiles of queries. */
typedef struct {
    float *out, *most, *sum;
} State;

static inline void prefetch(Ahead *ahead, int lines) {
    while (lines > 0 && ahead->left) {
        _mm_prefetch(ahead->rows + ahead->at, _MM_HINT_T1);
        _mm_prefetch(ahead->rows + ahead->stride / 2 + ahead->at, _MM_HINT_T1);
        lines -= 2;
        ahead->at += LINE;
        if (ahead->at >= ahead->width) {
            ahead->at = 0;
            ahead->rows += ahead->stride;
            ahead->left--;
        }
    }
}

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
static inline void scores_of(const char *keys, int64_t stride, const bf16 *q, int tiles, int dim, float *out) {
    const int64_t wide = tiles * TILE * sizeof(float);
    for (int t = 0; t < tiles; t += 2) {
        const int two = t + 1 < tiles;
        float *at = out + t * TILE, *below = at + TILE * tiles * TILE;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int d = 0; d < dim / PAIRED; d++) {
            const bf16 *own = q + (d * tiles + t) * ELEMENTS;
            _tile_loadd(4, keys + d * LINE, stride);
            _tile_loadd(5, keys + d * LINE + TILE * stride, stride);
            _tile_loadd(6, own, LINE);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(2, 5, 6);
            if (two) {
                _tile_loadd(7, own + ELEMENTS, LINE);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        _tile_stored(0, at, wide);
        _tile_stored(2, below, wide);
        if (two) {
            _tile_stored(1, at + TILE, wide);
            _tile_stored(3, below + TILE, wide);
        }
    }
}

/* out [tiles * TILE, dim] += P V. */
static void add_outputs(Scratch *own, int tiles, int steps, int dim, int lines, float *out) {
    const int64_t wide = dim * sizeof(float);
    const int dims = dim / TILE;
    for (int t = 0; t < tiles; t += 2) {
        const int two = t + 1 < tiles;
        const bf16 *p = own->chances + t * steps * ELEMENTS;
        for (int d = 0; d < dims; d += 2) {
            float *at = out + t * TILE * dim + d * TILE, *below = at + TILE * dim;
            _tile_loadd(0, at, wide);
            _tile_loadd(1, at + TILE, wide);
            if (two) {
                _tile_loadd(2, below, wide);
                _tile_loadd(3, below + TILE, wide);
            }
            for (int s = 0; s < steps; s++) {
                const bf16 *v = own->values + (s * dims + d) * ELEMENTS;
                _tile_loadd(4, p + s * ELEMENTS, LINE);
                _tile_loadd(6, v, LINE);
                _tile_loadd(7, v + ELEMENTS, LINE);
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                if (two) {
                    _tile_loadd(5, p + (steps + s) * ELEMENTS, LINE);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
                prefetch(&own->ahead, lines);
            }
            _tile_stored(0, at, wide);
            _tile_stored(1, at + TILE, wide);
            if (two) {
                _tile_stored(2, below, wide);
                _tile_stored(3, below + TILE, wide);
            }
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

/* From scores to chances, for one tile of queries; ``state`` takes the new maximum, and shrinks with it. */
static void chances_of(Scratch *own, int tile, int tiles, int rows, int dim, float scale, int lines, State state) {
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
                prefetch(&own->ahead, lines);
        }
        transpose(pairs, own->chances + (tile * steps + s) * ELEMENTS);
    }
    const __m512 shrink = exp2_of(_mm512_fmsub_ps(old, factor, base));
    const __m512 total = _mm512_add_ps(totals[0], totals[1]);
    _mm512_store_ps(sum, _mm512_fmadd_ps(_mm512_load_ps(sum), shrink, total));
    _mm512_store_ps(most, high);
    if (!_mm512_cmp_ps_mask(high, old, _CMP_NEQ_UQ))
        return;
    float shrinks[LANES];
    _mm512_storeu_ps(shrinks, shrink);
    for (int query = 0; query < TILE; query++, out += dim)
        for (int d = 0; d < dim; d += LANES)
            _mm512_store_ps(out + d, _mm512_mul_ps(_mm512_load_ps(out + d), _mm512_set1_ps(shrinks[query])));
}

/* Add a block of rows to the state of some tiles of queries; ``parts`` such calls prefetch the next block. */
static void add_block(const char *keys, int64_t stride, int rows, const bf16 *q, int tiles, int dim, float scale,
                      int parts, State state, Scratch *own) {
    const int steps = (rows + PAIRED - 1) / PAIRED, dims = dim / TILE;
    const int calls = parts * steps * (1 + 4 * tiles + (tiles + 1) / 2 * dims / 2);
    const int lines = (BLOCK * 4 * dim / LINE + calls - 1) / calls;
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
        scores_of(at, apart, q, tiles, dim, own->scores + s * PAIRED * tiles * TILE);
        prefetch(&own->ahead, lines);
    }
    for (int t = 0; t < tiles; t++)
        chances_of(own, t, tiles, rows, dim, scale, lines, state);
    add_outputs(own, tiles, steps, dim, lines, state.out);
}

/* What is asked, and where the answer goes. Queries of all heads that share a KV head are rows of it. */
typedef struct {
    const bf16 *q;    /* [queries, heads * group, dim] */
    const char *rows; /* [count, 2, heads, dim], bf16 */
    void *work;       /* host_attention_work bytes, from a multiple of 64 on */
    bf16 *out;        /* [queries, heads * group, dim] */
    float *lse;       /* [queries, heads * group], natural logarithms */
    double *seconds;  /* the time it took is added; may be 0 */
    int64_t count;
    int32_t heads, group, queries, dim, threads;
    float scale; /* of the scores */
} Question;

/* Where query ``row`` of a KV head is among the queries of all heads. */
static inline int64_t place_of(const Question *own, int head, int row) {
    return (int64_t)(row % own->queries * own->heads + head) * own->group + row / own->queries;
}

/* Queries of a KV head as tiles, one chunk behind the other; queries that are not there are 0. */
static void pack_queries(const Question *own, int head, bf16 *out) {
    const int count = own->queries * own->group, dim = own->dim, tiles = (count + TILE - 1) / TILE;
    memset(out, 0, (int64_t)tiles * TILE * dim * sizeof(bf16));
    for (int first = 0; first < tiles; first += CHUNK) {
        const int width = tiles - first < CHUNK ? tiles - first : CHUNK;
        for (int row = first * TILE; row < count && row < (first + width) * TILE; row++) {
            const uint32_t *from = (const uint32_t *)(own->q + place_of(own, head, row) * dim);
            uint32_t *to = (uint32_t *)out + (row / TILE - first) * ELEMENTS / 2 + row % TILE;
            for (int d = 0; d < dim / 2; d++)
                to[d / TILE * width * ELEMENTS / 2 + d % TILE * TILE] = from[d];
        }
        out += (int64_t)width * TILE * dim;
    }
}

static void configure_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((packed, aligned(64))) config = {.palette = 1};
    for (int tile = 0; tile < 8; tile++)
        config.bytes[tile] = LINE, config.rows[tile] = TILE;
    _tile_loadconfig(&config);
}

/* A question, prepared. */
typedef struct {
    const char *rows;
    int64_t count, stride;
    int heads, tiles, dim;
    float scale;
    bf16 *q;       /* [heads], as pack_queries leaves them */
    float *states; /* [runs, heads] of outputs, maxima, sums */
} Call;

static State state_of(const Call *call, int64_t run, int head) {
    const int64_t queries = call->tiles * TILE;
    float *out = call->states + (run * call->heads + head) * queries * (call->dim + 2);
    return (State){out, out + queries * call->dim, out + queries * (call->dim + 1)};
}

/* One run of rows, heads from ``first`` to ``last``. */
static void attend_run(const Call *call, int64_t run, int first, int last, Scratch *own) {
    const int64_t begin = run * RUN, end = begin + RUN < call->count ? begin + RUN : call->count;
    const int dim = call->dim, queries = call->tiles * TILE, parts = (call->tiles + CHUNK - 1) / CHUNK;
    for (int head = first; head < last; head++) {
        State state = state_of(call, run, head);
        memset(state.out, 0, (int64_t)queries * (dim + 2) * sizeof(float));
        for (int query = 0; query < queries; query++)
            state.most[query] = LEAST;
    }
    for (int64_t row = begin; row < end; row += BLOCK)
        for (int head = first; head < last; head++) {
            const int rows = end - row < BLOCK ? end - row : BLOCK;
            const char *keys = call->rows + row * call->stride + head * dim * sizeof(bf16);
            /* Next comes the next head, or the first one's next rows. */
            const int64_t next = head + 1 < last ? row : row + BLOCK;
            const int64_t left = next < end ? (end - next < BLOCK ? end - next : BLOCK) : 0;
            const char *further = call->rows + next * call->stride + (head + 1 < last ? head + 1 : first) * dim * 2;
            own->ahead = (Ahead){further, call->stride, left, 0, dim * sizeof(bf16)};
            pair_values(keys + call->stride / 2, call->stride, rows, dim, own->values);
            for (int tile = 0; tile < call->tiles; tile += CHUNK) {
                const int64_t at = tile * TILE;
                State state = state_of(call, run, head);
                state = (State){state.out + at * dim, state.most + at, state.sum + at};
                add_block(keys, call->stride, rows, call->q + ((int64_t)head * queries + at) * dim,
                          call->tiles - tile < CHUNK ? call->tiles - tile : CHUNK, dim, call->scale, parts, state, own);
            }
        }
}

static inline bf16 to_bf16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

/* All runs of one query of one head. */
static void merge(const Call *call, int64_t runs, int head, int query, bf16 *out, float *lse) {
    float total[MOST_DIM] = {0}, most = LEAST, sum = 0;
    for (int64_t run = 0; run < runs; run++)
        most = fmaxf(most, state_of(call, run, head).most[query]);
    for (int64_t run = 0; run < runs; run++) {
        const State state = state_of(call, run, head);
        const float factor = exp2f(call->scale * (state.most[query] - most)), *from = state.out + query * call->dim;
        sum += factor * state.sum[query];
        for (int d = 0; d < call->dim; d++)
            total[d] += factor * from[d];
    }
    /* Without rows there is nothing, and its logarithm. */
    const float inverse = runs ? 1 / sum : 0;
    for (int d = 0; d < call->dim; d++)
        out[d] = to_bf16(total[d] * inverse);
    *lse = runs ? (call->scale * most + log2f(sum)) * (float)M_LN2 : -INFINITY;
}

/* Ask the system for tile registers; 0, or its error. Once in a process. */
int host_attention_init(void) {
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
}

static int64_t scratch_bytes(int dim) {
    const int64_t scores = BLOCK * CHUNK * TILE;
    return scores * (sizeof(float) + sizeof(bf16)) + (BLOCK + PAIRED) * dim * sizeof(bf16);
}

/* Bytes of a question's ``work``; ``queries`` of a KV head, those of all its query heads. */
int64_t host_attention_work(int64_t count, int heads, int queries, int dim, int threads) {
    const int64_t padded = (queries + TILE - 1) / TILE * TILE, runs = (count + RUN - 1) / RUN;
    return heads * padded * (dim * sizeof(bf16) + runs * (dim + 2) * sizeof(float)) + threads * scratch_bytes(dim);
}

/* Answer a Question: bf16, dim a multiple of 32 and at most MOST_DIM, any number of rows. It cannot fail, and calls
 * nothing but OpenMP, so that a stream of CUDA may run it. */
void host_attention(void *question) {
    const Question *asked = question;
    const int heads = asked->heads, dim = asked->dim, queries = asked->queries * asked->group;
    const int tiles = (queries + TILE - 1) / TILE, groups = (heads + GROUP - 1) / GROUP;
    const int64_t runs = (asked->count + RUN - 1) / RUN, packed = (int64_t)tiles * TILE * dim;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    char *scratch = asked->work;
    bf16 *q = (bf16 *)(scratch + asked->threads * scratch_bytes(dim));
    const Call call = {
        .rows = asked->rows, .count = asked->count, .stride = 4 * (int64_t)heads * dim, .heads = heads, .tiles = tiles,
        .dim = dim, .scale = asked->scale * (float)M_LOG2E, .q = q, .states = (float *)(q + heads * packed),
    };
#pragma omp parallel num_threads(asked->threads)
    {
        float *scores = (float *)(scratch + omp_get_thread_num() * scratch_bytes(dim));
        bf16 *chances = (bf16 *)(scores + BLOCK * CHUNK * TILE), *values = chances + BLOCK * CHUNK * TILE;
        Scratch own = {.scores = scores, .chances = chances, .values = values, .rest = values + BLOCK * dim};
        configure_tiles();
#pragma omp for
        for (int head = 0; head < heads; head++)
            pack_queries(asked, head, call.q + head * packed);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < runs * groups; task++) {
            const int first = task % groups * GROUP;
            attend_run(&call, task / groups, first, first + GROUP < heads ? first + GROUP : heads, &own);
        }
        _tile_release();
#pragma omp for
        for (int64_t each = 0; each < (int64_t)heads * queries; each++) {
            const int64_t at = place_of(asked, each / queries, each % queries);
            merge(&call, runs, each / queries, each % queries, asked->out + at * dim, asked->lse + at);
        }
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    if (asked->seconds)
        *asked->seconds += (end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec);
}
