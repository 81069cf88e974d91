/* Divides attention among threads: one task for each run of positions of a sequence and KV head, then tasks that merge
 * the states of runs for each query row. Tasks run in any order, which does not change results. */

enum {
    RUN = 512,      /* positions of a task, which begins at a multiple of it */
    STATE = 2,      /* floats of a row's state after its output: maximum and sum */
};

typedef struct {
    const void *request;
    int64_t batch, heads, group, tokens, threads;
    const int64_t *runs;    /* [batch], number of runs of each sequence */
    int64_t state, scratch; /* floats of a task's state, and of a thread's scratch */
    char *work;
    int64_t work_bytes;
    void (*attend)(const void *request, int64_t b, int64_t head, int64_t run, float *state, float *scratch);
    /* Merges row ``row`` of a KV head from ``runs`` states, ``apart`` floats apart, into row ``at`` of the output
     * [batch, tokens, heads * group]. */
    void (*merge)(const void *request, const float *states, int64_t runs, int64_t apart, int64_t row, int64_t query_head,
                  int64_t at);
} Tasks;

typedef struct {
    const Tasks *tasks;
    const int64_t *starts;  /* [batch + 1], first task of each sequence */
    float *states, *scratch;
} TasksInWork;

enum { MERGED = 16 }; /* rows of a task that merges */

static void attend_task(const void *argument, int64_t number, int64_t worker) {
    const TasksInWork *work = argument;
    const Tasks *tasks = work->tasks;
    int64_t b = 0;
    while (number >= work->starts[b + 1])
        b++;
    const int64_t own = number - work->starts[b];
    tasks->attend(tasks->request, b, own / tasks->runs[b], own % tasks->runs[b], work->states + number * tasks->state,
                  work->scratch + worker * tasks->scratch);
}

static void merge_task(const void *argument, int64_t number, int64_t worker) {
    const TasksInWork *work = argument;
    const Tasks *tasks = work->tasks;
    const int64_t heads = tasks->heads, rows = tasks->tokens * tasks->group, all = tasks->batch * heads * rows;
    for (int64_t each = number * MERGED; each < min_of((number + 1) * MERGED, all); each++) {
        const int64_t b = each / (heads * rows), head = each / rows % heads, row = each % rows;
        const int64_t token = row / tasks->group, query_head = head * tasks->group + row % tasks->group;
        const int64_t runs = tasks->runs[b], at = (b * tasks->tokens + token) * heads * tasks->group + query_head;
        const float *states = work->states + (work->starts[b] + head * runs) * tasks->state;
        tasks->merge(tasks->request, states, runs, tasks->state, row, query_head, at);
    }
}

/* Returns the bytes that ``work`` needs if it has less, else 0 after computing the result. */
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
    const TasksInWork work = {tasks, starts, states, states + count * state};
    share(attend_task, &work, count, tasks->threads);
    share(merge_task, &work, (batch * heads * rows + MERGED - 1) / MERGED, tasks->threads);
    return 0;
}
