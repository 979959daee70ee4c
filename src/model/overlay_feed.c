/* overlay_feed.c - a delta file's bytes, in pieces of any size, into pages. See overlay.h.
 * Owner: the loader thread of a load; it may run beside steps, which read layers that are ready
 * only.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"
#include "overlay_internal.h"

enum { FLOATS_AT_ONCE = 4096 };

struct bd_overlay_feed {
    bd_model *model;
    const bd_overlay_plan *plan; /* borrowed, as are the pages */
    void *const *pages;
    uint32_t at;         /* piece being filled */
    uint64_t done_bytes; /* of it, carry included */
    uint32_t carry_bytes;
    uint8_t *carry;    /* a row or value whose end has not come yet */
    uint32_t *left;    /* [ready_count] pieces not complete */
    bool brought;      /* the backend copies what is being fed by itself, and puts are marked */
    uint64_t *marks;   /* [ready_count] of those in [ready, complete) */
    uint32_t complete; /* put, but not yet known to be visible */
    uint32_t ready;
};

static uint64_t unit_bytes(const bd_overlay_piece *piece) {
    return piece->kind == BD_PIECE_FLOATS ? bd_dtype_bytes(piece->dtype) : piece->row_bytes;
}

bd_status bd_overlay_feed_create(bd_model *model, const bd_overlay_plan *plan, void *const *pages,
                                 bd_overlay_feed **out, bd_error *err) {
    uint64_t unit_max = sizeof(float);
    *out = NULL;
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        if (unit_bytes(&plan->pieces[i]) > unit_max) unit_max = unit_bytes(&plan->pieces[i]);
    }
    bd_overlay_feed *feed =
        calloc(1, sizeof *feed + plan->ready_count * (sizeof *feed->marks + sizeof *feed->left) +
                      unit_max);
    if (!feed) return bd_fail(err, BD_E_MEMORY, NULL, "no memory to load a delta");
    feed->model = model;
    feed->plan = plan;
    feed->pages = pages;
    feed->marks = (uint64_t *)(feed + 1);
    feed->left = (uint32_t *)(feed->marks + plan->ready_count);
    feed->carry = (uint8_t *)(feed->left + plan->ready_count);
    for (uint32_t i = 0; i < plan->piece_count; i++)
        feed->left[plan->pieces[i].ready_index]++;
    while (feed->ready < plan->ready_count && feed->left[feed->ready] == 0)
        feed->ready++;
    feed->complete = feed->ready;
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
    return feed->model->ops->rows_put(
        feed->model->backend, dst, (piece->first_row + first) * piece->row_bytes, data, bytes, err);
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

/* The next `bytes` bytes of the piece: finish the cut unit, put whole ones, keep the rest. */
static bd_status put_bytes(bd_overlay_feed *feed, const bd_overlay_piece *piece,
                           const uint8_t *data, uint64_t bytes, bd_error *err) {
    const uint64_t unit = unit_bytes(piece);
    uint64_t first = feed->done_bytes / unit;
    feed->done_bytes += bytes;
    if (feed->carry_bytes > 0) {
        const uint64_t wanted = unit - feed->carry_bytes, n = bytes < wanted ? bytes : wanted;
        memcpy(feed->carry + feed->carry_bytes, data, (size_t)n);
        feed->carry_bytes += (uint32_t)n;
        data += n;
        bytes -= n;
        if (feed->carry_bytes < unit) return BD_OK;
        feed->carry_bytes = 0;
        const bd_status s = put_units(feed, piece, first++, feed->carry, 1, err);
        if (s != BD_OK) return s;
    }
    const uint64_t whole = bytes / unit;
    const bd_status s = put_units(feed, piece, first, data, whole, err);
    if (s != BD_OK) return s;
    feed->carry_bytes = (uint32_t)(bytes - whole * unit);
    memcpy(feed->carry, data + whole * unit, feed->carry_bytes);
    return BD_OK;
}

/* What is complete becomes ready: at once by waiting, which at the feed's end must be and is cheap
 * where bytes come slowly; else as marks are reached, so that uploads need not pause. */
static bd_status finish_piece(bd_overlay_feed *feed, const bd_overlay_piece *piece, bd_error *err) {
    const bd_backend_ops *ops = feed->model->ops;
    bd_status s = BD_OK;
    uint64_t mark = 0;
    BD_ASSERT(feed->carry_bytes == 0 && feed->left[piece->ready_index] > 0);
    feed->at++;
    feed->done_bytes = 0;
    if (--feed->left[piece->ready_index] > 0 || piece->ready_index != feed->complete) return BD_OK;
    const bool later = feed->brought && feed->at < feed->plan->piece_count;
    if (later)
        s = ops->put_mark(feed->model->backend, &mark, err);
    else if (ops->put_flush)
        s = ops->put_flush(feed->model->backend, err);
    if (s != BD_OK) return s;
    while (feed->complete < feed->plan->ready_count && feed->left[feed->complete] == 0)
        feed->marks[feed->complete++] = mark;
    if (!later) feed->ready = feed->complete;
    return BD_OK;
}

static bd_status look_at_marks(bd_overlay_feed *feed, bd_error *err) {
    bd_status s = BD_OK;
    bool reached = true;
    while (s == BD_OK && reached && feed->ready < feed->complete) {
        s = feed->model->ops->put_reached(feed->model->backend, feed->marks[feed->ready], &reached,
                                          err);
        if (s == BD_OK && reached) feed->ready++;
    }
    return s;
}

bd_status bd_overlay_feed_bytes(bd_overlay_feed *feed, uint32_t file_index, uint64_t from,
                                const uint8_t *data, uint64_t bytes, bd_error *err) {
    const bd_backend_ops *ops = feed->model->ops;
    feed->brought = false;
    if (ops->bring) {
        bd_status s = ops->bring(feed->model->backend, data, bytes, &feed->brought, err);
        if (s == BD_OK) s = look_at_marks(feed, err);
        if (s != BD_OK) return s;
    }
    while (feed->at < feed->plan->piece_count) {
        const bd_overlay_piece *piece = &feed->plan->pieces[feed->at];
        const uint64_t start = piece->offset_bytes + feed->done_bytes,
                       end = piece->offset_bytes + piece->bytes;
        if (piece->file_index > file_index) return BD_OK;
        if (piece->file_index == file_index && start >= from + bytes) return BD_OK;
        if (piece->file_index < file_index || start < from) {
            return bd_fail(err, BD_E_INTERNAL, piece->tensor,
                           "bytes of %s were passed over while loading", piece->tensor);
        }
        const uint64_t until = end < from + bytes ? end : from + bytes;
        bd_status s = put_bytes(feed, piece, data + (start - from), until - start, err);
        if (s == BD_OK && until == end) s = finish_piece(feed, piece, err);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

uint32_t bd_overlay_feed_ready(const bd_overlay_feed *feed) {
    return feed->ready;
}

/* Of a load that ends early some bytes may still be on their way, from memory that is the caller's
 * again after this and into pages that are another's. What went wrong before is known already. */
void bd_overlay_feed_destroy(bd_overlay_feed *feed) {
    if (!feed) return;
    const bd_backend_ops *ops = feed->model->ops;
    if (feed->at < feed->plan->piece_count && ops->put_flush) {
        bd_status s = ops->put_flush(feed->model->backend, NULL);
        (void)s;
    }
    free(feed);
}
