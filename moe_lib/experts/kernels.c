/* Experts as the checkpoints store them, in bfloat16, int4 or fp8, against rows in bfloat16. Sums and SwiGLU are in float32.
   Plain C for any processor; where AVX-512 has products of bfloat16 pairs, they are used. Built by native.py. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum format { BF16, INT4, FP8 }; /* as native.py numbers them */

#define GROUP 32  /* int4 weights that share a scale */
#define SQUARE 128 /* fp8 weights that share one, in each direction */
#define BLOCK 64  /* rows of weights that one thread takes at a time */
#define OPEN 16   /* of them that are opened at a time: of gate and up, they fit a core's second cache */
#define FLOATS_TILE 3 /* rows of x that meet four of weights at a time: as many sums as there are registers */
#define PAIRS_TILE 6
#define PLANES_TILE 8
#define FEW 16    /* rows of one expert, up to which int4 is multiplied as it lies and not opened to bfloat16 first */

static inline float from_bf16(uint16_t b) {
    uint32_t bits = (uint32_t)b << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline uint16_t to_bf16(float f) { /* round to nearest, ties to even; NaN stays NaN */
    uint32_t bits;
    memcpy(&bits, &f, 4);
    uint16_t rounded = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    return f != f ? 0x7fc0 : rounded;
}

/* One stack of weights: [experts, n, k]. int4 has the even column in the low nibble, and a bfloat16 scale for every 32 columns of
   a row; fp8 (e4m3) a float32 scale for every 128 x 128 weights, with partial squares at both edges; bfloat16 none. */
typedef struct {
    enum format format;
    const uint8_t *weight, *scale;
    long n, k;
} stack;

static inline long row_bytes(stack s) { return s.format == BF16 ? 2 * s.k : s.format == INT4 ? s.k / 2 : s.k; }
static inline const uint8_t *weights(stack s, long e, long row) { return s.weight + (e * s.n + row) * row_bytes(s); }

static inline const uint8_t *scales(stack s, long e, long row) { /* where those of this row begin */
    const long down = (s.n + SQUARE - 1) / SQUARE, across = (s.k + SQUARE - 1) / SQUARE;
    return s.format == INT4 ? s.scale + (e * s.n + row) * (s.k / GROUP) * 2 : s.scale + (e * down + row / SQUARE) * across * 4;
}

/* One row of weights in float32: loops that any compiler makes vectors of. */
static void open_row(stack s, long e, long row, float *restrict out) {
    const uint8_t *w = weights(s, e, row), *scale = s.format == BF16 ? NULL : scales(s, e, row);
    if (s.format == BF16)
        for (long c = 0; c < s.k; c++) out[c] = from_bf16(((const uint16_t *)w)[c]);
    else if (s.format == INT4)
        for (long g = 0; g < s.k / GROUP; g++, w += GROUP / 2, out += GROUP) {
            const float by = from_bf16(((const uint16_t *)scale)[g]);
            for (int i = 0; i < GROUP; i += 8) {
                uint32_t eight;
                memcpy(&eight, w + i / 2, 4);
                for (int j = 0; j < 8; j++) out[i + j] = (float)((int)(eight >> 4 * j & 15) - 8) * by;
            }
        }
    else
        for (long from = 0; from < s.k; from += SQUARE) {
            const float by = ((const float *)scale)[from / SQUARE];
            const long end = from + SQUARE < s.k ? from + SQUARE : s.k;
            for (long c = from; c < end; c++) {
                /* exponent and mantissa in float32's places; its bias is 120 larger, and the product is exact, subnormals too */
                const uint32_t u = w[c], bits = (u & 0x7f) << 20 | (u & 0x80) << 24 | ((u & 0x7f) == 0x7f ? 0x7f800000 : 0);
                float f;
                memcpy(&f, &bits, 4);
                out[c] = f * 0x1p120f * by;
            }
        }
}

#define INLINE static inline __attribute__((always_inline))

/* Four rows of weights against `count` rows of x, all in float32. `count` is a constant wherever this is called, so all sums stay in
   registers; compilers know how to make such vectors of what the processor has. */
typedef float lanes __attribute__((vector_size(32), aligned(4), may_alias));
INLINE void four_floats(const float *w, const float *x, const int count, long k, float *out) {
    lanes sum[FLOATS_TILE][4];
    for (int m = 0; m < count; m++)
        for (int r = 0; r < 4; r++) sum[m][r] = (lanes){0};
    for (long c = 0; c < k; c += 8) {
#pragma GCC unroll 4
        for (int r = 0; r < 4; r++) {
            const lanes v = *(const lanes *)(w + r * k + c);
#pragma GCC unroll 3
            for (int m = 0; m < count; m++) sum[m][r] += v * *(const lanes *)(x + m * k + c);
        }
    }
    for (int m = 0; m < count; m++)
        for (int r = 0; r < 4; r++) {
            const lanes t = sum[m][r];
            out[m * BLOCK + r] = ((t[0] + t[4]) + (t[1] + t[5])) + ((t[2] + t[6]) + (t[3] + t[7]));
        }
}

#define FLOATS_OF(count) case count: four_floats(w, x, count, k, out); break;
static void four_floats_of(int count, const float *w, const float *x, long k, float *out) {
    switch (count) { FLOATS_OF(1) FLOATS_OF(2) FLOATS_OF(FLOATS_TILE) }
}

#ifdef __AVX512BF16__
#include <immintrin.h>

#define STEP 128 /* int4 weights in one 64-byte load */

/* The sums of four vectors. */
INLINE __m128 totals(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* The same in bfloat16. */
INLINE void four_pairs(const uint16_t *w, const uint16_t *x, const int count, long k, float *out) {
    __m512 sum[PAIRS_TILE][4];
    for (int m = 0; m < count; m++)
        for (int r = 0; r < 4; r++) sum[m][r] = _mm512_setzero_ps();
    for (long c = 0; c < k; c += 32) {
        __m512bh v[4];
        for (int r = 0; r < 4; r++) {
            _mm_prefetch((const char *)(w + (r + 4) * k + c), _MM_HINT_T1); /* the next four rows */
            v[r] = (__m512bh)_mm512_loadu_si512(w + r * k + c);
        }
        for (int m = 0; m < count; m++) {
            const __m512bh values = (__m512bh)_mm512_loadu_si512(x + m * k + c);
            for (int r = 0; r < 4; r++) sum[m][r] = _mm512_dpbf16_ps(sum[m][r], v[r], values);
        }
    }
    for (int m = 0; m < count; m++) _mm_storeu_ps(out + m * BLOCK, totals(sum[m][0], sum[m][1], sum[m][2], sum[m][3]));
}

#define PAIRS_OF(count) case count: four_pairs(w, x, count, k, out); break;
static void four_pairs_of(int count, const uint16_t *w, const uint16_t *x, long k, float *out) {
    switch (count) { PAIRS_OF(1) PAIRS_OF(2) PAIRS_OF(3) PAIRS_OF(4) PAIRS_OF(5) PAIRS_OF(PAIRS_TILE) }
}

/* x in the order in which a load of int4 weights opens: of each 128 values first those at 4i, then 4i + 1, 4i + 2, 4i + 3. */
INLINE long plane(long c) { return c / STEP * STEP + c % 4 * 32 + c % STEP / 4; }

/* Four rows of int4 weights against `count` of x in planes: the scale comes in once for four products, in float32. */
INLINE void four_planes(const uint8_t *w, const uint16_t *scale, const uint16_t *x, const int count, long k, float *out) {
    /* nibble -> bfloat16 of nibble - 8; twice, because the lookup takes five bits and the fifth belongs to a neighbour */
    static const uint16_t value[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000,
                                       0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                       0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i table = _mm512_loadu_si512(value);
    const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0); /* a scale for every 4 lanes */
    const long ahead = k > 4096 ? k : 4096; /* bytes: the next two rows, or some of the next short ones */
    for (int pair = 0; pair < 4; pair += 2) {
        __m512 sum[2][PLANES_TILE];
        for (int m = 0; m < count; m++) sum[0][m] = sum[1][m] = _mm512_setzero_ps();
        for (long c = 0; c < k; c += STEP) {
            __m512bh open[2][4];
            __m512 by[2];
            for (int r = 0; r < 2; r++) {
                const uint8_t *from = w + ((pair + r) * k + c) / 2;
                _mm_prefetch((const char *)from + ahead, _MM_HINT_T1);
                const __m512i v = _mm512_loadu_si512(from);
                open[r][0] = (__m512bh)_mm512_permutexvar_epi16(v, table);
                open[r][1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table);
                open[r][2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table);
                open[r][3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table);
                const __m128i s = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)(scale + ((pair + r) * k + c) / GROUP)));
                by[r] = _mm512_castsi512_ps(_mm512_permutexvar_epi32(spread, _mm512_castsi128_si512(_mm_slli_epi32(s, 16))));
            }
            for (int m = 0; m < count; m++) {
                __m512 part[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
                for (int p = 0; p < 4; p++) {
                    const __m512bh values = (__m512bh)_mm512_loadu_si512(x + m * k + c + 32 * p);
                    part[0] = _mm512_dpbf16_ps(part[0], open[0][p], values);
                    part[1] = _mm512_dpbf16_ps(part[1], open[1][p], values);
                }
                sum[0][m] = _mm512_fmadd_ps(part[0], by[0], sum[0][m]);
                sum[1][m] = _mm512_fmadd_ps(part[1], by[1], sum[1][m]);
            }
        }
        for (int m = 0; m < count; m++)
            for (int r = 0; r < 2; r++) out[m * BLOCK + pair + r] = _mm512_reduce_add_ps(sum[r][m]);
    }
}

#define PLANES_OF(count) case count: four_planes(w, scale, x, count, k, out); break;
static void four_planes_of(int count, const uint8_t *w, const uint16_t *scale, const uint16_t *x, long k, float *out) {
    switch (count) { PLANES_OF(1) PLANES_OF(2) PLANES_OF(3) PLANES_OF(4) PLANES_OF(5) PLANES_OF(6) PLANES_OF(7) PLANES_OF(PLANES_TILE) }
}

/* Rows of int4 in bfloat16, weight times scale rounded once: a lookup in the sixteen products of each scale. */
static void open_int4(const uint8_t *w, const uint16_t *scale, long weights, uint16_t *out) {
    const __m512 numbers = _mm512_set_ps(7, 6, 5, 4, 3, 2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8);
    for (long g = 0; g < weights / GROUP; g++) {
        const __m256i products = (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(numbers, _mm512_set1_ps(from_bf16(scale[g]))));
        const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(w + g * GROUP / 2)));
        const __m512i nibbles = _mm512_or_si512(bytes, _mm512_slli_epi32(bytes, 12)); /* one in each sixteen bits */
        _mm512_storeu_si512(out + g * GROUP, _mm512_permutexvar_epi16(nibbles, _mm512_broadcast_i64x4(products)));
    }
}
#endif

/* How the rows of one expert meet its weights. */
enum way {
    FLOATS, /* both opened to float32 */
    PAIRS,  /* both in bfloat16 */
    PLANES, /* int4 as it lies, x in planes */
};

static enum way way(enum format format, long rows, long k, int allow_wide) {
#ifdef __AVX512BF16__
    if (allow_wide && k % 32 == 0) return format == INT4 && rows <= FEW && k % STEP == 0 ? PLANES : PAIRS;
#endif
    return (void)format, (void)rows, (void)k, (void)allow_wide, FLOATS;
}

int takes_wide(long k) { return way(BF16, 1, k, 1) == PAIRS; } /* whether this build multiplies pairs of bfloat16 in rows of k */

static inline int tile(enum way way) { return way == FLOATS ? FLOATS_TILE : way == PAIRS ? PAIRS_TILE : PLANES_TILE; }
static inline int part(enum way way) { return way == PLANES ? BLOCK : OPEN; } /* rows of weights until the next tile of x */
static inline long value_bytes(enum way way) { return way == FLOATS ? 4 : 2; }

/* Value i of rows, put as the way wants it; rows have a multiple of STEP where it is PLANES. */
static inline void put(enum way way, void *rows, long i, float value) {
#ifdef __AVX512BF16__
    if (way == PLANES) i = plane(i);
#endif
    if (way == FLOATS)
        ((float *)rows)[i] = value;
    else
        ((uint16_t *)rows)[i] = to_bf16(value);
}

/* Row m of x, put so. */
static void ready_row(enum way way, const uint16_t *x, void *rows, long m, long k) {
    for (long c = 0; c < k; c++) put(way, rows, m * k + c, from_bf16(x[c]));
}

/* `width` rows of weights in bfloat16; `room` holds one in float32. */
static void open_pairs(stack s, long e, long row, int width, float *restrict room, uint16_t *restrict out) {
#ifdef __AVX512BF16__
    if (s.format == INT4) {
        open_int4(weights(s, e, row), (const uint16_t *)scales(s, e, row), width * s.k, out);
        return;
    }
#endif
    for (int r = 0; r < width; r++) {
        open_row(s, e, row + r, room);
        for (long c = 0; c < s.k; c++) out[r * s.k + c] = to_bf16(room[c]);
    }
}

/* `width` rows of weights as the way wants them, in `out` unless they are so. */
static const void *opened(stack s, long e, long row, int width, enum way way, float *room, void *out) {
    if (way == PLANES || (way == PAIRS && s.format == BF16)) return weights(s, e, row);
    if (way == PAIRS) open_pairs(s, e, row, width, room, out);
    for (int r = 0; way == FLOATS && r < width; r++) open_row(s, e, row + r, (float *)out + r * s.k);
    return out;
}

/* out[m, i] = x[m] times row `row` + i of the weights, which `w` holds as the way wants them. */
static void product(stack s, long e, long row, int width, const void *w, enum way way, const void *x, int count, float *out) {
    for (int r = 0; r < width; r += 4) {
        if (way == FLOATS) four_floats_of(count, (const float *)w + r * s.k, x, s.k, out + r);
#ifdef __AVX512BF16__
        if (way == PAIRS) four_pairs_of(count, (const uint16_t *)w + r * s.k, x, s.k, out + r);
        if (way == PLANES)
            four_planes_of(count, (const uint8_t *)w + r * s.k / 2, (const uint16_t *)scales(s, e, row + r), x, s.k, out + r);
#endif
    }
    (void)e, (void)row; /* without AVX-512 */
}

static inline int smaller(long a, long b) { return (int)(a < b ? a : b); }

/* All local experts on their rows, as in contract.py: ends[e] is where the rows of expert e end. x, y [rows, hidden] are bfloat16;
   `ready` has four bytes for each value of x, and `h` for each of the rows x inter between. hidden and inter are multiples of 16, in
   int4 of 32.
   Work is handed out in blocks of weights, not in experts: it is even for one expert and for all, on two cores and on many. */
void experts_forward(const uint16_t *x, uint16_t *y, char *ready, char *h, const long *ends, long experts, long hidden, long inter,
                     int format, const uint8_t *gate, const uint8_t *gate_scale, const uint8_t *up, const uint8_t *up_scale,
                     const uint8_t *down, const uint8_t *down_scale, int allow_wide, int threads) {
    const stack g = {format, gate, gate_scale, inter, hidden}, u = {format, up, up_scale, inter, hidden},
                d = {format, down, down_scale, hidden, inter};
    const long up_blocks = (inter + BLOCK - 1) / BLOCK, down_blocks = (hidden + BLOCK - 1) / BLOCK;
    const long longest = hidden > inter ? hidden : inter;
#pragma omp parallel num_threads(threads)
    {
        float *room = malloc(4 * longest), a[PLANES_TILE * BLOCK], b[PLANES_TILE * BLOCK];
        void *open[2] = {malloc(4 * OPEN * longest), malloc(4 * OPEN * longest)};
#pragma omp for schedule(dynamic)
        for (long e = 0; e < experts; e++) {
            const long from = e ? ends[e - 1] : 0;
            const enum way w = way(format, ends[e] - from, hidden, allow_wide);
            if (w != PAIRS)
                for (long m = from; m < ends[e]; m++) ready_row(w, x + m * hidden, ready + 4 * from * hidden, m - from, hidden);
        }
#pragma omp for schedule(dynamic)
        for (long item = 0; item < experts * up_blocks; item++) {
            const long e = item / up_blocks, block = item % up_blocks * BLOCK, from = e ? ends[e - 1] : 0, rows = ends[e] - from;
            const enum way w = way(format, rows, hidden, allow_wide), then = way(format, rows, inter, allow_wide);
            const char *at = w == PAIRS ? (const char *)(x + from * hidden) : ready + 4 * from * hidden;
            for (long r = block; rows && r < smaller(inter, block + BLOCK); r += part(w)) {
                const int width = smaller(inter - r, part(w));
                const void *gates = opened(g, e, r, width, w, room, open[0]), *ups = opened(u, e, r, width, w, room, open[1]);
                for (long m = 0; m < rows; m += tile(w)) {
                    const int count = smaller(rows - m, tile(w));
                    product(g, e, r, width, gates, w, at + m * hidden * value_bytes(w), count, a);
                    product(u, e, r, width, ups, w, at + m * hidden * value_bytes(w), count, b);
                    for (int i = 0; i < count; i++)
                        for (int c = 0; c < width; c++) {
                            const float z = a[i * BLOCK + c];
                            put(then, h + 4 * from * inter, (m + i) * inter + r + c, z / (1 + expf(-z)) * b[i * BLOCK + c]);
                        }
                }
            }
        }
#pragma omp for schedule(dynamic)
        for (long item = 0; item < experts * down_blocks; item++) {
            const long e = item / down_blocks, block = item % down_blocks * BLOCK, from = e ? ends[e - 1] : 0, rows = ends[e] - from;
            const enum way w = way(format, rows, inter, allow_wide);
            const char *at = h + 4 * from * inter;
            for (long r = block; rows && r < smaller(hidden, block + BLOCK); r += part(w)) {
                const int width = smaller(hidden - r, part(w));
                const void *downs = opened(d, e, r, width, w, room, open[0]);
                for (long m = 0; m < rows; m += tile(w)) {
                    const int count = smaller(rows - m, tile(w));
                    product(d, e, r, width, downs, w, at + m * inter * value_bytes(w), count, a);
                    for (int i = 0; i < count; i++)
                        for (int c = 0; c < width; c++) y[(from + m + i) * hidden + r + c] = to_bf16(a[i * BLOCK + c]);
                }
            }
        }
        free(room), free(open[0]), free(open[1]);
    }
}

/* The weights of one expert in bfloat16, out [n, k]. */
void dequantise(int format, const uint8_t *weight, const uint8_t *scale, uint16_t *out, long n, long k, int threads) {
    const stack s = {format, weight, scale, n, k};
#pragma omp parallel num_threads(threads)
    {
        float *room = malloc(4 * k);
#pragma omp for
        for (long r = 0; r < n; r++) open_pairs(s, 0, r, 1, room, out + r * k);
        free(room);
    }
}
