/* CPython glue: buffers in, GIL released, threads that live as long as a call. Private to hvd_onebit/kernels.py, which
 * checks dtypes, overlap and options with messages fit for users; here only what keeps memory safe is checked again. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <pthread.h>

#include "onebit.h"

/* ---- Threads: made and joined in each call, so that a fork or an exit never meets one ---- */

#define MAX_THREADS 64

struct errand {
    onebit_part *part;
    const void *job;
    size_t index;
};

static void *run_errand(void *argument) {
    const struct errand *errand = argument;
    errand->part(errand->job, errand->index);
    return NULL;
}

/* A thread for each part but the first, which is for the caller, as is what no thread could be made for. */
static void run_on_threads(onebit_part *part, const void *job, size_t num_parts) {
    pthread_t threads[MAX_THREADS];
    struct errand errands[MAX_THREADS];
    size_t made = 1;
    for (; made < num_parts; made++) {
        const struct errand errand = {part, job, made};
        errands[made] = errand;
        if (pthread_create(&threads[made], NULL, run_errand, &errands[made]) != 0) break;
    }
    part(job, 0);
    for (size_t index = made; index < num_parts; index++) part(job, index);
    for (size_t index = 1; index < made; index++) pthread_join(threads[index], NULL);
}

/* Fills `team` for `threads` of them; n and block for what is to be compressed, n == 0 else. */
static int make_team(struct onebit_team *team, int threads, Py_ssize_t n, Py_ssize_t block) {
    if (threads < 1 || threads > MAX_THREADS) {
        PyErr_Format(PyExc_ValueError, "threads must be 1 to %d, got %d", MAX_THREADS, threads);
        return -1;
    }
    team->num_parts = (size_t)threads;
    team->run = run_on_threads;
    team->sums = NULL;
    const size_t num_sums = threads == 1 ? 0 : onebit_num_sums((size_t)n, (size_t)block);
    if (num_sums == 0) return 0;
    team->sums = PyMem_Calloc(num_sums, sizeof *team->sums);
    if (team->sums != NULL) return 0;
    PyErr_NoMemory();
    return -1;
}

/* ---- Buffers of one call ---- */

#define MAX_ARRAYS 5

struct call {
    struct onebit_team team;
    Py_buffer arrays[MAX_ARRAYS], *messages, *gradients;
    Py_ssize_t num_arrays, num_messages, num_gradients;
    const uint8_t **pointers;
    const float **gradient_pointers;
};

static void release(struct call *call) {
    for (Py_ssize_t i = 0; i < call->num_arrays; i++) PyBuffer_Release(&call->arrays[i]);
    for (Py_ssize_t i = 0; i < call->num_messages; i++) PyBuffer_Release(&call->messages[i]);
    for (Py_ssize_t i = 0; i < call->num_gradients; i++) PyBuffer_Release(&call->gradients[i]);
    PyMem_Free(call->messages);
    PyMem_Free(call->pointers);
    PyMem_Free(call->gradients);
    PyMem_Free(call->gradient_pointers);
    PyMem_Free(call->team.sums);
}

/* Bytes at *data, *num_bytes of them; NULL and -1 for None. */
static int take_bytes(struct call *call, PyObject *object, int flags, void **data, Py_ssize_t *num_bytes) {
    *data = NULL;
    *num_bytes = -1;
    if (object == Py_None) return 0;
    Py_buffer *view = &call->arrays[call->num_arrays];
    if (PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | flags) < 0) return -1;
    call->num_arrays++;
    *data = view->buf;
    *num_bytes = view->len;
    return 0;
}

/* Whether there are *count floats at `bytes`, or any number of them if it is -1, which then becomes their number. */
static int check_floats(const void *bytes, Py_ssize_t num_bytes, const char *name, Py_ssize_t *count) {
    if (num_bytes < 0 || num_bytes % (Py_ssize_t)sizeof(float) != 0 || (uintptr_t)bytes % sizeof(float) != 0 ||
        (*count >= 0 && num_bytes / (Py_ssize_t)sizeof(float) != *count)) {
        PyErr_Format(PyExc_ValueError, "%s: not as many aligned floats as expected", name);
        return -1;
    }
    *count = num_bytes / (Py_ssize_t)sizeof(float);
    return 0;
}

/* Floats as `check_floats` has them; None only if `optional`. */
static int take_floats(struct call *call, PyObject *object, const char *name, int flags, int optional,
                       Py_ssize_t *count, float **data) {
    void *bytes;
    Py_ssize_t num_bytes;
    if (take_bytes(call, object, flags, &bytes, &num_bytes) < 0) return -1;
    *data = bytes;
    if (num_bytes < 0 && optional) return 0;
    return check_floats(bytes, num_bytes, name, count);
}

/* The gradients of a list or tuple, all of the length of the first. */
static int take_gradients(struct call *call, PyObject *object, Py_ssize_t *num_elements) {
    PyObject *sequence = PySequence_Fast(object, "gradients must be a sequence");
    if (sequence == NULL) return -1;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    int status = -1;
    if (count < 1) {
        PyErr_SetString(PyExc_ValueError, "there must be one gradient at least");
        goto done;
    }
    call->gradients = PyMem_Calloc((size_t)count, sizeof *call->gradients);
    call->gradient_pointers = PyMem_Calloc((size_t)count, sizeof *call->gradient_pointers);
    if (call->gradients == NULL || call->gradient_pointers == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_buffer *view = &call->gradients[i];
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(sequence, i), view, PyBUF_C_CONTIGUOUS) < 0) goto done;
        call->num_gradients++;
        call->gradient_pointers[i] = view->buf;
        if (check_floats(view->buf, view->len, "gradient", num_elements) < 0) goto done;
    }
    status = 0;
done:
    Py_DECREF(sequence);
    return status;
}

static int check_counts(Py_ssize_t num_elements, Py_ssize_t block) {
    if (num_elements < 0 || block < 1) {
        PyErr_SetString(PyExc_ValueError, "num_elements must be at least 0 and block at least 1");
        return -1;
    }
    return 0;
}

static int check_message_length(Py_ssize_t num_bytes, Py_ssize_t num_elements, Py_ssize_t block) {
    if (num_bytes < 0 || (size_t)num_bytes != onebit_message_num_bytes((size_t)num_elements, (size_t)block)) {
        PyErr_SetString(PyExc_ValueError, "a message has the wrong length");
        return -1;
    }
    return 0;
}

static int take_message(struct call *call, PyObject *object, Py_ssize_t num_elements, Py_ssize_t block,
                        uint8_t **data) {
    void *bytes;
    Py_ssize_t num_bytes;
    if (take_bytes(call, object, PyBUF_WRITABLE, &bytes, &num_bytes) < 0) return -1;
    *data = bytes;
    return check_message_length(num_bytes, num_elements, block);
}

/* The messages of a list or tuple. */
static int take_messages(struct call *call, PyObject *object, Py_ssize_t num_elements, Py_ssize_t block) {
    PyObject *sequence = PySequence_Fast(object, "messages must be a sequence");
    if (sequence == NULL) return -1;
    const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence);
    int status = -1;
    if (count < 1) {
        PyErr_SetString(PyExc_ValueError, "there must be one message at least");
        goto done;
    }
    call->messages = PyMem_Calloc((size_t)count, sizeof *call->messages);
    call->pointers = PyMem_Calloc((size_t)count, sizeof *call->pointers);
    if (call->messages == NULL || call->pointers == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_buffer *view = &call->messages[i];
        if (PyObject_GetBuffer(PySequence_Fast_GET_ITEM(sequence, i), view, PyBUF_C_CONTIGUOUS) < 0) goto done;
        call->num_messages++;
        call->pointers[i] = view->buf;
        if (check_message_length(view->len, num_elements, block) < 0) goto done;
    }
    status = 0;
done:
    Py_DECREF(sequence);
    return status;
}

static int check_level(int level) {
    if (level < 0 || level > (int)onebit_max_level()) {
        PyErr_Format(PyExc_ValueError, "level %d is not available", level);
        return -1;
    }
    return 0;
}

/* ---- Functions ---- */

static PyObject *py_levels(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored)) {
    const Py_ssize_t count = (Py_ssize_t)onebit_max_level() + 1;
    PyObject *names = PyTuple_New(count);
    for (Py_ssize_t level = 0; names != NULL && level < count; level++) {
        PyObject *name = PyUnicode_FromString(onebit_level_name((enum onebit_level)level));
        if (name == NULL) {
            Py_CLEAR(names);
        } else {
            PyTuple_SET_ITEM(names, level, name);
        }
    }
    return names;
}

static PyObject *py_compress(PyObject *Py_UNUSED(module), PyObject *args) {
    int level, mean, threads;
    PyObject *py_gradients, *py_momentum, *py_kept, *py_error, *py_message, *py_live, *result = NULL;
    float beta, one_minus_beta, *momentum, *error, *live;
    Py_ssize_t block, count = -1;
    uint8_t *message;
    struct call call = {0};
    if (!PyArg_ParseTuple(args, "iOOOffOOnpOi:compress", &level, &py_gradients, &py_momentum, &py_kept, &beta,
                          &one_minus_beta, &py_error, &py_message, &block, &mean, &py_live, &threads))
        return NULL;
    if (check_level(level) < 0 || check_counts(0, block) < 0 ||
        take_gradients(&call, py_gradients, &count) < 0 ||
        take_floats(&call, py_momentum, "momentum", 0, 1, &count, &momentum) < 0 ||
        (py_kept != Py_None && take_messages(&call, py_kept, count, block) < 0) ||
        take_floats(&call, py_error, "error", PyBUF_WRITABLE, 1, &count, &error) < 0 ||
        take_floats(&call, py_live, "live", 0, 1, &count, &live) < 0 ||
        take_message(&call, py_message, count, block, &message) < 0 ||
        make_team(&call.team, threads, count, block) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    onebit_compress((enum onebit_level)level, call.gradient_pointers, (size_t)call.num_gradients, momentum, call.pointers,
                    (size_t)call.num_messages, beta, one_minus_beta, error, live, (size_t)count, (size_t)block,
                    mean ? ONEBIT_MEAN : ONEBIT_RMS, message, &call.team);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&call);
    return result;
}

static PyObject *py_reduce(PyObject *Py_UNUSED(module), PyObject *args) {
    int level, mean, threads;
    PyObject *py_messages, *py_error, *py_message, *py_live, *result = NULL;
    float *error, *live;
    Py_ssize_t count, block;
    uint8_t *message;
    struct call call = {0};
    if (!PyArg_ParseTuple(args, "iOOOnnpOi:reduce", &level, &py_messages, &py_error, &py_message, &count, &block, &mean,
                          &py_live, &threads))
        return NULL;
    if (check_level(level) < 0 || check_counts(count, block) < 0 ||
        take_messages(&call, py_messages, count, block) < 0 ||
        take_floats(&call, py_error, "error", PyBUF_WRITABLE, 1, &count, &error) < 0 ||
        take_floats(&call, py_live, "live", 0, 1, &count, &live) < 0 ||
        take_message(&call, py_message, count, block, &message) < 0 ||
        make_team(&call.team, threads, count, block) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    onebit_reduce((enum onebit_level)level, call.pointers, (size_t)call.num_messages, error, live, (size_t)count,
                  (size_t)block, mean ? ONEBIT_MEAN : ONEBIT_RMS, message, &call.team);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&call);
    return result;
}

static PyObject *py_average(PyObject *Py_UNUSED(module), PyObject *args) {
    int level, threads;
    PyObject *py_messages, *py_values, *py_live, *result = NULL;
    float *values, *live;
    Py_ssize_t count = -1, block;
    struct call call = {0};
    if (!PyArg_ParseTuple(args, "iOOnOi:average", &level, &py_messages, &py_values, &block, &py_live, &threads))
        return NULL;
    if (check_level(level) < 0 || check_counts(0, block) < 0 ||
        take_floats(&call, py_values, "values", PyBUF_WRITABLE, 0, &count, &values) < 0 ||
        take_floats(&call, py_live, "live", 0, 1, &count, &live) < 0 ||
        take_messages(&call, py_messages, count, block) < 0 || make_team(&call.team, threads, 0, 1) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    onebit_average((enum onebit_level)level, call.pointers, (size_t)call.num_messages, values, live, (size_t)count,
                   (size_t)block, &call.team);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&call);
    return result;
}

static PyObject *py_apply(PyObject *Py_UNUSED(module), PyObject *args) {
    int level, threads;
    PyObject *py_messages, *py_parameter, *py_momentum, *py_variance, *result = NULL;
    float *parameter, *momentum, *variance;
    Py_ssize_t num_elements, block, start, count = -1;
    struct onebit_step step;
    struct call call = {0};
    if (!PyArg_ParseTuple(args, "iOnOOOnnffffpi:apply", &level, &py_messages, &start, &py_parameter, &py_momentum,
                          &py_variance, &num_elements, &block, &step.step_size, &step.eps, &step.variance_correction,
                          &step.decay, &step.hold, &threads))
        return NULL;
    if (check_level(level) < 0 || check_counts(num_elements, block) < 0 ||
        take_floats(&call, py_parameter, "parameter", PyBUF_WRITABLE, 0, &count, &parameter) < 0 ||
        take_floats(&call, py_momentum, "momentum", PyBUF_WRITABLE, 1, &count, &momentum) < 0 ||
        take_floats(&call, py_variance, "variance", 0, 1, &count, &variance) < 0 ||
        take_messages(&call, py_messages, num_elements, block) < 0 || make_team(&call.team, threads, 0, 1) < 0)
        goto done;
    if (start < 0 || start > num_elements || count > num_elements - start) {
        PyErr_SetString(PyExc_ValueError, "the slice reaches beyond the message");
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    onebit_apply((enum onebit_level)level, call.pointers, (size_t)call.num_messages, (size_t)num_elements,
                 (size_t)block, (size_t)start, (size_t)count, parameter, momentum, variance, &step, &call.team);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&call);
    return result;
}

static PyObject *py_triad(PyObject *Py_UNUSED(module), PyObject *args) {
    int level, threads;
    PyObject *py_a, *py_b, *py_c, *result = NULL;
    float *a, *b, *c, factor;
    Py_ssize_t count = -1;
    struct call call = {0};
    if (!PyArg_ParseTuple(args, "iOOOfi:triad", &level, &py_a, &py_b, &py_c, &factor, &threads)) return NULL;
    if (check_level(level) < 0 || take_floats(&call, py_a, "a", PyBUF_WRITABLE, 0, &count, &a) < 0 ||
        take_floats(&call, py_b, "b", 0, 0, &count, &b) < 0 || take_floats(&call, py_c, "c", 0, 0, &count, &c) < 0 ||
        make_team(&call.team, threads, 0, 1) < 0)
        goto done;
    Py_BEGIN_ALLOW_THREADS
    onebit_triad((enum onebit_level)level, a, b, c, factor, (size_t)count, &call.team);
    Py_END_ALLOW_THREADS
    result = Py_NewRef(Py_None);
done:
    release(&call);
    return result;
}

/* ---- Module ---- */

static PyMethodDef methods[] = {
    {"levels", py_levels, METH_NOARGS, "Names of the levels of vector instructions that this processor has, \"c\" first."},
    {"compress", py_compress, METH_VARARGS,
     "compress(level, gradients, momentum, kept, beta, one_minus_beta, error, message, block, mean, live, threads)"},
    {"reduce", py_reduce, METH_VARARGS,
     "reduce(level, messages, error, message, num_elements, block, mean, live, threads)"},
    {"average", py_average, METH_VARARGS, "average(level, messages, values, block, live, threads)"},
    {"apply", py_apply, METH_VARARGS,
     "apply(level, messages, start, parameter, momentum, variance, num_elements, block, step_size, eps, "
     "variance_correction, decay, hold, threads)"},
    {"triad", py_triad, METH_VARARGS, "triad(level, a, b, c, factor, threads): a = b + factor * c"},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_PER_INTERPRETER_GIL_SUPPORTED},
#endif
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_kernels",
    .m_doc = "Native kernels; see hvd_onebit.kernels.",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&definition); }
