/* Attention of the tokens of a pass to the KV slots of their sequences, under the mask of a token tree.
 *
 * A task is a run of positions of one sequence and KV head, for all query rows (tokens times query heads of the group).
 * Runs begin at multiples of RUN and are merged in order. So the output of a query depends neither on the number of
 * threads nor on other queries, bit for bit.
 */

enum {
    BLOCK = 64,     /* positions whose scores are computed together */
#ifdef __AVX512F__
    WIDE = 8, FEW = 3, NARROW = 4, MANY = 6, /* vectors of an output, and rows, that are summed in registers */
#else
    WIDE = 4, FEW = 2, NARROW = 2, MANY = 4,
#endif
};

typedef struct {
    char *work;
    int64_t work_bytes;
    const float *q;              /* [batch, heads * group, tokens, dim], dim dense */
    int64_t q_batch, q_head, q_token; /* elements */
    const float *keys, *values;  /* [batch, heads, slots, dim], or pages [pages, heads, page, dim]; dim dense */
    int64_t k_outer, k_head, k_slot, v_outer, v_head, v_slot; /* elements; outer: between sequences or pages */
    const int32_t *table;        /* [batch, heads, pages], or NULL */
    int64_t table_batch, table_head, page;
    const int32_t *lengths, *segments; /* [batch] and [6, batch], of the plan */
    const int64_t *mask;         /* [planned, words] */
    int64_t words;
    const int32_t *first, *low, *high; /* first visible positions of queries, their minimum and maximum; or NULL */
    const float *sinks;          /* [heads * group], or NULL */
    float *out;                  /* [batch, tokens, heads * group, value_dim], dense */
    float *lse;                  /* [batch, tokens, heads * group], log-sum-exps (natural logarithm); or NULL */
    int64_t batch, tokens, heads, group, dim, value_dim, threads;
    double scale, softcap;       /* softcap is 0 for none */
} AttentionRequest;

/* One sequence of a request. */
typedef struct {
    int64_t length, end, start, first_query, runs; /* positions before the tail, all, first to read */
    int64_t first_kv;                              /* of the table or of the slots: position 0 */
} Sequence;

static Sequence sequence_of(const AttentionRequest *request, int64_t b) {
    const int64_t batch = request->batch, tails = request->segments[2 * batch + b];
    const int64_t planned = request->segments[4 * batch + b], length = request->lengths[b];
    /* Each planned query that the call leaves out also shortens the tail. */
    const int64_t end = length + tails - planned + request->tokens;
    const int64_t start = request->low ? request->low[b] : 0;
    const int64_t runs = (end + RUN - 1) / RUN - start / RUN;
    return (Sequence){length, end, start, request->segments[3 * batch + b], runs, request->segments[batch + b]};
}

/* Finds the addresses of the keys and values of ``count`` positions from ``from`` on. */
static void find_rows(const AttentionRequest *request, const Sequence *sequence, int64_t b, int64_t head, int64_t from,
                      int count, const char **keys, const char **values) {
    const float *k = request->keys + head * request->k_head, *v = request->values + head * request->v_head;
    int64_t outer = b, slot = sequence->first_kv + from, left = count;
    const int32_t *next = NULL;
    if (request->table) {
        next = request->table + b * request->table_batch + head * request->table_head + slot / request->page;
        slot %= request->page;
        left = 0;
    }
    for (int i = 0; i < count; i++, slot++, left--) {
        if (next && left <= 0) {
            outer = *next++;
            slot = i ? 0 : slot;
            left = request->page - slot;
        }
        keys[i] = (const char *)(k + outer * request->k_outer + slot * request->k_slot);
        values[i] = (const char *)(v + outer * request->v_outer + slot * request->v_slot);
    }
}

/* Returns whether the query of planned index ``query`` sees a position. */
static inline int sees(const AttentionRequest *request, const Sequence *sequence, int64_t query, int64_t position) {
    if (request->first && position < request->first[query])
        return 0;
    const int64_t bit = position - sequence->length;
    return bit < 0 || (request->mask[query * request->words + bit / 64] >> bit % 64 & 1);
}

/* Adds probs [rows, BLOCK] values [count, dim] to out [rows, dim], for ``wide`` vectors and ``rows`` in registers. */
INLINE void add_tile(const char *const *values, const char *const *ahead, int count, const float *probs, float *out,
                     int64_t out_row, int64_t at, int wide, int rows) {
    vec sums[MANY][WIDE];
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int i = 0; i < wide; i++)
            sums[m][i] = load(out + m * out_row + at + i * LANES);
    for (int n = 0; n < count; n++) {
        const float *value = (const float *)values[n] + at;
        vec parts[WIDE];
#pragma GCC unroll 8
        for (int i = 0; i < wide; i++) {
            parts[i] = load(value + i * LANES);
            if (ahead)
                _mm_prefetch(ahead[n] + (at + i * LANES) * sizeof(float), _MM_HINT_T1);
        }
#pragma GCC unroll 8
        for (int m = 0; m < rows; m++) {
            const vec prob = broadcast(probs[m * BLOCK + n]);
#pragma GCC unroll 8
            for (int i = 0; i < wide; i++)
                sums[m][i] = fmadd(prob, parts[i], sums[m][i]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < rows; m++)
#pragma GCC unroll 8
        for (int i = 0; i < wide; i++)
            store(out + m * out_row + at + i * LANES, sums[m][i]);
}

/* Calls add_tile for any number of rows up to MANY. */
INLINE void add_columns(const char *const *values, const char *const *ahead, int count, const float *probs, float *out,
                        int64_t out_row, int64_t at, int wide, int rows) {
    switch (wide == WIDE && rows > FEW ? FEW : rows) {
    case 1: return add_tile(values, ahead, count, probs, out, out_row, at, wide, 1);
    case 2: return add_tile(values, ahead, count, probs, out, out_row, at, wide, 2);
    case 3: return add_tile(values, ahead, count, probs, out, out_row, at, wide, 3);
    case 4: return add_tile(values, ahead, count, probs, out, out_row, at, wide, 4);
#ifdef __AVX512F__
    case 5: return add_tile(values, ahead, count, probs, out, out_row, at, wide, 5);
    case 6: return add_tile(values, ahead, count, probs, out, out_row, at, wide, 6);
#endif
    }
}

static void add_values(const char *const *values, const char *const *ahead, int count, const float *probs, float *out,
                       int64_t rows, int64_t dim) {
    const int few = rows <= FEW, wide = few ? WIDE : NARROW, most = equal_parts(rows, few ? FEW : MANY);
    for (int64_t m = 0; m < rows; m += most) {
        const int together = min_of(most, rows - m);
        const char *const *next = m ? NULL : ahead;
        int64_t at = 0;
        for (; at + wide * LANES <= dim; at += wide * LANES)
            if (few)
                add_columns(values, next, count, probs + m * BLOCK, out + m * dim, dim, at, WIDE, together);
            else
                add_columns(values, next, count, probs + m * BLOCK, out + m * dim, dim, at, NARROW, together);
        for (; at < dim; at += LANES)
            add_columns(values, next, count, probs + m * BLOCK, out + m * dim, dim, at, 1, together);
    }
}

/* Turns the scores of a row's block into probabilities, updates its maximum and sum, and rescales its output. */
static void softmax_row(float *scores, int count, float *out, int64_t dim, float *state) {
    for (int n = count; n % LANES; n++)
        scores[n] = -INFINITY;
    vec most = broadcast(-INFINITY);
    for (int n = 0; n < count; n += LANES)
        most = max_of(load(scores + n), most);
    const float old = state[0], now = fmaxf(old, max_in(most));
    if (now == -INFINITY) {
        memset(scores, 0, BLOCK * sizeof(float));
        return;
    }
    if (now > old) {
        const float factor = expf(old - now);
        for (int64_t d = 0; d < dim; d += LANES)
            store(out + d, load(out + d) * broadcast(factor));
        state[0] = now;
        state[1] *= factor;
    }
    vec total = broadcast(0);
    for (int n = 0; n < count; n += LANES) {
        const vec score = load(scores + n);
        /* The probability is exactly 0 for a hidden position. */
        const vec prob = unless_equal(score, broadcast(-INFINITY), broadcast(0), exp_of(score - broadcast(now)));
        store(scores + n, prob);
        total += prob;
    }
    state[1] += sum_of(total);
}

/* Computes a task: run ``number`` of a sequence for one KV head. ``state`` has [rows] outputs, then STATE floats. */
static void attend_run(const void *argument, int64_t b, int64_t head, int64_t number, float *state, float *scratch) {
    const AttentionRequest *request = argument;
    const Sequence own = sequence_of(request, b), *sequence = &own;
    const int64_t run = own.start / RUN + number;
    const int64_t dim = request->dim, value_dim = request->value_dim, rows = request->tokens * request->group;
    const int64_t begin = run * RUN > sequence->start ? run * RUN : sequence->start;
    const int64_t stop = min_of((run + 1) * RUN, sequence->end);
    float *q = scratch, *scores = scratch + rows * dim, *states = state + rows * value_dim;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t token = row / request->group, query_head = head * request->group + row % request->group;
        const float *from = request->q + b * request->q_batch + query_head * request->q_head + token * request->q_token;
        for (int64_t d = 0; d < dim; d++)
            q[row * dim + d] = from[d] * (float)request->scale;
        states[row * STATE] = -INFINITY;
        states[row * STATE + 1] = 0;
    }
    memset(state, 0, rows * value_dim * sizeof(float));
    const char *keys[BLOCK], *values[BLOCK], *next_keys[BLOCK], *next_values[BLOCK];
    const int64_t together = equal_parts(rows, MOST_LEFT);
    int64_t from = begin;
    int count = min_of(BLOCK - from % BLOCK, stop - from);
    find_rows(request, sequence, b, head, from, count, keys, values);
    while (count > 0) {
        const int64_t next = from + count;
        const int next_count = min_of(BLOCK, stop - next);
        if (next_count > 0)
            find_rows(request, sequence, b, head, next, next_count, next_keys, next_values);
        for (int n = 0; n < count;) {
            const int right = count - n >= RIGHT ? RIGHT : 1;
            for (int64_t m = 0; m < rows; m += together) {
                const int left = min_of(together, rows - m);
                const char *const *ahead = m ? NULL : values + n;
                if (right == RIGHT)
                    dots_of(keys + n, ahead, FLOAT32, RIGHT, q + m * dim, dim, left, dim, scores + m * BLOCK + n, BLOCK);
                else
                    dots_of(keys + n, NULL, FLOAT32, 1, q + m * dim, dim, left, dim, scores + m * BLOCK + n, BLOCK);
            }
            n += right;
        }
        if (request->softcap)
            for (int64_t row = 0; row < rows; row++)
                for (int n = 0; n < count; n++) {
                    float *score = scores + row * BLOCK + n;
                    *score = (float)request->softcap * tanhf(*score / (float)request->softcap);
                }
        if (next > sequence->length || (request->first && from < request->high[b]))
            for (int64_t row = 0; row < rows; row++)
                for (int n = 0; n < count; n++)
                    if (!sees(request, sequence, sequence->first_query + row / request->group, from + n))
                        scores[row * BLOCK + n] = -INFINITY;
        for (int64_t row = 0; row < rows; row++)
            softmax_row(scores + row * BLOCK, count, state + row * value_dim, value_dim, states + row * STATE);
        add_values(values, next_count == count && dim >= value_dim ? next_keys : NULL, count, scores, state, rows,
                   value_dim);
        from = next, count = next_count;
        memcpy(keys, next_keys, sizeof keys);
        memcpy(values, next_values, sizeof values);
    }
}

/* Merges the states of a sequence and head for one query row. */
static void merge_row(const void *argument, const float *states, int64_t runs, int64_t apart, int64_t row,
                      int64_t query_head, int64_t at) {
    const AttentionRequest *request = argument;
    const int64_t value_dim = request->value_dim, rows = request->tokens * request->group;
    const float sink = request->sinks ? request->sinks[query_head] : -INFINITY;
    float most = sink, sum = 0, *out = request->out + at * value_dim;
    for (int64_t run = 0; run < runs; run++)
        most = fmaxf(most, states[run * apart + rows * value_dim + row * STATE]);
    if (most == -INFINITY) {
        memset(out, 0, value_dim * sizeof(float));
        if (request->lse)
            request->lse[at] = -INFINITY;
        return;
    }
    float factors[runs];
    sum = expf(sink - most);
    for (int64_t run = 0; run < runs; run++) {
        const float *state = states + run * apart + rows * value_dim + row * STATE;
        factors[run] = expf(state[0] - most);
        sum += factors[run] * state[1];
    }
    for (int64_t d = 0; d < value_dim; d += LANES) {
        vec total = broadcast(0);
        for (int64_t run = 0; run < runs; run++)
            total = fmadd(broadcast(factors[run]), load(states + run * apart + row * value_dim + d), total);
        store(out + d, total / broadcast(sum));
    }
    if (request->lse)
        request->lse[at] = most + logf(sum);
}

/* Returns the bytes that ``work`` needs if it has less, else 0 after computing the result. */
int64_t attention(const void *argument) {
    const AttentionRequest *request = argument;
    const int64_t rows = request->tokens * request->group;
    int64_t runs[request->batch];
    for (int64_t b = 0; b < request->batch; b++)
        runs[b] = sequence_of(request, b).runs;
    const Tasks tasks = {request, request->batch, request->heads, request->group, request->tokens, request->threads,
                         runs, rows * (request->value_dim + STATE), rows * (request->dim + BLOCK), request->work,
                         request->work_bytes, attend_run, merge_row};
    return run_tasks(&tasks);
}

/* Returns the slot of a position of sequence b, or -1 if there is none; see kernels/step/kv_slots.py. */
static inline int64_t written_slot(int64_t position, int64_t size, int64_t ring, const int32_t *table, int64_t b,
                                   int64_t pages, int64_t page) {
    if (ring)
        return position % ring;
    if (table) {
        if (position >= pages * page || table[b * pages + position / page] < 0)
            return -1;
        position = (int64_t)table[b * pages + position / page] * page + position % page;
    }
    return position < size ? position : -1;
}

typedef struct {
    const float *x;                   /* [batch, heads, tokens, dim], dim dense */
    int64_t x_batch, x_head, x_token; /* elements */
    float *slots;                     /* [batch, heads, size, dim], dim dense */
    int64_t to_batch, to_head, to_slot, dim;
} Appended;

typedef struct {
    Appended parts[2];    /* keys and values */
    const int64_t *start; /* [batch] */
    int64_t batch, heads, tokens, size, ring;
    const int32_t *table; /* [batch, pages], dense, or NULL */
    int64_t pages, page;
} AppendRequest;

/* Writes token t of sequence b to the slot of position start[b] + t, if there is one. */
void append(const void *argument) {
    const AppendRequest *request = argument;
    for (int part = 0; part < 2; part++) {
        const Appended *appended = &request->parts[part];
        for (int64_t b = 0; b < request->batch; b++)
            for (int64_t h = 0; h < request->heads; h++)
                for (int64_t t = 0; t < request->tokens; t++) {
                    const int64_t slot = written_slot(request->start[b] + t, request->size, request->ring,
                                                      request->table, b, request->pages, request->page);
                    if (slot < 0)
                        continue;
                    memcpy(appended->slots + b * appended->to_batch + h * appended->to_head + slot * appended->to_slot,
                           appended->x + b * appended->x_batch + h * appended->x_head + t * appended->x_token,
                           appended->dim * sizeof(float));
                }
    }
}
