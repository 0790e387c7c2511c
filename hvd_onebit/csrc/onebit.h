/* Compression of float32 values to one sign bit each and a scale per block, with error feedback.
 *
 * C99 without Python, allocation, threads or global state; any number of threads may call at once on different arrays.
 * The layout of a message is described in hvd_onebit/wire.py, the arithmetic, to the order of every rounding, in
 * hvd_onebit/kernels.py. All levels, and any number of threads, give the same bits.
 *
 * Preconditions common to all functions:
 *   - `level` is at most onebit_max_level();
 *   - floats are aligned to 4 bytes; messages may lie at any address;
 *   - a message of n elements has onebit_message_num_bytes(n, block) bytes, block >= 1, and `messages` holds
 *     num_messages >= 1 of them, none NULL unless it has 0 bytes;
 *   - what is written overlaps nothing else; arrays that are only read may overlap each other;
 *   - n == 0 is allowed and touches nothing;
 *   - `team` may be NULL: then the calling thread does all.
 * Floating-point control (flushing of denormals, rounding) is set to IEEE's default inside on x86-64 and aarch64, and
 * restored.
 */
#ifndef HVD_ONEBIT_ONEBIT_H
#define HVD_ONEBIT_ONEBIT_H

#include <stddef.h>
#include <stdint.h>

/* Vector instructions to use: those of one kind of processor are counted from 1. */
enum onebit_level { ONEBIT_PLAIN = 0, ONEBIT_AVX2 = 1, ONEBIT_AVX512 = 2, ONEBIT_NEON = 1 };

/* Kind of scale of a block: sqrt(sum(z*z) / d), or sum(|z|) / d. */
enum onebit_scale { ONEBIT_RMS = 0, ONEBIT_MEAN = 1 };

/* Numbers of an update; see onebit_apply. */
struct onebit_step {
    float step_size, eps, variance_correction, decay;
    int hold;
};

/* Sum over a part of a block, and how many live elements it holds. */
struct onebit_sum {
    double total;
    size_t count;
};

/* Part `index` of a job. */
typedef void onebit_part(const void *job, size_t index);

/* Threads that share the work of a call.
 *
 * num_parts  parts to cut the work into, at least 1
 * run        calls part(job, index) once for each index below num_parts, on any threads, and returns when all are done
 * sums       room for onebit_num_sums(n, block) sums, or NULL if that is 0
 */
struct onebit_team {
    size_t num_parts;
    void (*run)(onebit_part *part, const void *job, size_t num_parts);
    struct onebit_sum *sums;
};

/* The highest level that both this build and this processor have. */
enum onebit_level onebit_max_level(void);

/* Name of a level of this build. */
const char *onebit_level_name(enum onebit_level level);

/* Length in bytes of a message of n elements. */
size_t onebit_message_num_bytes(size_t n, size_t block);

/* Sums that a team keeps while it compresses n elements. */
size_t onebit_num_sums(size_t n, size_t block);

/* Compress z = (beta * momentum + one_minus_beta * gradient) + error into `message`; error becomes z - C(z).
 *
 * gradients n floats each, num_gradients >= 1 of them: the gradient is their mean, summed in their order
 * momentum  n floats, or NULL: then the mean of `kept`, num_kept messages of n elements; if there are none, z = gradient +
 *           error
 * error     n floats, updated except in blocks that aren't finite; or NULL: nothing added, nothing kept
 * live      n floats, elements where it's 0 being held (no part in scale and error, bit 1); or NULL: none is
 * message   overwritten, pad bits included
 */
void onebit_compress(enum onebit_level level, const float *const *gradients, size_t num_gradients, const float *momentum,
                     const uint8_t *const *kept, size_t num_kept, float beta, float one_minus_beta, float *error,
                     const float *live, size_t n, size_t block, enum onebit_scale kind, uint8_t *message,
                     const struct onebit_team *team);

/* Compress y = mean of `messages` + error into `message`; error becomes y - C(y). error, live, message as above. */
void onebit_reduce(enum onebit_level level, const uint8_t *const *messages, size_t num_messages, float *error,
                   const float *live, size_t n, size_t block, enum onebit_scale kind, uint8_t *message,
                   const struct onebit_team *team);

/* values (n floats) becomes the mean of `messages`; 0 where `live` (n floats, or NULL) is 0. */
void onebit_average(enum onebit_level level, const uint8_t *const *messages, size_t num_messages, float *values,
                    const float *live, size_t n, size_t block, const struct onebit_team *team);

/* One step of the optimizer on elements [start, start + count) of messages of n elements: with m their mean,
 *
 *     parameter = parameter * decay - step_size * (m / (sqrt(variance) / variance_correction + eps)),  momentum = m
 *
 * or, if variance is NULL, parameter = parameter * decay - step_size * m. If step->hold, elements where variance is 0 are
 * left as they are.
 *
 * start + count <= n; start needs no alignment. parameter, momentum, variance: count floats each; momentum may be NULL.
 */
void onebit_apply(enum onebit_level level, const uint8_t *const *messages, size_t num_messages, size_t n, size_t block,
                  size_t start, size_t count, float *parameter, float *momentum, const float *variance,
                  const struct onebit_step *step, const struct onebit_team *team);

/* a = b + s * c, n floats each: a yardstick for the memory's speed, as in McCalpin's STREAM. */
void onebit_triad(enum onebit_level level, float *a, const float *b, const float *c, float s, size_t n,
                  const struct onebit_team *team);

#endif
