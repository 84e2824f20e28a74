/* y = x W^T + bias for few rows x: each weight is read once, at the speed of the memory or of the FMA units. */
#pragma once
#include "vectors.h"

#define TILE 6        /* rows of W a tile: with two vectors of tokens 12 sums, which fit the 16 registers of AVX2 */
#define DEPTH 1024    /* elements of a row of W a pass, so that TILE rows converted from bfloat16 stay in the first cache */
#define GROUP 8       /* blocks of tokens a pass over W: their panel stays in the second cache */
#define WIDTH (2 * LANES)

typedef struct {
    const void *weight, *bias; /* bias may be NULL */
    int64_t out, in;
} linear_t;

/* sums[r][2 vectors] += W[r, 0..depth) times the block's panel [depth][vectors * LANES]; W float32 with rows `stride` apart. */
#define TILE_KERNEL(NAME, ROWS, VECTORS, AHEAD)                                                               \
    static void NAME(const float *w, int64_t stride, const float *panel, int64_t depth, float *sums) {        \
        vec acc[ROWS][VECTORS];                                                                               \
        for (int r = 0; r < ROWS; r++)                                                                        \
            for (int v = 0; v < VECTORS; v++) acc[r][v] = *(vec *)(sums + r * WIDTH + v * LANES);             \
        for (int64_t k = 0; k < depth; k++) {                                                                 \
            vec x[VECTORS];                                                                                   \
            for (int v = 0; v < VECTORS; v++) x[v] = *(const vec *)(panel + (k * VECTORS + v) * LANES);       \
            if (AHEAD && !(k & 15))                                                                           \
                for (int r = 0; r < ROWS; r++) __builtin_prefetch(w + (r + ROWS) * stride + k);               \
            _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++) {                                          \
                float one = w[r * stride + k];                                                                \
                for (int v = 0; v < VECTORS; v++) acc[r][v] += one * x[v];                                    \
            }                                                                                                 \
        }                                                                                                     \
        for (int r = 0; r < ROWS; r++)                                                                        \
            for (int v = 0; v < VECTORS; v++) *(vec *)(sums + r * WIDTH + v * LANES) = acc[r][v];             \
    }
TILE_KERNEL(tile_first, TILE, 2, 1) /* of a tile's blocks, the one that fetches the next tile meanwhile */
TILE_KERNEL(tile_wide, TILE, 2, 0)
TILE_KERNEL(tile_half, TILE, 1, 1)
TILE_KERNEL(row_wide, 1, 2, 0)
TILE_KERNEL(row_half, 1, 1, 0)

static void widen(const bf16 *from, float *to, int64_t count) {
    for (int64_t i = 0; i < count; i++) to[i] = from_bf16(from[i]);
}

static int64_t block_width(int64_t n, int64_t first) { return n - first > LANES ? WIDTH : LANES; }

/* Tokens x [n, in] into blocks [in][width], zeros where the last block has no token; blocks lie `in * WIDTH` apart. */
static void pack(const float *x, int64_t n, int64_t in, float *panel) {
    int64_t blocks = (n + WIDTH - 1) / WIDTH;
#pragma omp parallel for if (n * in > SMALL)
    for (int64_t b = 0; b < blocks; b++) {
        int64_t first = b * WIDTH, width = block_width(n, first), real = n - first < width ? n - first : width;
        float *p = panel + b * in * WIDTH;
        for (int64_t k = 0; k < in; k++) {
            for (int64_t i = 0; i < real; i++) p[k * width + i] = x[(first + i) * in + k];
            for (int64_t i = real; i < width; i++) p[k * width + i] = 0;
        }
    }
}

/* sums [rows][WIDTH] of a block's tokens to y, which is [n, out]. */
static void store(const float *sums, int64_t out, int rows, int64_t real, float *y, int add) {
    for (int64_t i = 0; i < real; i++, y += out)
        if (rows == TILE && add)
            for (int r = 0; r < TILE; r++) y[r] += sums[r * WIDTH + i];
        else if (rows == TILE)
            for (int r = 0; r < TILE; r++) y[r] = sums[r * WIDTH + i];
        else
            for (int r = 0; r < rows; r++) y[r] = sums[r * WIDTH + i] + (add ? y[r] : 0);
}

static void begin(const linear_t *m, int64_t o, int rows, float *sums, int b) {
    memset(sums, 0, sizeof(float) * TILE * WIDTH);
    for (int r = 0; m->bias && r < rows; r++)
        for (int l = 0; l < WIDTH; l++) sums[r * WIDTH + l] = get(m->bias, o + r, b);
}

static void linear_blocks(const linear_t *m, const float *panel, int64_t n, float *y, int add, int b) {
    int64_t blocks = (n + WIDTH - 1) / WIDTH, tiles = (m->out + TILE - 1) / TILE;
#pragma omp parallel for schedule(static) if (n * m->out * m->in > SMALL)
    for (int64_t t = 0; t < tiles; t++) {
        int64_t o = t * TILE;
        int rows = m->out - o < TILE ? (int)(m->out - o) : TILE;
        float wide[TILE * DEPTH], sums[GROUP][TILE * WIDTH];
        for (int64_t i = 0; i < blocks; i++) begin(m, o, rows, sums[i], b);
        for (int64_t k = 0; k < m->in; k += DEPTH) {
            int64_t depth = m->in - k < DEPTH ? m->in - k : DEPTH, stride = b ? DEPTH : m->in;
            const float *w = b ? wide : (const float *)m->weight + o * m->in + k;
            for (int r = 0; b && r < rows; r++) widen((const bf16 *)m->weight + (o + r) * m->in + k, wide + r * DEPTH, depth);
            for (int64_t i = 0; i < blocks; i++) {
                int64_t width = block_width(n, i * WIDTH);
                const float *p = panel + i * m->in * WIDTH + k * width;
                if (rows == TILE)
                    (width < WIDTH ? tile_half : i ? tile_wide : tile_first)(w, stride, p, depth, sums[i]);
                else
                    for (int r = 0; r < rows; r++)
                        (width == WIDTH ? row_wide : row_half)(w + r * stride, stride, p, depth, sums[i] + r * WIDTH);
            }
        }
        for (int64_t i = 0; i < blocks; i++) {
            int64_t first = i * WIDTH, real = n - first < WIDTH ? n - first : WIDTH;
            store(sums[i], m->out, rows, real, y + first * m->out + o, add);
        }
    }
}

/* Eight rows of W, `in` apart, times x. */
static inline v8 dot8(const void *w, int64_t in, const float *x, int b) {
    v8 acc[8] = {{0}};
    int64_t k = 0;
    for (; k + 8 <= in; k += 8) {
        v8 one = *(const v8 *)(x + k);
        for (int r = 0; r < 8 && !(k & 15); r++) __builtin_prefetch((const char *)w + ((r + 8) * in + k) * (b ? 2 : 4));
        for (int r = 0; r < 8; r++) acc[r] += one * load8(w, r * in + k, b);
    }
    v8 sum = sums8(acc);
    for (; k < in; k++)
        for (int r = 0; r < 8; r++) sum[r] += x[k] * get(w, r * in + k, b);
    return sum;
}

/* One to three tokens: dot products along the rows of W, eight rows at a time; bound by the memory. out is at least 8. */
static void linear_few(const linear_t *m, const float *x, int64_t n, float *y, int add, int b) {
    int64_t eights = (m->out + 7) / 8;
#pragma omp parallel for schedule(static) if (n * m->out * m->in > SMALL)
    for (int64_t e = 0; e < eights; e++) {
        int64_t o = e * 8 + 8 <= m->out ? e * 8 : m->out - 8; /* the last eight overlap those before */
        const char *w = (const char *)m->weight + o * m->in * (b ? 2 : 4);
        for (int64_t i = 0; i < n; i++) {
            v8 sum = b ? dot8(w, m->in, x + i * m->in, 1) : dot8(w, m->in, x + i * m->in, 0);
            for (int r = (int)(e * 8 - o); r < 8; r++) {
                float *at = y + i * m->out + o + r;
                *at = sum[r] + (m->bias ? get(m->bias, o + r, b) : 0) + (add ? *at : 0);
            }
        }
    }
}

/* y [n, out] = (add: y +) x [n, in] W^T + bias; panel: in * GROUP * WIDTH floats of work space. */
void linear(const linear_t *m, const float *x, int64_t n, float *y, int add, int b, float *panel) {
    if (n <= 3 && m->out >= 8) {
        linear_few(m, x, n, y, add, b);
        return;
    }
    for (int64_t first = 0; first < n; first += GROUP * WIDTH) {
        int64_t part = n - first < GROUP * WIDTH ? n - first : GROUP * WIDTH;
        pack(x + first * m->in, part, m->in, panel);
        linear_blocks(m, panel, part, y + first * m->out, add, b);
    }
}
