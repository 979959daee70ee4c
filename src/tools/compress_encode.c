/* compress_encode.c - one weight to planes of bits and scales, rows in parallel. Each row is
 * computed by itself and sums over rows are taken in row order, so the result does not depend on
 * the number of threads. Owner: the run. Threads: workers of the pool share the read-only inputs
 * and write disjoint rows. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "compress_internal.h"

#define BLOCK_VALUES                                                                               \
    (256u << 10) /* of one task: large against the cost of a hand-over, small against a matrix */

typedef struct encoder {
    const bd_compress_item *item;
    bd_compress_planes *planes;
    uint32_t plane; /* the one being coded; those before it are complete */
    bool matrix_scale;
    uint64_t rows, cols, block_rows;
    uint64_t tuned_rows; /* rows with values of the fine-tune */
    double *sums;        /* [rows] of |residual| */
    double *base_sums;   /* [rows] of |base| */
    float *scratch;      /* [worker][2][cols] */
} encoder;

/* What the planes before this one leave of a row of differences. */
static void subtract_planes(const encoder *e, uint64_t row, float *values) {
    for (uint32_t p = 0; p < e->plane; p++) {
        const float scale = e->planes->scale[p][row];
        for (uint64_t i = 0; i < e->cols; i++)
            values[i] -= values[i] >= 0.0f ? scale : -scale;
    }
}

static void encode_row(const encoder *e, uint64_t row, float *base, float *values) {
    bd_tensor_to_f32(&e->item->base, row * e->cols, e->cols, base);
    if (row < e->tuned_rows) {
        bd_tensor_to_f32(&e->item->tuned, row * e->cols, e->cols, values);
    } else { /* beyond a smaller vocabulary: as the base has it */
        memcpy(values, base, (size_t)e->cols * sizeof *values);
    }
    if (e->plane == 0) {
        double sum = 0.0;
        for (uint64_t i = 0; i < e->cols; i++)
            sum += (double)fabsf(base[i]);
        e->base_sums[row] = sum;
    }
    for (uint64_t i = 0; i < e->cols; i++)
        values[i] -= base[i];
    subtract_planes(e, row, values);
    e->sums[row] =
        bd_delta_pack_row(values, e->cols, e->planes->bits[e->plane] + row * (e->cols / 8));
    e->planes->scale[e->plane][row] = (float)(e->sums[row] / (double)e->cols);
}

static void encode_block(void *ctx, uint32_t index, uint32_t worker) {
    const encoder *e = ctx;
    float *base = e->scratch + (uint64_t)worker * 2 * e->cols, *values = base + e->cols;
    const uint64_t first = (uint64_t)index * e->block_rows;
    const uint64_t end = e->rows - first < e->block_rows ? e->rows : first + e->block_rows;
    for (uint64_t row = first; row < end; row++)
        encode_row(e, row, base, values);
}

static double total(const double *values, uint64_t count) {
    double sum = 0.0;
    for (uint64_t i = 0; i < count; i++)
        sum += values[i];
    return sum;
}

static bd_status check_sums(const encoder *e, bd_error *err) {
    for (uint64_t row = 0; row < e->rows; row++) {
        if (isfinite(e->sums[row])) continue;
        const bool in_base = !isfinite(e->base_sums[row]);
        return bd_fail(err, BD_E_FORMAT, e->item->name,
                       "tensor \"%s\" of the %s has a NaN or an infinity in row %llu",
                       e->item->name, in_base ? "base" : "fine-tune", (unsigned long long)row);
    }
    return BD_OK;
}

static bd_status allocate(encoder *e, uint32_t planes, uint32_t workers, bd_error *err) {
    uint64_t bits_bytes, all_bytes;
    const uint64_t row_bytes = e->cols / 8 + sizeof(float);
    if (__builtin_mul_overflow(e->rows, row_bytes, &bits_bytes) ||
        __builtin_mul_overflow(bits_bytes, (uint64_t)planes, &all_bytes)) {
        return bd_fail(err, BD_E_LIMIT, e->item->name, "tensor \"%s\" is too large", e->item->name);
    }
    /* Scales first: floats must be aligned, bits need not. */
    uint8_t *block = malloc((size_t)all_bytes);
    e->planes->storage = block;
    e->sums = calloc((size_t)e->rows, sizeof *e->sums);
    e->base_sums = calloc((size_t)e->rows, sizeof *e->base_sums);
    e->scratch = calloc((size_t)workers * 2, (size_t)e->cols * sizeof *e->scratch);
    if (!block || !e->sums || !e->base_sums || !e->scratch) {
        return bd_fail(err, BD_E_MEMORY, e->item->name, "out of memory for tensor \"%s\"",
                       e->item->name);
    }
    float *scales = (float *)(void *)block;
    uint8_t *bits = block + (size_t)planes * e->rows * sizeof *scales;
    for (uint32_t p = 0; p < planes; p++) {
        e->planes->scale[p] = scales + p * e->rows;
        e->planes->bits[p] = bits + p * e->rows * (e->cols / 8);
    }
    return BD_OK;
}

bd_status bd_compress_encode(bd_pool *pool, const bd_compress_item *item, uint32_t planes,
                             bool matrix_scale, bd_compress_planes *out, bd_error *err) {
    *out = (bd_compress_planes){0};
    encoder e = {.item = item, .planes = out, .matrix_scale = matrix_scale};
    e.rows = item->base.shape[0];
    e.cols = item->base.shape[1];
    e.tuned_rows = item->tuned.shape[0];
    e.block_rows = e.cols < BLOCK_VALUES ? BLOCK_VALUES / e.cols : 1;
    const uint64_t blocks = (e.rows + e.block_rows - 1) / e.block_rows;
    bd_status status = BD_OK;
    if (blocks > UINT32_MAX) {
        return bd_fail(err, BD_E_LIMIT, item->name, "tensor \"%s\" is too large", item->name);
    }
    if ((status = allocate(&e, planes, bd_pool_width(pool), err)) != BD_OK) goto done;
    for (e.plane = 0; e.plane < planes; e.plane++) {
        bd_pool_parallel_for(pool, (uint32_t)blocks, encode_block, &e);
        if ((status = check_sums(&e, err)) != BD_OK) goto done;
        const double sum = total(e.sums, e.rows);
        if (e.plane == 0) {
            const double base_sum = total(e.base_sums, e.rows);
            out->relative_change = sum > 0.0 ? sum / base_sum : 0.0;
        }
        const float mean = (float)(sum / ((double)e.tuned_rows * (double)e.cols));
        for (uint64_t row = 0; matrix_scale && row < e.tuned_rows; row++)
            out->scale[e.plane][row] = mean;
    }
done:
    free(e.sums);
    free(e.base_sums);
    free(e.scratch);
    if (status != BD_OK) bd_compress_planes_free(out);
    return status;
}

void bd_compress_planes_free(bd_compress_planes *planes) {
    free(planes->storage);
    *planes = (bd_compress_planes){0};
}

bd_status bd_compress_check_finite(const bd_tensor *tensor, const char *name, bd_error *err) {
    float values[1024];
    const size_t unit_bytes = bd_dtype_bytes(tensor->dtype);
    const uint64_t count = unit_bytes ? tensor->bytes / unit_bytes : 0;
    for (uint64_t at = 0; at < count; at += 1024) {
        const uint64_t part = count - at < 1024 ? count - at : 1024;
        bd_tensor_to_f32(tensor, at, part, values);
        for (uint64_t i = 0; i < part; i++) {
            if (isfinite(values[i])) continue;
            return bd_fail(
                err, BD_E_FORMAT, name,
                "tensor \"%s\" of the fine-tune has a NaN or an infinity at element %llu", name,
                (unsigned long long)at + i);
        }
    }
    return BD_OK;
}
