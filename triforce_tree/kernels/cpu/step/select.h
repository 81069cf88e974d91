/* Selection of the context chunks that a retrieval view attends to; see kernels/step/select.py. */

typedef struct {
    char *work;
    int64_t work_bytes;
    const float *q;     /* [batch, heads * group, dim]; the last dimension of all tensors is dense */
    int64_t q_batch, q_head;
    const float *means; /* [batch, heads, chunks, columns], columns dim or 2 dim */
    int64_t means_batch, means_head, means_chunk;
    const int64_t *limit; /* [batch] */
    int32_t *table;       /* [batch, heads, ...] */
    int64_t table_batch, table_head;
    int64_t batch, heads, group, dim, columns, chunks, slots, threads;
    double scale, variance; /* factors on the scores, and on the squares of the queries */
} SelectRequest;

enum { SCORED = 256 }; /* chunks of a task */

/* Returns the element of rank ``rank``, descending from 0, of numbers without NaN, which it reorders. */
static float nth_largest(float *numbers, int64_t count, int64_t rank) {
    int64_t low = 0, high = count - 1;
    while (low < high) {
        const float pivot = numbers[low + (high - low) / 2];
        int64_t i = low, j = high;
        while (i <= j) {
            while (numbers[i] > pivot)
                i++;
            while (numbers[j] < pivot)
                j--;
            if (i <= j) {
                const float held = numbers[i];
                numbers[i++] = numbers[j], numbers[j--] = held;
            }
        }
        if (rank <= j)
            high = j;
        else if (rank >= i)
            low = i;
        else
            break;
    }
    return numbers[rank];
}

/* Computes the raw scores [group, chunks] of chunks ``begin`` to ``end`` of a head. */
static void score_chunks(const SelectRequest *request, int64_t b, int64_t head, int64_t begin, int64_t end,
                         const float *q, float *scores) {
    const float *means = request->means + b * request->means_batch + head * request->means_head;
    const int64_t together = equal_parts(request->group, MOST_LEFT), row = request->means_chunk;
    for (int64_t chunk = begin; chunk < end;) {
        const int right = end - chunk >= RIGHT ? RIGHT : 1;
        const char *at[RIGHT], *ahead[RIGHT];
        for (int i = 0; i < right; i++) {
            at[i] = (const char *)(means + (chunk + i) * row);
            ahead[i] = (const char *)(means + (chunk + i + 2 * RIGHT) * row);
        }
        for (int64_t m = 0; m < request->group; m += together) {
            const int left = min_of(together, request->group - m);
            float *to = scores + m * request->chunks + chunk;
            if (right == RIGHT)
                dots_of(at, m ? NULL : ahead, FLOAT32, RIGHT, q + m * request->columns, request->columns, left,
                        request->columns, to, request->chunks);
            else
                dots_of(at, NULL, FLOAT32, 1, q + m * request->columns, request->columns, left, request->columns, to,
                        request->chunks);
        }
        chunk += right;
    }
    for (int64_t m = 0; m < request->group; m++)
        for (int64_t chunk = begin; chunk < end; chunk++)
            scores[m * request->chunks + chunk] *= (float)request->scale;
}

/* Writes the group's score of each chunk to the first row: the largest log-softmax over its queries. */
static void join_group(float *scores, int64_t group, int64_t chunks, int64_t limit) {
    for (int64_t m = 0; m < group && group > 1; m++) {
        float *row = scores + m * chunks, most = -INFINITY, sum = 0;
        for (int64_t i = 0; i < limit; i++)
            most = fmaxf(most, row[i]);
        for (int64_t i = 0; i < limit; i++)
            sum += expf(row[i] - most);
        const float whole = most + logf(sum);
        for (int64_t i = 0; i < limit; i++) {
            row[i] -= whole;
            /* The comparisons keep NaN. */
            if (m && !(row[i] <= scores[i]) && scores[i] == scores[i])
                scores[i] = row[i];
        }
    }
    for (int64_t i = 0; i < limit; i++)
        scores[i] = scores[i] >= -FLT_MAX ? scores[i] : -FLT_MAX;
    scores[0] = INFINITY;
}

/* Returns the workspace of a KV head: queries [group, columns], scores [group, chunks] and a copy of one row. */
static float *head_work(const SelectRequest *request, int64_t each) {
    const int64_t own = request->group * (request->columns + request->chunks) + request->chunks;
    return (float *)(((intptr_t)request->work + LINE - 1) / LINE * LINE) + each * own;
}

static void widen_queries(const SelectRequest *request, int64_t each) {
    const int64_t b = each / request->heads, head = each % request->heads * request->group;
    for (int64_t m = 0; m < request->group; m++) {
        const float *q = request->q + b * request->q_batch + (head + m) * request->q_head;
        float *to = head_work(request, each) + m * request->columns;
        for (int64_t d = 0; d < request->dim; d++)
            to[d] = q[d];
        for (int64_t d = request->dim; d < request->columns; d++)
            to[d] = (float)request->variance * (q[d - request->dim] * q[d - request->dim]);
    }
}

static void score_task(const void *argument, int64_t number, int64_t worker) {
    const SelectRequest *request = argument;
    const int64_t parts = (request->chunks + SCORED - 1) / SCORED, each = number / parts, b = each / request->heads;
    const int64_t begin = number % parts * SCORED, end = min_of(begin + SCORED, request->limit[b]);
    float *queries = head_work(request, each);
    if (begin < end)
        score_chunks(request, b, each % request->heads, begin, end, queries, queries + request->group * request->columns);
}

static void choose_task(const void *argument, int64_t each, int64_t worker) {
    const SelectRequest *request = argument;
    const int64_t b = each / request->heads, limit = request->limit[b], slots = request->slots;
    float *scores = head_work(request, each) + request->group * request->columns;
    float *copy = scores + request->group * request->chunks;
    int32_t *table = request->table + b * request->table_batch + each % request->heads * request->table_head;
    join_group(scores, request->group, request->chunks, limit);
    memcpy(copy, scores, limit * sizeof(float));
    const float least = nth_largest(copy, limit, slots - 1);
    int64_t equal = slots, found = 0;
    for (int64_t i = 0; i < limit; i++)
        equal -= scores[i] > least;
    for (int64_t i = 0; i < limit && found < slots; i++)
        if (scores[i] > least || (scores[i] == least && equal-- > 0))
            table[found++] = i;
}

/* Returns the bytes that ``work`` needs if it has less, else 0 after computing the result. */
int64_t select_chunks(const void *argument) {
    const SelectRequest *request = argument;
    const int64_t heads = request->batch * request->heads, parts = (request->chunks + SCORED - 1) / SCORED;
    const int64_t own = request->group * (request->columns + request->chunks) + request->chunks;
    const int64_t needed = heads * own * sizeof(float) + LINE;
    if (request->work_bytes < needed)
        return needed;
    for (int64_t each = 0; each < heads; each++)
        widen_queries(request, each);
    share(score_task, request, heads * parts, request->threads);
    share(choose_task, request, heads, request->threads);
    return 0;
}
