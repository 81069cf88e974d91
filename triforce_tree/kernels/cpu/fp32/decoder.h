/* The two parts of a decoder layer around its attention, each in one call. */

typedef struct {
    const float *x;            /* [rows, length] */
    const float *norm;         /* [length] */
    Matrix matrices[3];        /* queries, keys, values */
    int64_t outs[3];           /* of each matrix; those of queries and keys are multiples of dim */
    float *out[3];             /* [rows, outs] */
    float *normed;             /* [rows, length], workspace */
    const float *cos, *sin;    /* [sequences, tokens, dim], dense, for queries and keys */
    int64_t rows, length, tokens, angles, dim, threads; /* angles: elements of cos from one sequence to the next */
    double eps;
} ProjectRequest;

/* Rows ``begin`` to ``end`` of all three matrices, one after the other. */
static void project_columns(const ProjectRequest *request, int64_t begin, int64_t end) {
    for (int i = 0; i < 3; i++) {
        const int64_t outs = request->outs[i], from = begin > 0 ? begin : 0, to = min_of(end, outs);
        if (from < to)
            multiply(&request->matrices[i], from, to, request->normed, request->rows, request->length,
                     request->out[i] + from, outs);
        begin -= outs, end -= outs;
    }
}

/* Queries, keys and values of the normalised x; queries and keys by rotary embeddings, as ``rotary``. */
void project(const void *argument) {
    const ProjectRequest *request = argument;
    const NormRequest norm = {request->x, request->norm, request->normed, request->rows, request->length, request->eps};
    const int64_t columns = request->outs[0] + request->outs[1] + request->outs[2], threads = request->threads;
    const int64_t blocks = (columns + RIGHT - 1) / RIGHT, dim = request->dim, half = dim / 2;
    rms_norm(&norm);
#pragma omp parallel for num_threads(threads)
    for (int64_t part = 0; part < threads; part++)
        project_columns(request, blocks * part / threads * RIGHT, min_of(blocks * (part + 1) / threads * RIGHT, columns));
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

/* Columns ``begin`` to ``end`` of residual + x matrix^T. */
static void add_product(const Matrix *matrix, int64_t begin, int64_t end, const float *x, int64_t rows, int64_t length,
                        const float *residual, float *out, int64_t outs) {
    multiply(matrix, begin, end, x, rows, length, out + begin, outs);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t n = begin; n < end; n++)
            out[row * outs + n] += residual[row * outs + n];
}

/* y = residual + attended projection^T; out = y + the gated MLP of the normalised y. */
void finish(const void *argument) {
    const FinishRequest *request = argument;
    const int64_t rows = request->rows, length = request->length, threads = request->threads;
    const int64_t blocks = (length + RIGHT - 1) / RIGHT, gated_blocks = (request->neurons + GATED_OUTS - 1) / GATED_OUTS;
    const NormRequest norm = {request->joined, request->norm, request->normed, rows, length, request->eps};
    const GatedRequest gated_request = {request->normed, request->activated, request->gate, request->up,
                                        rows, length, request->neurons, threads};
#pragma omp parallel num_threads(threads)
    {
#pragma omp for
        for (int64_t part = 0; part < threads; part++)
            add_product(&request->projection, blocks * part / threads * RIGHT,
                        min_of(blocks * (part + 1) / threads * RIGHT, length), request->attended, rows,
                        request->attended_length, request->residual, request->joined, length);
#pragma omp single
        rms_norm(&norm);
#pragma omp for schedule(dynamic, 1)
        for (int64_t block = 0; block < gated_blocks; block++)
            gated_block(&gated_request, block);
#pragma omp for
        for (int64_t part = 0; part < threads; part++)
            add_product(&request->down, blocks * part / threads * RIGHT,
                        min_of(blocks * (part + 1) / threads * RIGHT, length), request->activated, rows,
                        request->neurons, request->joined, request->out, length);
    }
}
