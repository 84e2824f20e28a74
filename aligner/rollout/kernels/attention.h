/* Rotary positions, the cache, and attention: each query reads exactly the keys that its row has. */
#pragma once
#include "layers.h"

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

/* s[t] = q . key t for t < count, rounded up to eight: the cache has as many positions, and what is behind `count` is not used. */
static inline void scores_of(const float *q, const void *keys, int64_t base, int64_t d, int64_t count, float scale, float *s, int b) {
    for (int64_t t = 0; t < count; t += 8) {
        v8 a[8] = {{0}};
        int64_t k = 0;
        for (; k + 8 <= d; k += 8) {
            v8 one = *(const v8 *)(q + k);
            for (int j = 0; j < 8; j++) a[j] += one * load8(keys, base + (t + j) * d + k, b);
        }
        v8 sum = sums8(a);
        for (; k < d; k++)
            for (int j = 0; j < 8; j++) sum[j] += q[k] * get(keys, base + (t + j) * d + k, b);
        *(v8 *)(s + t) = sum * scale;
    }
}

/* s[t] = exp(s[t] - the largest) for t < count; returns their sum. */
static inline float exponentials(float *s, int64_t count) {
    int64_t end = (count + 7) / 8 * 8;
    for (int64_t t = count; t < end; t++) s[t] = -INFINITY;
    v8 top = all(-INFINITY), sum = {0};
    for (int64_t t = 0; t < end; t += 8) top = pick(*(v8 *)(s + t) > top, *(v8 *)(s + t), top);
    float most = max8(top);
    for (int64_t t = 0; t < end; t += 8) sum += *(v8 *)(s + t) = exponential(*(v8 *)(s + t) - most);
    return sum8(sum);
}

/* y[k .. k + 8 * VECTORS) = sum over t of s[t] * value t, times `inverse`; in PARTS sums, so that none waits for the one before. */
#define MIX(VECTORS, PARTS)                                                                                   \
    for (; k + 8 * VECTORS <= d; k += 8 * VECTORS) {                                                          \
        v8 a[PARTS][VECTORS];                                                                                 \
        int64_t t = 0;                                                                                        \
        memset(a, 0, sizeof(a));                                                                              \
        for (; t + PARTS <= count; t += PARTS)                                                                \
            for (int u = 0; u < PARTS; u++)                                                                   \
                for (int v = 0; v < VECTORS; v++)                                                             \
                    a[u][v] += s[t + u] * load8(values, base + (t + u) * d + k + 8 * v, b);                   \
        for (; t < count; t++)                                                                                \
            for (int v = 0; v < VECTORS; v++) a[0][v] += s[t] * load8(values, base + t * d + k + 8 * v, b);   \
        for (int v = 0; v < VECTORS; v++) {                                                                   \
            for (int u = 1; u < PARTS; u++) a[0][v] += a[u][v];                                               \
            *(v8 *)(y + k + 8 * v) = a[0][v] * inverse;                                                       \
        }                                                                                                     \
    }

/* One query over the `count` first positions of one group: softmax(q K^T * scale) V. */
static inline void attend_one(const model_t *m, const float *q, const void *keys, const void *values, int64_t base, int64_t count,
                              float *s, float *y, int b) {
    int64_t d = m->dim, k = 0;
    scores_of(q, keys, base, d, count, m->scale, s, b);
    float inverse = 1 / exponentials(s, count);
    MIX(8, 1)
    MIX(4, 2)
    MIX(2, 4)
    MIX(1, 8)
    for (; k < d; k++) {
        float a = 0;
        for (int64_t t = 0; t < count; t++) a += s[t] * get(values, base + t * d + k, b);
        y[k] = a * inverse;
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
