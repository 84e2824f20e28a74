/* Which token a uniform stands for: aligner/rollout/sampling.py without truncation. */
#pragma once
#include "vectors.h"

#define BLOCK 256

static float largest(const float *z, int64_t count) {
    v8 top[4] = {all(-INFINITY), all(-INFINITY), all(-INFINITY), all(-INFINITY)};
    int64_t i = 0;
    for (; i + 32 <= count; i += 32)
        for (int v = 0; v < 4; v++) top[v] = pick(*(const v8 *)(z + i + 8 * v) > top[v], *(const v8 *)(z + i + 8 * v), top[v]);
    float most = -INFINITY;
    for (int v = 0; v < 4; v++) most = max8(top[v]) > most ? max8(top[v]) : most;
    for (; i < count; i++) most = z[i] > most ? z[i] : most;
    return most;
}

/* One row: as aligner/rollout/sampling.py has it, with the cumulative sum over blocks of ids in double. */
static void sample_row(const float *z, int64_t vocab, float u, float temperature, int64_t *token, float *logprob, double *blocks) {
    float inverse = temperature > 0 ? 1 / temperature : 1, top = largest(z, vocab);
    double sum = 0;
    int64_t count = (vocab + BLOCK - 1) / BLOCK;
    for (int64_t c = 0; c < count; c++) {
        int64_t end = (c + 1) * BLOCK < vocab ? (c + 1) * BLOCK : vocab, i = c * BLOCK;
        v8 part = {0};
        for (; i + 8 <= end; i += 8) part += exponential((*(const v8 *)(z + i) - top) * inverse);
        sum += sum8(part);
        for (; i < end; i++) sum += exponential_of((z[i] - top) * inverse);
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
            float e = exponential_of((z[i] - top) * inverse);
            if (e > 0) last = i; /* rounding may leave the block's sum above that of its ids: then its last possible id */
            s += e;
            if (e > 0 && s > target) break;
        }
        while (last < 0) /* the last block of all held nothing, and rounding led here */
            for (i = --c * BLOCK; i < (c + 1) * BLOCK; i++)
                if (exponential_of((z[i] - top) * inverse) > 0) last = i;
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
