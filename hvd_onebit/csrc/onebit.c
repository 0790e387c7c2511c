#include "onebit.h"

#include <float.h>
#include <math.h>
#include <string.h>

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
#include <immintrin.h>
#define TARGET_AVX2 __attribute__((target("avx2")))
#define TARGET_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#else
#define HAVE_X86 0
#endif

#if defined(__GNUC__) || defined(__clang__)
#define ALWAYS_INLINE inline __attribute__((always_inline))
#define NEVER_INLINE __attribute__((noinline))
#define ALIGNED __attribute__((aligned(64)))
#else
#define ALWAYS_INLINE inline
#define NEVER_INLINE
#define ALIGNED
#endif

/* Elements whose sum is kept apart. Part of the contract; so much of z also fits the first-level cache. */
#define SUB_BLOCK 2048
/* Partial sums of a sub-block. Part of the contract. */
#define LANES 8
/* Messages decoded at a time: as many bit streams as a loop can follow, and a bound on stack. */
#define GROUP 16

static size_t smaller(size_t a, size_t b) { return a < b ? a : b; }

static size_t num_bytes_of(size_t bits) { return bits / 8 + (bits % 8 != 0); }

static size_t num_blocks_of(size_t n, size_t block) { return n / block + (n % block != 0); }

size_t onebit_message_num_bytes(size_t n, size_t block) { return 4 * num_blocks_of(n, block) + num_bytes_of(n); }

/* ---- Elementwise loops: compiled once a level, vectorised by the compiler ---- */

/* z = beta * momentum + one_minus_beta * gradient */
static ALWAYS_INLINE void momentum_step_loop(const float *restrict gradient, const float *restrict momentum, float beta,
                                             float one_minus_beta, size_t count, float *restrict z) {
    for (size_t i = 0; i < count; i++) z[i] = beta * momentum[i] + one_minus_beta * gradient[i];
}

static ALWAYS_INLINE void divide_loop(float *restrict z, float divisor, size_t count) {
    for (size_t i = 0; i < count; i++) z[i] = z[i] / divisor;
}

static ALWAYS_INLINE void hold_loop(float *restrict z, const float *restrict live, size_t count) {
    for (size_t i = 0; i < count; i++) z[i] = live[i] != 0.0f ? z[i] : 0.0f;
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

static ALWAYS_INLINE void apply_loop(const float *restrict m, float *restrict parameter, float *restrict momentum,
                                     const float *restrict variance, size_t count, const struct onebit_step *step) {
    int corrected = step->variance_correction != 1.0f;
    if (variance == NULL) {
        const float step_size = step->step_size, decay = step->decay;
        for (size_t i = 0; i < count; i++) {
            parameter[i] = parameter[i] * decay - step_size * m[i];
            momentum[i] = m[i];
        }
    } else if (step->hold) {
        adam_loop(m, parameter, momentum, variance, count, step, 1, 1);
    } else if (corrected) {
        adam_loop(m, parameter, momentum, variance, count, step, 1, 0);
    } else {
        adam_loop(m, parameter, momentum, variance, count, step, 0, 0);
    }
}

/* ---- Plain loops; i is where to go on, for the last elements of the vector versions ---- */

/* z = z / divisor + error, held elements 0; lanes[i % LANES] += |z| or z*z. error and live may be NULL. */
static void absorb_plain(float *restrict z, float divisor, const float *restrict error, const float *restrict live,
                         size_t i, size_t count, enum onebit_scale kind, double *restrict lanes) {
    for (; i < count; i++) {
        float value = divisor != 1.0f ? z[i] / divisor : z[i];
        if (error != NULL) value = value + error[i];
        if (live != NULL && !(live[i] != 0.0f)) value = 0.0f;
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

/* z = ((z or nothing) + ±scales[0]) + ±scales[1] + ...: starts from nothing unless go_on. 1 <= num <= GROUP. i is a
 * multiple of 8. */
static void sum_signs_plain(const uint8_t *const *bits, const float *scales, size_t num, int go_on, float *restrict z,
                            size_t i, size_t count) {
    for (; i < count; i += 8) {
        const size_t width = smaller(8, count - i);
        float sums[8] = {-0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f, -0.0f}; /* -0 + x is x, for x = -0 too */
        if (go_on) memcpy(sums, z + i, width * sizeof(float));
        for (size_t r = 0; r < num; r++) {
            const unsigned byte = bits[r][i / 8];
            const float values[2] = {-scales[r], scales[r]};
            for (unsigned k = 0; k < 8; k++) sums[k] = sums[k] + values[byte >> k & 1];
        }
        memcpy(z + i, sums, width * sizeof(float));
    }
}

#if HAVE_X86

/* ---- AVX2 ---- */

TARGET_AVX2 static void absorb_avx2(float *z, float divisor, const float *error, const float *live, size_t count,
                                    enum onebit_scale kind, double *lanes) {
    const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF)), divisors = _mm256_set1_ps(divisor);
    __m256d low_sum = _mm256_loadu_pd(lanes), high_sum = _mm256_loadu_pd(lanes + 4);
    size_t i = 0;
    for (; i + 8 <= count; i += 8) {
        __m256 value = _mm256_loadu_ps(z + i);
        if (divisor != 1.0f) value = _mm256_div_ps(value, divisors);
        if (error != NULL) value = _mm256_add_ps(value, _mm256_loadu_ps(error + i));
        if (live != NULL) {
            value = _mm256_and_ps(value, _mm256_cmp_ps(_mm256_loadu_ps(live + i), _mm256_setzero_ps(), _CMP_NEQ_UQ));
        }
        _mm256_storeu_ps(z + i, value);
        if (kind == ONEBIT_MEAN) value = _mm256_and_ps(value, magnitude);
        __m256d low = _mm256_cvtps_pd(_mm256_castps256_ps128(value));
        __m256d high = _mm256_cvtps_pd(_mm256_extractf128_ps(value, 1));
        if (kind != ONEBIT_MEAN) {
            low = _mm256_mul_pd(low, low);
            high = _mm256_mul_pd(high, high);
        }
        low_sum = _mm256_add_pd(low_sum, low);
        high_sum = _mm256_add_pd(high_sum, high);
    }
    _mm256_storeu_pd(lanes, low_sum);
    _mm256_storeu_pd(lanes + 4, high_sum);
    absorb_plain(z, divisor, error, live, i, count, kind, lanes);
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

TARGET_AVX2 static void sum_signs_avx2(const uint8_t *const *bits, const float *scales, size_t num, int go_on, float *z,
                                       size_t count) {
    /* Shifting by these brings the bits of 8 elements of a 32-bit word to the sign positions; the next 8 are 8 higher. */
    const __m256i shift0 = _mm256_setr_epi32(31, 30, 29, 28, 27, 26, 25, 24);
    const __m256i shift1 = _mm256_sub_epi32(shift0, _mm256_set1_epi32(8));
    const __m256i shift2 = _mm256_sub_epi32(shift0, _mm256_set1_epi32(16));
    const __m256i shift3 = _mm256_sub_epi32(shift0, _mm256_set1_epi32(24));
    const __m256 sign = _mm256_set1_ps(-0.0f);
    size_t i = 0;
    for (; i + 32 <= count; i += 32) {
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
        _mm256_storeu_ps(z + i, sum0);
        _mm256_storeu_ps(z + i + 8, sum1);
        _mm256_storeu_ps(z + i + 16, sum2);
        _mm256_storeu_ps(z + i + 24, sum3);
    }
    sum_signs_plain(bits, scales, num, go_on, z, i, count);
}

TARGET_AVX2 static void momentum_step_avx2(const float *gradient, const float *momentum, float beta,
                                           float one_minus_beta, size_t count, float *z) {
    momentum_step_loop(gradient, momentum, beta, one_minus_beta, count, z);
}

TARGET_AVX2 static void divide_avx2(float *z, float divisor, size_t count) { divide_loop(z, divisor, count); }

TARGET_AVX2 static void hold_avx2(float *z, const float *live, size_t count) { hold_loop(z, live, count); }

TARGET_AVX2 static void apply_avx2(const float *m, float *parameter, float *momentum, const float *variance,
                                   size_t count, const struct onebit_step *step) {
    apply_loop(m, parameter, momentum, variance, count, step);
}

/* ---- AVX-512: as AVX2, with masks for the last elements ---- */

TARGET_AVX512 static inline __mmask16 first_lanes(size_t count) {
    return count >= 16 ? (__mmask16)0xFFFF : (__mmask16)((1u << count) - 1);
}

TARGET_AVX512 static void absorb_avx512(float *z, float divisor, const float *error, const float *live, size_t count,
                                        enum onebit_scale kind, double *lanes) {
    const __m512 divisors = _mm512_set1_ps(divisor);
    __m512d sum = _mm512_loadu_pd(lanes);
    size_t i = 0;
    for (; i + 16 <= count; i += 16) {
        __m512 value = _mm512_loadu_ps(z + i);
        if (divisor != 1.0f) value = _mm512_div_ps(value, divisors);
        if (error != NULL) value = _mm512_add_ps(value, _mm512_loadu_ps(error + i));
        if (live != NULL) {
            const __mmask16 alive = _mm512_cmp_ps_mask(_mm512_loadu_ps(live + i), _mm512_setzero_ps(), _CMP_NEQ_UQ);
            value = _mm512_maskz_mov_ps(alive, value);
        }
        _mm512_storeu_ps(z + i, value);
        if (kind == ONEBIT_MEAN) value = _mm512_abs_ps(value);
        __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(value));
        __m512d high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(value, 1));
        if (kind != ONEBIT_MEAN) {
            low = _mm512_mul_pd(low, low);
            high = _mm512_mul_pd(high, high);
        }
        sum = _mm512_add_pd(_mm512_add_pd(sum, low), high);
    }
    _mm512_storeu_pd(lanes, sum);
    absorb_plain(z, divisor, error, live, i, count, kind, lanes);
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
                                           float *z, size_t count) {
    const __m512 nothing = _mm512_set1_ps(-0.0f); /* -0 + x is x, for x = -0 too */
    size_t i = 0;
    for (; i + 64 <= count; i += 64) {
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
        _mm512_mask_storeu_ps(z + i, inside, sum);
    }
}

TARGET_AVX512 static void momentum_step_avx512(const float *gradient, const float *momentum, float beta,
                                               float one_minus_beta, size_t count, float *z) {
    momentum_step_loop(gradient, momentum, beta, one_minus_beta, count, z);
}

TARGET_AVX512 static void divide_avx512(float *z, float divisor, size_t count) { divide_loop(z, divisor, count); }

TARGET_AVX512 static void hold_avx512(float *z, const float *live, size_t count) { hold_loop(z, live, count); }

TARGET_AVX512 static void apply_avx512(const float *m, float *parameter, float *momentum, const float *variance,
                                       size_t count, const struct onebit_step *step) {
    apply_loop(m, parameter, momentum, variance, count, step);
}

#endif /* HAVE_X86 */

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
#else
#define DISPATCH(level, function, ...)                                                                                 \
    do {                                                                                                               \
        (void)(level);                                                                                                 \
        function(__VA_ARGS__);                                                                                         \
    } while (0)
#endif

static void momentum_step(const float *gradient, const float *momentum, float beta, float one_minus_beta, size_t count,
                          float *z) {
    momentum_step_loop(gradient, momentum, beta, one_minus_beta, count, z);
}

static void divide(float *z, float divisor, size_t count) { divide_loop(z, divisor, count); }

static void hold(float *z, const float *live, size_t count) { hold_loop(z, live, count); }

static void apply(const float *m, float *parameter, float *momentum, const float *variance, size_t count,
                  const struct onebit_step *step) {
    apply_loop(m, parameter, momentum, variance, count, step);
}

static void absorb(float *z, float divisor, const float *error, const float *live, size_t count, enum onebit_scale kind,
                   double *lanes) {
    absorb_plain(z, divisor, error, live, 0, count, kind, lanes);
}

static void feed_back(const float *z, float *error, const float *live, size_t count, float scale, uint8_t *bits) {
    feed_back_plain(z, error, live, 0, count, scale, bits);
}

static void sum_signs(const uint8_t *const *bits, const float *scales, size_t num, int go_on, float *z, size_t count) {
    sum_signs_plain(bits, scales, num, go_on, z, 0, count);
}

enum onebit_level onebit_max_level(void) {
#if HAVE_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return ONEBIT_AVX512;
    if (__builtin_cpu_supports("avx2")) return ONEBIT_AVX2;
#endif
    return ONEBIT_PLAIN;
}

/* ---- Floating-point environment: a framework's threads may flush denormals to zero ---- */

static unsigned enter_ieee(void) {
#if HAVE_X86
    unsigned saved = _mm_getcsr();
    _mm_setcsr(0x1F80); /* the default: nearest, no flushing, no traps */
    return saved;
#else
    return 0;
#endif
}

static void leave_ieee(unsigned saved) {
#if HAVE_X86
    _mm_setcsr(saved);
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

/* ---- Decoding ---- */

/* n elements in messages: what the functions below need of them. */
struct senders {
    const uint8_t *const *messages;
    size_t num, n, block;
};

/* z = sum of what the messages decode to, for elements [begin, begin + count): at most SUB_BLOCK, all in one block. */
static void decode(enum onebit_level level, const struct senders *from, size_t begin, size_t count, float *z) {
    const size_t bits_offset = 4 * num_blocks_of(from->n, from->block), block_index = begin / from->block;
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
        DISPATCH(level, sum_signs, bits, scales, num, done != 0, z, count);
    }
}

/* Length of the piece of [begin, end) that decode can take at once: to the next border of a block or sub-block. */
static size_t piece_length(const struct senders *from, size_t begin, size_t end) {
    const size_t left = smaller(end - begin, from->block - begin % from->block);
    return smaller(left, SUB_BLOCK - begin % SUB_BLOCK);
}

/* ---- Compression ---- */

/* What is compressed: gradient and momentum if there is a gradient, else the mean of messages. */
struct source {
    enum onebit_level level;
    const float *gradient, *momentum;
    float beta, one_minus_beta;
    struct senders from;
    float *error;
    const float *live;
    enum onebit_scale kind;
};

/* Fill z with `count` <= SUB_BLOCK compensated values from element `begin`, and return the sum that makes the scale. */
static double compensate(const struct source *in, size_t begin, size_t count, float *z) {
    float divisor = 1.0f;
    if (in->gradient == NULL) {
        decode(in->level, &in->from, begin, count, z);
        divisor = (float)in->from.num;
    } else if (in->momentum == NULL) {
        memcpy(z, in->gradient + begin, count * sizeof(float));
    } else {
        DISPATCH(in->level, momentum_step, in->gradient + begin, in->momentum + begin, in->beta, in->one_minus_beta,
                 count, z);
    }
    double lanes[LANES] = {0.0};
    const float *error = in->error == NULL ? NULL : in->error + begin;
    const float *live = in->live == NULL ? NULL : in->live + begin;
    DISPATCH(in->level, absorb, z, divisor, error, live, count, in->kind, lanes);
    return ((lanes[0] + lanes[4]) + (lanes[2] + lanes[6])) + ((lanes[1] + lanes[5]) + (lanes[3] + lanes[7]));
}

static size_t count_live(const float *live, size_t count) {
    size_t found = 0;
    for (size_t i = 0; i < count; i++) found += live[i] != 0.0f;
    return found;
}

/* Scale of a block from the sum over its `count` live elements; always the same NaN if that isn't finite. */
static float scale_of(double total, size_t count, enum onebit_scale kind) {
    if (count == 0) return 0.0f;
    const double mean = total / (double)count;
    const float scale = (float)(kind == ONEBIT_MEAN ? mean : sqrt(mean));
    const uint32_t nan_bits = 0x7FC00000;
    float nan_scale;
    memcpy(&nan_scale, &nan_bits, sizeof nan_scale);
    return scale <= FLT_MAX ? scale : nan_scale;
}

static NEVER_INLINE void compress_blocks(const struct source *in, size_t n, size_t block, uint8_t *message) {
    uint8_t *bits = message + 4 * num_blocks_of(n, block);
    float z[SUB_BLOCK] ALIGNED;
    for (size_t begin = 0, index = 0; begin < n; begin += smaller(block, n - begin), index++) {
        const size_t size = smaller(block, n - begin);

        /* first pass: the scale */
        double total = 0.0;
        for (size_t at = 0; at < size; at += SUB_BLOCK) {
            total += compensate(in, begin + at, smaller(SUB_BLOCK, size - at), z);
        }
        const float scale = scale_of(total, in->live == NULL ? size : count_live(in->live + begin, size), in->kind);
        memcpy(message + 4 * index, &scale, sizeof scale);

        /* second pass: bits and error; z is still there if the block is one sub-block */
        float *kept = scale == scale ? in->error : NULL;
        for (size_t at = 0; at < size; at += SUB_BLOCK) {
            const size_t first = begin + at, count = smaller(SUB_BLOCK, size - at);
            if (size > SUB_BLOCK) compensate(in, first, count, z);
            uint8_t unaligned[SUB_BLOCK / 8];
            uint8_t *target = first % 8 == 0 ? bits + first / 8 : unaligned;
            DISPATCH(in->level, feed_back, z, kept == NULL ? NULL : kept + first,
                     in->live == NULL ? NULL : in->live + first, count, scale, target);
            if (target == unaligned) insert_bits(unaligned, count, first, bits);
        }
    }
}

void onebit_compress(enum onebit_level level, const float *gradient, const float *momentum, float beta,
                     float one_minus_beta, float *error, const float *live, size_t n, size_t block,
                     enum onebit_scale kind, uint8_t *message) {
    if (n == 0) return;
    const struct source in = {level, gradient, momentum, beta, one_minus_beta, {NULL, 0, n, block}, error, live, kind};
    const unsigned saved = enter_ieee();
    compress_blocks(&in, n, block, message);
    leave_ieee(saved);
}

void onebit_reduce(enum onebit_level level, const uint8_t *const *messages, size_t num_messages, float *error,
                   const float *live, size_t n, size_t block, enum onebit_scale kind, uint8_t *message) {
    if (n == 0) return;
    const struct source in = {level, NULL, NULL, 0.0f, 0.0f, {messages, num_messages, n, block}, error, live, kind};
    const unsigned saved = enter_ieee();
    compress_blocks(&in, n, block, message);
    leave_ieee(saved);
}

/* ---- Use of what was received ---- */

static NEVER_INLINE void average_pieces(enum onebit_level level, const struct senders *from, float *values,
                                        const float *live) {
    for (size_t at = 0, count; at < from->n; at += count) {
        count = piece_length(from, at, from->n);
        decode(level, from, at, count, values + at);
        if (from->num != 1) DISPATCH(level, divide, values + at, (float)from->num, count);
        if (live != NULL) DISPATCH(level, hold, values + at, live + at, count);
    }
}

static NEVER_INLINE void apply_pieces(enum onebit_level level, const struct senders *from, size_t start, size_t count,
                                      float *parameter, float *momentum, const float *variance,
                                      const struct onebit_step *step) {
    float m[SUB_BLOCK] ALIGNED;
    for (size_t at = 0, length; at < count; at += length) {
        length = piece_length(from, start + at, start + count);
        decode(level, from, start + at, length, m);
        if (from->num != 1) DISPATCH(level, divide, m, (float)from->num, length);
        DISPATCH(level, apply, m, parameter + at, momentum + at, variance == NULL ? NULL : variance + at, length, step);
    }
}

void onebit_average(enum onebit_level level, const uint8_t *const *messages, size_t num_messages, float *values,
                    const float *live, size_t n, size_t block) {
    const struct senders from = {messages, num_messages, n, block};
    const unsigned saved = enter_ieee();
    average_pieces(level, &from, values, live);
    leave_ieee(saved);
}

void onebit_apply(enum onebit_level level, const uint8_t *const *messages, size_t num_messages, size_t n, size_t block,
                  size_t start, size_t count, float *parameter, float *momentum, const float *variance,
                  const struct onebit_step *step) {
    const struct senders from = {messages, num_messages, n, block};
    const unsigned saved = enter_ieee();
    apply_pieces(level, &from, start, count, parameter, momentum, variance, step);
    leave_ieee(saved);
}
