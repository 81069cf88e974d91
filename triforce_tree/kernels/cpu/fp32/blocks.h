/* Weights in the blocks of GGUF files, which are unpacked in registers to the fp32 values that the package gguf gives.
 *
 * A value is code * scale + offset. Code, scale and their product need at most 24 bits, so only the addition rounds, and
 * a fused multiply-add gives the same bits as separate operations. */

enum { GROUP = 32, VECTORS = GROUP / LANES, GROUPS_OF_K = 8 }; /* elements that are unpacked together; their vectors */

typedef uint32_t codes __attribute__((vector_size(LANES * 4)));

/* Calls OF for every kind of blocks. */
#define BLOCKS(OF) OF(Q8_0); OF(Q4_0); OF(Q4_1); OF(Q5_0); OF(Q5_1); OF(Q4_K); OF(Q5_K); OF(Q6_K)

INLINE int in_blocks(int kind) { return kind >= Q8_0; }

INLINE int block_bytes(int kind) {
    switch (kind) {
    case Q8_0: return 34;
    case Q4_0: return 18;
    case Q4_1: return 20;
    case Q5_0: return 22;
    case Q5_1: return 24;
    case Q4_K: return 144;
    case Q5_K: return 176;
    default: return 210;
    }
}

INLINE int groups_of_block(int kind) { return kind >= Q4_K ? GROUPS_OF_K : 1; }

INLINE int64_t row_bytes(int kind, int64_t length) {
    if (!in_blocks(kind))
        return length * element_bytes(kind);
    return length / (GROUP * groups_of_block(kind)) * block_bytes(kind);
}

INLINE codes bytes_at(const uint8_t *at) {
#ifdef __AVX512F__
    return (codes)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
#else
    return (codes)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
#endif
}

/* Returns the numbers of a vector's elements. */
INLINE codes lanes(void) {
#ifdef __AVX512F__
    return (codes){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
    return (codes){0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

INLINE vec floats_of(codes x) {
#ifdef __AVX512F__
    return _mm512_cvtepi32_ps((__m512i)x);
#else
    return _mm256_cvtepi32_ps((__m256i)x);
#endif
}

/* Returns the fp16 number at ``at`` in every element. */
INLINE vec half_at(const uint8_t *at) {
    int16_t bits;
    memcpy(&bits, at, sizeof bits);
#ifdef __AVX512F__
    return _mm512_cvtph_ps(_mm256_set1_epi16(bits));
#else
    return _mm256_cvtph_ps(_mm_set1_epi16(bits));
#endif
}

/* Returns code * scale + offset for the codes in the lowest four bits of the elements. */
INLINE vec from_4_bits(codes x, vec scale, vec offset) {
#ifdef __AVX512F__
    return _mm512_permutexvar_ps((__m512i)x, fmadd(floats_of(lanes()), scale, offset));
#else
    return fmadd(floats_of(x & 15), scale, offset);
#endif
}

/* Scales and offsets of the groups of a block of 256 elements; Q6_K has a scale for 16 elements, and no offsets. */
typedef struct {
    float scales[16], offsets[GROUPS_OF_K];
} KScales;

INLINE void read_k_scales(const uint8_t *block, int kind, KScales *to) {
    if (kind == Q6_K) {
        for (int i = 0; i < 16; i += LANES)
            store(to->scales + i, load_as((const char *)block + 192 + i, INT8) * half_at(block + 208));
        return;
    }
    /* 4 bytes have six bits of scales 0-3 each, the next 4 those of offsets 0-3; their highest two bits and the last 4
     * bytes are scales and offsets 4-7. */
    uint32_t x[3], least[4];
    memcpy(x, block + 4, sizeof x);
    least[0] = x[0] & 0x3f3f3f3f, least[1] = (x[2] & 0x0f0f0f0f) | (x[0] >> 2 & 0x30303030);
    least[2] = x[1] & 0x3f3f3f3f, least[3] = (x[2] >> 4 & 0x0f0f0f0f) | (x[1] >> 2 & 0x30303030);
    const __m256 factors = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)least)));
    const __m256 offsets = _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(least + 2))));
    int16_t both[2];
    memcpy(both, block, sizeof both);
    _mm256_storeu_ps(to->scales, factors * _mm256_cvtph_ps(_mm_set1_epi16(both[0])));
    _mm256_storeu_ps(to->offsets, offsets * -_mm256_cvtph_ps(_mm_set1_epi16(both[1])));
}

/* Unpacks a group of 32 elements: group ``part`` of a block of 256, or a block of 32. */
INLINE void unpack_group(const uint8_t *block, int part, const KScales *of_k, int kind, vec *out) {
    vec scale, offset;
    if (kind == Q8_0) {
        scale = half_at(block);
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++)
            out[i] = load_as((const char *)block + 2 + i * LANES, INT8) * scale;
    } else if (kind == Q6_K) {
        const uint8_t *low = block + part % 2 * GROUP + part / 4 * 64, *high = block + 128 + part / 4 * GROUP;
        const int shift = part % 4 / 2 * 4, high_shift = part % 4 * 2;
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) {
            const codes four = bytes_at(low + i * LANES) >> shift & 15, two = bytes_at(high + i * LANES) >> high_shift & 3;
            scale = broadcast(of_k->scales[part * 2 + i * LANES / 16]);
            out[i] = fmadd(floats_of(four | two << 4), scale, scale * broadcast(-32));
        }
    } else if (kind == Q4_K || kind == Q5_K) {
        const uint8_t *four = block + (kind == Q4_K ? 16 : 48) + part / 2 * GROUP;
        scale = broadcast(of_k->scales[part]), offset = broadcast(of_k->offsets[part]);
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) {
            const codes x = bytes_at(four + i * LANES) >> part % 2 * 4;
            if (kind == Q4_K)
                out[i] = from_4_bits(x, scale, offset);
            else
                out[i] = fmadd(floats_of((x & 15) | (bytes_at(block + 16 + i * LANES) >> part & 1) << 4), scale, offset);
        }
    } else {
        const int has_offset = kind == Q4_1 || kind == Q5_1, five = kind == Q5_0 || kind == Q5_1;
        const uint8_t *at = block + 2 + 2 * has_offset + 4 * five;
        scale = half_at(block);
        if (has_offset)
            offset = half_at(block + 2);
        else
            offset = scale * broadcast(five ? -16 : -8);
        uint32_t bits = 0;
        if (five)
            memcpy(&bits, at - 4, sizeof bits);
#pragma GCC unroll 4
        for (int i = 0; i < VECTORS; i++) {
            const codes x = bytes_at(at + i * LANES % 16) >> i * LANES / 16 * 4;
            if (five) {
                const codes fifth = ((codes){} + bits) >> (lanes() + i * LANES) & 1;
                out[i] = fmadd(floats_of((x & 15) | fifth << 4), scale, offset);
            } else
                out[i] = from_4_bits(x, scale, offset);
        }
    }
}

/* Unpacks a row of blocks, and prefetches the row ``ahead`` unless it is NULL. */
INLINE void unpack_row(const char *row, const char *ahead, int kind, int64_t length, float *out) {
    const int groups = groups_of_block(kind), bytes = block_bytes(kind);
    KScales of_k;
    for (int64_t at = 0; at < length; row += bytes, ahead += ahead ? bytes : 0) {
        if (groups > 1)
            read_k_scales((const uint8_t *)row, kind, &of_k);
        for (int part = 0; part < groups; part++, at += GROUP) {
            vec parts[VECTORS];
            if (ahead)
                _mm_prefetch(ahead + part * (bytes / groups), _MM_HINT_T1);
            unpack_group((const uint8_t *)row, part, &of_k, kind, parts);
#pragma GCC unroll 4
            for (int j = 0; j < VECTORS; j++)
                store(out + at + j * LANES, parts[j]);
        }
    }
}
