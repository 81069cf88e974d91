/* Attention of a few queries to many KV positions ("rows": one key and one value of every head), on a CPU with AMX,
 * AVX-512 or AVX2.
 *
 * A task is a run of rows for a group of heads. One of two headers computes it block by block, with products in bf16 if
 * the processor has them, else in fp32. Each task has its own softmax state (outputs, maxima, sums). The states are
 * merged in the order of rows, so results do not depend on the number of threads, bit for bit.
 */
#if defined(__AMX_BF16__) || defined(__AVX512BF16__)
#include "cpu_block_bf16.h"
#else
#include "cpu_block_fp32.h"
#endif

#include <math.h>

#include "threads.h"

enum {
    RUN = 2048,          /* most rows of a task */
    TASKS = 96,          /* target number of tasks of a request: several for each thread */
    PAGE = 4096,         /* bytes; hardware prefetchers do not cross page boundaries */
    STATES = 512 * 1024, /* most bytes of a task's outputs, so that L2 holds them with keys and values */
};

/* Inputs and outputs of one call. The query heads that share a KV head are stacked as query rows of that head. */
typedef struct {
    const element *q;  /* [queries, heads * group, dim] */
    const char *keys;  /* [count, heads, dim] of elements, ``stride`` bytes from one row to the next */
    const char *values; /* [count, heads, value_dim], with the same stride */
    void *work;        /* host_attention_work bytes, aligned to 64 */
    element *out;      /* [queries, heads * group, value_dim] */
    float *lse;        /* [queries, heads * group], log-sum-exps (natural logarithm) */
    int64_t count, stride;
    int32_t heads, group, queries, dim, value_dim, threads;
    float scale; /* factor on the scores */
} Request;

/* A request and values that are computed from it. */
typedef struct {
    const Request *request;
    int tiles;      /* tiles of query rows per KV head */
    int run, block; /* rows per task, and per block */
    float scale;    /* for exponentials in base 2 */
    packed *q;      /* [heads], results of pack_queries */
    char *scratch;  /* [threads] */
    int64_t runs, groups; /* groups of heads */
    float *states;  /* [runs, heads], each outputs, maxima and sums */
} Job;

/* Returns the index of query row ``row`` of a KV head in [queries, heads * group]. */
static inline int64_t query_index(const Request *request, int head, int row) {
    return ((int64_t)(row % request->queries) * request->heads + head) * request->group + row / request->queries;
}

/* Packs the query rows of a KV head, one chunk of tiles after another. */
static void pack_queries(const Request *request, int head, packed *out) {
    const int count = request->queries * request->group, dim = request->dim, tiles = (count + TILE - 1) / TILE;
    for (int first = 0; first < tiles; first += CHUNK, out += CHUNK * TILE * dim) {
        const element *queries[CHUNK * TILE];
        for (int i = 0; i < CHUNK * TILE; i++) {
            const int row = first * TILE + i;
            queries[i] = row < count ? request->q + query_index(request, head, row) * dim : NULL;
        }
        pack_chunk(queries, min_of(CHUNK, tiles - first), dim, out);
    }
}

/* Returns the heads of a task, at most as many as fill a memory page of keys, so that its lines are read in order. */
static int heads_per_task(int tiles, int dim, int value_dim) {
    int heads = PAGE / (dim * sizeof(element));
    while (heads > 1 && heads * tiles * TILE * value_dim * sizeof(float) > STATES)
        heads /= 2;
    return heads;
}

/* Returns the rows of a task. Longer runs write and merge fewer states, and more tasks balance the load better. The
 * number depends only on the shape, so that the number of threads does not change results. */
static int rows_per_task(int64_t count, int heads, int tiles, int dim, int value_dim) {
    const int group = heads_per_task(tiles, dim, value_dim), groups = (heads + group - 1) / group;
    const int64_t blocks = (count * groups / TASKS + BLOCK - 1) / BLOCK;
    return blocks < 2 ? 2 * BLOCK : min_of(blocks * BLOCK, RUN);
}

static State task_state(const Job *job, int64_t run, int head) {
    const int64_t queries = job->tiles * TILE, value_dim = job->request->value_dim;
    float *out = job->states + (run * job->request->heads + head) * queries * (value_dim + 2);
    return (State){out, out + queries * value_dim, out + queries * (value_dim + 1)};
}

/* Computes the attention of one head's queries to at most a block of rows, from ``row`` on. */
static void attend_block(const Job *job, int64_t run, int64_t row, int rows, int head, Scratch *scratch) {
    const Request *request = job->request;
    const int dim = request->dim, value_dim = request->value_dim;
    const char *keys = request->keys + row * request->stride + head * dim * sizeof(element);
    const char *values = request->values + row * request->stride + head * value_dim * sizeof(element);
    const State state = task_state(job, run, head);
    begin_block(keys, values, request->stride, rows, dim, value_dim, scratch);
    for (int tile = 0; tile < job->tiles; tile += CHUNK) {
        const int64_t index = tile * TILE;
        const State part = {state.out + index * value_dim, state.max + index, state.sum + index};
        const packed *q = job->q + ((int64_t)head * job->tiles * TILE + index) * dim;
        add_block(keys, request->stride, rows, q, min_of(CHUNK, job->tiles - tile), dim, value_dim, job->scale, part,
                  scratch);
    }
}

/* Computes a task: a run of rows for heads ``first`` to ``last`` (exclusive). */
static void attend_run(const Job *job, int64_t run, int first, int last, Scratch *scratch) {
    const Request *request = job->request;
    const int64_t begin = run * job->run, end = min_of(begin + job->run, request->count);
    const int queries = job->tiles * TILE, chunks = (job->tiles + CHUNK - 1) / CHUNK;
    const int width = request->dim * sizeof(element), value_width = request->value_dim * sizeof(element);
    for (int head = first; head < last; head++) {
        State state = task_state(job, run, head);
        memset(state.out, 0, (int64_t)queries * (request->value_dim + 2) * sizeof(float));
        for (int query = 0; query < queries; query++)
            state.max[query] = NO_MAX;
    }
    for (int64_t row = begin; row < end; row += job->block)
        for (int head = first; head < last; head++) {
            /* The next block to prefetch is the next head's, or the first head's next rows. */
            const int same_rows = head + 1 < last, next_head = same_rows ? head + 1 : first;
            const int64_t next = same_rows ? row : row + job->block;
            const int rows = min_of(job->block, end - row);
            scratch->prefetcher = (Prefetcher){.keys = request->keys + next * request->stride + next_head * width,
                                               .values = request->values + next * request->stride +
                                                         next_head * value_width,
                                               .stride = request->stride,
                                               .left = next < end ? min_of(job->block, end - next) : 0,
                                               .width = width,
                                               .value_width = value_width,
                                               .share = (rows * (width + value_width) / LINE + chunks - 1) / chunks};
            attend_block(job, run, row, rows, head, scratch);
        }
}

/* Merges the states of all runs for one query row. Without runs, outputs are 0 and the log-sum-exp is -inf. */
static void merge(const Job *job, int64_t runs, int head, int row) {
    const int value_dim = job->request->value_dim;
    float total[MAX_DIM] = {0}, max = NO_MAX, sum = 0;
    for (int64_t run = 0; run < runs; run++)
        max = fmaxf(max, task_state(job, run, head).max[row]);
    for (int64_t run = 0; run < runs; run++) {
        const State state = task_state(job, run, head);
        const float factor = exp2f(job->scale * (state.max[row] - max));
        sum += factor * state.sum[row];
        add_query(state.out, row, value_dim, factor, total);
    }
    const int64_t index = query_index(job->request, head, row);
    for (int d = 0; d < value_dim; d++)
        job->request->out[index * value_dim + d] = runs ? round_to_element(total[d] / sum) : 0;
    job->request->lse[index] = runs ? (job->scale * max + log2f(sum)) * (float)M_LN2 : -INFINITY;
}

/* Must be called first, once per process; returns 0, or the system's error number. */
int host_attention_init(void) { return ask_system(); }

/* Returns the bytes of ``work`` of a request; ``rows`` is the number of query rows of a KV head (queries * group). */
int64_t host_attention_work(int64_t count, int heads, int rows, int dim, int value_dim, int threads) {
    const int tiles = (rows + TILE - 1) / TILE, run = rows_per_task(count, heads, tiles, dim, value_dim);
    const int64_t runs = (count + run - 1) / run;
    return threads * scratch_bytes(dim, value_dim) +
           (int64_t)heads * tiles * TILE * (dim * sizeof(packed) + runs * (value_dim + 2) * sizeof(float));
}

static void pack_task(const void *argument, int64_t head, int64_t worker) {
    const Job *job = argument;
    pack_queries(job->request, head, job->q + head * job->tiles * TILE * job->request->dim);
}

static void attend_task(const void *argument, int64_t number, int64_t worker) {
    const Job *job = argument;
    const Request *request = job->request;
    const int dim = request->dim, value_dim = request->value_dim;
    const int group = heads_per_task(job->tiles, dim, value_dim), first = number % job->groups * group;
    Scratch scratch = scratch_of(job->scratch + worker * scratch_bytes(dim, value_dim), dim, value_dim);
    begin_tiles();
    attend_run(job, number / job->groups, first, min_of(first + group, request->heads), &scratch);
    end_tiles();
}

static void merge_task(const void *argument, int64_t head, int64_t worker) {
    const Job *job = argument;
    for (int row = 0; row < job->request->queries * job->request->group; row++)
        merge(job, job->runs, head, row);
}

/* Computes a Request: dim and value_dim are multiples of 32 up to MAX_DIM, and count may be 0. It cannot fail and calls
 * no CUDA function, so that it can be a host function of a CUDA stream. */
void host_attention(void *argument) {
    const Request *request = argument;
    const int heads = request->heads, dim = request->dim, value_dim = request->value_dim, rows = request->queries * request->group;
    const int tiles = (rows + TILE - 1) / TILE, group = heads_per_task(tiles, dim, value_dim);
    const int run = rows_per_task(request->count, heads, tiles, dim, value_dim);
    const int64_t runs = (request->count + run - 1) / run, groups = (heads + group - 1) / group;
    const int64_t packed_queries = (int64_t)tiles * TILE * dim, scratch_size = scratch_bytes(dim, value_dim);
    packed *q = (packed *)((char *)request->work + request->threads * scratch_size);
    const Job job = {.request = request, .tiles = tiles, .run = run, .block = block_of(tiles),
                     .scale = request->scale * (float)M_LOG2E, .q = q, .states = (float *)(q + heads * packed_queries),
                     .scratch = request->work, .runs = runs, .groups = groups};
    share(pack_task, &job, heads, request->threads);
    share(attend_task, &job, runs * groups, request->threads);
    share(merge_task, &job, heads, request->threads);
}
