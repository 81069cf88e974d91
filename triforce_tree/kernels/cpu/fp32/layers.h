/* RMS norm and rotary embeddings. */

typedef struct {
    const float *x, *weight; /* [rows, length] and [length] */
    float *out;              /* [rows, length] */
    int64_t rows, length;
    double eps;
} NormRequest;

/* Computes x / sqrt(mean(x^2) + eps) * weight. */
void rms_norm(const void *argument) {
    const NormRequest *request = argument;
    const int64_t length = request->length, whole = length / LANES * LANES;
    for (int64_t row = 0; row < request->rows; row++) {
        const float *x = request->x + row * length;
        float *out = request->out + row * length;
        vec squares[2] = {broadcast(0), broadcast(0)};
        for (int64_t i = 0; i < whole; i += LANES) {
            const vec part = load(x + i);
            squares[i / LANES % 2] = fmadd(part, part, squares[i / LANES % 2]);
        }
        float sum = sum_of(squares[0] + squares[1]);
        for (int64_t i = whole; i < length; i++)
            sum += x[i] * x[i];
        const float factor = 1.0f / sqrtf(sum / length + (float)request->eps);
        for (int64_t i = 0; i < whole; i += LANES)
            store(out + i, load(x + i) * broadcast(factor) * load(request->weight + i));
        for (int64_t i = whole; i < length; i++)
            out[i] = x[i] * factor * request->weight[i];
    }
}

typedef struct {
    const float *x;          /* [batch, heads, tokens, dim], dim dense */
    float *out;              /* [batch, tokens, heads, dim], dense */
    int64_t x_batch, x_head, x_token, heads;
} Rotated;

typedef struct {
    Rotated parts[2];        /* queries and keys */
    const float *cos, *sin;  /* [batch, tokens, dim], dense, with ``angles`` elements between sequences */
    int64_t batch, tokens, dim, angles;
} RotaryRequest;

/* Computes x * cos + rotate_half(x) * sin. */
void rotary(const void *argument) {
    const RotaryRequest *request = argument;
    const int64_t dim = request->dim, half = dim / 2;
    for (int part = 0; part < 2; part++) {
        const Rotated *rotated = &request->parts[part];
        for (int64_t b = 0; b < request->batch; b++)
            for (int64_t t = 0; t < request->tokens; t++) {
                const float *cos = request->cos + b * request->angles + t * dim;
                const float *sin = request->sin + b * request->angles + t * dim;
                for (int64_t h = 0; h < rotated->heads; h++) {
                    const float *x = rotated->x + b * rotated->x_batch + h * rotated->x_head + t * rotated->x_token;
                    float *out = rotated->out + ((b * request->tokens + t) * rotated->heads + h) * dim;
                    for (int64_t i = 0; i < half; i++) {
                        out[i] = x[i] * cos[i] - x[half + i] * sin[i];
                        out[half + i] = x[half + i] * cos[half + i] + x[i] * sin[half + i];
                    }
                }
            }
    }
}
