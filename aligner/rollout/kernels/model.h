/* What native.py fills in: pointers to weights, cache and work space. The same fields in the same order as its Structures. */
#pragma once
#include "linear.h"

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
