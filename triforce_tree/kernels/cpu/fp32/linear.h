/* Products of a few rows with weight matrices, which are read from memory once. */

enum { PARTS = 4 }; /* parts of a matrix per thread, so that a thread that begins late still takes some */

/* A weight matrix. */
typedef struct {
    const char *weights; /* [outs, length], dense */
    const float *bias;   /* [outs], or NULL */
    const float *scales; /* [outs], factors of the rows of INT8; not read for other kinds */
    int64_t kind;        /* how the rows of weights are stored */
} Matrix;

/* Multiplies ``right`` rows of a matrix, at ``at``, by all rows of x. The rows ``ahead`` are prefetched. */
INLINE void multiply_right(const char *const *at, const char *const *ahead, int kind, int right, const float *x,
                           int64_t rows, int64_t length, float *out, int64_t out_row) {
    const int64_t together = equal_parts(rows, MOST_LEFT);
    for (int64_t m = 0; m < rows; m += together)
        dots_of(at, m ? NULL : ahead, kind, right, x + m * length, length, min_of(together, rows - m), length,
                out + m * out_row, out_row);
}

static void multiply_fp32(const char *const *at, int right, const float *x, int64_t rows, int64_t length, float *out,
                          int64_t out_row) {
    if (right == RIGHT)
        multiply_right(at, NULL, FLOAT32, RIGHT, x, rows, length, out, out_row);
    else
        multiply_right(at, NULL, FLOAT32, 1, x, rows, length, out, out_row);
}

/* Multiplies as ``multiply_right``, after unpacking the rows of the matrix. */
INLINE void multiply_unpacked(const char *const *at, const char *const *ahead, int kind, int right, const float *x,
                              int64_t rows, int64_t length, float *out, int64_t out_row) {
    float unpacked[RIGHT * length];
    const char *from[RIGHT];
    for (int i = 0; i < right; i++) {
        unpack_row(at[i], ahead ? ahead[i] : NULL, kind, length, unpacked + i * length);
        from[i] = (const char *)(unpacked + i * length);
    }
    multiply_fp32(from, right, x, rows, length, out, out_row);
}

/* Multiplies rows ``begin`` to ``end`` of a matrix by all rows of x; rows of ``out`` begin at matrix row ``begin``. */
INLINE void multiply_rows(const Matrix *matrix, int kind, int64_t begin, int64_t end, const float *x, int64_t rows,
                          int64_t length, float *out, int64_t out_row) {
    const int64_t bytes = row_bytes(kind, length);
    /* The distance in bytes is equal for all kinds, because rows of fewer bits are processed faster. */
    const int64_t ahead_bytes = RIGHT * row_bytes(FLOAT32, length);
    for (int64_t n = begin; n < end;) {
        const int right = end - n >= RIGHT ? RIGHT : 1;
        const char *at[RIGHT], *ahead[RIGHT];
        float *to = out + n - begin;
        for (int i = 0; i < right; i++) {
            at[i] = matrix->weights + (n + i) * bytes;
            ahead[i] = at[i] + ahead_bytes;
        }
        if (in_blocks(kind)) {
            if (right == RIGHT && rows == 1)
                dots(at, ahead, kind, RIGHT, x, length, 1, length, to, out_row);
            else
                multiply_unpacked(at, right == RIGHT ? ahead : NULL, kind, right, x, rows, length, to, out_row);
        } else if (right == RIGHT)
            multiply_right(at, ahead, kind, RIGHT, x, rows, length, to, out_row);
        else
            multiply_right(at, NULL, kind, 1, x, rows, length, to, out_row);
        for (int64_t i = 0; i < rows; i++)
            for (int j = 0; j < right; j++) {
                if (kind == INT8)
                    to[i * out_row + j] *= matrix->scales[n + j];
                if (matrix->bias)
                    to[i * out_row + j] += matrix->bias[n + j];
            }
        n += right;
    }
}

static void multiply(const Matrix *matrix, int64_t begin, int64_t end, const float *x, int64_t rows, int64_t length,
                     float *out, int64_t out_row) {
#define OF(kind) \
    case kind: return multiply_rows(matrix, kind, begin, end, x, rows, length, out, out_row)
    switch (matrix->kind) {
        OF(FLOAT32);
        OF(BFLOAT16);
        OF(HALF);
        OF(INT8);
        BLOCKS(OF);
    }
#undef OF
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

typedef struct {
    const char *weights; /* [rows, length], dense */
    float *out;          /* [rows, length] */
    int64_t kind, rows, length, threads;
} UnpackRequest;

enum { UNPACKED = 1 << 16 }; /* elements of a task that unpacks */

static int64_t rows_of_task(const UnpackRequest *request) {
    return request->length < UNPACKED ? UNPACKED / request->length : 1;
}

static void unpack_task(const void *argument, int64_t number, int64_t worker) {
    const UnpackRequest *request = argument;
    const int64_t rows = rows_of_task(request), length = request->length, bytes = row_bytes(request->kind, length);
    for (int64_t n = number * rows; n < min_of((number + 1) * rows, request->rows); n++) {
        const char *row = request->weights + n * bytes;
#define OF(kind) \
    case kind: \
        unpack_row(row, row + UNPACKED, kind, length, request->out + n * length); \
        break
        switch (request->kind) {
            BLOCKS(OF);
        }
#undef OF
    }
}

/* Unpacks rows of blocks. */
void unpack(const void *argument) {
    const UnpackRequest *request = argument;
    const int64_t rows = rows_of_task(request);
    share(unpack_task, request, (request->rows + rows - 1) / rows, request->threads);
}
