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
#define TILE 8    /* the most rows of x that meet them at a time */
#define PAIRS_TILE 6
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

/* One row of weights in float32. */
static void open_row(stack s, long e, long row, float *out) {
    const uint8_t *w = weights(s, e, row), *scale = s.format == BF16 ? NULL : scales(s, e, row);
    if (s.format == BF16)
        for (long c = 0; c < s.k; c++) out[c] = from_bf16(((const uint16_t *)w)[c]);
    else if (s.format == INT4)
        for (long g = 0; g < s.k / GROUP; g++) {
            const float by = from_bf16(((const uint16_t *)scale)[g]);
            for (int i = 0; i < GROUP; i++) out[g * GROUP + i] = (float)((w[g * GROUP / 2 + i / 2] >> (i % 2 * 4) & 15) - 8) * by;
        }
    else
        for (long c = 0; c < s.k; c++) {
            /* exponent and mantissa in float32's places; its bias is 120 larger, and the product is exact, subnormals too */
            uint32_t bits = (w[c] & 0x7f) << 20 | (uint32_t)(w[c] & 0x80) << 24;
            float f;
            memcpy(&f, &bits, 4);
            f *= 0x1p120f;
            out[c] = ((w[c] & 0x7f) == 0x7f ? NAN : f) * ((const float *)scale)[c / SQUARE];
        }
}

/* `width` columns of out for `count` rows of x in float32; each row of weights is opened once into `open`. */
static void plain(stack s, long e, long row, int width, const float *x, int count, float *open, float *out) {
    for (int r = 0; r < width; r++) {
        open_row(s, e, row + r, open);
        for (int m = 0; m < count; m++) {
            float lane[16] = {0}, sum = 0; /* sixteen sums side by side, which any compiler makes vectors of */
            for (long c = 0; c < s.k; c += 16)
                for (int i = 0; i < 16; i++) lane[i] += x[m * s.k + c + i] * open[c + i];
            for (int i = 0; i < 16; i++) sum += lane[i];
            out[m * BLOCK + r] = sum;
        }
    }
}

#ifdef __AVX512BF16__
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))
#define STEP 128 /* int4 weights in one 64-byte load */

/* The sums of four vectors. */
INLINE __m128 totals(__m512 a, __m512 b, __m512 c, __m512 d) {
    const __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(ab, cd, 0x44), _mm512_shuffle_ps(ab, cd, 0xee));
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
    return _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
}

/* Four rows of bfloat16 weights against `count` of x. `count` is a constant wherever this is called, so all sums stay in registers. */
INLINE void four(const uint16_t *w, const uint16_t *x, const int count, long k, float *out) {
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

#define FOUR(count) case count: four(w, x, count, k, out); break;
static void four_of(int count, const uint16_t *w, const uint16_t *x, long k, float *out) {
    switch (count) { FOUR(1) FOUR(2) FOUR(3) FOUR(4) FOUR(5) FOUR(PAIRS_TILE) }
}

/* x in the order in which a load of int4 weights opens: of each 128 values first those at 4i, then 4i + 1, 4i + 2, 4i + 3. */
INLINE long plane(long c) { return c / STEP * STEP + c % 4 * 32 + c % STEP / 4; }

/* Four rows of int4 weights against `count` of x in planes: the scale comes in once for four products, in float32. */
INLINE void four_int4(const uint8_t *w, const uint16_t *scale, const uint16_t *x, const int count, long k, float *out) {
    /* nibble -> bfloat16 of nibble - 8; twice, because the lookup takes five bits and the fifth belongs to a neighbour */
    static const uint16_t value[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000,
                                       0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                       0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i table = _mm512_loadu_si512(value);
    const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0); /* a scale for every 4 lanes */
    const long ahead = k > 4096 ? k : 4096; /* bytes: the next two rows, or some of the next short ones */
    for (int pair = 0; pair < 4; pair += 2) {
        __m512 sum[2][TILE];
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

#define FOUR_INT4(count) case count: four_int4(w, scale, x, count, k, out); break;
static void four_int4_of(int count, const uint8_t *w, const uint16_t *scale, const uint16_t *x, long k, float *out) {
    switch (count) { FOUR_INT4(1) FOUR_INT4(2) FOUR_INT4(3) FOUR_INT4(4) FOUR_INT4(5) FOUR_INT4(6) FOUR_INT4(7) FOUR_INT4(TILE) }
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
    FLOATS, /* x in float32 */
    PAIRS,  /* x as it is; weights that are not bfloat16 are opened to it first */
    PLANES, /* x in planes, int4 as it lies */
};

static enum way way(enum format format, long rows, long n, long k, int allow_wide) {
#ifdef __AVX512BF16__
    if (allow_wide && n % 4 == 0 && k % 32 == 0) return format == INT4 && rows <= FEW && k % STEP == 0 ? PLANES : PAIRS;
#endif
    return (void)format, (void)rows, (void)n, (void)k, (void)allow_wide, FLOATS;
}

int takes_wide(long n, long k) { return way(BF16, 1, n, k, 1) != FLOATS; } /* whether this build has PAIRS for weights [n, k] */

static inline int tile(enum way way) { return way == PAIRS ? PAIRS_TILE : TILE; }
static inline int part(enum way way) { return way == PAIRS ? OPEN : BLOCK; }
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

/* `width` rows of weights in bfloat16. */
static void open_pairs(stack s, long e, long row, int width, float *room, uint16_t *out) {
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

/* Rows of weights as PAIRS wants them, opened where they are something else. */
static const uint16_t *opened(stack s, long e, long row, int width, enum way way, float *room, uint16_t *out) {
    if (way != PAIRS || s.format == BF16) return (const uint16_t *)weights(s, e, row);
    open_pairs(s, e, row, width, room, out);
    return out;
}

/* out[m, i] = x[m] times row `row` + i of the weights. */
static void product(stack s, long e, long row, int width, const uint16_t *opened, enum way way, const void *x, int count, float *room,
                    float *out) {
#ifdef __AVX512BF16__
    if (way != FLOATS) {
        for (int r = 0; r < width; r += 4)
            if (way == PAIRS)
                four_of(count, opened + r * s.k, x, s.k, out + r);
            else
                four_int4_of(count, weights(s, e, row + r), (const uint16_t *)scales(s, e, row + r), x, s.k, out + r);
        return;
    }
#endif
    (void)opened, (void)way;
    plain(s, e, row, width, x, count, room, out);
}

static inline int smaller(long a, long b) { return (int)(a < b ? a : b); }

/* All local experts on their rows, as in contract.py: ends[e] is where the rows of expert e end. x, y [rows, hidden] are bfloat16;
   `ready` has four bytes for each value of x, and `h` for each of the rows x inter between. In int4, hidden and inter are multiples
   of 32; else of 16.
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
        float *room = malloc(4 * longest), a[TILE * BLOCK], b[TILE * BLOCK];
        uint16_t *open[2] = {malloc(2 * OPEN * longest), malloc(2 * OPEN * longest)};
#pragma omp for schedule(dynamic)
        for (long e = 0; e < experts; e++) {
            const long from = e ? ends[e - 1] : 0;
            const enum way w = way(format, ends[e] - from, inter, hidden, allow_wide);
            if (w != PAIRS)
                for (long m = from; m < ends[e]; m++) ready_row(w, x + m * hidden, ready + 4 * from * hidden, m - from, hidden);
        }
#pragma omp for schedule(dynamic)
        for (long item = 0; item < experts * up_blocks; item++) {
            const long e = item / up_blocks, block = item % up_blocks * BLOCK, from = e ? ends[e - 1] : 0, rows = ends[e] - from;
            const enum way w = way(format, rows, inter, hidden, allow_wide), then = way(format, rows, hidden, inter, allow_wide);
            const char *at = w == PAIRS ? (const char *)(x + from * hidden) : ready + 4 * from * hidden;
            for (long r = block; rows && r < smaller(inter, block + BLOCK); r += part(w)) {
                const int width = smaller(inter - r, part(w));
                const uint16_t *gates = opened(g, e, r, width, w, room, open[0]), *ups = opened(u, e, r, width, w, room, open[1]);
                for (long m = 0; m < rows; m += tile(w)) {
                    const int count = smaller(rows - m, tile(w));
                    product(g, e, r, width, gates, w, at + m * hidden * value_bytes(w), count, room, a);
                    product(u, e, r, width, ups, w, at + m * hidden * value_bytes(w), count, room, b);
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
            const enum way w = way(format, rows, hidden, inter, allow_wide);
            const char *at = h + 4 * from * inter;
            for (long r = block; rows && r < smaller(hidden, block + BLOCK); r += part(w)) {
                const int width = smaller(hidden - r, part(w));
                const uint16_t *downs = opened(d, e, r, width, w, room, open[0]);
                for (long m = 0; m < rows; m += tile(w)) {
                    const int count = smaller(rows - m, tile(w));
                    product(d, e, r, width, downs, w, at + m * inter * value_bytes(w), count, room, a);
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
