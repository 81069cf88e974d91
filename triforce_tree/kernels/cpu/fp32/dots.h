/* Products of a few rows with a few rows of a matrix, whose sums are in registers. */

/* Adds the products of LANES elements of rows of x, at ``x``, with those of rows of the matrix. */
INLINE void add_products(vec sums[][RIGHT], const vec *rows, int right, const float *x, int64_t x_row, int left) {
#pragma GCC unroll 8
    for (int m = 0; m < left; m++) {
        const vec row = load(x + m * x_row);
#pragma GCC unroll 4
        for (int i = 0; i < right; i++)
            sums[m][i] = fmadd(rows[i], row, sums[m][i]);
    }
}

/* Adds the products of blocks. */
INLINE void add_blocks(vec sums[][RIGHT], const char *const *at, const char *const *ahead, int kind, int right,
                       const float *x, int64_t x_row, int left, int length) {
    const int groups = groups_of_block(kind), bytes = block_bytes(kind);
    KScales of_k[RIGHT];
    for (int block = 0; block < length / (GROUP * groups); block++) {
        if (groups > 1)
            for (int i = 0; i < right; i++)
                read_k_scales((const uint8_t *)at[i] + block * bytes, kind, &of_k[i]);
        for (int part = 0; part < groups; part++) {
            vec rows[VECTORS][RIGHT];
#pragma GCC unroll 4
            for (int i = 0; i < right; i++) {
                vec own[VECTORS];
                if (ahead)
                    _mm_prefetch(ahead[i] + block * bytes + part * (bytes / groups), _MM_HINT_T1);
                unpack_group((const uint8_t *)at[i] + block * bytes, part, &of_k[i], kind, own);
#pragma GCC unroll 4
                for (int j = 0; j < VECTORS; j++)
                    rows[j][i] = own[j];
            }
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++)
                add_products(sums, rows[j], right, x + (block * groups + part) * GROUP + j * LANES, x_row, left);
        }
    }
}

/* Sets out[m * out_row + i] to the product of row m of x with row i of ``right`` (at most RIGHT) rows at ``at``. Each
 * product is summed in the same order, whatever ``left``, ``right`` and ``kind`` are. The rows ``ahead`` are prefetched. */
INLINE void dots(const char *const *at, const char *const *ahead, int kind, int right, const float *x, int64_t x_row,
                 int left, int length, float *out, int64_t out_row) {
    vec sums[MOST_LEFT][RIGHT];
    const int bytes = element_bytes(kind), whole = in_blocks(kind) ? length : length / LANES * LANES;
#pragma GCC unroll 8
    for (int m = 0; m < left; m++)
#pragma GCC unroll 4
        for (int i = 0; i < RIGHT; i++)
            sums[m][i] = broadcast(0);
    if (in_blocks(kind))
        add_blocks(sums, at, ahead, kind, right, x, x_row, left, length);
    else
        for (int at_element = 0; at_element < whole; at_element += LANES) {
            vec rows[RIGHT];
#pragma GCC unroll 4
            for (int i = 0; i < right; i++) {
                rows[i] = load_as(at[i] + at_element * bytes, kind);
                if (ahead && !(at_element * bytes % LINE))
                    _mm_prefetch(ahead[i] + at_element * bytes, _MM_HINT_T1);
            }
            add_products(sums, rows, right, x + at_element, x_row, left);
        }
    if (length > whole)
        for (int m = 0; m < left; m++) {
            const vec row = load_part((const char *)(x + m * x_row + whole), FLOAT32, length - whole);
            for (int i = 0; i < right; i++)
                sums[m][i] = fmadd(load_part(at[i] + whole * bytes, kind, length - whole), row, sums[m][i]);
        }
#pragma GCC unroll 8
    for (int m = 0; m < left; m++) {
        const __m128 four = sums_of(sums[m][0], sums[m][1], sums[m][2], sums[m][3]);
        if (right == RIGHT)
            _mm_storeu_ps(out + m * out_row, four);
        else
            out[m * out_row] = _mm_cvtss_f32(four);
    }
}

/* Calls dots for any ``left`` up to MOST_LEFT. */
INLINE void dots_of(const char *const *at, const char *const *ahead, int kind, int right, const float *x,
                    int64_t x_row, int left, int length, float *out, int64_t out_row) {
    switch (left) {
    case 1: return dots(at, ahead, kind, right, x, x_row, 1, length, out, out_row);
    case 2: return dots(at, ahead, kind, right, x, x_row, 2, length, out, out_row);
#ifdef __AVX512F__
    case 3: return dots(at, ahead, kind, right, x, x_row, 3, length, out, out_row);
    case 4: return dots(at, ahead, kind, right, x, x_row, 4, length, out, out_row);
    case 5: return dots(at, ahead, kind, right, x, x_row, 5, length, out, out_row);
    case 6: return dots(at, ahead, kind, right, x, x_row, 6, length, out, out_row);
#endif
    }
}
