/* Random numbers; number i of a call depends only on the seed and i. */

enum { NOISE_BLOCK = 256 };

typedef struct {
    float *out;
    uint64_t seed;
    int64_t count, threads;
} NoiseRequest;

/* Returns 64 random bits by SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). */
static inline uint64_t random_bits(uint64_t seed, uint64_t index) {
    uint64_t x = seed + (index + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    x = (x ^ x >> 27) * 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

/* Returns ln(x) for normal x, to within two units of the last place (polynomial of Cephes' logf). */
static inline float log_of(float x) {
    int32_t bits;
    memcpy(&bits, &x, sizeof bits);
    /* x is 2^exponent times a number from sqrt(1/2) to sqrt(2). */
    const int32_t exponent = (bits - 0x3f3504f3) >> 23;
    bits -= exponent << 23;
    memcpy(&x, &bits, sizeof x);
    const float f = x - 1, square = f * f, e = exponent;
    float y = 7.0376836292e-2f;
    y = y * f - 1.1514610310e-1f;
    y = y * f + 1.1676998740e-1f;
    y = y * f - 1.2420140846e-1f;
    y = y * f + 1.4249322787e-1f;
    y = y * f - 1.6668057665e-1f;
    y = y * f + 2.0000714765e-1f;
    y = y * f - 2.4999993993e-1f;
    y = y * f + 3.3333331174e-1f;
    y = y * f * square - 2.12194440e-4f * e - 0.5f * square;
    return f + y + 0.693359375f * e;
}

enum { NOISE_TASK = 16 }; /* blocks of a task */

static void exponential_task(const void *argument, int64_t number, int64_t worker) {
    const NoiseRequest *request = argument;
    const int64_t blocks = (request->count + NOISE_BLOCK - 1) / NOISE_BLOCK;
    for (int64_t block = number * NOISE_TASK; block < min_of((number + 1) * NOISE_TASK, blocks); block++) {
        float uniform[NOISE_BLOCK];
#pragma omp simd
        for (int i = 0; i < NOISE_BLOCK; i++) {
            const int64_t bits = random_bits(request->seed, block * NOISE_BLOCK + i) >> 1 | 1;
            uniform[i] = (float)bits * 0x1p-63f;
        }
#pragma omp simd
        for (int i = 0; i < NOISE_BLOCK; i++) {
            const float u = uniform[i] < 0x1.fffffep-1f ? uniform[i] : 0x1.fffffep-1f, left = 1 - u;
            /* The quotient corrects for the rounding of 1 - u; the result is u where 1 - u rounds to 1. */
            const float none = (float)(left >= 1);
            uniform[i] = (none - log_of(left)) / (none + (1 - left)) * u;
        }
        const int64_t first = block * NOISE_BLOCK;
        memcpy(request->out + first, uniform, min_of(NOISE_BLOCK, request->count - first) * sizeof(float));
    }
}

/* Draws from Exp(1) as -log(1 - u) for uniform u in (0, 1), with the relative precision of fp32 down to 2^-63. */
void exponential(const void *argument) {
    const NoiseRequest *request = argument;
    const int64_t numbers = NOISE_TASK * NOISE_BLOCK;
    share(exponential_task, request, (request->count + numbers - 1) / numbers, request->threads);
}
