/* late_backend.h - the CPU backend as a device that copies by itself and as late as backend.h lets
 * it. What is brought is taken when the next bring or the flush returns, and must be then what it
 * was; puts lie in a queue until a flush, or until they happen to run; a mark is reached when all
 * before it has run, and told of later still. A fault is told and ends the program, since most are
 * found on a loader's thread. Threads: as backend.h; each rank's state is under its lock. */
#ifndef BITDELTA_TESTS_LATE_BACKEND_H
#define BITDELTA_TESTS_LATE_BACKEND_H

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base_support.h"
#include "bitdelta/backend/backend.h"

enum { LATE_RANKS_MAX = 8, LATE_MEMORY_MAX = 64, LATE_CALLS_GO_WELL = 1 << 30 };

typedef struct late_window { /* bytes lent: [from, from + bytes) */
    const uint8_t *from;
    uint64_t bytes;
    uint8_t *copy; /* as they were when they were lent */
    bool taken;
    uint32_t users; /* puts in the queue, and the rank while it is open */
} late_window;

typedef struct late_put {
    enum { LATE_PLANE, LATE_PART, LATE_ROWS, LATE_VECTOR } kind;
    void *dst;
    uint32_t n, k;
    bd_plane_part part; /* LATE_PLANE too, with the rows alone */
    uint64_t first, count;
    late_window *window; /* its source is at `at` there; NULL: it is `kept` */
    uint64_t at;
    uint8_t *kept;
} late_put;

typedef struct late_rank {
    pthread_mutex_t lock;
    bd_backend *backend;
    late_window *open;
    late_put *queue; /* [put_cap]; put number i is at i - first_put */
    uint64_t first_put, done, put_count, put_cap;
    uint64_t *marks; /* [mark_count] puts before it */
    uint64_t mark_count, mark_cap;
    uint64_t random;
} late_rank;

static struct {
    bd_backend_ops ops;
    late_rank ranks[LATE_RANKS_MAX];
    uint32_t rank_count;
    pthread_mutex_t lock; /* of what follows and of new ranks */
    struct {
        const uint8_t *at;
        uint64_t bytes;
    } memory[LATE_MEMORY_MAX]; /* of host_alloc and host_lock */
    uint64_t seed;
    uint32_t refused_of_100; /* are not brought */
    _Atomic int calls_left;  /* that go well; the one after them does not */
    _Atomic uint64_t brought, flushed, asked;
} late = {.lock = PTHREAD_MUTEX_INITIALIZER, .calls_left = LATE_CALLS_GO_WELL};

static inline _Noreturn BD_PRINTF(1, 2) void late_fault(const char *format, ...) {
    va_list args;
    va_start(args, format);
    fprintf(stderr, "late backend: ");
    vfprintf(stderr, format, args);
    fprintf(stderr, "\n");
    va_end(args);
    abort();
}

static inline late_rank *late_of(const bd_backend *backend) {
    for (uint32_t i = 0; i < LATE_RANKS_MAX; i++)
        if (late.ranks[i].backend == backend) return &late.ranks[i];
    late_fault("a call of a backend that is not open");
}

static inline uint64_t late_below(late_rank *r, uint64_t bound) {
    return support_random(&r->random) % bound;
}

/* Other threads' turn: what was given back too early is used again meanwhile. */
static inline void late_pause(late_rank *r) {
    pthread_mutex_lock(&r->lock);
    const uint64_t dice = late_below(r, 64);
    pthread_mutex_unlock(&r->lock);
    if (dice < 2)
        usleep((useconds_t)(1 + dice * 400));
    else if (dice < 12)
        usleep(30);
}

static inline bool late_call_fails(bd_error *err) {
    if (atomic_load(&late.calls_left) >= LATE_CALLS_GO_WELL) return false;
    if (atomic_fetch_sub(&late.calls_left, 1) != 0) return false;
    atomic_store(&late.calls_left, LATE_CALLS_GO_WELL);
    (void)bd_fail(err, BD_E_DEVICE, "device", "a planted fault");
    return true;
}

/* ---- Windows ---- */

static inline void late_leave(late_window *window) {
    if (--window->users > 0) return;
    free(window->copy);
    free(window);
}

static inline void late_take(late_window *window) {
    if (window->taken) return;
    for (uint64_t i = 0; i < window->bytes; i++)
        if (window->from[i] != window->copy[i])
            late_fault("byte %llu of %llu was changed while it was lent", (unsigned long long)i,
                       (unsigned long long)window->bytes);
    window->taken = true;
}

static inline void late_window_end(late_rank *r) {
    if (!r->open) return;
    late_take(r->open);
    late_leave(r->open);
    r->open = NULL;
}

static inline bool late_inside(const void *data, uint64_t bytes, const void *in,
                               uint64_t in_bytes) {
    const uintptr_t at = (uintptr_t)data, from = (uintptr_t)in;
    return at >= from && bytes <= in_bytes && at - from <= in_bytes - bytes;
}

/* ---- The queue ---- */

static inline void late_run_one(late_rank *r) {
    const bd_backend_ops *cpu = bd_backend_cpu_ops();
    late_put *p = &r->queue[r->done - r->first_put];
    if (p->window) late_take(p->window);
    const void *src = p->window ? p->window->copy + p->at : p->kept;
    bd_error err = {0};
    bd_status s = BD_OK;
    p->part.src = src;
    if (p->kind == LATE_PLANE)
        s = cpu->plane_put(r->backend, p->dst, p->n, p->k, p->part.first_row, p->part.row_count,
                           src, p->part.src_stride_bytes, &err);
    else if (p->kind == LATE_PART)
        s = cpu->plane_part_put(r->backend, p->dst, p->n, p->k, &p->part, &err);
    else if (p->kind == LATE_ROWS)
        s = cpu->rows_put(r->backend, p->dst, p->first, src, p->count, &err);
    else
        s = cpu->vector_put(r->backend, p->dst, p->first, src, p->count, &err);
    if (s != BD_OK) late_fault("a put that was late: %s", err.message);
    if (p->window) late_leave(p->window);
    free(p->kept);
    if (++r->done == r->put_count) r->first_put = r->done;
}

static inline void late_run_until(late_rank *r, uint64_t end) {
    while (r->done < end)
        late_run_one(r);
}

/* The device goes on by itself, now and then. */
static inline void late_drift(late_rank *r) {
    if (late_below(r, 8) != 0) return;
    for (uint64_t n = late_below(r, r->put_count - r->done + 1); n > 0; n--) {
        const late_put *p = &r->queue[r->done - r->first_put];
        if (p->window && !p->window->taken && late_below(r, 4) != 0) return;
        late_run_one(r);
    }
}

static inline late_put *late_push(late_rank *r) {
    const uint64_t lying = r->put_count - r->first_put;
    if (lying == r->put_cap) {
        r->put_cap = r->put_cap ? 2 * r->put_cap : 256;
        r->queue = realloc(r->queue, r->put_cap * sizeof *r->queue);
        if (!r->queue) late_fault("no memory for puts");
    }
    r->put_count++;
    return &r->queue[lying];
}

static inline bd_status late_add(bd_backend *backend, late_put p, const void *src, uint64_t bytes,
                                 bd_error *err) {
    late_rank *r = late_of(backend);
    if (late_call_fails(err)) return BD_E_DEVICE;
    pthread_mutex_lock(&r->lock);
    if (r->open && late_inside(src, bytes, r->open->from, r->open->bytes)) {
        p.window = r->open;
        p.at = (uint64_t)((const uint8_t *)src - r->open->from);
        p.window->users++;
    } else {
        p.kept = malloc(bytes);
        if (!p.kept) late_fault("no memory for a put");
        memcpy(p.kept, src, bytes);
    }
    *late_push(r) = p;
    late_drift(r);
    pthread_mutex_unlock(&r->lock);
    return BD_OK;
}

static inline bd_status late_plane_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                                       uint32_t first_row, uint32_t row_count, const void *src,
                                       uint64_t src_stride_bytes, bd_error *err) {
    const late_put p = {.kind = LATE_PLANE,
                        .dst = dst,
                        .n = n,
                        .k = k,
                        .part = {.first_row = first_row,
                                 .row_count = row_count,
                                 .src_stride_bytes = src_stride_bytes}};
    return late_add(backend, p, src, (row_count - 1) * src_stride_bytes + k / 8, err);
}

static inline bd_status late_plane_part_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                                            const bd_plane_part *part, bd_error *err) {
    const late_put p = {.kind = LATE_PART, .dst = dst, .n = n, .k = k, .part = *part};
    return late_add(backend, p, part->src,
                    (part->row_count - 1) * part->src_stride_bytes + part->col_count / 8, err);
}

static inline bd_status late_rows_put(bd_backend *backend, void *dst, uint64_t offset,
                                      const void *src, uint64_t bytes, bd_error *err) {
    const late_put p = {.kind = LATE_ROWS, .dst = dst, .first = offset, .count = bytes};
    return late_add(backend, p, src, bytes, err);
}

static inline bd_status late_vector_put(bd_backend *backend, void *dst, uint64_t first,
                                        const float *src, uint64_t count, bd_error *err) {
    const late_put p = {.kind = LATE_VECTOR, .dst = dst, .first = first, .count = count};
    return late_add(backend, p, src, 4 * count, err);
}

/* ---- Bring, flush, marks ---- */

static inline bd_status late_flush(bd_backend *backend, bd_error *err) {
    late_rank *r = late_of(backend);
    (void)err;
    late_pause(r);
    pthread_mutex_lock(&r->lock);
    late_window_end(r);
    late_run_until(r, r->put_count);
    pthread_mutex_unlock(&r->lock);
    atomic_fetch_add(&late.flushed, 1);
    return BD_OK;
}

static inline bool late_may_bring(const void *data, uint64_t bytes) {
    bool found = false;
    pthread_mutex_lock(&late.lock);
    for (uint32_t i = 0; i < LATE_MEMORY_MAX; i++)
        found |=
            late.memory[i].at && late_inside(data, bytes, late.memory[i].at, late.memory[i].bytes);
    pthread_mutex_unlock(&late.lock);
    return found;
}

static inline bd_status late_bring(bd_backend *backend, const void *data, uint64_t bytes,
                                   bool *brought, bd_error *err) {
    late_rank *r = late_of(backend);
    *brought = false;
    late_pause(r);
    const bool fails = late_call_fails(err), may = late_may_bring(data, bytes);
    pthread_mutex_lock(&r->lock);
    if (fails && late_below(r, 2) == 0) { /* it waits for nothing: what was lent before still is */
        pthread_mutex_unlock(&r->lock);
        return BD_E_DEVICE;
    }
    late_window_end(r);
    if (may && late_below(r, 100) >= late.refused_of_100) {
        late_window *window = calloc(1, sizeof *window);
        if (!window || !(window->copy = malloc(bytes))) late_fault("no memory for a window");
        memcpy(window->copy, data, bytes);
        window->from = data;
        window->bytes = bytes;
        window->users = 1;
        r->open = window; /* of a call that fails too: the copy may be under way */
        atomic_fetch_add(&late.brought, 1);
        *brought = !fails;
    }
    late_drift(r);
    pthread_mutex_unlock(&r->lock);
    return fails ? BD_E_DEVICE : BD_OK;
}

static inline bd_status late_mark(bd_backend *backend, uint64_t *mark, bd_error *err) {
    late_rank *r = late_of(backend);
    if (late_call_fails(err)) return BD_E_DEVICE;
    pthread_mutex_lock(&r->lock);
    if (r->mark_count == r->mark_cap) {
        r->mark_cap = r->mark_cap ? 2 * r->mark_cap : 256;
        r->marks = realloc(r->marks, r->mark_cap * sizeof *r->marks);
        if (!r->marks) late_fault("no memory for marks");
    }
    r->marks[r->mark_count++] = r->put_count;
    *mark = r->mark_count;
    late_drift(r);
    pthread_mutex_unlock(&r->lock);
    return BD_OK;
}

static inline bd_status late_reached(bd_backend *backend, uint64_t mark, bool *reached,
                                     bd_error *err) {
    late_rank *r = late_of(backend);
    if (late_call_fails(err)) return BD_E_DEVICE;
    pthread_mutex_lock(&r->lock);
    if (mark < 1 || mark > r->mark_count) late_fault("a mark that was never put");
    late_drift(r);
    *reached = r->done >= r->marks[mark - 1] && late_below(r, 4) != 0;
    pthread_mutex_unlock(&r->lock);
    atomic_fetch_add(&late.asked, 1);
    return BD_OK;
}

/* ---- Host memory ---- */

static inline void late_remember(const void *at, uint64_t bytes) {
    pthread_mutex_lock(&late.lock);
    uint32_t i = 0;
    while (late.memory[i].at)
        if (++i == LATE_MEMORY_MAX) late_fault("more host memory than is kept note of");
    late.memory[i].at = at;
    late.memory[i].bytes = bytes;
    pthread_mutex_unlock(&late.lock);
}

/* Nothing of it may be lent. */
static inline void late_forget(const void *at) {
    uint64_t bytes = 0;
    pthread_mutex_lock(&late.lock);
    for (uint32_t i = 0; i < LATE_MEMORY_MAX; i++) {
        if (late.memory[i].at != at) continue;
        bytes = late.memory[i].bytes;
        late.memory[i].at = NULL;
    }
    pthread_mutex_unlock(&late.lock);
    if (bytes == 0) late_fault("host memory is given back that was never had");
    for (uint32_t i = 0; i < LATE_RANKS_MAX; i++) {
        late_rank *r = &late.ranks[i];
        if (!r->backend) continue;
        pthread_mutex_lock(&r->lock);
        if (r->open && late_inside(r->open->from, r->open->bytes, at, bytes))
            late_fault("host memory is given back while some of it is lent");
        pthread_mutex_unlock(&r->lock);
    }
}

static inline void *late_host_alloc(bd_backend *backend, uint64_t bytes) {
    (void)backend;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return NULL;
    late_remember(memory, bytes);
    return memory;
}

static inline void late_host_free(bd_backend *backend, void *memory, uint64_t bytes) {
    (void)backend;
    late_forget(memory);
    munmap(memory, bytes);
}

static inline bool late_host_lock(bd_backend *backend, void *memory, uint64_t bytes) {
    (void)backend;
    late_remember(memory, bytes);
    return true;
}

static inline void late_host_unlock(bd_backend *backend, void *memory) {
    (void)backend;
    late_forget(memory);
}

/* ---- Open and close ---- */

static inline bd_status late_open(const bd_backend_options *options, bd_backend **out,
                                  bd_error *err) {
    const bd_status s = bd_backend_cpu_ops()->open(options, out, err);
    if (s != BD_OK) return s;
    late_rank *r = &late.ranks[options->rank];
    if (r->backend) late_fault("rank %u is open already", options->rank);
    *r = (late_rank){.backend = *out, .random = late.seed + options->rank};
    pthread_mutex_init(&r->lock, NULL);
    return BD_OK;
}

/* Nothing is on its way, nothing is lent. */
static inline void late_check_idle(const char *when) {
    for (uint32_t i = 0; i < LATE_RANKS_MAX; i++) {
        late_rank *r = &late.ranks[i];
        if (!r->backend) continue;
        pthread_mutex_lock(&r->lock);
        if (r->open) late_fault("%s: rank %u still copies from memory that was lent", when, i);
        if (r->done < r->put_count)
            late_fault("%s: %llu puts of rank %u have not run", when,
                       (unsigned long long)(r->put_count - r->done), i);
        pthread_mutex_unlock(&r->lock);
    }
}

static inline void late_close(bd_backend *backend) {
    late_rank *r = backend ? late_of(backend) : NULL;
    if (r) {
        late_check_idle("at the backend's end");
        pthread_mutex_destroy(&r->lock);
        free(r->queue);
        free(r->marks);
        *r = (late_rank){0};
    }
    bd_backend_cpu_ops()->close(backend);
}

static inline const bd_backend_ops *late_ops(uint64_t seed) {
    late.seed = seed;
    late.ops = *bd_backend_cpu_ops();
    late.ops.name = "late";
    late.ops.puts_anywhere = false;
    late.ops.open = late_open;
    late.ops.close = late_close;
    late.ops.plane_put = late_plane_put;
    late.ops.plane_part_put = late_plane_part_put;
    late.ops.rows_put = late_rows_put;
    late.ops.vector_put = late_vector_put;
    late.ops.put_flush = late_flush;
    late.ops.bring = late_bring;
    late.ops.put_mark = late_mark;
    late.ops.put_reached = late_reached;
    late.ops.host_alloc = late_host_alloc;
    late.ops.host_free = late_host_free;
    late.ops.host_lock = late_host_lock;
    late.ops.host_unlock = late_host_unlock;
    return &late.ops;
}

#endif
