/* The torch engine's forward pass on a CPU: decode and prefill of Llama-like models with few rows at a time.
 *
 * BLAS libraries are made for large square products. A decode step multiplies 1 to some hundred rows with every weight once, where
 * they reach a third of what the machine can do; the kernels here read each weight once, at the speed of the memory or of the FMA units,
 * and attention reads exactly the keys that a row has. Compiled for the machine at hand by native.py; vectors are GCC's own, so that
 * nothing here depends on one instruction set.
 *
 * Legend: n tokens of one pass, D head size, W a weight matrix [out, in], "block" a group of tokens that fills vector lanes.
 * Weights and cache are float32 or bfloat16 (model.bf16); activations and sums are float32. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define TILE 6        /* rows of W a tile: with two vectors of tokens 12 sums, which fit the 16 registers of AVX2 */
#define DEPTH 1024    /* elements of a row of W a pass, so that TILE rows converted from bfloat16 stay in the first cache */
#define GROUP 8       /* blocks of tokens a pass over W: their panel stays in the second cache */
#define WIDTH (2 * LANES)
#define SMALL 16384   /* multiply-adds below which a second thread costs more than it saves */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t bf16;

typedef struct {
    const void *weight, *bias; /* bias may be NULL */
    int64_t out, in;
} linear_t;

typedef struct {
    linear_t qkv, out, up, down;
    const void *attention_norm, *attention_shift, *mlp_norm, *mlp_shift; /* shifts: of LayerNorm; NULL is RMSNorm */
    const void *qk_norms;                                                /* [heads + groups, D] or NULL */
} layer_t;

typedef struct {
    int64_t layers, hidden, heads, groups, dim, ffn, vocab, rows, length; /* rows, length: of the cache */
    int32_t use_bf16, gated;
    float eps, scale;
    const layer_t *layer;
    linear_t head;
    const void *embedding, *positions, *final_norm, *final_shift; /* positions: learned ones, or NULL */
    const float *cosines, *sines;                                 /* [length, D], the first half of sines negated; or NULL */
    void *keys, *values;                                          /* [layers, rows, groups, length, D] */
    float *x, *normed, *qkv, *attended, *up, *panel, *scores;     /* work space for `capacity` tokens; scores per thread */
    int64_t capacity;
} model_t;

static inline float from_bf16(bf16 h) {
    union { uint32_t u; float f; } c = {(uint32_t)h << 16};
    return c.f;
}

static inline bf16 to_bf16(float f) { /* to nearest even; a NaN stays one */
    union { float f; uint32_t u; } c = {f};
    if (f != f) return 0x7FC0;
    return (bf16)((c.u + 0x7FFF + ((c.u >> 16) & 1)) >> 16);
}

static inline float get(const void *p, int64_t i, int b) { return b ? from_bf16(((const bf16 *)p)[i]) : ((const float *)p)[i]; }

static inline vec load(const void *p, int64_t i, int b) {
    if (!b) return *(const vec *)((const float *)p + i);
    return (vec)(__builtin_convertvector(*(const hvec *)((const bf16 *)p + i), uvec) << 16);
}

static inline float total(vec v) {
    float *f = (float *)&v;
    for (int l = LANES / 2; l; l /= 2)
        for (int i = 0; i < l; i++) f[i] += f[i + l];
    return f[0];
}

/* exp to 2 ulp (Cephes' expf); 0 below -87.3, a NaN stays one. Free of branches, so that loops over it become vector code. */
static inline float exponential(float x) {
    float c = x < -87.3f ? -87.3f : x > 88.0f ? 88.0f : x;
    float n = (c * 1.44269504f + 12582912.0f) - 12582912.0f;
    float r = c - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { int32_t i; float f; } scale = {((int32_t)n + 127) << 23};
    return x < -87.3f ? 0.0f : p * scale.f;
}

/* ---- linear layers ---- */

/* sums[r][2 vectors] += W[r, 0..depth) times the block's panel [depth][vectors * LANES]; W float32 with rows `stride` apart. */
#define TILE_KERNEL(NAME, ROWS, VECTORS)                                                                      \
    static void NAME(const float *w, int64_t stride, const float *panel, int64_t depth, float *sums) {        \
        vec acc[ROWS][VECTORS];                                                                               \
        for (int r = 0; r < ROWS; r++)                                                                        \
            for (int v = 0; v < VECTORS; v++) acc[r][v] = *(vec *)(sums + r * WIDTH + v * LANES);             \
        for (int64_t k = 0; k < depth; k++) {                                                                 \
            vec x[VECTORS];                                                                                   \
            for (int v = 0; v < VECTORS; v++) x[v] = *(const vec *)(panel + (k * VECTORS + v) * LANES);       \
            _Pragma("GCC unroll 6") for (int r = 0; r < ROWS; r++) {                                          \
                float one = w[r * stride + k];                                                                \
                for (int v = 0; v < VECTORS; v++) acc[r][v] += one * x[v];                                    \
            }                                                                                                 \
        }                                                                                                     \
        for (int r = 0; r < ROWS; r++)                                                                        \
            for (int v = 0; v < VECTORS; v++) *(vec *)(sums + r * WIDTH + v * LANES) = acc[r][v];             \
    }
TILE_KERNEL(tile_wide, TILE, 2)
TILE_KERNEL(tile_half, TILE, 1)
TILE_KERNEL(row_wide, 1, 2)
TILE_KERNEL(row_half, 1, 1)

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

static void store(const linear_t *m, const float *sums, int64_t o, int rows, int64_t n, int64_t first, float *y, int add, int b) {
    int64_t real = n - first < WIDTH ? n - first : WIDTH;
    for (int64_t i = 0; i < real; i++)
        for (int r = 0; r < rows; r++) {
            float s = sums[r * WIDTH + i] + (m->bias ? get(m->bias, o + r, b) : 0);
            float *at = y + (first + i) * m->out + o + r;
            *at = add ? *at + s : s;
        }
}

static void linear_blocks(const linear_t *m, const float *panel, int64_t n, float *y, int add, int b) {
    int64_t blocks = (n + WIDTH - 1) / WIDTH, tiles = (m->out + TILE - 1) / TILE;
#pragma omp parallel for schedule(static) if (n * m->out * m->in > SMALL)
    for (int64_t t = 0; t < tiles; t++) {
        int64_t o = t * TILE;
        int rows = m->out - o < TILE ? (int)(m->out - o) : TILE;
        float wide[TILE * DEPTH], sums[GROUP][TILE * WIDTH];
        memset(sums, 0, sizeof(sums[0]) * blocks);
        for (int64_t k = 0; k < m->in; k += DEPTH) {
            int64_t depth = m->in - k < DEPTH ? m->in - k : DEPTH, stride = b ? DEPTH : m->in;
            const float *w = b ? wide : (const float *)m->weight + o * m->in + k;
            for (int r = 0; b && r < rows; r++) widen((const bf16 *)m->weight + (o + r) * m->in + k, wide + r * DEPTH, depth);
            for (int64_t i = 0; i < blocks; i++) {
                int64_t width = block_width(n, i * WIDTH);
                const float *p = panel + i * m->in * WIDTH + k * width;
                if (rows == TILE)
                    (width == WIDTH ? tile_wide : tile_half)(w, stride, p, depth, sums[i]);
                else
                    for (int r = 0; r < rows; r++)
                        (width == WIDTH ? row_wide : row_half)(w + r * stride, stride, p, depth, sums[i] + r * WIDTH);
            }
        }
        for (int64_t i = 0; i < blocks; i++) store(m, sums[i], o, rows, n, i * WIDTH, y, add, b);
    }
}

/* One to three tokens: dot products along the rows of W, four rows at a time; bound by the memory. */
#define DOT_KERNEL(NAME, TOKENS, BF16)                                                                        \
    static void NAME(const void *w, int64_t in, const float *x, float out[4][3]) {                            \
        vec acc[4][TOKENS];                                                                                   \
        memset(acc, 0, sizeof(acc));                                                                          \
        int64_t k = 0;                                                                                        \
        for (; k + LANES <= in; k += LANES) {                                                                 \
            vec t[TOKENS];                                                                                    \
            for (int i = 0; i < TOKENS; i++) t[i] = *(const vec *)(x + i * in + k);                           \
            for (int r = 0; r < 4; r++) {                                                                     \
                vec one = load(w, r * in + k, BF16);                                                          \
                for (int i = 0; i < TOKENS; i++) acc[r][i] += one * t[i];                                     \
            }                                                                                                 \
        }                                                                                                     \
        for (int r = 0; r < 4; r++)                                                                           \
            for (int i = 0; i < TOKENS; i++) {                                                                \
                out[r][i] = total(acc[r][i]);                                                                 \
                for (int64_t j = k; j < in; j++) out[r][i] += get(w, r * in + j, BF16) * x[i * in + j];       \
            }                                                                                                 \
    }
DOT_KERNEL(dot1, 1, 0)
DOT_KERNEL(dot2, 2, 0)
DOT_KERNEL(dot3, 3, 0)
DOT_KERNEL(dot1_bf16, 1, 1)
DOT_KERNEL(dot2_bf16, 2, 1)
DOT_KERNEL(dot3_bf16, 3, 1)

static void linear_few(const linear_t *m, const float *x, int64_t n, float *y, int add, int b) {
    typedef void (*kernel)(const void *, int64_t, const float *, float[4][3]);
    static const kernel kernels[2][3] = {{dot1, dot2, dot3}, {dot1_bf16, dot2_bf16, dot3_bf16}};
    kernel dot = kernels[b][n - 1];
    int64_t quads = (m->out + 3) / 4;
#pragma omp parallel for schedule(static) if (n * m->out * m->in > SMALL)
    for (int64_t q = 0; q < quads; q++) {
        int64_t o = q * 4 + 4 <= m->out ? q * 4 : m->out - 4; /* the last four overlap; out is at least 4 */
        float sums[4][3];
        dot((const char *)m->weight + o * m->in * (b ? 2 : 4), m->in, x, sums);
        for (int r = (int)(q * 4 - o); r < 4; r++)
            for (int64_t i = 0; i < n; i++) {
                float s = sums[r][i] + (m->bias ? get(m->bias, o + r, b) : 0);
                float *at = y + i * m->out + o + r;
                *at = add ? *at + s : s;
            }
    }
}

/* y [n, out] = (add: y +) x [n, in] W^T + bias; panel: in * GROUP * WIDTH floats of work space. */
void linear(const linear_t *m, const float *x, int64_t n, float *y, int add, int b, float *panel) {
    if (n <= 3 && m->out >= 4) {
        linear_few(m, x, n, y, add, b);
        return;
    }
    for (int64_t first = 0; first < n; first += GROUP * WIDTH) {
        int64_t part = n - first < GROUP * WIDTH ? n - first : GROUP * WIDTH;
        pack(x + first * m->in, part, m->in, panel);
        linear_blocks(m, panel, part, y + first * m->out, add, b);
    }
}

/* ---- norms and activations ---- */

static void normalise(const float *x, float *y, int64_t size, const void *weight, const void *shift, float eps, int b) {
    vec sum = {0}, square = {0};
    float mean = 0, s = 0;
    int64_t k = 0;
    if (shift) {
        for (; k + LANES <= size; k += LANES) sum += *(const vec *)(x + k);
        for (mean = total(sum); k < size; k++) mean += x[k];
        mean /= size;
    }
    for (k = 0; k + LANES <= size; k += LANES) {
        vec d = *(const vec *)(x + k) - mean;
        square += d * d;
    }
    for (s = total(square); k < size; k++) s += (x[k] - mean) * (x[k] - mean);
    float inverse = 1 / sqrtf(s / size + eps);
    for (k = 0; k < size; k++) y[k] = (x[k] - mean) * inverse * get(weight, k, b) + (shift ? get(shift, k, b) : 0);
}

static void norm(const model_t *m, const float *x, int64_t n, const void *weight, const void *shift) {
#pragma omp parallel for if (n * m->hidden > SMALL)
    for (int64_t i = 0; i < n; i++)
        normalise(x + i * m->hidden, m->normed + i * m->hidden, m->hidden, weight, shift, m->eps, m->use_bf16);
}

/* silu(gate) * up on [gate, up] rows of 2 * ffn, packed to rows of ffn; or GPT-2's gelu (tanh) in place. */
static void activate(const model_t *m, int64_t n) {
    int64_t f = m->ffn;
    if (!m->gated) {
#pragma omp parallel for if (n * f > SMALL)
        for (int64_t i = 0; i < n * f; i++) {
            float u = m->up[i], t = 2 * 0.7978845608f * (u + 0.044715f * u * u * u);
            m->up[i] = u / (1 + exponential(-t));
        }
        return;
    }
#pragma omp parallel for if (n * f > SMALL)
    for (int64_t i = 0; i < n; i++) {
        float *gate = m->up + i * 2 * f, *up = gate + f;
        for (int64_t k = 0; k < f; k++) gate[k] = gate[k] / (1 + exponential(-gate[k])) * up[k];
    }
    for (int64_t i = 1; i < n; i++) memmove(m->up + i * f, m->up + i * 2 * f, f * sizeof(float));
}

/* ---- attention ---- */

static void rotate(float *x, const float *c, const float *s, int64_t d) {
    int64_t half = d / 2;
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], z = x[i + half];
        x[i] = a * c[i] + z * s[i];
        x[i + half] = z * c[i + half] + a * s[i + half];
    }
}

static void keep(void *cache, int64_t at, const float *x, int64_t d, int b) {
    if (!b)
        memcpy((float *)cache + at, x, d * sizeof(float));
    else
        for (int64_t i = 0; i < d; i++) ((bf16 *)cache)[at + i] = to_bf16(x[i]);
}

static int64_t cache_at(const model_t *m, int64_t layer, int64_t row, int64_t group) {
    return ((layer * m->rows + row) * m->groups + group) * m->length * m->dim;
}

/* Norms and rotates queries and keys of each token, and puts its keys and values into the cache. */
static void place(const model_t *m, const layer_t *l, int64_t layer, const int64_t *rows, const int64_t *at, int64_t n) {
    int64_t d = m->dim, width = (m->heads + 2 * m->groups) * d;
#pragma omp parallel for if (n * width > SMALL)
    for (int64_t i = 0; i < n; i++) {
        float *qkv = m->qkv + i * width;
        for (int64_t h = 0; h < m->heads + m->groups; h++) {
            const void *weight = (const char *)l->qk_norms + h * d * (m->use_bf16 ? 2 : 4);
            if (l->qk_norms) normalise(qkv + h * d, qkv + h * d, d, weight, NULL, m->eps, m->use_bf16);
            if (m->cosines) rotate(qkv + h * d, m->cosines + at[i] * d, m->sines + at[i] * d, d);
        }
        for (int64_t k = 0, base = m->heads * d; k < 2 * m->groups * d; k++)
            if (m->use_bf16) qkv[base + k] = from_bf16(to_bf16(qkv[base + k]));
        for (int64_t g = 0; g < m->groups; g++) {
            int64_t slot = cache_at(m, layer, rows[i], g) + at[i] * d;
            keep(m->keys, slot, qkv + (m->heads + g) * d, d, m->use_bf16);
            keep(m->values, slot, qkv + (m->heads + m->groups + g) * d, d, m->use_bf16);
        }
    }
}

static inline float dot(const float *q, const void *key, int64_t at, int64_t d, int b) {
    vec a = {0};
    int64_t k = 0;
    for (; k + LANES <= d; k += LANES) a += *(const vec *)(q + k) * load(key, at + k, b);
    float s = total(a);
    for (; k < d; k++) s += q[k] * get(key, at + k, b);
    return s;
}

/* One query over the `count` first positions of one group: softmax(q K^T * scale) V. */
static inline void attend_one(const model_t *m, const float *q, const void *keys, const void *values, int64_t base, int64_t count,
                              float *s, float *y, int b) {
    int64_t d = m->dim, k = 0;
    float top = -INFINITY, sum = 0;
    for (int64_t t = 0; t < count; t++) {
        s[t] = dot(q, keys, base + t * d, d, b) * m->scale;
        top = s[t] > top ? s[t] : top;
    }
    for (int64_t t = 0; t < count; t++) s[t] = exponential(s[t] - top);
    for (int64_t t = 0; t < count; t++) sum += s[t];
    for (; k + 4 * LANES <= d; k += 4 * LANES) {
        vec a[4] = {{0}};
        for (int64_t t = 0; t < count; t++)
            for (int v = 0; v < 4; v++) a[v] += s[t] * load(values, base + t * d + k + v * LANES, b);
        for (int v = 0; v < 4; v++) *(vec *)(y + k + v * LANES) = a[v] / sum;
    }
    for (; k + LANES <= d; k += LANES) {
        vec a = {0};
        for (int64_t t = 0; t < count; t++) a += s[t] * load(values, base + t * d + k, b);
        *(vec *)(y + k) = a / sum;
    }
    for (; k < d; k++) {
        float a = 0;
        for (int64_t t = 0; t < count; t++) a += s[t] * get(values, base + t * d + k, b);
        y[k] = a / sum;
    }
}

static void attend(const model_t *m, int64_t layer, const int64_t *rows, const int64_t *at, int64_t n) {
    int64_t d = m->dim, per = m->heads / m->groups, width = (m->heads + 2 * m->groups) * d, work = 0;
    for (int64_t i = 0; i < n; i++) work += (at[i] + 1) * m->heads * d;
#pragma omp parallel for collapse(2) schedule(dynamic, 1) if (work > SMALL)
    for (int64_t i = 0; i < n; i++)
        for (int64_t g = 0; g < m->groups; g++) {
            float *scores = m->scores + omp_get_thread_num() * m->length;
            int64_t base = cache_at(m, layer, rows[i], g);
            for (int64_t h = g * per; h < (g + 1) * per; h++) {
                const float *q = m->qkv + i * width + h * d;
                float *y = m->attended + (i * m->heads + h) * d;
                if (m->use_bf16)
                    attend_one(m, q, m->keys, m->values, base, at[i] + 1, scores, y, 1);
                else
                    attend_one(m, q, m->keys, m->values, base, at[i] + 1, scores, y, 0);
            }
        }
}

/* ---- the model ---- */

static void embed(const model_t *m, const int64_t *tokens, const int64_t *at, int64_t n) {
    int64_t h = m->hidden;
#pragma omp parallel for if (n * h > SMALL)
    for (int64_t i = 0; i < n; i++)
        for (int64_t k = 0; k < h; k++) {
            float p = m->positions ? get(m->positions, at[i] * h + k, m->use_bf16) : 0;
            m->x[i * h + k] = get(m->embedding, tokens[i] * h + k, m->use_bf16) + p;
        }
}

/* Keep the wanted tokens alone; `wanted` ascends, so that nothing is overwritten before it is read. */
static void gather(float *x, int64_t size, const int64_t *wanted, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (wanted[i] != i) memcpy(x + i * size, x + wanted[i] * size, size * sizeof(float));
}

/* n tokens of the sequences in `rows` at positions `at`, all of whose earlier positions are in the cache or among these tokens;
 * logits [count, vocab] of the tokens numbered by `wanted` [count], ascending; none where count is 0. */
void forward(const model_t *m, const int64_t *tokens, const int64_t *rows, const int64_t *at, int64_t n, const int64_t *wanted,
             int64_t count, float *logits) {
    int b = m->use_bf16;
    embed(m, tokens, at, n);
    for (int64_t i = 0; i < m->layers; i++) {
        const layer_t *l = m->layer + i;
        norm(m, m->x, n, l->attention_norm, l->attention_shift);
        linear(&l->qkv, m->normed, n, m->qkv, 0, b, m->panel);
        place(m, l, i, rows, at, n);
        if (i == m->layers - 1 && count == 0) return;
        attend(m, i, rows, at, n);
        if (i == m->layers - 1 && count < n) { /* the rest of the last layer matters for the wanted tokens only */
            gather(m->x, m->hidden, wanted, count);
            gather(m->attended, m->heads * m->dim, wanted, count);
            n = count;
        }
        linear(&l->out, m->attended, n, m->x, 1, b, m->panel);
        norm(m, m->x, n, l->mlp_norm, l->mlp_shift);
        linear(&l->up, m->normed, n, m->up, 0, b, m->panel);
        activate(m, n);
        linear(&l->down, m->up, n, m->x, 1, b, m->panel);
    }
    norm(m, m->x, n, m->final_norm, m->final_shift);
    linear(&m->head, m->normed, n, logits, 0, b, m->panel);
}

/* ---- sampling ---- */

#define BLOCK 256

/* One row: as aligner/rollout/sampling.py has it, with the cumulative sum over blocks of ids in double. */
static void sample_row(const float *z, int64_t vocab, float u, float temperature, int64_t *token, float *logprob, double *blocks) {
    float inverse = temperature > 0 ? 1 / temperature : 1, top = -INFINITY;
    for (int64_t i = 0; i < vocab; i++) top = z[i] > top ? z[i] : top;
    double sum = 0;
    int64_t count = (vocab + BLOCK - 1) / BLOCK;
    for (int64_t c = 0; c < count; c++) {
        int64_t end = (c + 1) * BLOCK < vocab ? (c + 1) * BLOCK : vocab;
        float lanes[LANES] = {0};
        int64_t i = c * BLOCK;
        for (; i + LANES <= end; i += LANES)
            for (int l = 0; l < LANES; l++) lanes[l] += exponential((z[i + l] - top) * inverse);
        for (; i < end; i++) lanes[0] += exponential((z[i] - top) * inverse);
        float part = 0;
        for (int l = 0; l < LANES; l++) part += lanes[l];
        sum += part;
        blocks[c] = sum;
    }
    *token = 0;
    *logprob = NAN;
    if (!(sum > 0) || !(top < INFINITY)) return; /* a NaN somewhere, or an infinite logit: the log-prob says so */
    if (temperature == 0) {
        while (z[*token] != top) ++*token;
    } else {
        double target = u * sum;
        int64_t c = 0;
        while (c < count - 1 && !(blocks[c] > target)) c++;
        int64_t i = c * BLOCK, end = (c + 1) * BLOCK < vocab ? (c + 1) * BLOCK : vocab, last = -1;
        for (double s = c ? blocks[c - 1] : 0; i < end; i++) {
            float e = exponential((z[i] - top) * inverse);
            if (e > 0) last = i; /* rounding may leave the block's sum above that of its ids: then its last possible id */
            s += e;
            if (e > 0 && s > target) break;
        }
        while (last < 0) /* the last block of all held nothing, and rounding led here */
            for (i = --c * BLOCK; i < (c + 1) * BLOCK; i++)
                if (exponential((z[i] - top) * inverse) > 0) last = i;
        *token = last;
    }
    *logprob = (float)((z[*token] - top) * (double)inverse - log(sum));
}

/* tokens and log-probs [n] of logits [n, vocab]; blocks: n * ceil(vocab / 256) doubles of work space. */
void sample(const float *logits, int64_t n, int64_t vocab, const float *uniforms, const float *temperature, int64_t *tokens,
            float *logprobs, double *blocks) {
    int64_t per = (vocab + BLOCK - 1) / BLOCK;
#pragma omp parallel for if (n * vocab > SMALL)
    for (int64_t i = 0; i < n; i++)
        sample_row(logits + i * vocab, vocab, uniforms[i], temperature[i], tokens + i, logprobs + i, blocks + i * per);
}
