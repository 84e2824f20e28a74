/* The torch engine's forward pass on a CPU: decode and prefill of Llama-like models and GPT-2, few rows at a time.
 *
 * BLAS libraries are made for large square products. A decode step multiplies 1 to some hundred rows with every weight once, where
 * they reach a third of what the machine can do; the kernels here read each weight once, at the speed of the memory or of the FMA units,
 * and attention reads exactly the keys that a row has. Compiled for the machine at hand by native.py; vectors are GCC's own, so that
 * nothing here depends on one instruction set.
 *
 * Legend: n tokens of one pass, D head size, W a weight matrix [out, in], "block" a group of tokens that fills vector lanes.
 * Weights and cache are float32 or bfloat16 (model.bf16); activations and sums are float32. */
#include "attention.h"
#include "sampling.h"

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
