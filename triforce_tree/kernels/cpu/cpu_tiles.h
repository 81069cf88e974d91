/* Products of bf16 tiles with sums in fp32, by AMX or by the bf16 dot products of AVX-512.
 *
 * A tile has 16 rows of 64 bytes. In a left tile row i holds 32 elements of matrix row i; in a right tile row i holds
 * the elements of matrix rows 2i and 2i + 1, interleaved, for 16 columns.
 */
#include "cpu_shared.h"

#include <errno.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef element bf16;

enum {
    TILE = 16,                /* rows of a tile */
    PAIRED = 2 * TILE,        /* bf16 elements in a row of a tile */
    ELEMENTS = TILE * PAIRED, /* elements of a bf16 tile */
    SQUARE = TILE * TILE,     /* elements of an fp32 tile */
};

/* Addresses and strides of the tiles of a product. ``row`` is the stride between rows of a tile, ``step`` between tiles
 * that are summed, ``lower`` to the second tile below, and ``beside`` to the second tile on the right. */
typedef struct {
    const char *at;
    int64_t row, step, lower; /* bytes */
} Left;

typedef struct {
    const bf16 *at;
    int64_t step, beside; /* elements */
} Right;

typedef struct {
    float *at;
    int64_t row, lower, beside; /* floats */
} Result;

#ifdef __AMX_BF16__

/* Requests permission to use tile registers, once per process; returns 0 or the error number. */
static int ask_system(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) ? errno : 0;
}

/* It is constant, because ``_tile_loadconfig`` declares only 8 bytes, so stores to a local could be dropped. */
static const struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} __attribute__((packed, aligned(64))) TILES = {.palette = 1, .bytes = {[0 ... 7] = LINE}, .rows = {[0 ... 7] = TILE}};

static inline void begin_tiles(void) { _tile_loadconfig(&TILES); }
static inline void end_tiles(void) { _tile_release(); }

/* Computes ``lower`` x ``beside`` (1 or 2 each) sums of ``steps`` products; ``add`` keeps earlier results. */
static inline __attribute__((always_inline)) void multiply(Left a, Right b, Result c, int steps, int lower, int beside,
                                                           int add, Prefetcher *prefetcher) {
    const int64_t row = c.row * sizeof(float);
    /* This keeps earlier stores before the tile loads, which in some versions of gcc do not declare that they read. */
    __asm__ volatile("" ::: "memory");
    if (add) {
        _tile_loadd(0, c.at, row);
        if (beside > 1)
            _tile_loadd(1, c.at + c.beside, row);
        if (lower > 1)
            _tile_loadd(2, c.at + c.lower, row);
        if (lower > 1 && beside > 1)
            _tile_loadd(3, c.at + c.lower + c.beside, row);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int s = 0; s < steps; s++) {
        _tile_loadd(4, a.at + s * a.step, a.row);
        _tile_loadd(6, b.at + s * b.step, LINE);
        _tile_dpbf16ps(0, 4, 6);
        if (beside > 1) {
            _tile_loadd(7, b.at + s * b.step + b.beside, LINE);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (lower > 1) {
            _tile_loadd(5, a.at + s * a.step + a.lower, a.row);
            _tile_dpbf16ps(2, 5, 6);
        }
        if (lower > 1 && beside > 1)
            _tile_dpbf16ps(3, 5, 7);
        prefetch(prefetcher);
    }
    _tile_stored(0, c.at, row);
    if (beside > 1)
        _tile_stored(1, c.at + c.beside, row);
    if (lower > 1)
        _tile_stored(2, c.at + c.lower, row);
    if (lower > 1 && beside > 1)
        _tile_stored(3, c.at + c.lower + c.beside, row);
}

#else

static int ask_system(void) { return 0; }
static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}

/* Computes some rows of one or two adjacent result tiles in registers. Each row accumulates pairs of elements of its
 * left row times right rows. Two result tiles share the loads of left rows. */
static inline __attribute__((always_inline)) void multiply_rows(const char *a, int64_t row, int64_t a_step, Right b,
                                                                float *c, Result at, int rows, int beside, int steps,
                                                                int add) {
    __m512 sums[TILE];
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++)
        sums[i] = add ? load(c + i % rows * at.row + i / rows * at.beside) : _mm512_setzero_ps();
    for (int s = 0; s < steps; s++, a += a_step, b.at += b.step)
        for (int pair = 0; pair < TILE; pair++) {
            const bf16 *from = b.at + pair * PAIRED;
            const __m512bh right = (__m512bh)_mm512_loadu_si512(from);
            const __m512bh other = beside > 1 ? (__m512bh)_mm512_loadu_si512(from + b.beside) : right;
#pragma GCC unroll 16
            for (int i = 0; i < rows; i++) {
                int32_t word;
                memcpy(&word, a + i * row + pair * sizeof word, sizeof word);
                const __m512bh left = (__m512bh)_mm512_set1_epi32(word);
                sums[i] = _mm512_dpbf16_ps(sums[i], left, right);
                if (beside > 1)
                    sums[rows + i] = _mm512_dpbf16_ps(sums[rows + i], left, other);
            }
        }
#pragma GCC unroll 16
    for (int i = 0; i < TILE; i++)
        store(c + i % rows * at.row + i / rows * at.beside, sums[i]);
}

/* Computes ``lower`` x ``beside`` (1 or 2 each) sums of ``steps`` products; ``add`` keeps earlier results. */
static inline void multiply(Left a, Right b, Result c, int steps, int lower, int beside, int add,
                            Prefetcher *prefetcher) {
    const int half = TILE / 2;
    for (int y = 0; y < lower; y++) {
        const char *left = a.at + y * a.lower;
        float *out = c.at + y * c.lower;
        if (beside > 1)
            for (int i = 0; i < TILE; i += half)
                multiply_rows(left + i * a.row, a.row, a.step, b, out + i * c.row, c, half, 2, steps, add);
        else
            multiply_rows(left, a.row, a.step, b, out, c, TILE, 1, steps, add);
    }
    for (int s = 0; s < steps; s++)
        prefetch(prefetcher);
}

#endif
