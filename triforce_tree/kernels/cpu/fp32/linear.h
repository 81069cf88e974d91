/* Products of a few rows with weight matrices, which are read from memory once. */

enum { PARTS = 4 }; /* parts of a matrix per thread, so that a thread that begins late still takes some */

/* A weight matrix. */
typedef struct {
    const char *weights; /* [outs, length], dense */
    const float *bias;   /* [outs], or NULL */
    const float *scales; /* [outs], factors of the rows of INT8; not read for other kinds */
    int64_t kind;        /* how the elements of weights are stored */
} Matrix;

/* Multiplies rows ``begin`` to ``end`` of a matrix by all rows of x; rows of ``out`` begin at matrix row ``begin``. */
INLINE void multiply_rows(const Matrix *matrix, int kind, int64_t begin, int64_t end, const float *x, int64_t rows,
                          int64_t length, float *out, int64_t out_row) {
    const int64_t row_bytes = length * element_bytes(kind), together = equal_parts(rows, MOST_LEFT);
    /* The distance in bytes is equal for all kinds, because rows of fewer bits are processed faster. */
    const int64_t ahead_bytes = RIGHT * row_bytes * element_bytes(FLOAT32) / element_bytes(kind);
    for (int64_t n = begin; n < end;) {
        const int right = end - n >= RIGHT ? RIGHT : 1;
        const char *at[RIGHT], *ahead[RIGHT];
        for (int i = 0; i < right; i++) {
            at[i] = matrix->weights + (n + i) * row_bytes;
            ahead[i] = at[i] + ahead_bytes;
        }
        for (int64_t m = 0; m < rows; m += together) {
            const int left = min_of(together, rows - m);
            float *to = out + m * out_row + n - begin;
            if (right == RIGHT)
                dots_of(at, m ? NULL : ahead, kind, RIGHT, x + m * length, length, left, length, to, out_row);
            else
                dots_of(at, NULL, kind, 1, x + m * length, length, left, length, to, out_row);
            if (kind == INT8)
                for (int i = 0; i < left; i++)
                    for (int j = 0; j < right; j++)
                        to[i * out_row + j] *= matrix->scales[n + j];
            if (matrix->bias)
                for (int i = 0; i < left; i++)
                    for (int j = 0; j < right; j++)
                        to[i * out_row + j] += matrix->bias[n + j];
        }
        n += right;
    }
}

static void multiply(const Matrix *matrix, int64_t begin, int64_t end, const float *x, int64_t rows, int64_t length,
                     float *out, int64_t out_row) {
    switch (matrix->kind) {
    case FLOAT32: return multiply_rows(matrix, FLOAT32, begin, end, x, rows, length, out, out_row);
    case BFLOAT16: return multiply_rows(matrix, BFLOAT16, begin, end, x, rows, length, out, out_row);
    case HALF: return multiply_rows(matrix, HALF, begin, end, x, rows, length, out, out_row);
    case INT8: return multiply_rows(matrix, INT8, begin, end, x, rows, length, out, out_row);
    }
}

typedef struct {
    const float *x; /* [rows, length] */
    float *out;     /* [rows, outs] */
    Matrix matrix;
    int64_t rows, length, outs, threads;
} LinearRequest;

/* Returns the number of parts into which the rows of a matrix are divided for the threads. */
static int64_t parts_of(int64_t outs, int64_t threads) {
    return threads < 2 ? 1 : min_of(PARTS * threads, (outs + 2 * RIGHT - 1) / (2 * RIGHT));
}

/* Returns the first row of a part, a multiple of RIGHT or ``outs``. */
static int64_t begin_of(int64_t part, int64_t parts, int64_t outs) {
    return min_of((outs + RIGHT - 1) / RIGHT * part / parts * RIGHT, outs);
}

static void linear_task(const void *argument, int64_t part, int64_t worker) {
    const LinearRequest *request = argument;
    const int64_t outs = request->outs, parts = parts_of(outs, request->threads), begin = begin_of(part, parts, outs);
    multiply(&request->matrix, begin, begin_of(part + 1, parts, outs), request->x, request->rows, request->length,
             request->out + begin, outs);
}

void linear(const void *argument) {
    const LinearRequest *request = argument;
    share(linear_task, request, parts_of(request->outs, request->threads), request->threads);
}

typedef struct {
    const float *x; /* [rows, length] */
    float *out;     /* [rows, outs] */
    Matrix gate, up;
    int64_t rows, length, outs, threads;
} GatedRequest;

enum { GATED_OUTS = 64 }; /* columns of a block, whose gates are kept until they are multiplied */

/* Computes a block of columns of silu(x gate^T) * (x up^T). */
static void gated_block(const GatedRequest *request, int64_t block) {
    const int64_t rows = request->rows, outs = request->outs;
    const int64_t begin = block * GATED_OUTS, end = min_of(begin + GATED_OUTS, outs), count = end - begin;
    float gates[MOST_GATED * GATED_OUTS];
    multiply(&request->gate, begin, end, request->x, rows, request->length, gates, GATED_OUTS);
    multiply(&request->up, begin, end, request->x, rows, request->length, request->out + begin, outs);
    for (int64_t m = 0; m < rows; m++)
        for (int64_t n = 0; n < count; n += LANES) {
            float *up = request->out + m * outs + begin + n;
            const int part = min_of(LANES, count - n);
            const vec gate = load_part((const char *)(gates + m * GATED_OUTS + n), FLOAT32, part);
            const vec silu = gate / (broadcast(1) + exp_of(broadcast(0) - gate));
            float result[LANES];
            store(result, silu * load_part((const char *)up, FLOAT32, part));
            memcpy(up, result, part * sizeof(float));
        }
}

static void gated_task(const void *argument, int64_t block, int64_t worker) { gated_block(argument, block); }

void gated(const void *argument) {
    const GatedRequest *request = argument;
    share(gated_task, request, (request->outs + GATED_OUTS - 1) / GATED_OUTS, request->threads);
}
