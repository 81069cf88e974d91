/* How attention is divided among threads: a task for each run of positions of a sequence and KV head, then the merging
 * of the runs' states for each query row. Both go in any order, and none of the results depends on it. */

enum {
    RUN = 512,      /* positions of a task, which begins at a multiple of it */
    STATE = 2,      /* floats of a row's state beside its output: maximum and sum */
};

typedef struct {
    const void *request;
    int64_t batch, heads, group, tokens, threads;
    const int64_t *runs;    /* [batch], of each sequence */
    int64_t state, scratch; /* floats: of a task's state, and of a thread */
    char *work;
    int64_t work_bytes;
    void (*attend)(const void *request, int64_t b, int64_t head, int64_t run, float *state, float *scratch);
    /* Row ``row`` of a KV head, from ``runs`` states that are ``apart`` floats apart, to row ``at`` of the output
     * [batch, tokens, heads * group]. */
    void (*merge)(const void *request, const float *states, int64_t runs, int64_t apart, int64_t row, int64_t query_head,
                  int64_t at);
} Tasks;

/* Returns the bytes of ``work`` that are needed, if it has less; else 0, when all is computed. */
static int64_t run_tasks(const Tasks *tasks) {
    const int64_t batch = tasks->batch, heads = tasks->heads, rows = tasks->tokens * tasks->group;
    const int64_t state = tasks->state, scratch = tasks->scratch;
    int64_t count = 0, starts[batch + 1];
    for (int64_t b = 0; b < batch; b++) {
        starts[b] = count;
        count += tasks->runs[b] * heads;
    }
    starts[batch] = count;
    const int64_t needed = (count * state + tasks->threads * scratch) * sizeof(float) + LINE;
    if (tasks->work_bytes < needed)
        return needed;
    float *states = (float *)(((intptr_t)tasks->work + LINE - 1) / LINE * LINE);
#pragma omp parallel num_threads(tasks->threads) if (count > 1)
    {
#pragma omp for schedule(dynamic, 1)
        for (int64_t task = 0; task < count; task++) {
            int64_t b = 0;
            while (task >= starts[b + 1])
                b++;
            const int64_t own = task - starts[b];
            tasks->attend(tasks->request, b, own / tasks->runs[b], own % tasks->runs[b], states + task * state,
                          states + count * state + omp_get_thread_num() * scratch);
        }
#pragma omp for
        for (int64_t each = 0; each < batch * heads * rows; each++) {
            const int64_t b = each / (heads * rows), head = each / rows % heads, row = each % rows;
            const int64_t token = row / tasks->group, query_head = head * tasks->group + row % tasks->group;
            const int64_t runs = tasks->runs[b], at = (b * tasks->tokens + token) * heads * tasks->group + query_head;
            tasks->merge(tasks->request, states + (starts[b] + head * runs) * state, runs, state, row, query_head, at);
        }
    }
    return 0;
}
