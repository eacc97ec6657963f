/* Experts in int4 or bfloat16, as the checkpoints store them, against rows in bfloat16; and fp8 opened to bfloat16.
   Plain C for any processor; where AVX-512 has products of bfloat16 pairs, they are used. Built by native.py. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define GROUP 32 /* int4 weights that share a scale */
#define TILE 8   /* rows of x at a time: 2 x 8 sums and 8 opened weights fill the 32 registers that AVX-512 has */
#define BLOCK 64 /* rows of weights that one thread takes at a time: with a tile of x they fit a core's second cache */

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

/* out[r, c] = value(w[r, c]) * scale[r / block, c / block] for e4m3 weights [rows, cols]; partial blocks at both edges. */
void fp8_dequantise(const uint8_t *w, const float *scale, uint16_t *out, long rows, long cols, long block, int threads) {
    long across = (cols + block - 1) / block;
#pragma omp parallel for num_threads(threads)
    for (long r = 0; r < rows; r++)
        for (long b = 0; b < across; b++) {
            const float s = scale[r / block * across + b];
            const long end = (b + 1) * block < cols ? (b + 1) * block : cols;
            for (long c = b * block; c < end; c++) {
                /* exponent and mantissa in float32's places; its bias is 120 larger, and the product is exact, subnormals too */
                uint32_t u = w[r * cols + c], bits = (u & 0x7f) << 20 | (u & 0x80) << 24;
                float f;
                memcpy(&f, &bits, 4);
                f *= 0x1p120f;
                out[r * cols + c] = to_bf16(((u & 0x7f) == 0x7f ? NAN : f) * s);
            }
        }
}

/* One column of y for `count` rows of x, in float32: the row of weights is opened once into `open`. No scale: bfloat16. */
static void plain(const float *x, const uint8_t *w, const uint16_t *scale, uint16_t *y, long count, long stride, long k,
                  float *open) {
    for (long c = 0; c < k; c++) {
        if (scale)
            open[c] = (float)((w[c / 2] >> (c % 2 * 4) & 15) - 8) * from_bf16(scale[c / GROUP]);
        else
            open[c] = from_bf16(((const uint16_t *)w)[c]);
    }
    for (long m = 0; m < count; m++) {
        float lane[16] = {0}, sum = 0; /* sixteen sums side by side, which any compiler makes vectors of */
        for (long c = 0; c < k; c += 16)
            for (int i = 0; i < 16; i++) lane[i] += x[m * k + c + i] * open[c + i];
        for (int i = 0; i < 16; i++) sum += lane[i];
        y[m * stride] = to_bf16(sum);
    }
}

#ifdef __AVX512BF16__
#include <immintrin.h>

#define STEP 128 /* weights in one 64-byte load */

/* x in the order in which a load of weights opens: of each 128 values first those at 4i, then 4i + 1, 4i + 2, 4i + 3. */
static void planes(const uint16_t *x, uint16_t *out, long k) {
    for (long c = 0; c < k; c += STEP)
        for (int p = 0; p < 4; p++)
            for (int i = 0; i < 32; i++) out[c + 32 * p + i] = x[c + 4 * i + p];
}

/* Two rows of weights against `count` rows of x. `count` is a constant wherever this is called, so all sums stay in registers. */
static inline __attribute__((always_inline)) void int4_pair(const uint16_t *x, const uint8_t *w, const uint16_t *scale, uint16_t *y,
                                                            const int count, long n, long k) {
    /* nibble -> bfloat16 of nibble - 8; twice, because the lookup takes five bits and the fifth belongs to a neighbour */
    static const uint16_t value[32] = {0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0, 0x3f80, 0x4000,
                                       0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040,
                                       0xc000, 0xbf80, 0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
    const __m512i table = _mm512_loadu_si512(value);
    const __m512i spread = _mm512_set_epi32(3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0, 0); /* a scale for every 4 lanes */
    __m512 sum[2][TILE];
    for (int m = 0; m < count; m++) sum[0][m] = sum[1][m] = _mm512_setzero_ps();
    const long ahead = k > 4096 ? k : 4096; /* bytes: the next pair of rows, or some pairs of short rows */
    for (long c = 0; c < k; c += STEP) {
        __m512bh open[2][4];
        __m512 s[2];
        for (int r = 0; r < 2; r++) {
            const uint8_t *from = w + (r * k + c) / 2;
            _mm_prefetch((const char *)from + ahead, _MM_HINT_T0);
            const __m512i v = _mm512_loadu_si512(from);
            open[r][0] = (__m512bh)_mm512_permutexvar_epi16(v, table);
            open[r][1] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 4), table);
            open[r][2] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table);
            open[r][3] = (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi16(v, 12), table);
            const __m128i four = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i *)(scale + (r * k + c) / GROUP)));
            s[r] = _mm512_castsi512_ps(
                _mm512_permutexvar_epi32(spread, _mm512_castsi128_si512(_mm_slli_epi32(four, 16))));
        }
        for (int m = 0; m < count; m++) {
            const uint16_t *at = x + m * k + c;
            __m512 part[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
            for (int p = 0; p < 4; p++) {
                const __m512bh values = (__m512bh)_mm512_loadu_si512(at + 32 * p);
                part[0] = _mm512_dpbf16_ps(part[0], open[0][p], values);
                part[1] = _mm512_dpbf16_ps(part[1], open[1][p], values);
            }
            sum[0][m] = _mm512_fmadd_ps(part[0], s[0], sum[0][m]); /* the scale, in float32, once for 8 products a lane */
            sum[1][m] = _mm512_fmadd_ps(part[1], s[1], sum[1][m]);
        }
    }
    for (int m = 0; m < count; m++)
        for (int r = 0; r < 2; r++) y[m * n + r] = to_bf16(_mm512_reduce_add_ps(sum[r][m]));
}

/* The same for weights in bfloat16 and x in its own order. */
static inline __attribute__((always_inline)) void bf16_pair(const uint16_t *x, const uint16_t *w, uint16_t *y, const int count,
                                                            long n, long k) {
    __m512 sum[2][TILE];
    for (int m = 0; m < count; m++) sum[0][m] = sum[1][m] = _mm512_setzero_ps();
    for (long c = 0; c < k; c += 32) {
        __m512bh open[2];
        for (int r = 0; r < 2; r++) {
            _mm_prefetch((const char *)(w + r * k + c + 2 * k), _MM_HINT_T0);
            open[r] = (__m512bh)_mm512_loadu_si512(w + r * k + c);
        }
        for (int m = 0; m < count; m++) {
            const __m512bh values = (__m512bh)_mm512_loadu_si512(x + m * k + c);
            for (int r = 0; r < 2; r++) sum[r][m] = _mm512_dpbf16_ps(sum[r][m], open[r], values);
        }
    }
    for (int m = 0; m < count; m++)
        for (int r = 0; r < 2; r++) y[m * n + r] = to_bf16(_mm512_reduce_add_ps(sum[r][m]));
}

#define PAIR(count)                                                \
    case count:                                                    \
        if (scale) int4_pair(x, w, scale, y, count, n, k);         \
        else bf16_pair(x, (const uint16_t *)w, y, count, n, k);    \
        break;

static void tile(const uint16_t *x, const uint8_t *w, const uint16_t *scale, uint16_t *y, int count, long n, long k) {
    switch (count) { PAIR(1) PAIR(2) PAIR(3) PAIR(4) PAIR(5) PAIR(6) PAIR(7) PAIR(TILE) }
}
#endif

/* Bytes of a row of k weights, and where the scales of such a row begin. */
static inline long row_bytes(long k, const uint16_t *scale) { return scale ? k / 2 : 2 * k; }
static inline const uint16_t *scale_at(const uint16_t *scale, long row, long k) { return scale ? scale + row * k / GROUP : scale; }

/* `width` columns of y [count, stride] from row `row` of the weights on, for up to TILE prepared rows of x. `open` holds k.
   On the AVX-512 path width is even. */
static void block(const void *x, const uint8_t *w, const uint16_t *scale, long row, uint16_t *y, int count, long width, long stride,
                  long k, int wide, float *open) {
#ifdef __AVX512BF16__
    if (wide) {
        for (long r = row; r < row + width; r += 2)
            tile(x, w + r * row_bytes(k, scale), scale_at(scale, r, k), y + r - row, count, stride, k);
        return;
    }
#endif
    (void)wide;
    for (long r = row; r < row + width; r++)
        plain(x, w + r * row_bytes(k, scale), scale_at(scale, r, k), y + r - row, count, stride, k, open);
}

/* Bytes of a prepared row of k. */
static inline long room(long k, int wide) { return k * (wide ? 2 : 4); }

/* A row as `block` wants it: bfloat16, reordered for int4, on the AVX-512 path; float32 on the other. */
static void prepare(const uint16_t *x, void *out, long k, int wide, int int4) {
#ifdef __AVX512BF16__
    if (wide && int4) {
        planes(x, out, k);
        return;
    }
#endif
    (void)int4;
    if (wide)
        memcpy(out, x, 2 * k);
    else
        for (long i = 0; i < k; i++) ((float *)out)[i] = from_bf16(x[i]);
}

int takes_wide(long n, long k, int int4) { /* whether this build has the AVX-512 path for weights [n, k] */
#ifdef __AVX512BF16__
    return n % 2 == 0 && k % (int4 ? STEP : 32) == 0;
#else
    return n < 0 && k < 0 && int4;
#endif
}

/* All local experts on their rows, as in contract.py: ends[e] is where the rows of expert e end. Weights are stacked: int4 with
   the even column in the low nibble and bfloat16 scales for every 32 columns, or bfloat16 and no scales. In int4, hidden and inter are
   multiples of 32; in bfloat16, of 16. x, y [rows, hidden] and h [rows, inter] are bfloat16; ready_x and ready_h have four bytes for
   each value of x and h. Sums and SwiGLU are in float32.
   Work is handed out in blocks of weights, not in experts: it is even for one expert and for all, on two cores and on many. */
void experts_forward(const uint16_t *x, uint16_t *y, uint16_t *h, char *ready_x, char *ready_h, const long *ends, long experts,
                     long hidden, long inter, const uint8_t *gate, const uint16_t *gate_scale, const uint8_t *up,
                     const uint16_t *up_scale, const uint8_t *down, const uint16_t *down_scale, int allow_wide, int threads) {
    const long rows = ends[experts - 1], up_blocks = (inter + BLOCK - 1) / BLOCK, down_blocks = (hidden + BLOCK - 1) / BLOCK;
    const int int4 = gate_scale != NULL;
    const int wide_x = allow_wide && takes_wide(inter, hidden, int4), wide_h = allow_wide && takes_wide(hidden, inter, int4);
#pragma omp parallel num_threads(threads)
    {
        float *open = malloc(sizeof(float) * (hidden > inter ? hidden : inter));
#pragma omp for
        for (long m = 0; m < rows; m++) prepare(x + m * hidden, ready_x + m * room(hidden, wide_x), hidden, wide_x, int4);
#pragma omp for schedule(dynamic)
        for (long item = 0; item < experts * up_blocks; item++) {
            const long e = item / up_blocks, r = item % up_blocks * BLOCK, width = inter - r < BLOCK ? inter - r : BLOCK;
            for (long m = e ? ends[e - 1] : 0; m < ends[e]; m += TILE) {
                uint16_t g[TILE * BLOCK], u[TILE * BLOCK];
                const int count = ends[e] - m < TILE ? (int)(ends[e] - m) : TILE;
                const char *rows_of_x = ready_x + m * room(hidden, wide_x);
                block(rows_of_x, gate, gate_scale, e * inter + r, g, count, width, BLOCK, hidden, wide_x, open);
                block(rows_of_x, up, up_scale, e * inter + r, u, count, width, BLOCK, hidden, wide_x, open);
                for (int i = 0; i < count; i++)
                    for (long c = 0; c < width; c++) {
                        const float z = from_bf16(g[i * BLOCK + c]);
                        h[(m + i) * inter + r + c] = to_bf16(z / (1 + expf(-z)) * from_bf16(u[i * BLOCK + c]));
                    }
            }
        }
#pragma omp for
        for (long m = 0; m < rows; m++) prepare(h + m * inter, ready_h + m * room(inter, wide_h), inter, wide_h, int4);
#pragma omp for schedule(dynamic)
        for (long item = 0; item < experts * down_blocks; item++) {
            const long e = item / down_blocks, r = item % down_blocks * BLOCK, width = hidden - r < BLOCK ? hidden - r : BLOCK;
            for (long m = e ? ends[e - 1] : 0; m < ends[e]; m += TILE)
                block(ready_h + m * room(inter, wide_h), down, down_scale, e * hidden + r, y + m * hidden + r,
                      ends[e] - m < TILE ? (int)(ends[e] - m) : TILE, width, hidden, inter, wide_h, open);
        }
        free(open);
    }
}

/* y [rows, n] = x [rows, k] times the transpose of one weight [n, k]; ready has four bytes for each value of x. */
void linear(const uint16_t *x, const uint8_t *w, const uint16_t *scale, uint16_t *y, char *ready, long rows, long n, long k,
            int allow_wide, int threads) {
    const int int4 = scale != NULL, wide = allow_wide && takes_wide(n, k, int4);
#pragma omp parallel num_threads(threads)
    {
        float *open = malloc(sizeof(float) * k);
#pragma omp for
        for (long m = 0; m < rows; m++) prepare(x + m * k, ready + m * room(k, wide), k, wide, int4);
#pragma omp for schedule(dynamic)
        for (long r = 0; r < n; r += BLOCK)
            for (long m = 0; m < rows; m += TILE)
                block(ready + m * room(k, wide), w, scale, r, y + m * n + r, rows - m < TILE ? (int)(rows - m) : TILE,
                      n - r < BLOCK ? n - r : BLOCK, n, k, wide, open);
        free(open);
    }
}
