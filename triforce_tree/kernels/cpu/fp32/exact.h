/* Attention whose bits do not depend on where the keys that a query sees are stored, nor on the other queries.
 *
 * The keys that a query sees have positions 0, 1, ... Keys before the tail are in the slots of their positions. Keys of
 * the tail (ancestors and the query's own key) are in any slots of ascending order. All sums are in the order of
 * positions: runs begin at multiples of RUN, the probabilities of a run are summed in LANES sums by position modulo
 * LANES, and values one by one. A hidden key adds 0 * v or 0 to a sum, which does not change it.
 */

typedef struct {
    char *work;
    int64_t work_bytes;
    const float *q;                   /* [batch, tokens, heads * group, dim], dense, scaled */
    const char *keys, *values;        /* as in AttentionRequest; strides in elements of ``kind`` */
    int64_t k_outer, k_head, k_slot, v_outer, v_head, v_slot;
    const int32_t *table;
    int64_t table_batch, table_head, page;
    const int32_t *lengths;           /* [batch], positions before the tail */
    const int64_t *mask;              /* [batch, planned, words], tail slots that queries see without a window */
    int64_t words, planned, tail;     /* planned: queries of a sequence, of which ``tokens`` are given; tail: slots */
    const float *sinks;
    float *out;                       /* [batch, tokens, heads * group, value_dim], dense */
    int64_t batch, tokens, heads, group, dim, value_dim, threads, kind;
    int64_t window, chunked;          /* positions that a query sees, 0 for all; whether the window does not slide */
    double softcap;
} ExactRequest;

static inline int bit_of(const int64_t *words, int64_t bit) { return words[bit / 64] >> bit % 64 & 1; }

/* Returns how many tail slots before ``slot`` a query sees, the position of the slot's key within the tail. */
static int64_t seen_before(const int64_t *words, int64_t slot) {
    int64_t count = 0;
    for (int64_t w = 0; w < slot / 64; w++)
        count += __builtin_popcountll(words[w]);
    return slot % 64 ? count + __builtin_popcountll(words[slot / 64] & ((1ull << slot % 64) - 1)) : count;
}

static int64_t first_seen(const ExactRequest *request, int64_t position) {
    if (!request->window)
        return 0;
    const int64_t first = request->chunked ? position / request->window * request->window : position - request->window + 1;
    return first > 0 ? first : 0;
}

static const char *slot_of(const ExactRequest *request, const char *base, int64_t outer_stride, int64_t head_stride,
                           int64_t slot_stride, int64_t b, int64_t head, int64_t slot) {
    int64_t outer = b;
    if (request->table) {
        outer = request->table[b * request->table_batch + head * request->table_head + slot / request->page];
        slot %= request->page;
    }
    return base + (outer * outer_stride + head * head_stride + slot * slot_stride) * element_bytes(request->kind);
}

static float element_at(const char *at, int kind) {
    float lanes[LANES];
    store(lanes, load_part(at, kind, 1));
    return lanes[0];
}

/* Adds probs[n] * values[n] to out, one n after another, for one or four vectors of the output at a time. */
INLINE void weighted(const char *const *values, int count, const float *probs, float *out, int64_t at, int wide,
                     int kind) {
    vec sums[4];
#pragma GCC unroll 4
    for (int i = 0; i < wide; i++)
        sums[i] = load(out + at + i * LANES);
    for (int n = 0; n < count; n++) {
        if (!values[n])
            continue;
        const vec prob = broadcast(probs[n]);
        const char *value = values[n] + at * element_bytes(kind);
#pragma GCC unroll 4
        for (int i = 0; i < wide; i++)
            sums[i] = fmadd(prob, load_as(value + i * LANES * element_bytes(kind), kind), sums[i]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < wide; i++)
        store(out + at + i * LANES, sums[i]);
}

INLINE void weighted_values(const char *const *values, int count, const float *probs, float *out, int64_t dim,
                            int kind) {
    int64_t at = 0;
    for (; at + 4 * LANES <= dim; at += 4 * LANES)
        weighted(values, count, probs, out, at, 4, kind);
    for (; at + LANES <= dim; at += LANES)
        weighted(values, count, probs, out, at, 1, kind);
    for (; at < dim; at++)
        for (int n = 0; n < count; n++)
            if (values[n])
                out[at] = fmaf(probs[n], element_at(values[n] + at * element_bytes(kind), kind), out[at]);
}

/* Computes one run of positions of a sequence and KV head. ``state`` is [rows] outputs, then STATE floats each. */
INLINE void exact_run(const ExactRequest *request, int64_t b, int64_t head, int64_t run, float *state, float *scratch,
                      int kind) {
    const int64_t dim = request->dim, value_dim = request->value_dim, rows = request->tokens * request->group;
    const int64_t length = request->lengths[b], begin = run * RUN, end = begin + RUN;
    const int64_t *masks = request->mask + b * request->planned * request->words;
    const int64_t before = min_of(end, length) > begin ? min_of(end, length) - begin : 0;
    const int64_t tail = end > length ? request->tail : 0, count = before + tail;
    /* ``least`` is the first position that any query sees; slots before it may hold any value. */
    int64_t least = INT64_MAX;
    for (int64_t t = 0; t < request->tokens; t++) {
        const int64_t *words = masks + t * request->words;
        least = min_of(least, first_seen(request, length + seen_before(words, request->tail) - 1));
    }
    const int64_t skipped = least > begin ? min_of(least - begin, before) : 0;
    float *states = state + rows * value_dim, *q = scratch, *scores = scratch + rows * dim;
    const int64_t columns = RUN + request->tail;
    const char *keys[columns], *values[columns];
    for (int64_t n = skipped; n < count; n++) {
        const int64_t slot = n < before ? begin + n : length + n - before;
        keys[n] = slot_of(request, request->keys, request->k_outer, request->k_head, request->k_slot, b, head, slot);
        values[n] = slot_of(request, request->values, request->v_outer, request->v_head, request->v_slot, b, head, slot);
    }
    for (int64_t n = 0; n < skipped; n++)
        keys[n] = values[n] = NULL;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = row / request->group, query_head = head * request->group + row % request->group;
        const int64_t heads = request->heads * request->group;
        memcpy(q + row * dim, request->q + ((b * request->tokens + token) * heads + query_head) * dim,
               dim * sizeof(float));
    }
    memset(state, 0, rows * value_dim * sizeof(float));
    const int64_t together = equal_parts(rows, MOST_LEFT);
    for (int64_t n = skipped; n < count;) {
        const int right = count - n >= RIGHT ? RIGHT : 1;
        for (int64_t m = 0; m < rows; m += together) {
            const int left = min_of(together, rows - m);
            if (right == RIGHT)
                dots_of(keys + n, NULL, kind, RIGHT, q + m * dim, dim, left, dim, scores + m * columns + n, columns);
            else
                dots_of(keys + n, NULL, kind, 1, q + m * dim, dim, left, dim, scores + m * columns + n, columns);
        }
        n += right;
    }
    for (int64_t row = 0; row < rows; row++) {
        float *own = scores + row * columns, most = -INFINITY, lanes[LANES] = {0};
        const int64_t *words = masks + row / request->group * request->words;
        const int64_t position = length + seen_before(words, request->tail) - 1;
        const int64_t first = first_seen(request, position);
        const char *seen[columns];
        int64_t rank = 0, at[columns];
        for (int64_t n = 0; n < count; n++) {
            const int in_tail = n >= before, there = !in_tail || bit_of(words, n - before);
            at[n] = in_tail ? length + rank : begin + n;
            rank += in_tail && there;
            const int visible = n >= skipped && there && at[n] >= first && at[n] >= begin && at[n] < end;
            seen[n] = visible ? values[n] : NULL;
            if (visible && request->softcap)
                own[n] = (float)request->softcap * tanhf(own[n] / (float)request->softcap);
            if (!visible)
                own[n] = -INFINITY;
            most = fmaxf(most, own[n]);
        }
        float *row_state = states + row * STATE;
        row_state[0] = most, row_state[1] = 0;
        if (most == -INFINITY)
            continue;
        for (int64_t n = 0; n < count; n += LANES) {
            float part[LANES];
            const int some = min_of(LANES, count - n);
            memcpy(part, own + n, some * sizeof(float));
            for (int i = some; i < LANES; i++)
                part[i] = -INFINITY;
            const vec score = load(part);
            store(part, unless_equal(score, broadcast(-INFINITY), broadcast(0), exp_of(score - broadcast(most))));
            memcpy(own + n, part, some * sizeof(float));
        }
        for (int64_t n = 0; n < count; n++)
            if (seen[n])
                lanes[at[n] % LANES] += own[n];
        row_state[1] = sum_of(load(lanes));
        weighted_values(seen, count, own, state + row * value_dim, value_dim, kind);
    }
}

static void exact_task(const void *argument, int64_t b, int64_t head, int64_t run, float *state, float *scratch) {
    const ExactRequest *request = argument;
    switch (request->kind) {
    case FLOAT32: return exact_run(request, b, head, run, state, scratch, FLOAT32);
    case BFLOAT16: return exact_run(request, b, head, run, state, scratch, BFLOAT16);
    case HALF: return exact_run(request, b, head, run, state, scratch, HALF);
    }
}

/* Merges the runs of one query row in their order. */
static void exact_merge(const void *argument, const float *states, int64_t runs, int64_t apart, int64_t row,
                        int64_t query_head, int64_t at) {
    const ExactRequest *request = argument;
    const int64_t dim = request->value_dim, rows = request->tokens * request->group;
    const float sink = request->sinks ? request->sinks[query_head] : -INFINITY;
    float most = sink, *out = request->out + at * dim;
    for (int64_t run = 0; run < runs; run++)
        most = fmaxf(most, states[run * apart + rows * dim + row * STATE]);
    memset(out, 0, dim * sizeof(float));
    if (most == -INFINITY)
        return;
    float sum = expf(sink - most);
    for (int64_t run = 0; run < runs; run++) {
        const float *state = states + run * apart, *own = state + rows * dim + row * STATE;
        if (own[0] == -INFINITY)
            continue;
        const float factor = expf(own[0] - most);
        sum = fmaf(factor, own[1], sum);
        for (int64_t d = 0; d < dim; d++)
            out[d] = fmaf(factor, state[row * dim + d], out[d]);
    }
    for (int64_t d = 0; d < dim; d++)
        out[d] /= sum;
}

/* Returns the bytes that ``work`` needs if it has less, else 0 after computing the result. */
int64_t exact_attention(const void *argument) {
    const ExactRequest *request = argument;
    const int64_t rows = request->tokens * request->group;
    int64_t runs[request->batch];
    for (int64_t b = 0; b < request->batch; b++)
        runs[b] = (request->lengths[b] + request->tail + RUN - 1) / RUN;
    const Tasks tasks = {request, request->batch, request->heads, request->group, request->tokens, request->threads,
                         runs, rows * (request->value_dim + STATE), rows * (request->dim + RUN + request->tail),
                         request->work, request->work_bytes, exact_task, exact_merge};
    return run_tasks(&tasks);
}
