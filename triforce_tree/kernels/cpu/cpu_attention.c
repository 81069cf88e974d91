/* Attention of a few query rows to many rows of keys and values, on a CPU with AMX, AVX-512 or AVX2.
 *
 * A task is a run of rows for a group of heads, which goes block by block through one of two headers: products are in
 * bf16 where the processor has them, else in fp32. It ends in a state (outputs, maxima, sums) of its own, and the
 * states are merged in their order: the same rows give the same bits, whatever the number of threads.
 */
#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include "cpu_block_bf16.h"
#else
#include "cpu_block_fp32.h"
#endif

#include <math.h>
#include <omp.h>
#include <time.h>

enum {
    RUN = 2048,          /* rows of a task, at most */
    TASKS = 96,          /* of a question, about: several for each thread */
    PAGE = 4096,         /* bytes within which hardware prefetches */
    STATES = 512 * 1024, /* bytes of a task's outputs, at most: they stay in L2 beside the rows */
};

/* What is asked, and where the answer goes. All query heads that share a KV head are rows of it. */
typedef struct {
    const number *q;  /* [queries, heads * group, dim] */
    const char *rows; /* [count, 2, heads, dim] of numbers */
    void *work;       /* host_attention_work bytes, from a multiple of 64 on */
    number *out;      /* [queries, heads * group, dim] */
    float *lse;       /* [queries, heads * group], natural logarithms */
    double *seconds;  /* the time that it took is added */
    int64_t count;
    int32_t heads, group, queries, dim, threads;
    float scale; /* of the scores */
} Question;

/* A question in the making. */
typedef struct {
    const Question *asked;
    int64_t stride;
    int tiles;      /* of a KV head's query rows */
    int run, block; /* rows of a task, and of a block */
    float scale;    /* for powers of 2 */
    packed *q;      /* [heads], as pack_queries leaves them */
    float *states;  /* [runs, heads] of outputs, maxima, sums */
} Call;

/* Where row ``row`` of a KV head is among the queries of all heads. */
static inline int64_t place_of(const Question *asked, int head, int row) {
    return ((int64_t)(row % asked->queries) * asked->heads + head) * asked->group + row / asked->queries;
}

/* Rows of a KV head, one chunk of tiles behind the other. */
static void pack_queries(const Question *asked, int head, packed *out) {
    const int count = asked->queries * asked->group, dim = asked->dim, tiles = (count + TILE - 1) / TILE;
    for (int first = 0; first < tiles; first += CHUNK, out += CHUNK * TILE * dim) {
        const number *queries[CHUNK * TILE];
        for (int i = 0; i < CHUNK * TILE; i++) {
            const int row = first * TILE + i;
            queries[i] = row < count ? asked->q + place_of(asked, head, row) * dim : NULL;
        }
        pack_chunk(queries, smaller(CHUNK, tiles - first), dim, out);
    }
}

/* Heads of a task: what makes a page of keys, so that its lines are read in order, or a part of it. */
static int group_of(int tiles, int dim) {
    int heads = PAGE / (dim * sizeof(number));
    while (heads > 1 && heads * tiles * TILE * dim * sizeof(float) > STATES)
        heads /= 2;
    return heads;
}

/* Rows of a task: long runs leave fewer states to write and to merge, but many tasks are shared out evenly. The
 * shape alone decides, so that threads do not change bits. */
static int run_of(int64_t count, int heads, int tiles, int dim) {
    const int group = group_of(tiles, dim), groups = (heads + group - 1) / group;
    const int64_t blocks = (count * groups / TASKS + BLOCK - 1) / BLOCK;
    return blocks < 2 ? 2 * BLOCK : smaller(blocks * BLOCK, RUN);
}

static State state_of(const Call *call, int64_t run, int head) {
    const int64_t queries = call->tiles * TILE;
    float *out = call->states + (run * call->asked->heads + head) * queries * (call->asked->dim + 2);
    return (State){out, out + queries * call->asked->dim, out + queries * (call->asked->dim + 1)};
}

/* Rows from ``row`` on, at most a block of them, for one head. */
static void attend_block(const Call *call, int64_t run, int64_t row, int rows, int head, Scratch *own) {
    const int dim = call->asked->dim;
    const char *keys = call->asked->rows + row * call->stride + head * dim * sizeof(number);
    const State state = state_of(call, run, head);
    begin_block(keys, call->stride, rows, dim, own);
    for (int tile = 0; tile < call->tiles; tile += CHUNK) {
        const int64_t at = tile * TILE;
        const State part = {state.out + at * dim, state.most + at, state.sum + at};
        const packed *q = call->q + ((int64_t)head * call->tiles * TILE + at) * dim;
        add_block(keys, call->stride, rows, q, smaller(CHUNK, call->tiles - tile), dim, call->scale, part, own);
    }
}

/* One run of rows, heads from ``first`` to ``last``. */
static void attend_run(const Call *call, int64_t run, int first, int last, Scratch *own) {
    const int64_t begin = run * call->run, end = smaller(begin + call->run, call->asked->count);
    const int dim = call->asked->dim, queries = call->tiles * TILE, chunks = (call->tiles + CHUNK - 1) / CHUNK;
    for (int head = first; head < last; head++) {
        State state = state_of(call, run, head);
        memset(state.out, 0, (int64_t)queries * (dim + 2) * sizeof(float));
        for (int query = 0; query < queries; query++)
            state.most[query] = LEAST;
    }
    for (int64_t row = begin; row < end; row += call->block)
        for (int head = first; head < last; head++) {
            /* Next comes the next head, or the first one's next rows. */
            const int more = head + 1 < last, beside = more ? head + 1 : first;
            const int64_t next = more ? row : row + call->block;
            const int rows = smaller(call->block, end - row);
            own->ahead = (Ahead){.rows = call->asked->rows + next * call->stride + beside * dim * sizeof(number),
                                 .stride = call->stride,
                                 .left = next < end ? smaller(call->block, end - next) : 0,
                                 .width = dim * sizeof(number),
                                 .share = (rows * 4 * dim / LINE + chunks - 1) / chunks};
            attend_block(call, run, row, rows, head, own);
        }
}

/* All runs of one row of one KV head; without runs there is nothing, and its logarithm. */
static void merge(const Call *call, int64_t runs, int head, int row) {
    const int dim = call->asked->dim;
    float total[MOST_DIM] = {0}, most = LEAST, sum = 0;
    for (int64_t run = 0; run < runs; run++)
        most = fmaxf(most, state_of(call, run, head).most[row]);
    for (int64_t run = 0; run < runs; run++) {
        const State state = state_of(call, run, head);
        const float factor = exp2f(call->scale * (state.most[row] - most));
        sum += factor * state.sum[row];
        add_query(state.out, row, dim, factor, total);
    }
    const int64_t at = place_of(call->asked, head, row);
    for (int d = 0; d < dim; d++)
        call->asked->out[at * dim + d] = runs ? rounded_to_number(total[d] / sum) : 0;
    call->asked->lse[at] = runs ? (call->scale * most + log2f(sum)) * (float)M_LN2 : -INFINITY;
}

/* Before anything else, once in a process; 0, or the system's error. */
int host_attention_init(void) { return ask_system(); }

/* Bytes of a question's ``work``; ``rows`` of a KV head are those of all its query heads. */
int64_t host_attention_work(int64_t count, int heads, int rows, int dim, int threads) {
    const int tiles = (rows + TILE - 1) / TILE, run = run_of(count, heads, tiles, dim);
    const int64_t runs = (count + run - 1) / run;
    return threads * scratch_bytes(dim) +
           (int64_t)heads * tiles * TILE * (dim * sizeof(packed) + runs * (dim + 2) * sizeof(float));
}

/* Answer a Question: dim is a multiple of 32, at most MOST_DIM; there may be no rows. It cannot fail, and calls
 * nothing of CUDA, so that a stream may run it. */
void host_attention(void *question) {
    const Question *asked = question;
    const int heads = asked->heads, dim = asked->dim, rows = asked->queries * asked->group;
    const int tiles = (rows + TILE - 1) / TILE, group = group_of(tiles, dim);
    const int run = run_of(asked->count, heads, tiles, dim);
    const int64_t runs = (asked->count + run - 1) / run, groups = (heads + group - 1) / group;
    const int64_t own_queries = (int64_t)tiles * TILE * dim;
    struct timespec begin, end;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    char *scratch = asked->work;
    packed *q = (packed *)(scratch + asked->threads * scratch_bytes(dim));
    const Call call = {.asked = asked, .stride = 4 * (int64_t)heads * dim, .tiles = tiles, .run = run,
                       .block = block_of(tiles), .scale = asked->scale * (float)M_LOG2E,
                       .q = q, .states = (float *)(q + heads * own_queries)};
#pragma omp parallel num_threads(asked->threads)
    {
        Scratch own = scratch_of(scratch + omp_get_thread_num() * scratch_bytes(dim), dim);
        begin_tiles();
#pragma omp for
        for (int head = 0; head < heads; head++)
            pack_queries(asked, head, call.q + head * own_queries);
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < runs * groups; task++) {
            const int first = task % groups * group;
            attend_run(&call, task / groups, first, smaller(first + group, heads), &own);
        }
        end_tiles();
#pragma omp for
        for (int64_t each = 0; each < (int64_t)heads * rows; each++)
            merge(&call, runs, each / rows, each % rows);
    }
    clock_gettime(CLOCK_MONOTONIC, &end);
    *asked->seconds += (end.tv_sec - begin.tv_sec) + 1e-9 * (end.tv_nsec - begin.tv_nsec);
}
