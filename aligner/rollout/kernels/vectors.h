/* Vectors, bfloat16 and the exponential function. Vectors are GCC's own, so that nothing here depends on one instruction set. */
#pragma once
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define SMALL 16384   /* multiply-adds below which a second thread costs more than it saves */

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef float v8 __attribute__((vector_size(32), aligned(4), may_alias)); /* where the code is about eight lanes */
typedef int32_t i8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t h8 __attribute__((vector_size(16), aligned(2), may_alias));
typedef uint32_t u8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint16_t bf16;


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

static inline v8 load8(const void *p, int64_t i, int b) {
    if (!b) return *(const v8 *)((const float *)p + i);
    return (v8)(__builtin_convertvector(*(const h8 *)((const bf16 *)p + i), u8) << 16);
}

static inline float total(vec v) {
    float s = 0;
    for (int l = 0; l < LANES / 2; l++) s += v[l] + v[l + LANES / 2];
    return s;
}

static inline v8 pick(i8 mask, v8 yes, v8 no) { return (v8)((mask & (i8)yes) | (~mask & (i8)no)); }

static inline v8 all(float f) { return f - (v8){0}; }

/* exp to 2 ulp (Cephes' expf); 0 below -87.3, a NaN stays one. */
static inline v8 exponential(v8 x) {
    i8 low = x < -87.3f;
    v8 c = pick(low, all(-87.3f), pick(x > 88.0f, all(88.0f), x));
    v8 z = c * 1.44269504f + 12582912.0f, n = z - 12582912.0f; /* 1.5 * 2^23: the nearest integer stands in the low bits of z */
    v8 r = c - n * 0.693359375f + n * 2.12194440e-4f;
    v8 p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    v8 scale = (v8)(((i8)z - 0x4B400000 + 127) << 23);
    return (v8)((i8)(p * scale) & ~low);
}

static inline float exponential_of(float x) { return exponential(all(x))[0]; }

static inline float sum8(v8 v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

static inline float max8(v8 v) {
    float top = v[0];
    for (int l = 1; l < 8; l++) top = v[l] > top ? v[l] : top;
    return top;
}

/* Sums of the lanes of eight vectors, as the lanes of one. */
static inline v8 sums8(const v8 a[8]) {
    v8 t[4], u[2];
    for (int i = 0; i < 4; i++)
        t[i] = __builtin_shuffle(a[2 * i], a[2 * i + 1], (i8){0, 2, 8, 10, 4, 6, 12, 14}) +
               __builtin_shuffle(a[2 * i], a[2 * i + 1], (i8){1, 3, 9, 11, 5, 7, 13, 15});
    for (int i = 0; i < 2; i++)
        u[i] = __builtin_shuffle(t[2 * i], t[2 * i + 1], (i8){0, 2, 8, 10, 4, 6, 12, 14}) +
               __builtin_shuffle(t[2 * i], t[2 * i + 1], (i8){1, 3, 9, 11, 5, 7, 13, 15});
    return __builtin_shuffle(u[0], u[1], (i8){0, 1, 2, 3, 8, 9, 10, 11}) +
           __builtin_shuffle(u[0], u[1], (i8){4, 5, 6, 7, 12, 13, 14, 15});
}
