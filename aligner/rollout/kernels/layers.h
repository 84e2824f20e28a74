/* Norms and activations. */
#pragma once
#include "model.h"

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

static inline v8 silu(v8 x) { return x / (1.0f + exponential(-x)); }

static inline v8 gelu(v8 u) { return u / (1.0f + exponential(-1.5957691216f * (u + 0.044715f * u * u * u))); }

/* silu(gate) * up of rows [gate, up], each of ffn, into rows of ffn; or GPT-2's gelu (tanh), in place. */
static void activate(const model_t *m, int64_t n) {
    int64_t f = m->ffn, from = m->gated ? 2 * f : f;
#pragma omp parallel for if (n * f > SMALL)
    for (int64_t i = 0; i < n; i++) {
        float *x = m->up + i * from;
        int64_t k = 0;
        for (; k + 8 <= f; k += 8) {
            v8 one = *(v8 *)(x + k);
            if (m->gated)
                one = silu(one) * *(v8 *)(x + f + k);
            else
                one = gelu(one);
            *(v8 *)(x + k) = one;
        }
        for (; k < f; k++) x[k] = m->gated ? silu(all(x[k]))[0] * x[f + k] : gelu(all(x[k]))[0];
    }
    for (int64_t i = 1; m->gated && i < n; i++) memmove(m->up + i * f, m->up + i * from, f * sizeof(float));
}
