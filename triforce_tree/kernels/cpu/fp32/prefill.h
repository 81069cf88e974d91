/* Causal attention of many queries, the tokens of a prompt.
 *
 * The elements of a vector are different query rows. So the products with keys and values broadcast their elements as
 * they are stored, and the softmax needs no sum over a vector. A task is a few panels of query rows (tokens times query
 * heads of the group) of one KV head, which read each block of keys and values together. All sums are in the order of
 * positions, so the output of a query does not depend on other queries, bit for bit. */

enum {
#ifdef __AVX512F__
    ACROSS = 4, /* vectors of a panel */
#else
    ACROSS = 2,
#endif
    DOWN = 6,               /* rows of a tile, whose sums are in registers */
    PANEL = ACROSS * LANES, /* query rows of a panel */
    MOST_PANELS = 4,        /* of a task */
    TOGETHER = 96,            /* positions whose scores are computed together */
};

typedef struct {
    char *work;
    int64_t work_bytes;
    const float *q; /* [batch, heads * group, queries, dim], dim dense */
    int64_t q_batch, q_head, q_token; /* elements */
    const float *keys, *values;       /* [batch, heads, positions, dim], dim dense */
    int64_t k_batch, k_head, k_slot, v_batch, v_head, v_slot;
    float *out; /* [batch, queries, heads * group, value_dim], dense */
    int64_t batch, heads, group, queries, positions, dim, value_dim;
    int64_t window; /* positions that a query sees; 0 for all up to its own */
    int64_t threads;
    double scale;
} PrefillRequest;

/* The query rows of a panel. */
typedef struct {
    float *q;              /* [dim, PANEL], scaled */
    float *out;            /* [value_dim, PANEL] */
    float *most, *sum;     /* [PANEL], maximum and sum of the softmax */
    int64_t first[PANEL], last[PANEL]; /* positions that a row sees; both ascend */
} Panel;

/* Adds the product of a tile of A, whose elements are a_row and a_column floats apart, and b [depth, PANEL] to c
 * [rows, PANEL], or sets c to it. */
INLINE void multiply_tile(const float *a, int64_t a_row, int64_t a_column, const float *b, int64_t depth, float *c,
                          int rows, int adds) {
    vec sums[DOWN][ACROSS];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int i = 0; i < ACROSS; i++)
            sums[m][i] = adds ? load(c + m * PANEL + i * LANES) : broadcast(0);
    for (int64_t k = 0; k < depth; k++) {
        vec right[ACROSS];
#pragma GCC unroll 8
        for (int i = 0; i < ACROSS; i++)
            right[i] = load(b + k * PANEL + i * LANES);
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            const vec left = broadcast(a[m * a_row + k * a_column]);
#pragma GCC unroll 8
            for (int i = 0; i < ACROSS; i++)
                sums[m][i] = fmadd(left, right[i], sums[m][i]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int i = 0; i < ACROSS; i++)
            store(c + m * PANEL + i * LANES, sums[m][i]);
}

/* Calls multiply_tile for all rows of A. */
INLINE void multiply_panel(const float *a, int64_t a_row, int64_t a_column, const float *b, int64_t depth, float *c,
                           int64_t rows, int adds) {
    for (int64_t m = 0; m < rows; m += DOWN) {
        const float *from = a + m * a_row;
        float *to = c + m * PANEL;
        switch (min_of(DOWN, rows - m)) {
        case 1: multiply_tile(from, a_row, a_column, b, depth, to, 1, adds); break;
        case 2: multiply_tile(from, a_row, a_column, b, depth, to, 2, adds); break;
        case 3: multiply_tile(from, a_row, a_column, b, depth, to, 3, adds); break;
        case 4: multiply_tile(from, a_row, a_column, b, depth, to, 4, adds); break;
        case 5: multiply_tile(from, a_row, a_column, b, depth, to, 5, adds); break;
        default: multiply_tile(from, a_row, a_column, b, depth, to, DOWN, adds);
        }
    }
}

/* Sets the scores of positions that a row does not see to -inf. */
static void hide(const Panel *panel, float *scores, int64_t from, int64_t count) {
    for (int64_t n = 0; n < count; n++)
        for (int64_t row = 0; row < PANEL; row++)
            if (from + n < panel->first[row] || from + n > panel->last[row])
                scores[n * PANEL + row] = -INFINITY;
}

/* Turns the scores [count, PANEL] of a block into probabilities, updates maxima and sums, and rescales outputs. */
static void softmax_panel(const Panel *panel, float *scores, int64_t count, int64_t value_dim, int hidden) {
    for (int64_t at = 0; at < PANEL; at += LANES) {
        const vec old = load(panel->most + at);
        vec now = old, total = broadcast(0);
        for (int64_t n = 0; n < count; n++)
            now = max_of(load(scores + n * PANEL + at), now);
        const int changed = any_above(now - old, 0);
        for (int64_t n = 0; n < count; n++) {
            float *score = scores + n * PANEL + at;
            vec prob = exp_of(load(score) - now);
            if (hidden)
                prob = unless_equal(load(score), broadcast(-INFINITY), broadcast(0), prob);
            store(score, prob);
            total += prob;
        }
        if (changed) {
            const vec factor = exp_of(old - now);
            total = fmadd(load(panel->sum + at), factor, total);
            store(panel->most + at, now);
            for (int64_t d = 0; d < value_dim; d++)
                store(panel->out + d * PANEL + at, load(panel->out + d * PANEL + at) * factor);
        } else
            total += load(panel->sum + at);
        store(panel->sum + at, total);
    }
}

/* Fills a panel with the query rows of a KV head from ``row`` on. Rows behind the last one are copies of it. */
static void begin_panel(const PrefillRequest *request, Panel *panel, int64_t b, int64_t head, int64_t row) {
    const int64_t rows = request->queries * request->group, dim = request->dim;
    for (int64_t i = 0; i < PANEL; i++) {
        const int64_t own = min_of(row + i, rows - 1), token = own / request->group;
        const int64_t query_head = head * request->group + own % request->group;
        const float *from = request->q + b * request->q_batch + query_head * request->q_head + token * request->q_token;
        for (int64_t d = 0; d < dim; d++)
            panel->q[d * PANEL + i] = from[d] * (float)request->scale;
        const int64_t last = request->positions - request->queries + token;
        const int64_t first = request->window && last >= request->window ? last - request->window + 1 : 0;
        panel->first[i] = first, panel->last[i] = last;
        panel->most[i] = NO_MAX, panel->sum[i] = 0;
    }
    memset(panel->out, 0, request->value_dim * PANEL * sizeof(float));
}

static void end_panel(const PrefillRequest *request, const Panel *panel, int64_t b, int64_t head, int64_t row) {
    const int64_t rows = request->queries * request->group, heads = request->heads * request->group;
    for (int64_t i = 0; i < min_of(PANEL, rows - row); i++) {
        const int64_t token = (row + i) / request->group, query_head = head * request->group + (row + i) % request->group;
        float *out = request->out + ((b * request->queries + token) * heads + query_head) * request->value_dim;
        for (int64_t d = 0; d < request->value_dim; d++)
            out[d] = panel->out[d * PANEL + i] / panel->sum[i];
    }
}

typedef struct {
    const PrefillRequest *request;
    int64_t panels, parts; /* panels of a task, tasks of a KV head */
    int64_t scratch;       /* floats of a thread */
    float *memory;
} PrefillWork;

static void prefill_task(const void *argument, int64_t number, int64_t worker) {
    const PrefillWork *work = argument;
    const PrefillRequest *request = work->request;
    const int64_t dim = request->dim, value_dim = request->value_dim, rows = request->queries * request->group;
    const int64_t b = number / work->parts / request->heads, head = number / work->parts % request->heads;
    const int64_t row = number % work->parts * work->panels * PANEL;
    const int64_t panels = min_of(work->panels, (rows - row + PANEL - 1) / PANEL);
    float *scores = work->memory + worker * work->scratch, *next = scores + TOGETHER * PANEL;
    Panel panel[MOST_PANELS];
    for (int64_t i = 0; i < panels; i++) {
        Panel *own = &panel[i];
        own->q = next, own->out = own->q + dim * PANEL, own->most = own->out + value_dim * PANEL;
        own->sum = own->most + PANEL, next = own->sum + PANEL;
        begin_panel(request, own, b, head, row + i * PANEL);
    }
    const int64_t begin = panel[0].first[0], end = panel[panels - 1].last[PANEL - 1] + 1;
    const float *keys = request->keys + b * request->k_batch + head * request->k_head;
    const float *values = request->values + b * request->v_batch + head * request->v_head;
    for (int64_t from = begin / TOGETHER * TOGETHER; from < end; from += TOGETHER)
        for (int64_t i = 0; i < panels; i++) {
            const Panel *own = &panel[i];
            const int64_t count = min_of(TOGETHER, own->last[PANEL - 1] + 1 - from);
            if (count <= 0 || from + count <= own->first[0])
                continue;
            multiply_panel(keys + from * request->k_slot, request->k_slot, 1, own->q, dim, scores, count, 0);
            const int hidden = from < own->first[PANEL - 1] || from + count > own->last[0] + 1;
            if (hidden)
                hide(own, scores, from, count);
            softmax_panel(own, scores, count, value_dim, hidden);
            multiply_panel(values + from * request->v_slot, 1, request->v_slot, scores, count, own->out, value_dim, 1);
        }
    for (int64_t i = 0; i < panels; i++)
        end_panel(request, &panel[i], b, head, row + i * PANEL);
}

/* Returns the bytes that ``work`` needs if it has less, else 0 after computing the result. */
int64_t prefill_attention(const void *argument) {
    const PrefillRequest *request = argument;
    const int64_t all = (request->queries * request->group + PANEL - 1) / PANEL, heads = request->batch * request->heads;
    /* A thread gets several tasks. */
    const int64_t most = all * heads / (PARTS * request->threads), panels = min_of(MOST_PANELS, most > 1 ? most : 1);
    const int64_t parts = (all + panels - 1) / panels;
    const int64_t scratch = PANEL * (TOGETHER + MOST_PANELS * (request->dim + request->value_dim + 2));
    const int64_t needed = request->threads * scratch * sizeof(float) + LINE;
    if (request->work_bytes < needed)
        return needed;
    float *memory = (float *)(((intptr_t)request->work + LINE - 1) / LINE * LINE);
    const PrefillWork work = {request, panels, parts, scratch, memory};
    share(prefill_task, &work, heads * parts, request->threads);
    return 0;
}
