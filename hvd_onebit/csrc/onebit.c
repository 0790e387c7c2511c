#include "onebit.h"

#include <float.h>
#include <math.h>
#include <string.h>
#if defined(__unix__) || defined(__APPLE__)
#include <sched.h>
#define LET_OTHERS_RUN() ((void)sched_yield())
#else
#define LET_OTHERS_RUN() ((void)0)
#endif

/* Refuse to build where results would differ; NumPy serves such machines. */
#if defined(FLT_EVAL_METHOD) && FLT_EVAL_METHOD != 0
#error "float arithmetic must be rounded to float"
#endif
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "scales are written in the machine's byte order, which must be little-endian"
#endif
#if defined(__FAST_MATH__)
#error "fast math breaks the order of roundings"
#endif
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#endif

#if (defined(__GNUC__) || defined(__clang__)) && defined(__x86_64__)
#define HAVE_X86 1
#define FINISH_STREAM() _mm_sfence()
#include <immintrin.h>
#define TARGET_AVX2 __attribute__((target("avx2")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define HAVE_X86 0
#define FINISH_STREAM() ((void)0)
#endif

#if (defined(__GNUC__) || defined(__clang__)) && defined(__aarch64__)
#define HAVE_NEON 1
#include <arm_neon.h>
#else
#define HAVE_NEON 0
#endif

#if defined(__GNUC__) || defined(__clang__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define NEVER_INLINE __attribute__((noinline))
#define ALIGNED __attribute__((aligned(64)))
/* Ask for the memory AHEAD of element i. It may lie behind the end, which is harmless, but no pointer may point there. */
#define FETCH(pointer, i) __builtin_prefetch((const void *)((uintptr_t)((pointer) + (i)) + AHEAD * sizeof(float)), 0, 3)
#else
#define ALWAYS_INLINE inline
#define NEVER_INLINE
#define ALIGNED
#define FETCH(pointer, i) ((void)(pointer))
#endif

/* Elements whose sum is kept apart. Part of the contract; so much of z also fits the first-level cache. */
#define SUB_BLOCK 2048
/* Partial sums of a sub-block: as many as four registers of 512 bits hold. Part of the contract. */
#define LANES 32
/* Messages decoded at a time: as many bit streams as a loop can follow, and a bound on stack. */
#define GROUP 16
/* How many elements ahead memory is asked for: far enough to be there in time, and few enough that what was asked for is
 * not dropped again while a sub-block and what becomes of it pass through the first-level cache. */
#define AHEAD 512
/* An average of so many elements is written past the cache, which it would fill: that saves reading what it overwrites. */
#define PAST_CACHE ((size_t)1 << 20)
/* After so many elements, a tenth of a millisecond, other threads may have the core: those that move what is on the wire
 * need it for microseconds, and would wait for the end of the scheduler's time slice where a rank has but one core. */
#define STRETCH ((size_t)1 << 17)
/* Floats in a line of the cache. */
#define LINE 16

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static size_t num_bytes_of(size_t bits) { return bits / 8 + (bits % 8 != 0); }

static size_t num_blocks_of(size_t n, size_t block) { return n / block + (n % block != 0); }

size_t onebit_message_num_bytes(size_t n, size_t block) { return 4 * num_blocks_of(n, block) + num_bytes_of(n); }

/* What is added up to the values to be compressed: (beta * momentum + one_minus_beta * values) + error, held elements 0.
 * momentum, error and live may be NULL. `decoded` tells a momentum that lies in the cache, just decoded. */
struct addends {
    const float *values, *momentum, *error, *live;
    float beta, one_minus_beta;
    int decoded;
};

/* How a sum becomes a mean: multiplied by the factor, divided by the divisor. One of them is 1. */
struct mean {
    float factor, divisor;
};

/* ---- Elementwise loops: compiled once a level, vectorised by the compiler ---- */

static ALWAYS_INLINE void hold_loop(float *restrict z, const float *restrict live, size_t count) {
    for (size_t i = 0; i < count; i++) z[i] = live[i] != 0.0f ? z[i] : 0.0f;
}

static ALWAYS_INLINE void triad_loop(float *restrict a, const float *restrict b, const float *restrict c, float s,
                                     size_t count) {
    for (size_t i = 0; i < count; i++) a[i] = b[i] + s * c[i];
}

static ALWAYS_INLINE void adam_loop(const float *restrict m, float *restrict parameter, float *restrict momentum,
                                    const float *restrict variance, size_t count, const struct onebit_step *step,
                                    int corrected, int hold) {
    const float step_size = step->step_size, eps = step->eps, decay = step->decay;
    const float correction = step->variance_correction;
    for (size_t i = 0; i < count; i++) {
        /* Multiplying or dividing by 1 changes nothing; only the division is worth leaving out. */
        float root = sqrtf(variance[i]);
        if (corrected) root = root / correction;
        float moved = parameter[i] * decay - step_size * (m[i] / (root + eps));
        int held = hold && variance[i] == 0.0f;
        parameter[i] = held ? parameter[i] : moved;
        momentum[i] = held ? momentum[i] : m[i];
    }
}

static ALWAYS_INLINE void sgd_loop(const float *restrict m, float *restrict parameter, float *restrict momentum,
                                   size_t count, const struct onebit_step *step) {
    const float step_size = step->step_size, decay = step->decay;
    for (size_t i = 0; i < count; i++) {
        parameter[i] = parameter[i] * decay - step_size * m[i];
        momentum[i] = m[i];
    }
}

static ALWAYS_INLINE void apply_loop(const float *m, float *parameter, float *momentum, const float *variance,
                                     size_t count, const struct onebit_step *step) {
    if (variance == NULL) {
        sgd_loop(m, parameter, momentum, count, step);
    } else if (step->hold) {
        adam_loop(m, parameter, momentum, variance, count, step, 1, 1);
    } else if (step->variance_correction != 1.0f) {
        adam_loop(m, parameter, momentum, variance, count, step, 1, 0);
    } else {
        adam_loop(m, parameter, momentum, variance, count, step, 0, 0);
    }
}

/* The same line by line, as a compiler doesn't vectorise a loop that asks for memory. */
static ALWAYS_INLINE void apply_lines(const float *m, float *parameter, float *momentum, const float *variance,
                                      size_t count, const struct onebit_step *step) {
    size_t i = 0;
    for (; i + LINE <= count; i += LINE) {
        FETCH(parameter, i);
        FETCH(momentum, i);
        if (variance != NULL) FETCH(variance, i);
        apply_loop(m + i, parameter + i, momentum + i, variance == NULL ? NULL : variance + i, LINE, step);
    }
    apply_loop(m + i, parameter + i, momentum + i, variance == NULL ? NULL : variance + i, count - i, step);
}

/* z = the mean of `num` arrays, summed in their order, of `count` elements from `begin`. */
static ALWAYS_INLINE void mean_of_line(const float *const *arrays, size_t num, size_t begin, struct mean mean,
                                       float *restrict z, size_t count) {
    const float *a = arrays[0] + begin;
    if (num == 2) {
        const float *b = arrays[1] + begin;
        for (size_t k = 0; k < count; k++) z[k] = (a[k] + b[k]) * mean.factor;
        return;
    }
    float sums[LINE];
    for (size_t k = 0; k < count; k++) sums[k] = a[k];
    for (size_t r = 1; r < num; r++) {
        const float *b = arrays[r] + begin;
        for (size_t k = 0; k < count; k++) sums[k] = sums[k] + b[k];
    }
    if (mean.divisor == 1.0f) {
        for (size_t k = 0; k < count; k++) z[k] = sums[k] * mean.factor;
    } else {
        for (size_t k = 0; k < count; k++) z[k] = sums[k] / mean.divisor;
    }
}

/* The same for more elements, line by line as above. What is added to the mean next is asked for, too. */
static ALWAYS_INLINE void mean_lines(const float *const *arrays, size_t num, size_t begin, struct mean mean,
                                     struct addends next, float *restrict z, size_t count) {
    size_t i = 0;
    for (; i + LINE <= count; i += LINE) {
        for (size_t r = 0; r < num; r++) FETCH(arrays[r], begin + i);
        if (next.momentum != NULL && !next.decoded) FETCH(next.momentum, i);
        if (next.error != NULL) FETCH(next.error, i);
        mean_of_line(arrays, num, begin + i, mean, z + i, LINE);
    }
    mean_of_line(arrays, num, begin + i, mean, z + i, count - i);
}

/* ---- Plain loops; i is where to go on, for the last elements of the vector versions ---- */

/* z = the sum of the addends, which may be z itself; lanes[i % LANES] += |z| or z*z. */
static void absorb_plain(struct addends in, size_t i, size_t count, enum onebit_scale kind, float *z,
                         double *lanes) {
    for (; i < count; i++) {
        float value = in.values[i];
        if (in.momentum != NULL) value = in.beta * in.momentum[i] + in.one_minus_beta * value;
        if (in.error != NULL) value = value + in.error[i];
        if (in.live != NULL && !(in.live[i] != 0.0f)) value = 0.0f;
        z[i] = value;
        double term = kind == ONEBIT_MEAN ? fabs((double)value) : (double)value * (double)value;
        lanes[i % LANES] += term;
    }
}

/* bits = z >= 0, pad bits of the last byte 1; error = z - (z >= 0 ? scale : -scale) but for held elements, unless error
 * is NULL. i is a multiple of 8. */
static void feed_back_plain(const float *restrict z, float *restrict error, const float *restrict live, size_t i,
                            size_t count, float scale, uint8_t *restrict bits) {
    const float values[2] = {-scale, scale}; /* looked up, as branches on random signs are mispredicted */
    for (; i < count; i += 8) {
        const size_t width = smaller(8, count - i);
        unsigned byte = 0xFF;
        for (size_t k = 0; k < width; k++) byte ^= (unsigned)!(z[i + k] >= 0.0f) << k;
        bits[i / 8] = (uint8_t)byte;
        if (error == NULL) continue;
        for (size_t k = 0; k < width; k++) {
            const float rest = z[i + k] - values[byte >> k & 1];
            if (live == NULL || live[i + k] != 0.0f) error[i + k] = rest;
        }
    }
}

/* z = ((z or nothing) + ±scales[0]) + ±scales[1] + ..., then the mean: starts from nothing unless go_on.
 * 1 <= num <= GROUP. i is a multiple of 8. */
static void sum_signs_plain(const uint8_t *const *bits, const float *scales, size_t num, int go_on, struct mean mean,
                            float *restrict z, size_t i, size_t count) {
    for (; i < count; i += 8) {
        const size_t width = smaller(8, count - i);
        float sums[8] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f}; /* -0 + x is x, for x = -0 too */
        if (go_on) memcpy(sums, z + i, width * sizeof(float));
        for (size_t r = 0; r < num; r++) {
            const unsigned byte = bits[r][i / 8];
            const float values[2] = {-scales[r], scales[r]};
            for (unsigned k = 0; k < 8; k++) sums[k] = sums[k] + values[byte >> k & 1];
        }
        for (unsigned k = 0; k < 8; k++) sums[k] = sums[k] * mean.factor;
        if (mean.divisor != 1.0f) {
            for (unsigned k = 0; k < 8; k++) sums[k] = sums[k] / mean.divisor;
        }
        memcpy(z + i, sums, width * sizeof(float));
    }
}

/* Ask for the addends ahead of the LANES elements from i, unless decode has put values in z: it has seen to the error. */
static ALWAYS_INLINE void fetch(struct addends in, size_t i, const float *z) {
    for (size_t k = i; k < i + LANES; k += LINE) {
        if (in.values != z) {
            FETCH(in.values, k);
            if (in.momentum != NULL && !in.decoded) FETCH(in.momentum, k);
            if (in.error != NULL) FETCH(in.error, k);
        }
        if (in.live != NULL) FETCH(in.live, k);
    }
}

#if HAVE_X86

/* Floats before the next line of the cache begins: what is written past the cache has to fill whole lines. */
static ALWAYS_INLINE size_t num_floats_to_line(const float *values) {
    const size_t past = (uintptr_t)values / sizeof(float) % LINE;
    return past == 0 ? 0 : LINE - past;
}

/* ---- AVX2 ---- */

TARGET_AVX2 static ALWAYS_INLINE __m256 sum_avx2(struct addends in, size_t i) {
    __m256 value = _mm256_loadu_ps(in.values + i);
    if (in.momentum != NULL) {
        value = _mm256_add_ps(_mm256_mul_ps(_mm256_set1_ps(in.beta), _mm256_loadu_ps(in.momentum + i)),
                              _mm256_mul_ps(_mm256_set1_ps(in.one_minus_beta), value));
    }
    if (in.error != NULL) value = _mm256_add_ps(value, _mm256_loadu_ps(in.error + i));
    if (in.live != NULL) {
        value = _mm256_and_ps(value, _mm256_cmp_ps(_mm256_loadu_ps(in.live + i), _mm256_setzero_ps(), _CMP_NEQ_UQ));
    }
    return value;
}

TARGET_AVX2 static void absorb_avx2(struct addends in, size_t count, enum onebit_scale kind, float *z,
                                    double *lanes) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
    __m256d sums[LANES / 4];
    for (size_t k = 0; k < LANES / 4; k++) sums[k] = _mm256_setzero_pd();
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        fetch(in, i, z);
        for (size_t k = 0; k < LANES / 4; k += 2) {
            __m256 value = sum_avx2(in, i + 4 * k);
            _mm256_storeu_ps(z + i + 4 * k, value);
            if (kind == ONEBIT_MEAN) value = _mm256_and_ps(value, magnitude);
            __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
            __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
            if (kind != ONEBIT_MEAN) {
                low = _mm256_mul_pd(low, low);
                high = _mm256_mul_pd(high, high);
            }
            sums[k] = _mm256_add_pd(sums[k], low);
            sums[k + 1] = _mm256_add_pd(sums[k + 1], high);
        }
    }
    for (size_t k = 0; k < LANES / 4; k++) _mm256_storeu_pd(lanes + 4 * k, sums[k]);
    absorb_plain(in, i, count, kind, z, lanes);
}

TARGET_AVX2 static void feed_back_avx2(const float *z, float *error, const float *live, size_t count, float scale,
                                       uint8_t *bits) {
    const __m256 zero = _mm256_setzero_ps(), plus = _mm256_set1_ps(scale), minus = _mm256_set1_ps(-scale);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 value = _mm256_loadu_ps(z + i), positive = _mm256_cmp_ps(value, zero, _CMP_GE_OQ);
        bits[i / 8] = (uint8_t)_mm256_movemask_ps(positive);
        if (error != NULL) {
            __m256 rest = _mm256_sub_ps(value, _mm256_blendv_ps(minus, plus, positive));
            if (live != NULL) {
                __m256 alive = _mm256_cmp_ps(_mm256_loadu_ps(live + i), zero, _CMP_NEQ_UQ);
                rest = _mm256_blendv_ps(_mm256_loadu_ps(error + i), rest, alive);
            }
            _mm256_storeu_ps(error + i, rest);
        }
    }
    feed_back_plain(z, error, live, i, count, scale, bits);
}

TARGET_AVX2 static void sum_signs_avx2(const uint8_t *const *bits, const float *scales, size_t num, int go_on,
                                       struct mean mean, const float *ahead, float *z, size_t count) {
    /* Shifting by these brings the bits of 8 elements of a 32-bit word to the sign positions; the next 8 are 8 higher. */
    const __m256i shift0 = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i shift1 = _mm256_sub_epi32(shift0, _mm256_set1_epi32(8));
    const __m256i shift2 = _mm256_sub_epi32(shift0, _mm256_set1_epi32(16));
    const __m256i shift3 = _mm256_sub_epi32(shift0, _mm256_set1_epi32(24));
    const __m256 sign = _mm256_set1_ps(-0.0f);
    const __m256 factor = _mm256_set1_ps(mean.factor), divisor = _mm256_set1_ps(mean.divisor);
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
        if (ahead != NULL) {
            for (size_t k = i; k < i + 32; k += LINE) FETCH(ahead, k);
        }
        __m256 sum0 = sign, sum1 = sign, sum2 = sign, sum3 = sign; /* -0 + x is x, for x = -0 too */
        if (go_on) {
            sum0 = _mm256_loadu_ps(z + i);
            sum1 = _mm256_loadu_ps(z + i + 8);
            sum2 = _mm256_loadu_ps(z + i + 16);
            sum3 = _mm256_loadu_ps(z + i + 24);
        }
        for (size_t r = 0; r < num; r++) {
            int32_t word;
            memcpy(&word, bits[r] + i / 8, 4);
            const __m256i words = _mm256_set1_epi32(word);
            const __m256 minus = _mm256_set1_ps(-scales[r]);
#define ADD_SIGNED(sum, shift)                                                                                         \
    sum = _mm256_add_ps(                                                                                               \
        sum, _mm256_xor_ps(minus, _mm256_and_ps(sign, _mm256_castsi256_ps(_mm256_sllv_epi32(words, shift)))))
            ADD_SIGNED(sum0, shift0);
            ADD_SIGNED(sum1, shift1);
            ADD_SIGNED(sum2, shift2);
            ADD_SIGNED(sum3, shift3);
#undef ADD_SIGNED
        }
        sum0 = _mm256_mul_ps(sum0, factor);
        sum1 = _mm256_mul_ps(sum1, factor);
        sum2 = _mm256_mul_ps(sum2, factor);
        sum3 = _mm256_mul_ps(sum3, factor);
        if (mean.divisor != 1.0f) {
            sum0 = _mm256_div_ps(sum0, divisor);
            sum1 = _mm256_div_ps(sum1, divisor);
            sum2 = _mm256_div_ps(sum2, divisor);
            sum3 = _mm256_div_ps(sum3, divisor);
        }
        _mm256_storeu_ps(z + i, sum0);
        _mm256_storeu_ps(z + i + 8, sum1);
        _mm256_storeu_ps(z + i + 16, sum2);
        _mm256_storeu_ps(z + i + 24, sum3);
    }
    sum_signs_plain(bits, scales, num, go_on, mean, z, i, count);
}

TARGET_AVX2 static void hold_avx2(float *z, const float *live, size_t count) { hold_loop(z, live, count); }

TARGET_AVX2 static void apply_avx2(const float *m, float *parameter, float *momentum, const float *variance,
                                   size_t count, const struct onebit_step *step) {
    apply_lines(m, parameter, momentum, variance, count, step);
}

TARGET_AVX2 static void mean_floats_avx2(const float *const *arrays, size_t num, size_t begin, struct mean mean,
                                    struct addends next, float *z, size_t count) {
    mean_lines(arrays, num, begin, mean, next, z, count);
}

TARGET_AVX2 static void triad_avx2(float *a, const float *b, const float *c, float s, size_t count) {
    triad_loop(a, b, c, s, count);
}

TARGET_AVX2 static void stream_avx2(const float *z, float *values, size_t count) {
    const size_t head = smaller(count, num_floats_to_line(values));
    memcpy(values, z, head * sizeof(float));
    size_t i = head;
    for (; i + 8 <= count; i += 8) _mm256_stream_ps(values + i, _mm256_loadu_ps(z + i));
    memcpy(values + i, z + i, (count - i) * sizeof(float));
}

/* ---- AVX-512: as AVX2, with masks for the last elements ---- */

TARGET_AVX512 static ALWAYS_INLINE __mmask16 first_lanes(size_t count) {
    return count >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << count) - 1);
}

TARGET_AVX512 static ALWAYS_INLINE __m512 sum_avx512(struct addends in, size_t i) {
    __m512 value = _mm512_loadu_ps(in.values + i);
    if (in.momentum != NULL) {
        value = _mm512_add_ps(_mm512_mul_ps(_mm512_set1_ps(in.beta), _mm512_loadu_ps(in.momentum + i)),
                              _mm512_mul_ps(_mm512_set1_ps(in.one_minus_beta), value));
    }
    if (in.error != NULL) value = _mm512_add_ps(value, _mm512_loadu_ps(in.error + i));
    if (in.live != NULL) {
        const __m512 live = _mm512_loadu_ps(in.live + i);
        value = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(live, _mm512_setzero_ps(), _CMP_NEQ_UQ), value);
    }
    return value;
}

TARGET_AVX512 static void absorb_avx512(struct addends in, size_t count, enum onebit_scale kind, float *z,
                                        double *lanes) {
    __m512d sums[LANES / 8];
    for (size_t k = 0; k < LANES / 8; k++) sums[k] = _mm512_setzero_pd();
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        fetch(in, i, z);
        for (size_t k = 0; k < LANES / 8; k += 2) {
            __m512 value = sum_avx512(in, i + 8 * k);
            _mm512_storeu_ps(z + i + 8 * k, value);
            if (kind == ONEBIT_MEAN) value = _mm512_abs_ps(value);
            __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
            __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
            if (kind != ONEBIT_MEAN) {
                low = _mm512_mul_pd(low, low);
                high = _mm512_mul_pd(high, high);
            }
            sums[k] = _mm512_add_pd(sums[k], low);
            sums[k + 1] = _mm512_add_pd(sums[k + 1], high);
        }
    }
    for (size_t k = 0; k < LANES / 8; k++) _mm512_storeu_pd(lanes + 8 * k, sums[k]);
    absorb_plain(in, i, count, kind, z, lanes);
}

TARGET_AVX512 static void feed_back_avx512(const float *z, float *error, const float *live, size_t count, float scale,
                                           uint8_t *bits) {
    const __m512 zero = _mm512_setzero_ps(), plus = _mm512_set1_ps(scale), minus = _mm512_set1_ps(-scale);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        const __m512 value = _mm512_loadu_ps(z + i);
        const __mmask16 positive = _mm512_cmp_ps_mask(value, zero, _CMP_GE_OQ);
        const uint16_t word = (uint16_t)positive;
        memcpy(bits + i / 8, &word, sizeof word);
        if (error != NULL) {
            __m512 rest = _mm512_sub_ps(value, _mm512_mask_blend_ps(positive, minus, plus));
            if (live != NULL) {
                const __mmask16 alive = _mm512_cmp_ps_mask(_mm512_loadu_ps(live + i), zero, _CMP_NEQ_UQ);
                rest = _mm512_mask_blend_ps(alive, _mm512_loadu_ps(error + i), rest);
            }
            _mm512_storeu_ps(error + i, rest);
        }
    }
    feed_back_plain(z, error, live, i, count, scale, bits);
}

TARGET_AVX512 static void sum_signs_avx512(const uint8_t *const *bits, const float *scales, size_t num, int go_on,
                                           struct mean mean, const float *ahead, float *z, size_t count) {
    const __m512 nothing = _mm512_set1_ps(-0.0f); /* -0 + x is x, for x = -0 too */
    const __m512 factor = _mm512_set1_ps(mean.factor), divisor = _mm512_set1_ps(mean.divisor);
    size_t i = 0;
    for (; i + 64 <= count; i += 64) {
        if (ahead != NULL) {
            for (size_t k = i; k < i + 64; k += LINE) FETCH(ahead, k);
        }
        __m512 sum0 = nothing, sum1 = nothing, sum2 = nothing, sum3 = nothing;
        if (go_on) {
            sum0 = _mm512_loadu_ps(z + i);
            sum1 = _mm512_loadu_ps(z + i + 16);
            sum2 = _mm512_loadu_ps(z + i + 32);
            sum3 = _mm512_loadu_ps(z + i + 48);
        }
        for (size_t r = 0; r < num; r++) {
            uint16_t words[4];
            memcpy(words, bits[r] + i / 8, 8);
            const __m512 plus = _mm512_set1_ps(scales[r]), minus = _mm512_set1_ps(-scales[r]);
            sum0 = _mm512_add_ps(sum0, _mm512_mask_blend_ps((__mmask16)words[0], minus, plus));
            sum1 = _mm512_add_ps(sum1, _mm512_mask_blend_ps((__mmask16)words[1], minus, plus));
            sum2 = _mm512_add_ps(sum2, _mm512_mask_blend_ps((__mmask16)words[2], minus, plus));
            sum3 = _mm512_add_ps(sum3, _mm512_mask_blend_ps((__mmask16)words[3], minus, plus));
        }
        sum0 = _mm512_mul_ps(sum0, factor);
        sum1 = _mm512_mul_ps(sum1, factor);
        sum2 = _mm512_mul_ps(sum2, factor);
        sum3 = _mm512_mul_ps(sum3, factor);
        if (mean.divisor != 1.0f) {
            sum0 = _mm512_div_ps(sum0, divisor);
            sum1 = _mm512_div_ps(sum1, divisor);
            sum2 = _mm512_div_ps(sum2, divisor);
            sum3 = _mm512_div_ps(sum3, divisor);
        }
        _mm512_storeu_ps(z + i, sum0);
        _mm512_storeu_ps(z + i + 16, sum1);
        _mm512_storeu_ps(z + i + 32, sum2);
        _mm512_storeu_ps(z + i + 48, sum3);
    }
    for (; i < count; i += 16) {
        __mmask16 inside = first_lanes(count - i);
        __m512 sum = go_on ? _mm512_maskz_loadu_ps(inside, z + i) : nothing;
        for (size_t r = 0; r < num; r++) {
            uint16_t word = 0;
            memcpy(&word, bits[r] + i / 8, count - i > 8 ? 2 : 1);
            sum = _mm512_add_ps(sum, _mm512_mask_blend_ps((__mmask16)word, _mm512_set1_ps(-scales[r]),
                                                          _mm512_set1_ps(scales[r])));
        }
        sum = _mm512_div_ps(_mm512_mul_ps(sum, factor), divisor);
        _mm512_mask_storeu_ps(z + i, inside, sum);
    }
}

TARGET_AVX512 static void hold_avx512(float *z, const float *live, size_t count) { hold_loop(z, live, count); }

TARGET_AVX512 static void apply_avx512(const float *m, float *parameter, float *momentum, const float *variance,
                                   size_t count, const struct onebit_step *step) {
    apply_lines(m, parameter, momentum, variance, count, step);
}

TARGET_AVX512 static void mean_floats_avx512(const float *const *arrays, size_t num, size_t begin, struct mean mean,
                                    struct addends next, float *z, size_t count) {
    mean_lines(arrays, num, begin, mean, next, z, count);
}

TARGET_AVX512 static void triad_avx512(float *a, const float *b, const float *c, float s, size_t count) {
    triad_loop(a, b, c, s, count);
}

TARGET_AVX512 static void stream_avx512(const float *z, float *values, size_t count) {
    const size_t head = smaller(count, num_floats_to_line(values));
    memcpy(values, z, head * sizeof(float));
    size_t i = head;
    for (; i + 16 <= count; i += 16) _mm512_stream_ps(values + i, _mm512_loadu_ps(z + i));
    memcpy(values + i, z + i, (count - i) * sizeof(float));
}

#endif /* HAVE_X86 */

#if HAVE_NEON

/* ---- NEON ---- */

static ALWAYS_INLINE float32x4_t sum_neon(struct addends in, size_t i) {
    float32x4_t value = vld1q_f32(in.values + i);
    if (in.momentum != NULL) {
        value = vaddq_f32(vmulq_n_f32(vld1q_f32(in.momentum + i), in.beta), vmulq_n_f32(value, in.one_minus_beta));
    }
    if (in.error != NULL) value = vaddq_f32(value, vld1q_f32(in.error + i));
    if (in.live != NULL) {
        const uint32x4_t held = vceqzq_f32(vld1q_f32(in.live + i));
        value = vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_f32(value), held));
    }
    return value;
}

static void absorb_neon(struct addends in, size_t count, enum onebit_scale kind, float *z, double *lanes) {
    float64x2_t sums[LANES / 2];
    for (size_t k = 0; k < LANES / 2; k++) sums[k] = vdupq_n_f64(0.0);
    size_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        fetch(in, i, z);
        for (size_t k = 0; k < LANES / 2; k += 2) {
            float32x4_t value = sum_neon(in, i + 2 * k);
            vst1q_f32(z + i + 2 * k, value);
            if (kind == ONEBIT_MEAN) value = vabsq_f32(value);
            float64x2_t low = vcvt_f64_f32(vget_low_f32(value)), high = vcvt_high_f64_f32(value);
            if (kind != ONEBIT_MEAN) {
                low = vmulq_f64(low, low);
                high = vmulq_f64(high, high);
            }
            sums[k] = vaddq_f64(sums[k], low);
            sums[k + 1] = vaddq_f64(sums[k + 1], high);
        }
    }
    for (size_t k = 0; k < LANES / 2; k++) vst1q_f64(lanes + 2 * k, sums[k]);
    absorb_plain(in, i, count, kind, z, lanes);
}

static ALWAYS_INLINE void feed_back_half_neon(float32x4_t value, uint32x4_t positive, float32x4_t plus,
                                              float32x4_t minus, float *error, const float *live) {
    float32x4_t rest = vsubq_f32(value, vbslq_f32(positive, plus, minus));
    if (live != NULL) rest = vbslq_f32(vceqzq_f32(vld1q_f32(live)), vld1q_f32(error), rest);
    vst1q_f32(error, rest);
}

static void feed_back_neon(const float *z, float *error, const float *live, size_t count, float scale, uint8_t *bits) {
    const float32x4_t plus = vdupq_n_f32(scale), minus = vdupq_n_f32(-scale);
    const uint16_t weights[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    const uint16x8_t weight = vld1q_u16(weights);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        const float32x4_t low = vld1q_f32(z + i), high = vld1q_f32(z + i + 4);
        const uint32x4_t low_positive = vcgezq_f32(low), high_positive = vcgezq_f32(high);
        const uint16x8_t positive = vcombine_u16(vmovn_u32(low_positive), vmovn_u32(high_positive));
        bits[i / 8] = (uint8_t)vaddvq_u16(vandq_u16(positive, weight));
        if (error != NULL) {
            feed_back_half_neon(low, low_positive, plus, minus, error + i, live == NULL ? NULL : live + i);
            feed_back_half_neon(high, high_positive, plus, minus, error + i + 4, live == NULL ? NULL : live + i + 4);
        }
    }
    feed_back_plain(z, error, live, i, count, scale, bits);
}

static void sum_signs_neon(const uint8_t *const *bits, const float *scales, size_t num, int go_on, struct mean mean,
                           const float *ahead, float *z, size_t count) {
    const uint32_t weights[8] = {1, 2, 4, 8, 16, 32, 64, 128};
    const uint32x4_t low_weight = vld1q_u32(weights), high_weight = vld1q_u32(weights + 4);
    const float32x4_t nothing = vdupq_n_f32(-0.0f); /* -0 + x is x, for x = -0 too */
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        if (ahead != NULL) FETCH(ahead, i);
        float32x4_t sums[4] = {nothing, nothing, nothing, nothing};
        if (go_on) {
            for (size_t k = 0; k < 4; k++) sums[k] = vld1q_f32(z + i + 4 * k);
        }
        for (size_t r = 0; r < num; r++) {
            const uint32x4_t byte0 = vdupq_n_u32(bits[r][i / 8]), byte1 = vdupq_n_u32(bits[r][i / 8 + 1]);
            const float32x4_t plus = vdupq_n_f32(scales[r]), minus = vdupq_n_f32(-scales[r]);
            sums[0] = vaddq_f32(sums[0], vbslq_f32(vtstq_u32(byte0, low_weight), plus, minus));
            sums[1] = vaddq_f32(sums[1], vbslq_f32(vtstq_u32(byte0, high_weight), plus, minus));
            sums[2] = vaddq_f32(sums[2], vbslq_f32(vtstq_u32(byte1, low_weight), plus, minus));
            sums[3] = vaddq_f32(sums[3], vbslq_f32(vtstq_u32(byte1, high_weight), plus, minus));
        }
        for (size_t k = 0; k < 4; k++) {
            sums[k] = vmulq_n_f32(sums[k], mean.factor);
            if (mean.divisor != 1.0f) sums[k] = vdivq_f32(sums[k], vdupq_n_f32(mean.divisor));
            vst1q_f32(z + i + 4 * k, sums[k]);
        }
    }
    sum_signs_plain(bits, scales, num, go_on, mean, z, i, count);
}

static void hold_neon(float *z, const float *live, size_t count) { hold_loop(z, live, count); }

static void apply_neon(const float *m, float *parameter, float *momentum, const float *variance,
                                   size_t count, const struct onebit_step *step) {
    apply_lines(m, parameter, momentum, variance, count, step);
}

static void mean_floats_neon(const float *const *arrays, size_t num, size_t begin, struct mean mean,
                                    struct addends next, float *z, size_t count) {
    mean_lines(arrays, num, begin, mean, next, z, count);
}

static void triad_neon(float *a, const float *b, const float *c, float s, size_t count) {
    triad_loop(a, b, c, s, count);
}

static void stream_neon(const float *z, float *values, size_t count) { memcpy(values, z, count * sizeof(float)); }

#endif /* HAVE_NEON */

/* ---- Dispatch ---- */

#if HAVE_X86
#define DISPATCH(level, function, ...)                                                                                 \
    do {                                                                                                               \
        if ((level) == ONEBIT_AVX512)                                                                                  \
            function##_avx512(__VA_ARGS__);                                                                            \
        else if ((level) == ONEBIT_AVX2)                                                                               \
            function##_avx2(__VA_ARGS__);                                                                              \
        else                                                                                                           \
            function(__VA_ARGS__);                                                                                     \
    } while (0)
#elif HAVE_NEON
#define DISPATCH(level, function, ...)                                                                                 \
    do {                                                                                                               \
        if ((level) == ONEBIT_NEON)                                                                                    \
            function##_neon(__VA_ARGS__);                                                                              \
        else                                                                                                           \
            function(__VA_ARGS__);                                                                                     \
    } while (0)
#else
#define DISPATCH(level, function, ...)                                                                                 \
    do {                                                                                                               \
        (void)(level);                                                                                                 \
        function(__VA_ARGS__);                                                                                         \
    } while (0)
#endif

static void stream(const float *z, float *values, size_t count) { memcpy(values, z, count * sizeof(float)); }

static void hold(float *z, const float *live, size_t count) { hold_loop(z, live, count); }

static void apply(const float *m, float *parameter, float *momentum, const float *variance, size_t count,
                  const struct onebit_step *step) {
    apply_lines(m, parameter, momentum, variance, count, step);
}

static void mean_floats(const float *const *arrays, size_t num, size_t begin, struct mean mean, struct addends next,
                        float *z, size_t count) {
    mean_lines(arrays, num, begin, mean, next, z, count);
}

static void triad(float *a, const float *b, const float *c, float s, size_t count) { triad_loop(a, b, c, s, count); }

static void absorb(struct addends in, size_t count, enum onebit_scale kind, float *z, double *lanes) {
    absorb_plain(in, 0, count, kind, z, lanes);
}

static void feed_back(const float *z, float *error, const float *live, size_t count, float scale, uint8_t *bits) {
    feed_back_plain(z, error, live, 0, count, scale, bits);
}

static void sum_signs(const uint8_t *const *bits, const float *scales, size_t num, int go_on, struct mean mean,
                      const float *ahead, float *z, size_t count) {
    (void)ahead;
    sum_signs_plain(bits, scales, num, go_on, mean, z, 0, count);
}

enum onebit_level onebit_max_level(void) {
#if HAVE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return ONEBIT_AVX512;
    if (__builtin_cpu_supports("avx2")) return ONEBIT_AVX2;
#endif
#if HAVE_NEON
    return ONEBIT_NEON;
#else
    return ONEBIT_PLAIN;
#endif
}

const char *onebit_level_name(enum onebit_level level) {
    if (level == ONEBIT_PLAIN) return "c";
#if HAVE_NEON
    return "neon";
#else
    return level == ONEBIT_AVX2 ? "avx2" : "avx512";
#endif
}

/* ---- Floating-point environment: a framework's threads may flush denormals to zero ---- */

static uint64_t enter_ieee(void) {
#if HAVE_X86
    const unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1F80); /* the default: nearest, no flushing, no traps */
    return saved;
#elif HAVE_NEON
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0)); /* the same */
    return saved;
#else
    return 0;
#endif
}

static void leave_ieee(uint64_t saved) {
#if HAVE_X86
    _mm_setcsr((unsigned)saved);
#elif HAVE_NEON
    __asm__ volatile("msr fpcr, %0" : : "r"(saved));
#else
    (void)saved;
#endif
}

/* ---- Bits that don't start at a byte: blocks and slices that aren't a multiple of 8 ---- */

/* Copy `count` bits from bit `first` of `source` to the start of `target`; reads and writes no byte without such bits. */
static void extract_bits(const uint8_t *source, size_t first, size_t count, uint8_t *target) {
    const unsigned shift = first % 8;
    const uint8_t *from = source + first / 8;
    const size_t length = num_bytes_of(count), available = num_bytes_of(shift + count);
    for (size_t j = 0; j < length; j++) {
        unsigned pair = from[j] | (j + 1 < available ? (unsigned)from[j + 1] << 8 : 0);
        target[j] = (uint8_t)(pair >> shift);
    }
}

/* Copy `count` >= 1 bits from the start of `source`, whose pad bits are 1, to bit `first` of `target`, keeping the bits
 * before it; the bits after it in the last byte become 1. */
static void insert_bits(const uint8_t *source, size_t count, size_t first, uint8_t *target) {
    const unsigned shift = first % 8;
    uint8_t *to = target + first / 8;
    const size_t length = num_bytes_of(count), touched = num_bytes_of(shift + count);
    unsigned carried = to[0] & ((1u << shift) - 1);
    for (size_t j = 0; j < touched; j++) {
        unsigned byte = j < length ? source[j] : 0xFF;
        to[j] = (uint8_t)(carried | byte << shift);
        carried = byte >> (8 - shift);
    }
}

/* ---- Work shared by threads ---- */

/* Part `index` of `num` of the elements below n, cut at multiples of `unit`. */
struct range {
    size_t start, stop;
};

static struct range cut(size_t n, size_t unit, size_t num, size_t index) {
    const size_t units = num_blocks_of(n, unit), each = units / num, more = units % num;
    const size_t first = index * each + smaller(index, more), last = first + each + (index < more);
    const struct range range = {smaller(first * unit, n), smaller(last * unit, n)};
    return range;
}

static size_t num_parts_of(const struct onebit_team *team) { return team == NULL ? 1 : team->num_parts; }

static void share(const struct onebit_team *team, onebit_part *part, const void *job) {
    if (num_parts_of(team) > 1) {
        team->run(part, job, team->num_parts);
    } else {
        part(job, 0);
    }
}

/* Count elements that were worked on, and let other threads run at the end of a stretch. */
static void pace(size_t *stretch, size_t count) {
    *stretch += count;
    if (*stretch < STRETCH) return;
    *stretch = 0;
    LET_OTHERS_RUN();
}

/* ---- Decoding ---- */

/* n elements in messages: what the functions below need of them. */
struct senders {
    const uint8_t *const *messages;
    size_t num, n, block;
};

/* A sum divided by n; the inverse of a power of two is exact, and a multiplication the same to the bit. */
static struct mean mean_of(size_t num) {
    struct mean mean = {1.0f, 1.0f};
    if ((num & (num - 1)) == 0) {
        mean.factor = 1.0f / (float)num;
    } else {
        mean.divisor = (float)num;
    }
    return mean;
}

/* z = mean of what the messages decode to, for elements [begin, begin + count): at most SUB_BLOCK, all in one block.
 * Meanwhile the memory ahead of `ahead` is asked for, unless it's NULL. */
static void decode(enum onebit_level level, const struct senders *from, size_t begin, size_t count, const float *ahead,
                   float *z) {
    const size_t bits_offset = 4 * num_blocks_of(from->n, from->block), block_index = begin / from->block;
    const struct mean sum_only = {1.0f, 1.0f}, mean = mean_of(from->num);
    uint8_t shifted[GROUP][SUB_BLOCK / 8];
    const uint8_t *bits[GROUP];
    float scales[GROUP];
    for (size_t done = 0; done < from->num; done += GROUP) {
        const size_t num = smaller(GROUP, from->num - done);
        for (size_t r = 0; r < num; r++) {
            const uint8_t *message = from->messages[done + r];
            memcpy(&scales[r], message + 4 * block_index, 4);
            bits[r] = message + bits_offset + begin / 8;
            if (begin % 8 != 0) {
                extract_bits(message + bits_offset, begin, count, shifted[r]);
                bits[r] = shifted[r];
            }
        }
        const int first = done == 0, last = done + num == from->num;
        DISPATCH(level, sum_signs, bits, scales, num, !first, last ? mean : sum_only, first ? ahead : NULL, z, count);
    }
}

/* Length of the piece of [begin, end) that decode can take at once: to the next border of a block or sub-block. */
static size_t piece_length(const struct senders *from, size_t begin, size_t end) {
    const size_t left = smaller(end - begin, from->block - begin % from->block);
    return smaller(left, SUB_BLOCK - begin % SUB_BLOCK);
}

/* ---- Compression ---- */

/* What is compressed, the mean of gradients and the momentum if there are gradients, else the mean of messages; and where
 * it goes. The momentum may be the mean of messages, too. */
struct compression {
    enum onebit_level level;
    const float *const *gradients;
    size_t num_gradients;
    const float *momentum;
    struct senders kept;
    float beta, one_minus_beta;
    struct senders from;
    float *error;
    const float *live;
    size_t n, block;
    enum onebit_scale kind;
    uint8_t *message;
    const struct onebit_team *team;
};

static size_t count_live(const float *live, size_t count) {
    size_t found = 0;
    for (size_t i = 0; i < count; i++) found += live[i] != 0.0f;
    return found;
}

/* Fill z with `count` <= SUB_BLOCK compensated values from element `begin`, and return the sum that makes the scale. */
static struct onebit_sum compensate(const struct compression *job, size_t begin, size_t count, float *z) {
    struct addends in = {z, NULL, NULL, NULL, job->beta, job->one_minus_beta, 0};
    float momentum[SUB_BLOCK] ALIGNED;
    if (job->error != NULL) in.error = job->error + begin;
    if (job->live != NULL) in.live = job->live + begin;
    if (job->num_gradients == 0) {
        decode(job->level, &job->from, begin, count, in.error, z);
    } else {
        if (job->momentum != NULL) in.momentum = job->momentum + begin;
        if (job->kept.num > 0) {
            decode(job->level, &job->kept, begin, count, NULL, momentum);
            in.momentum = momentum;
            in.decoded = 1;
        }
        if (job->num_gradients == 1) {
            in.values = job->gradients[0] + begin;
        } else {
            DISPATCH(job->level, mean_floats, job->gradients, job->num_gradients, begin, mean_of(job->num_gradients),
                     in, z, count);
        }
    }
    double lanes[LANES] = {0.0};
    DISPATCH(job->level, absorb, in, count, job->kind, z, lanes);
    for (size_t half = LANES / 2; half > 0; half /= 2) {
        for (size_t k = 0; k < half; k++) lanes[k] += lanes[k + half];
    }
    const struct onebit_sum sum = {lanes[0], in.live == NULL ? count : count_live(in.live, count)};
    return sum;
}

static struct onebit_sum added(struct onebit_sum a, struct onebit_sum b) {
    const struct onebit_sum sum = {a.total + b.total, a.count + b.count};
    return sum;
}

/* Write the scale of block `index` from the sum over its live elements: always the same NaN if that isn't finite. */
static void put_scale(const struct compression *job, size_t index, struct onebit_sum sum) {
    float scale = 0.0f;
    if (sum.count != 0) {
        const double mean = sum.total / (double)sum.count;
        scale = (float)(job->kind == ONEBIT_MEAN ? mean : sqrt(mean));
        const uint32_t nan_bits = 0x7FC00000;
        if (!(scale <= FLT_MAX)) memcpy(&scale, &nan_bits, sizeof scale);
    }
    memcpy(job->message + 4 * index, &scale, sizeof scale);
}

/* Bits and error of `count` <= SUB_BLOCK compensated values z of block `index` from element `begin`. */
static void settle(const struct compression *job, size_t index, size_t begin, size_t count, const float *z) {
    uint8_t *bits = job->message + 4 * num_blocks_of(job->n, job->block);
    uint8_t unaligned[SUB_BLOCK / 8];
    uint8_t *target = begin % 8 == 0 ? bits + begin / 8 : unaligned;
    float scale;
    memcpy(&scale, job->message + 4 * index, sizeof scale);
    float *error = job->error != NULL && scale == scale ? job->error + begin : NULL;
    const float *live = job->live == NULL ? NULL : job->live + begin;
    DISPATCH(job->level, feed_back, z, error, live, count, scale, target);
    if (target == unaligned) insert_bits(unaligned, count, begin, bits);
}

/* Compress whole blocks, the elements of `range`. */
static NEVER_INLINE void compress_blocks(const struct compression *job, struct range range) {
    float z[SUB_BLOCK] ALIGNED;
    size_t stretch = 0;
    for (size_t begin = range.start, size; begin < range.stop; begin += size) {
        const size_t index = begin / job->block;
        size = smaller(job->block, job->n - begin);

        /* first pass: the scale */
        struct onebit_sum sum = {0.0, 0};
        for (size_t at = 0; at < size; at += SUB_BLOCK) {
            const size_t count = smaller(SUB_BLOCK, size - at);
            sum = added(sum, compensate(job, begin + at, count, z));
            if (size > SUB_BLOCK) pace(&stretch, count);
        }
        put_scale(job, index, sum);

        /* second pass: bits and error; z is still there if the block is one sub-block */
        for (size_t at = 0; at < size; at += SUB_BLOCK) {
            const size_t count = smaller(SUB_BLOCK, size - at);
            if (size > SUB_BLOCK) compensate(job, begin + at, count, z);
            settle(job, index, begin + at, count, z);
            pace(&stretch, count);
        }
    }
}

/* Elements of the least number of whole blocks that end at a byte. */
static size_t unit_of(size_t block) {
    size_t unit = block;
    while (unit % 8 != 0) unit *= 2;
    return unit;
}

static void compress_part(const void *argument, size_t index) {
    const struct compression *job = argument;
    const uint64_t saved = enter_ieee();
    compress_blocks(job, cut(job->n, unit_of(job->block), num_parts_of(job->team), index));
    leave_ieee(saved);
}

/* Sub-blocks of all blocks are numbered through; there is one after the other, and the last block may have fewer. */
static size_t sub_blocks_of(size_t block) { return num_blocks_of(block, SUB_BLOCK); }

static size_t num_sub_blocks(size_t n, size_t block) {
    return n / block * sub_blocks_of(block) + sub_blocks_of(n % block);
}

size_t onebit_num_sums(size_t n, size_t block) { return block <= SUB_BLOCK ? 0 : num_sub_blocks(n, block); }

struct sub_block {
    size_t index, begin, count;
};

static struct sub_block find_sub_block(const struct compression *job, size_t number) {
    const size_t each = sub_blocks_of(job->block), index = number / each;
    const size_t begin = index * job->block + number % each * SUB_BLOCK;
    const size_t end = job->n - index * job->block < job->block ? job->n : (index + 1) * job->block;
    const struct sub_block found = {index, begin, smaller(SUB_BLOCK, end - begin)};
    return found;
}

static struct range sub_blocks_of_part(const struct compression *job, size_t index) {
    return cut(num_sub_blocks(job->n, job->block), 1, job->team->num_parts, index);
}

static void sum_part(const void *argument, size_t index) {
    const struct compression *job = argument;
    const struct range range = sub_blocks_of_part(job, index);
    float z[SUB_BLOCK] ALIGNED;
    size_t stretch = 0;
    const uint64_t saved = enter_ieee();
    for (size_t number = range.start; number < range.stop; number++) {
        const struct sub_block at = find_sub_block(job, number);
        job->team->sums[number] = compensate(job, at.begin, at.count, z);
        pace(&stretch, at.count);
    }
    leave_ieee(saved);
}

static void settle_part(const void *argument, size_t index) {
    const struct compression *job = argument;
    const struct range range = sub_blocks_of_part(job, index);
    float z[SUB_BLOCK] ALIGNED;
    size_t stretch = 0;
    const uint64_t saved = enter_ieee();
    for (size_t number = range.start; number < range.stop; number++) {
        const struct sub_block at = find_sub_block(job, number);
        compensate(job, at.begin, at.count, z);
        settle(job, at.index, at.begin, at.count, z);
        pace(&stretch, at.count);
    }
    leave_ieee(saved);
}

/* Compress by sub-blocks where there are too few blocks to share: the sums first, for which all must have been seen. */
static NEVER_INLINE void compress_sub_blocks(const struct compression *job) {
    share(job->team, sum_part, job);
    const uint64_t saved = enter_ieee();
    const size_t num = num_sub_blocks(job->n, job->block), each = sub_blocks_of(job->block);
    for (size_t first = 0; first < num; first += each) {
        struct onebit_sum sum = {0.0, 0};
        for (size_t k = first; k < smaller(first + each, num); k++) sum = added(sum, job->team->sums[k]);
        put_scale(job, first / each, sum);
    }
    leave_ieee(saved);
    share(job->team, settle_part, job);
}

static void compress_job(const struct compression *job) {
    if (job->n == 0) return;
    const size_t num_parts = num_parts_of(job->team);
    /* Bits of two sub-blocks must not share a byte. */
    const int can_split_blocks = job->block > SUB_BLOCK && (job->block % 8 == 0 || job->block >= job->n);
    if (num_parts > 1 && can_split_blocks && num_blocks_of(job->n, job->block) < 4 * num_parts) {
        compress_sub_blocks(job);
    } else {
        share(job->team, compress_part, job);
    }
}

void onebit_compress(enum onebit_level level, const float *const *gradients, size_t num_gradients, const float *momentum,
                     const uint8_t *const *kept, size_t num_kept, float beta, float one_minus_beta, float *error,
                     const float *live, size_t n, size_t block, enum onebit_scale kind, uint8_t *message,
                     const struct onebit_team *team) {
    const struct senders from = {NULL, 0, n, block}, kept_from = {kept, num_kept, n, block};
    const struct compression job = {level, gradients, num_gradients, momentum, kept_from, beta, one_minus_beta, from,
                                    error, live,      n,             block,    kind,      message, team};
    compress_job(&job);
}

void onebit_reduce(enum onebit_level level, const uint8_t *const *messages, size_t num_messages, float *error,
                   const float *live, size_t n, size_t block, enum onebit_scale kind, uint8_t *message,
                   const struct onebit_team *team) {
    const struct senders from = {messages, num_messages, n, block}, nothing = {NULL, 0, n, block};
    const struct compression job = {level, NULL, 0,    NULL,  nothing, 0.0f,    0.0f, from,
                                    error, live, n, block, kind,    message, team};
    compress_job(&job);
}

/* ---- Use of what was received ---- */

struct averaging {
    enum onebit_level level;
    struct senders from;
    float *values;
    const float *live;
    const struct onebit_team *team;
};

static NEVER_INLINE void average_pieces(const struct averaging *job, struct range range) {
    float decoded[SUB_BLOCK] ALIGNED;
    const int past_cache = job->from.n >= PAST_CACHE;
    size_t stretch = 0;
    for (size_t at = range.start, count; at < range.stop; at += count) {
        float *values = job->values + at, *z = past_cache ? decoded : values;
        count = piece_length(&job->from, at, range.stop);
        decode(job->level, &job->from, at, count, past_cache ? NULL : values, z);
        if (job->live != NULL) DISPATCH(job->level, hold, z, job->live + at, count);
        if (past_cache) DISPATCH(job->level, stream, z, values, count);
        pace(&stretch, count);
    }
    if (past_cache) FINISH_STREAM();
}

static void average_part(const void *argument, size_t index) {
    const struct averaging *job = argument;
    const uint64_t saved = enter_ieee();
    average_pieces(job, cut(job->from.n, SUB_BLOCK, num_parts_of(job->team), index));
    leave_ieee(saved);
}

void onebit_average(enum onebit_level level, const uint8_t *const *messages, size_t num_messages, float *values,
                    const float *live, size_t n, size_t block, const struct onebit_team *team) {
    const struct averaging job = {level, {messages, num_messages, n, block}, values, live, team};
    share(team, average_part, &job);
}

struct application {
    enum onebit_level level;
    struct senders from;
    size_t start, count;
    float *parameter, *momentum;
    const float *variance;
    const struct onebit_step *step;
    const struct onebit_team *team;
};

static NEVER_INLINE void apply_pieces(const struct application *job, struct range range) {
    float m[SUB_BLOCK] ALIGNED;
    float unwanted[SUB_BLOCK] ALIGNED = {0}; /* a momentum that nobody asked for stays in the cache */
    size_t stretch = 0;
    for (size_t at = range.start, length; at < range.stop; at += length) {
        length = piece_length(&job->from, job->start + at, job->start + range.stop);
        decode(job->level, &job->from, job->start + at, length, NULL, m);
        DISPATCH(job->level, apply, m, job->parameter + at, job->momentum == NULL ? unwanted : job->momentum + at,
                 job->variance == NULL ? NULL : job->variance + at, length, job->step);
        pace(&stretch, length);
    }
}

static void apply_part(const void *argument, size_t index) {
    const struct application *job = argument;
    const uint64_t saved = enter_ieee();
    apply_pieces(job, cut(job->count, SUB_BLOCK, num_parts_of(job->team), index));
    leave_ieee(saved);
}

void onebit_apply(enum onebit_level level, const uint8_t *const *messages, size_t num_messages, size_t n, size_t block,
                  size_t start, size_t count, float *parameter, float *momentum, const float *variance,
                  const struct onebit_step *step, const struct onebit_team *team) {
    const struct application job = {level,     {messages, num_messages, n, block}, start, count, parameter, momentum,
                                    variance, step,                               team};
    share(team, apply_part, &job);
}

/* ---- A yardstick ---- */

struct triad_job {
    enum onebit_level level;
    float *a;
    const float *b, *c;
    float s;
    size_t n;
    const struct onebit_team *team;
};

static void triad_part(const void *argument, size_t index) {
    const struct triad_job *job = argument;
    const struct range range = cut(job->n, SUB_BLOCK, num_parts_of(job->team), index);
    const size_t at = range.start;
    DISPATCH(job->level, triad, job->a + at, job->b + at, job->c + at, job->s, range.stop - at);
}

void onebit_triad(enum onebit_level level, float *a, const float *b, const float *c, float s, size_t n,
                  const struct onebit_team *team) {
    const struct triad_job job = {level, a, b, c, s, n, team};
    share(team, triad_part, &job);
}
