/* The parts of a decoder layer before and after attention, each in one call. */

typedef struct {
    const float *x;            /* [rows, length] */
    const float *norm;         /* [length] */
    Matrix matrices[3];        /* queries, keys, values */
    int64_t outs[3];           /* rows of each matrix; for queries and keys they are multiples of dim */
    float *out[3];             /* [rows, outs] */
    float *normed;             /* [rows, length], workspace */
    const float *cos, *sin;    /* [sequences, tokens, dim], dense, for queries and keys */
    int64_t rows, length, tokens, angles, dim, threads; /* angles: elements of cos between sequences */
    double eps;
} ProjectRequest;

/* Multiplies by rows ``begin`` to ``end`` of the three matrices, which are counted consecutively. */
static void project_columns(const ProjectRequest *request, int64_t begin, int64_t end) {
    for (int i = 0; i < 3; i++) {
        const int64_t outs = request->outs[i], from = begin > 0 ? begin : 0, to = min_of(end, outs);
        if (from < to)
            multiply(&request->matrices[i], from, to, request->normed, request->rows, request->length,
                     request->out[i] + from, outs);
        begin -= outs, end -= outs;
    }
}

static void project_task(const void *argument, int64_t part, int64_t worker) {
    const ProjectRequest *request = argument;
    const int64_t outs = request->outs[0] + request->outs[1] + request->outs[2];
    const int64_t parts = parts_of(outs, request->threads);
    project_columns(request, begin_of(part, parts, outs), begin_of(part + 1, parts, outs));
}

/* Computes queries, keys and values of the normalised x, and rotates queries and keys like ``rotary``. */
void project(const void *argument) {
    const ProjectRequest *request = argument;
    const NormRequest norm = {request->x, request->norm, request->normed, request->rows, request->length, request->eps};
    const int64_t outs = request->outs[0] + request->outs[1] + request->outs[2];
    const int64_t dim = request->dim, half = dim / 2;
    rms_norm(&norm);
    share(project_task, request, parts_of(outs, request->threads), request->threads);
    for (int i = 0; i < 2; i++)
        for (int64_t row = 0; row < request->rows; row++) {
            const int64_t at = row / request->tokens * request->angles + row % request->tokens * dim;
            const float *cos = request->cos + at, *sin = request->sin + at;
            for (float *x = request->out[i] + row * request->outs[i], *end = x + request->outs[i]; x < end; x += dim)
#pragma omp simd
                for (int64_t d = 0; d < half; d++) {
                    const float low = x[d], high = x[half + d];
                    x[d] = low * cos[d] - high * sin[d];
                    x[half + d] = high * cos[half + d] + low * sin[half + d];
                }
        }
}

typedef struct {
    const float *attended;   /* [rows, heads * value_dim] */
    const float *residual;   /* [rows, length] */
    const float *norm;       /* [length] */
    Matrix projection, gate, up, down;
    float *joined, *normed, *activated; /* [rows, length] twice and [rows, neurons], workspace */
    float *out;              /* [rows, length] */
    int64_t rows, attended_length, length, neurons, threads;
    double eps;
} FinishRequest;

/* Computes the columns of ``part`` of residual + x matrix^T, which has ``length`` columns. */
static void add_product(const FinishRequest *request, const Matrix *matrix, int64_t part, const float *x,
                        int64_t x_length, const float *residual, float *out) {
    const int64_t length = request->length, parts = parts_of(length, request->threads);
    const int64_t begin = begin_of(part, parts, length), end = begin_of(part + 1, parts, length);
    multiply(matrix, begin, end, x, request->rows, x_length, out + begin, length);
    for (int64_t row = 0; row < request->rows; row++)
        for (int64_t n = begin; n < end; n++)
            out[row * length + n] += residual[row * length + n];
}

static void join_task(const void *argument, int64_t part, int64_t worker) {
    const FinishRequest *request = argument;
    add_product(request, &request->projection, part, request->attended, request->attended_length, request->residual,
                request->joined);
}

static void down_task(const void *argument, int64_t part, int64_t worker) {
    const FinishRequest *request = argument;
    add_product(request, &request->down, part, request->activated, request->neurons, request->joined, request->out);
}

/* Computes y = residual + attended projection^T, and out = y + the gated MLP of the normalised y. */
void finish(const void *argument) {
    const FinishRequest *request = argument;
    const int64_t rows = request->rows, length = request->length, threads = request->threads;
    const NormRequest norm = {request->joined, request->norm, request->normed, rows, length, request->eps};
    const GatedRequest gated_request = {request->normed, request->activated, request->gate, request->up,
                                        rows, length, request->neurons, threads};
    share(join_task, request, parts_of(length, threads), threads);
    rms_norm(&norm);
    gated(&gated_request);
    share(down_task, request, parts_of(length, threads), threads);
}
