/* overlay_feed.c - a delta file's bytes, in pieces of any size, into pages. See overlay.h.
 * Owner: the loader's thread of a load, which alone feeds a backend that copies by itself; another
 * backend's feeds may be filled from any threads at once. It runs beside steps, which read layers
 * that are ready only. */
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "overlay_internal.h"

enum { FLOATS_AT_ONCE = 4096 };

typedef struct cut_unit { /* a row or value that no call has whole */
    struct cut_unit *next;
    uint32_t piece;
    uint64_t unit; /* of the piece */
    uint64_t have_bytes;
    uint8_t data[];
} cut_unit;

struct bd_overlay_feed {
    bd_model *model;
    const bd_overlay_plan *plan; /* borrowed, as are the pages */
    void *const *pages;
    bool anywhere;
    bool brought; /* the backend copies what is being fed by itself, and puts are marked */
    bool loose;   /* something was given to the backend since it was last waited for */
    pthread_mutex_t lock;
    cut_unit *cuts;         /* guarded by lock */
    _Atomic uint64_t *left; /* [ready_count] bytes not put yet */
    uint64_t *marks;        /* [ready_count] of those in [ready, complete) */
    uint32_t complete;      /* put, but not yet known to be visible; guarded by lock */
    _Atomic uint32_t ready;
};

static uint64_t unit_bytes(const bd_overlay_piece *piece) {
    return piece->kind == BD_PIECE_FLOATS ? bd_dtype_bytes(piece->dtype) : piece->row_bytes;
}

bool bd_overlay_feeds_anywhere(const bd_model *model) {
    const bd_backend_ops *ops = model->ops;
    return ops->puts_anywhere && !ops->put_flush && !ops->bring;
}

bd_status bd_overlay_feed_create(bd_model *model, const bd_overlay_plan *plan, void *const *pages,
                                 bd_overlay_feed **out, bd_error *err) {
    *out = NULL;
    bd_overlay_feed *feed =
        calloc(1, sizeof *feed + plan->ready_count * (sizeof *feed->marks + sizeof *feed->left));
    if (!feed) return bd_fail(err, BD_E_MEMORY, NULL, "no memory to load a delta");
    feed->model = model;
    feed->plan = plan;
    feed->pages = pages;
    feed->anywhere = bd_overlay_feeds_anywhere(model);
    feed->marks = (uint64_t *)(feed + 1);
    feed->left = (_Atomic uint64_t *)(feed->marks + plan->ready_count);
    for (uint32_t i = 0; i < plan->piece_count; i++)
        feed->left[plan->pieces[i].ready_index] += plan->pieces[i].bytes;
    while (feed->complete < plan->ready_count && feed->left[feed->complete] == 0)
        feed->complete++;
    atomic_store(&feed->ready, feed->complete);
    pthread_mutex_init(&feed->lock, NULL);
    *out = feed;
    return BD_OK;
}

static bd_status check_finite(const bd_overlay_piece *piece, uint64_t first, const float *values,
                              uint64_t count, bd_error *err) {
    for (uint64_t i = 0; i < count; i++) {
        if (isfinite(values[i])) continue;
        return bd_fail(err, BD_E_FORMAT, piece->tensor, "value %llu of %s is not finite",
                       (unsigned long long)(first + i), piece->tensor);
    }
    return BD_OK;
}

/* `count` values of the piece, from value `first` on. */
static bd_status put_floats(bd_overlay_feed *feed, const bd_overlay_piece *piece, uint64_t first,
                            const uint8_t *data, uint64_t count, bd_error *err) {
    const bd_backend_ops *ops = feed->model->ops;
    uint8_t *dst = (uint8_t *)feed->pages[piece->page] + piece->page_offset_bytes;
    if (piece->dtype == BD_DTYPE_F32 && (uintptr_t)data % _Alignof(float) == 0) {
        const float *as_they_are = (const float *)(const void *)data;
        const bd_status s = check_finite(piece, first, as_they_are, count, err);
        return s == BD_OK ? ops->vector_put(feed->model->backend, dst, piece->first_row + first,
                                            as_they_are, count, err)
                          : s;
    }
    float values[FLOATS_AT_ONCE];
    const bd_tensor source = {.dtype = piece->dtype,
                              .rank = 1,
                              .shape = {count},
                              .bytes = count * bd_dtype_bytes(piece->dtype),
                              .data = data};
    for (uint64_t at = 0; at < count;) {
        const uint64_t n = count - at < FLOATS_AT_ONCE ? count - at : FLOATS_AT_ONCE;
        bd_tensor_to_f32(&source, at, n, values);
        bd_status s = check_finite(piece, first + at, values, n, err);
        if (s == BD_OK)
            s = ops->vector_put(feed->model->backend, dst, piece->first_row + first + at, values, n,
                                err);
        if (s != BD_OK) return s;
        at += n;
    }
    return BD_OK;
}

/* Whole rows of bf16 values, as they are. */
static bd_status put_rows(bd_overlay_feed *feed, const bd_overlay_piece *piece, uint64_t first,
                          const uint8_t *data, uint64_t count, bd_error *err) {
    const uint64_t bytes = count * piece->row_bytes;
    uint8_t *dst = (uint8_t *)feed->pages[piece->page] + piece->page_offset_bytes;
    for (uint64_t i = 0; i < bytes; i += 2) {
        if ((data[i + 1] & 0x7f) != 0x7f || (data[i] & 0x80) == 0) continue;
        return bd_fail(err, BD_E_FORMAT, piece->tensor, "row %llu of a page of %s is not finite",
                       (unsigned long long)(piece->first_row + first + i / piece->row_bytes),
                       piece->tensor);
    }
    const bd_status s = feed->model->ops->rows_put(
        feed->model->backend, dst, (piece->first_row + first) * piece->row_bytes, data, bytes, err);
    if (s == BD_E_UNSUPPORTED && err) /* the backend knows places, not names */
        return bd_fail(err, s, piece->tensor, "%s: %s", piece->tensor, err->message);
    return s;
}

static bd_status put_units(bd_overlay_feed *feed, const bd_overlay_piece *piece, uint64_t first,
                           const uint8_t *data, uint64_t count, bd_error *err) {
    if (count == 0) return BD_OK;
    if (piece->kind == BD_PIECE_FLOATS) return put_floats(feed, piece, first, data, count, err);
    if (piece->kind == BD_PIECE_ROWS) return put_rows(feed, piece, first, data, count, err);
    const bd_backend_ops *ops = feed->model->ops;
    uint8_t *dst = (uint8_t *)feed->pages[piece->page] + piece->page_offset_bytes;
    const bd_plane_part part = {
        .first_row = piece->first_row + (uint32_t)first,
        .row_count = (uint32_t)count,
        .first_col = piece->first_col,
        .col_count = (uint32_t)(8 * piece->take_bytes),
        .src = data + piece->take_from,
        .src_stride_bytes = piece->row_bytes,
    };
    if (part.col_count != piece->k)
        return ops->plane_part_put(feed->model->backend, dst, piece->n, piece->k, &part, err);
    return ops->plane_put(feed->model->backend, dst, piece->n, piece->k, part.first_row,
                          part.row_count, part.src, piece->row_bytes, err);
}

/* ---- What is complete ---- */

static bd_status flush(bd_overlay_feed *feed, bd_error *err) {
    const bd_backend_ops *ops = feed->model->ops;
    feed->loose = false;
    return ops->put_flush ? ops->put_flush(feed->model->backend, err) : BD_OK;
}

/* How far everything is put, with `mark` for what is new. Under the lock. */
static void advance(bd_overlay_feed *feed, uint64_t mark) {
    while (feed->complete < feed->plan->ready_count &&
           atomic_load(&feed->left[feed->complete]) == 0)
        feed->marks[feed->complete++] = mark;
}

/* What is complete becomes ready: at once by waiting, which at the feed's end must be and is cheap
 * where bytes come slowly; else as marks are reached, so that uploads need not pause. */
static bd_status index_complete(bd_overlay_feed *feed, uint32_t index, bd_error *err) {
    const bd_backend_ops *ops = feed->model->ops;
    bd_status s = BD_OK;
    if (feed->anywhere) {
        pthread_mutex_lock(&feed->lock);
        advance(feed, 0);
        atomic_store_explicit(&feed->ready, feed->complete, memory_order_release);
        pthread_mutex_unlock(&feed->lock);
        return BD_OK;
    }
    if (index != feed->complete) return BD_OK;
    const uint32_t ready_count = feed->plan->ready_count;
    uint64_t mark = 0;
    uint32_t end = index;
    while (end < ready_count && atomic_load(&feed->left[end]) == 0)
        end++;
    const bool later = feed->brought && end < ready_count;
    s = later ? ops->put_mark(feed->model->backend, &mark, err) : flush(feed, err);
    if (s != BD_OK) return s;
    advance(feed, mark);
    if (!later) atomic_store_explicit(&feed->ready, feed->complete, memory_order_release);
    return BD_OK;
}

static bd_status look_at_marks(bd_overlay_feed *feed, bd_error *err) {
    bd_status s = BD_OK;
    bool reached = true;
    uint32_t ready = atomic_load(&feed->ready);
    while (s == BD_OK && reached && ready < feed->complete) {
        s = feed->model->ops->put_reached(feed->model->backend, feed->marks[ready], &reached, err);
        if (s == BD_OK && reached) ready++;
    }
    atomic_store_explicit(&feed->ready, ready, memory_order_release);
    return s;
}

bd_status bd_overlay_feed_settle(bd_overlay_feed *feed, bd_error *err) {
    if (feed->anywhere || atomic_load(&feed->ready) == feed->complete) return BD_OK;
    const bd_status s = flush(feed, err);
    if (s == BD_OK) atomic_store_explicit(&feed->ready, feed->complete, memory_order_release);
    return s;
}

/* ---- Bytes ---- */

/* `count` units of the piece from unit `first` on: puts them, and takes them off what is left. */
static bd_status put_whole(bd_overlay_feed *feed, const bd_overlay_piece *piece, uint64_t first,
                           const uint8_t *data, uint64_t count, bd_error *err) {
    const uint64_t bytes = count * unit_bytes(piece);
    if (count == 0) return BD_OK;
    const bd_status s = put_units(feed, piece, first, data, count, err);
    if (s != BD_OK) return s;
    const uint64_t left = atomic_fetch_sub(&feed->left[piece->ready_index], bytes);
    BD_ASSERT(left >= bytes); /* no byte comes twice */
    return left == bytes ? index_complete(feed, piece->ready_index, err) : BD_OK;
}

/* The cut unit's record, made if these are its first bytes. Under the lock. NULL: no memory. */
static cut_unit *find_cut(bd_overlay_feed *feed, uint32_t piece, uint64_t unit, uint64_t bytes) {
    for (cut_unit *cut = feed->cuts; cut; cut = cut->next)
        if (cut->piece == piece && cut->unit == unit) return cut;
    cut_unit *cut = malloc(sizeof *cut + bytes);
    if (!cut) return NULL;
    *cut = (cut_unit){.next = feed->cuts, .piece = piece, .unit = unit};
    feed->cuts = cut;
    return cut;
}

static void unlink_cut(bd_overlay_feed *feed, const cut_unit *cut) {
    cut_unit **link = &feed->cuts;
    while (*link != cut)
        link = &(*link)->next;
    *link = cut->next;
}

/* Bytes of one unit, from its byte `from` on; whoever brings the last ones puts it. */
static bd_status put_cut(bd_overlay_feed *feed, uint32_t index, uint64_t unit, uint64_t from,
                         const uint8_t *data, uint64_t bytes, bd_error *err) {
    const bd_overlay_piece *piece = &feed->plan->pieces[index];
    const uint64_t whole = unit_bytes(piece);
    if (bytes == 0) return BD_OK;
    pthread_mutex_lock(&feed->lock);
    cut_unit *cut = find_cut(feed, index, unit, whole);
    if (cut) {
        memcpy(cut->data + from, data, (size_t)bytes);
        cut->have_bytes += bytes;
        BD_ASSERT(cut->have_bytes <= whole);
        if (cut->have_bytes == whole)
            unlink_cut(feed, cut);
        else
            cut = NULL;
        pthread_mutex_unlock(&feed->lock);
    } else {
        pthread_mutex_unlock(&feed->lock);
        return bd_fail(err, BD_E_MEMORY, piece->tensor, "no memory to load a delta");
    }
    if (!cut) return BD_OK;
    const bd_status s = put_whole(feed, piece, unit, cut->data, 1, err);
    free(cut);
    return s;
}

/* Bytes [at, at + bytes) of a piece: what ends a cut unit, whole ones, what begins a cut one. */
static bd_status put_bytes(bd_overlay_feed *feed, uint32_t index, uint64_t at, const uint8_t *data,
                           uint64_t bytes, bd_error *err) {
    const bd_overlay_piece *piece = &feed->plan->pieces[index];
    const uint64_t unit = unit_bytes(piece);
    uint64_t first = at / unit, head = at % unit;
    if (head > 0) {
        const uint64_t rest = unit - head, n = bytes < rest ? bytes : rest;
        const bd_status s = put_cut(feed, index, first++, head, data, n, err);
        if (s != BD_OK) return s;
        data += n;
        bytes -= n;
    }
    const uint64_t count = bytes / unit;
    const bd_status s = put_whole(feed, piece, first, data, count, err);
    if (s != BD_OK) return s;
    return put_cut(feed, index, first + count, 0, data + count * unit, bytes - count * unit, err);
}

/* The first piece that ends behind byte `from` of the file. Pieces are sorted and do not overlap.
 */
static uint32_t first_piece(const bd_overlay_plan *plan, uint32_t file_index, uint64_t from) {
    uint32_t low = 0, high = plan->piece_count;
    while (low < high) {
        const uint32_t mid = low + (high - low) / 2;
        const bd_overlay_piece *piece = &plan->pieces[mid];
        const bool before =
            piece->file_index < file_index ||
            (piece->file_index == file_index && piece->offset_bytes + piece->bytes <= from);
        if (before)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

bd_status bd_overlay_feed_bytes(bd_overlay_feed *feed, uint32_t file_index, uint64_t from,
                                const uint8_t *data, uint64_t bytes, bd_error *err) {
    const bd_backend_ops *ops = feed->model->ops;
    if (!feed->anywhere) {
        feed->brought = false;
        feed->loose = true;
    }
    if (ops->bring) {
        bd_status s = ops->bring(feed->model->backend, data, bytes, &feed->brought, err);
        if (s == BD_OK) s = look_at_marks(feed, err);
        if (s != BD_OK) return s;
    }
    for (uint32_t i = first_piece(feed->plan, file_index, from); i < feed->plan->piece_count; i++) {
        const bd_overlay_piece *piece = &feed->plan->pieces[i];
        if (piece->file_index != file_index || piece->offset_bytes >= from + bytes) break;
        const uint64_t end = piece->offset_bytes + piece->bytes,
                       start = piece->offset_bytes > from ? piece->offset_bytes : from,
                       until = end < from + bytes ? end : from + bytes;
        const bd_status s = put_bytes(feed, i, start - piece->offset_bytes, data + (start - from),
                                      until - start, err);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

uint32_t bd_overlay_feed_ready(const bd_overlay_feed *feed) {
    return atomic_load_explicit(&((bd_overlay_feed *)(uintptr_t)feed)->ready, memory_order_acquire);
}

/* Of a load that ends early some bytes may still be on their way, from memory that is the caller's
 * again after this and into pages that are another's. What went wrong before is known already. */
void bd_overlay_feed_destroy(bd_overlay_feed *feed) {
    if (!feed) return;
    if (feed->loose || atomic_load(&feed->ready) < feed->plan->ready_count) {
        bd_status s = flush(feed, NULL);
        (void)s;
    }
    for (cut_unit *cut = feed->cuts, *next; cut; cut = next) {
        next = cut->next;
        free(cut);
    }
    pthread_mutex_destroy(&feed->lock);
    free(feed);
}
