/* Runs the kernels of hvd_onebit/csrc/onebit.c on random arrays and messages, each in a heap block of exactly its size, so
 * that a sanitizer sees a byte too far. All levels and any cut into parts must give the plain loop's bits.
 *
 *     driver SEED CASES
 *
 * prints the levels it tried and a checksum of all results, the same on every processor. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "onebit.h"

#define MAX_MESSAGES 40
#define MAX_GRADIENTS 5

static uint64_t state;

static uint64_t draw(void) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

static size_t draw_below(size_t limit) { return (size_t)(draw() >> 16) % limit; }

static void *allocate(size_t num_bytes) {
    void *memory = malloc(num_bytes);
    if (memory == NULL && num_bytes > 0) abort();
    return memory;
}

static void *copy_of(const void *memory, size_t num_bytes) {
    void *copy = allocate(num_bytes);
    if (num_bytes > 0) memcpy(copy, memory, num_bytes);
    return copy;
}

/* Ordinary values mostly; also any bits at all: denormals, infinities, NaNs. */
static float draw_float(int wild) {
    float value = ldexpf((float)(int32_t)draw(), -31);
    if (wild && draw_below(8) == 0) {
        const uint32_t bits = (uint32_t)draw();
        memcpy(&value, &bits, sizeof value);
    } else if (draw_below(16) == 0) {
        value = draw_below(2) ? 0.0f : -0.0f;
    }
    return value;
}

static float *draw_floats(size_t n, int wild) {
    float *values = allocate(n * sizeof(float));
    for (size_t i = 0; i < n; i++) values[i] = draw_float(wild);
    return values;
}

static float *draw_mask(size_t n) {
    float *live = allocate(n * sizeof(float));
    for (size_t i = 0; i < n; i++) live[i] = draw_below(4) ? 1.0f : 0.0f;
    return live;
}

static uint8_t *draw_bytes(size_t num_bytes) {
    uint8_t *bytes = allocate(num_bytes);
    for (size_t i = 0; i < num_bytes; i++) bytes[i] = (uint8_t)(draw() >> 24);
    return bytes;
}

/* The last part first: parts must not need each other. */
static void run_backwards(onebit_part *part, const void *job, size_t num_parts) {
    while (num_parts-- > 0) part(job, num_parts);
}

static uint64_t checksum = 14695981039346656037u;

static void add_to_checksum(const void *memory, size_t num_bytes) {
    const uint8_t *bytes = memory;
    for (size_t i = 0; i < num_bytes; i++) checksum = (checksum ^ bytes[i]) * 1099511628211u;
}

static void *one_kind_of_nan(float *values, size_t n) {
    const uint32_t nan_bits = 0x7FC00000;
    for (size_t i = 0; i < n; i++) {
        if (values[i] != values[i]) memcpy(&values[i], &nan_bits, sizeof nan_bits);
    }
    return values;
}

static void compare(const char *what, int level, size_t num_parts, const void *found, const void *expected,
                    size_t num_bytes) {
    if (num_bytes == 0 || memcmp(found, expected, num_bytes) == 0) return;
    fprintf(stderr, "%s differs at level %s in %zu parts\n", what, onebit_level_name((enum onebit_level)level),
            num_parts);
    exit(1);
}

struct inputs {
    size_t n, block, num_messages, num_kept, num_gradients, start, count, num_bytes;
    float *gradients[MAX_GRADIENTS], *momentum, *error, *live, *parameter, *variance;
    const uint8_t *messages[MAX_MESSAGES];
    enum onebit_scale kind;
    struct onebit_step step;
};

struct results {
    uint8_t *sent, *reply;
    float *worker_error, *server_error, *values, *parameter, *momentum;
};

static struct results run(const struct inputs *in, int level_number, const struct onebit_team *team) {
    const enum onebit_level level = (enum onebit_level)level_number;
    const size_t n = in->n, bytes = n * sizeof(float), part = in->count * sizeof(float);
    struct results out = {0};
    out.sent = allocate(in->num_bytes);
    out.reply = allocate(in->num_bytes);
    if (in->error != NULL) {
        out.worker_error = copy_of(in->error, bytes);
        out.server_error = copy_of(in->error, bytes);
    }
    out.values = allocate(bytes);
    out.parameter = copy_of(in->parameter, part);
    out.momentum = copy_of(in->parameter, part);
    onebit_compress(level, (const float *const *)in->gradients, in->num_gradients, in->momentum, in->messages, in->num_kept,
                    0.9f, 0.1f, out.worker_error, in->live, n, in->block, in->kind, out.sent, team);
    onebit_reduce(level, in->messages, in->num_messages, out.server_error, in->live, n, in->block, in->kind, out.reply,
                  team);
    onebit_average(level, in->messages, in->num_messages, out.values, in->live, n, in->block, team);
    onebit_apply(level, in->messages, in->num_messages, n, in->block, in->start, in->count, out.parameter, out.momentum,
                 in->variance, &in->step, team);
    if (out.worker_error != NULL) {
        one_kind_of_nan(out.worker_error, n);
        one_kind_of_nan(out.server_error, n);
    }
    one_kind_of_nan(out.values, n);
    one_kind_of_nan(out.parameter, in->count);
    one_kind_of_nan(out.momentum, in->count);
    return out;
}

static void release(struct results *out) {
    free(out->sent);
    free(out->reply);
    free(out->worker_error);
    free(out->server_error);
    free(out->values);
    free(out->parameter);
    free(out->momentum);
}

static void run_case(void) {
    static const size_t lengths[] = {3, 40, 300, 3000, 9000, 20000};
    static const size_t blocks[] = {1, 7, 8, 64, 100, 2048, 3000, 4104, 1 << 20};
    struct inputs in = {0};
    in.n = draw_below(lengths[draw_below(6)]);
    in.block = blocks[draw_below(9)];
    if (in.block > in.n && in.n > 0) in.block = in.n;
    in.num_messages = draw_below(4) ? 1 + draw_below(4) : 1 + draw_below(MAX_MESSAGES);
    in.start = draw_below(in.n + 1);
    in.count = draw_below(in.n - in.start + 1);
    in.num_bytes = onebit_message_num_bytes(in.n, in.block);
    in.kind = draw_below(2) ? ONEBIT_MEAN : ONEBIT_RMS;
    const int wild = draw_below(2) == 0;
    in.num_gradients = draw_below(2) ? 1 : 1 + draw_below(MAX_GRADIENTS);
    for (size_t r = 0; r < in.num_gradients; r++) in.gradients[r] = draw_floats(in.n, wild);
    in.momentum = draw_below(2) ? draw_floats(in.n, wild) : NULL;
    in.num_kept = in.momentum == NULL && draw_below(2) ? in.num_messages : 0;
    in.error = draw_below(4) ? draw_floats(in.n, 0) : NULL;
    in.live = draw_below(2) ? draw_mask(in.n) : NULL;
    in.parameter = draw_floats(in.count, wild);
    in.variance = draw_below(3) ? draw_floats(in.count, wild) : NULL;
    for (size_t r = 0; r < in.num_messages; r++) in.messages[r] = draw_bytes(in.num_bytes);
    const struct onebit_step step = {0.01f, 1e-8f, draw_below(2) ? 1.0f : 0.9f, draw_below(2) ? 1.0f : 0.99f,
                                     (int)draw_below(2)};
    in.step = step;

    struct results expected = run(&in, ONEBIT_PLAIN, NULL);
    const size_t whole = in.n * sizeof(float), part = in.count * sizeof(float);
    for (int level = 0; level <= (int)onebit_max_level(); level++) {
        for (size_t num_parts = 1; num_parts <= 5; num_parts += 2) {
            struct onebit_team team = {num_parts, run_backwards, NULL};
            team.sums = allocate(onebit_num_sums(in.n, in.block) * sizeof *team.sums);
            struct results found = run(&in, level, &team);
            compare("message", level, num_parts, found.sent, expected.sent, in.num_bytes);
            compare("reply", level, num_parts, found.reply, expected.reply, in.num_bytes);
            if (in.error != NULL) {
                compare("worker error", level, num_parts, found.worker_error, expected.worker_error, whole);
                compare("server error", level, num_parts, found.server_error, expected.server_error, whole);
            }
            compare("average", level, num_parts, found.values, expected.values, whole);
            compare("parameter", level, num_parts, found.parameter, expected.parameter, part);
            compare("momentum", level, num_parts, found.momentum, expected.momentum, part);
            release(&found);
            free(team.sums);
        }
    }
    add_to_checksum(expected.sent, in.num_bytes);
    add_to_checksum(expected.reply, in.num_bytes);
    if (in.error != NULL) {
        add_to_checksum(expected.worker_error, whole);
        add_to_checksum(expected.server_error, whole);
    }
    add_to_checksum(expected.values, whole);
    add_to_checksum(expected.parameter, part);
    add_to_checksum(expected.momentum, part);
    release(&expected);
    for (size_t r = 0; r < in.num_gradients; r++) free(in.gradients[r]);
    free(in.momentum);
    free(in.error);
    free(in.live);
    free(in.parameter);
    free(in.variance);
    for (size_t r = 0; r < in.num_messages; r++) free((void *)in.messages[r]);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    state = 88172645463325252u + strtoull(argv[1], NULL, 10);
    for (long left = strtol(argv[2], NULL, 10); left > 0; left--) run_case();
    for (int level = 0; level <= (int)onebit_max_level(); level++) {
        printf("%s ", onebit_level_name((enum onebit_level)level));
    }
    printf("%016llx\n", (unsigned long long)checksum);
    return 0;
}
