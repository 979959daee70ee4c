/* cpu_weights.c - what is put before a step: base weights, rope tables, and the planes and vectors
 * of deltas. Owner: the executor thread before the first step; plane_put and vector_put: the
 * loader's thread at any time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "bitdelta/base/half.h"
#include "cpu.h"

static const char *const linear_names[BD_LINEAR_COUNT] = {"q", "k", "v", "o", "gate", "up", "down"};
static const char *const norm_names[BD_NORM_COUNT] = {
    "input", "post_attention", "pre_ffn", "post_ffn", "q", "k"};

static uint32_t linear_n(const bd_cpu *cpu, uint32_t which) {
    const bd_model_config *c = cpu->config;
    const uint32_t n[BD_LINEAR_COUNT] = {cpu->q_dim, cpu->kv_dim, cpu->kv_dim, c->hidden,
                                         c->ffn,     c->ffn,      c->hidden};
    return n[which];
}

static uint32_t linear_k(const bd_cpu *cpu, uint32_t which) {
    const bd_model_config *c = cpu->config;
    if (which == BD_LINEAR_O) return cpu->q_dim;
    return which == BD_LINEAR_DOWN ? c->ffn : c->hidden;
}

static void describe(char *out, size_t bytes, bd_weight_id id) {
    switch (id.kind) {
    case BD_WEIGHT_EMBED:
        snprintf(out, bytes, "embedding");
        break;
    case BD_WEIGHT_HEAD:
        snprintf(out, bytes, "head");
        break;
    case BD_WEIGHT_LINEAR:
        snprintf(out, bytes, "layer %u %s", id.layer, linear_names[id.which]);
        break;
    case BD_WEIGHT_BIAS:
        snprintf(out, bytes, "layer %u %s bias", id.layer, linear_names[id.which]);
        break;
    case BD_WEIGHT_NORM:
        snprintf(out, bytes, "layer %u %s norm", id.layer, norm_names[id.which]);
        break;
    }
}

/* A float32 matrix that bf16 holds exactly is read at half the bandwidth as bf16. */
static bool exact_in_bf16(const bd_weight_view *view) {
    for (uint64_t r = 0; r < view->rows; r++) {
        const uint8_t *row = (const uint8_t *)view->data + r * view->row_stride_bytes;
        for (uint64_t i = 0; i < view->cols; i++) {
            uint32_t bits;
            memcpy(&bits, row + 4 * i, sizeof bits);
            if ((bits & 0xffffu) != 0) return false;
        }
    }
    return true;
}

/* Weights live in huge pages where the system has them: every step reads all of them, and with
 * pages of 4 KiB a core of a virtual machine was measured to read 15 to 40% less a second. Hence
 * the copy of what is a mapped file, and rooms larger than most matrices. */
static uint8_t *room_take(bd_cpu *cpu, size_t bytes) {
    const size_t line_bytes = 64, huge_bytes = (size_t)2 << 20, room_bytes = 16 * huge_bytes;
    bytes = (bytes + line_bytes - 1) / line_bytes * line_bytes;
    bd_cpu_room *room = cpu->rooms;
    if (room == NULL || room->bytes - room->used_bytes < bytes) {
        if (bytes > SIZE_MAX - huge_bytes || (room = calloc(1, sizeof *room)) == NULL) return NULL;
        room->bytes =
            bytes > room_bytes ? (bytes + huge_bytes - 1) / huge_bytes * huge_bytes : room_bytes;
        room->data = aligned_alloc(huge_bytes, room->bytes);
        if (room->data == NULL) {
            free(room);
            return NULL;
        }
        (void)madvise(room->data, room->bytes, MADV_HUGEPAGE); /* a wish */
        room->next = cpu->rooms;
        cpu->rooms = room;
    }
    uint8_t *data = room->data + room->used_bytes;
    room->used_bytes += bytes;
    return data;
}

void bd_cpu_rooms_free(bd_cpu *cpu) {
    while (cpu->rooms != NULL) {
        bd_cpu_room *room = cpu->rooms;
        cpu->rooms = room->next;
        free(room->data);
        free(room);
    }
}

static bd_status copy_matrix(bd_cpu *cpu, bd_cpu_matrix *matrix, const bd_weight_view *view,
                             const char *subject, bd_error *err) {
    const bool narrow = view->dtype == BD_DTYPE_F32 && exact_in_bf16(view);
    const size_t size = narrow ? 2 : bd_dtype_bytes(view->dtype);
    const size_t row_bytes = (size_t)view->cols * size;
    uint8_t *copy = room_take(cpu, (size_t)view->rows * row_bytes);
    if (copy == NULL) {
        return bd_fail(err, BD_E_MEMORY, subject, "%llu x %llu weights do not fit in memory",
                       (unsigned long long)view->rows, (unsigned long long)view->cols);
    }
    for (uint64_t r = 0; r < view->rows; r++) {
        const uint8_t *from = (const uint8_t *)view->data + r * view->row_stride_bytes;
        uint8_t *to = copy + r * row_bytes;
        if (!narrow) {
            memcpy(to, from, row_bytes);
            continue;
        }
        for (uint64_t i = 0; i < view->cols; i++) {
            uint32_t bits;
            memcpy(&bits, from + 4 * i, sizeof bits);
            const uint16_t high = (uint16_t)(bits >> 16);
            memcpy(to + 2 * i, &high, sizeof high);
        }
    }
    matrix->data = copy;
    matrix->stride_bytes = row_bytes;
    matrix->dtype = narrow ? BD_DTYPE_BF16 : view->dtype;
    return BD_OK;
}

static bd_status put_matrix(bd_cpu *cpu, bd_cpu_matrix *matrix, uint32_t n, uint32_t k,
                            const bd_weight_view *view, const char *subject, bd_error *err) {
    if (matrix->data != NULL) return bd_fail(err, BD_E_ARGUMENT, subject, "put twice");
    if (view->rows != n || view->cols != k) {
        return bd_fail(err, BD_E_MISMATCH, subject, "shape is %llu x %llu, the config says %u x %u",
                       (unsigned long long)view->rows, (unsigned long long)view->cols, n, k);
    }
    const bd_status status = copy_matrix(cpu, matrix, view, subject, err);
    if (status != BD_OK) return status;
    matrix->n = n;
    matrix->k = k;
    return BD_OK;
}

static float element(const bd_weight_view *view, uint64_t i) {
    const uint8_t *at = (const uint8_t *)view->data + i * bd_dtype_bytes(view->dtype);
    if (view->dtype == BD_DTYPE_F32) {
        float value;
        memcpy(&value, at, sizeof value);
        return value;
    }
    uint16_t bits;
    memcpy(&bits, at, sizeof bits);
    return view->dtype == BD_DTYPE_BF16 ? bd_bf16_to_f32(bits) : bd_f16_to_f32(bits);
}

static bd_status put_vector(bd_cpu *cpu, const float **slot, uint32_t count,
                            const bd_weight_view *view, const char *subject, bd_error *err) {
    if (*slot != NULL) return bd_fail(err, BD_E_ARGUMENT, subject, "put twice");
    if (view->rows != 1 || view->cols != count) {
        return bd_fail(err, BD_E_MISMATCH, subject, "shape is %llu x %llu, the config says %u",
                       (unsigned long long)view->rows, (unsigned long long)view->cols, count);
    }
    float *values = bd_cpu_f32(cpu, BD_CPU_SMALL) + cpu->small_used_floats;
    for (uint32_t i = 0; i < count; i++)
        values[i] = element(view, i);
    cpu->small_used_floats += count;
    *slot = values;
    return BD_OK;
}

static bool id_in_range(const bd_cpu *cpu, bd_weight_id id) {
    const uint32_t layers = cpu->config->layers;
    if (id.kind == BD_WEIGHT_EMBED || id.kind == BD_WEIGHT_HEAD) return true;
    if (id.kind != BD_WEIGHT_NORM) return id.layer < layers && id.which < BD_LINEAR_COUNT;
    return (id.layer < layers && id.which < BD_NORM_COUNT) ||
           (id.layer == layers && id.which == BD_NORM_INPUT);
}

bd_status bd_cpu_weight_put(bd_backend *backend, bd_weight_id id, const bd_weight_view *view,
                            bd_error *err) {
    bd_cpu *cpu = bd_cpu_of(backend);
    const bd_model_config *c = cpu->config;
    BD_ASSERT(id_in_range(cpu, id));
    char subject[64];
    describe(subject, sizeof subject, id);
    if (view->dtype != BD_DTYPE_F32 && view->dtype != BD_DTYPE_BF16 &&
        view->dtype != BD_DTYPE_F16) {
        return bd_fail(err, BD_E_UNSUPPORTED, subject,
                       "weights must be float32, bfloat16 or float16");
    }
    BD_ASSERT(view->rows <= 1 ||
              view->row_stride_bytes >= view->cols * bd_dtype_bytes(view->dtype));
    const uint32_t slot = id.layer * BD_LINEAR_COUNT + id.which;
    switch (id.kind) {
    case BD_WEIGHT_EMBED:
        return put_matrix(cpu, &cpu->embed, c->vocab, c->hidden, view, subject, err);
    case BD_WEIGHT_HEAD:
        if (c->tied)
            return bd_fail(err, BD_E_ARGUMENT, subject,
                           "the embedding is the head of a tied model");
        return put_matrix(cpu, &cpu->head, c->vocab, c->hidden, view, subject, err);
    case BD_WEIGHT_LINEAR:
        return put_matrix(cpu, &cpu->linears[slot], linear_n(cpu, id.which),
                          linear_k(cpu, id.which), view, subject, err);
    case BD_WEIGHT_BIAS:
        return put_vector(cpu, &cpu->biases[slot], linear_n(cpu, id.which), view, subject, err);
    case BD_WEIGHT_NORM:
        break;
    }
    const bool per_head = id.which == BD_NORM_Q || id.which == BD_NORM_K;
    return put_vector(cpu, &cpu->norms[id.layer * BD_NORM_COUNT + id.which],
                      per_head ? c->head_dim : c->hidden, view, subject, err);
}

bd_status bd_cpu_rope_table_put(bd_backend *backend, uint32_t table, const float *inv_freq,
                                float scale, bd_error *err) {
    bd_cpu *cpu = bd_cpu_of(backend);
    if (table >= cpu->options.rope_tables_max) {
        return bd_fail(err, BD_E_LIMIT, "rope table", "table %u, but only %u were planned", table,
                       cpu->options.rope_tables_max);
    }
    if (!(scale > 0.0f))
        return bd_fail(err, BD_E_ARGUMENT, "rope table", "the scale must be positive");
    const uint32_t half = cpu->config->rope.rotary_dim / 2;
    memcpy(bd_cpu_row(cpu, BD_CPU_ROPE, table, half), inv_freq, half * sizeof *inv_freq);
    cpu->rope_scales[table] = scale;
    return BD_OK;
}

uint64_t bd_cpu_plane_bytes(uint32_t n, uint32_t k) {
    return ((uint64_t)bd_cpu_plane_offset(bd_cpu_plane_words(k), (n + 7u) / 8u * 8u, 0) + 63u) /
           64u * 64u;
}

static void put_row(uint8_t *to, const uint8_t *from, uint32_t bytes) {
    uint32_t word = 0;
    for (; bytes >= 4; bytes -= 4, from += 4, to += BD_CPU_PLANE_STEP) {
        memcpy(&word, from, 4);
        word = ~word;
        memcpy(to, &word, 4);
    }
    if (bytes == 0) return;
    word = 0;
    for (uint32_t b = 0; b < bytes; b++)
        word |= (uint32_t)(uint8_t)~from[b] << 8 * b;
    memcpy(to, &word, 4);
}

bd_status bd_cpu_plane_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                           uint32_t first_row, uint32_t row_count, const void *src,
                           uint64_t src_stride_bytes, bd_error *err) {
    (void)backend;
    (void)err;
    BD_ASSERT(k % 8u == 0 && first_row <= n && row_count <= n - first_row);
    const uint32_t words = bd_cpu_plane_words(k);
    for (uint32_t r = 0; r < row_count; r++) {
        uint8_t *to = (uint8_t *)dst + bd_cpu_plane_offset(words, first_row + r, 0);
        put_row(to, (const uint8_t *)src + r * src_stride_bytes, k / 8u);
    }
    return BD_OK;
}

/* Byte by byte: a part may begin and end inside a word of its row. Whoever puts a row's last byte
 * clears what is left of that word. */
static void put_bytes(uint8_t *row, const uint8_t *from, uint32_t first, uint32_t count,
                      uint32_t row_bytes) {
    for (uint32_t i = 0; i < count; i++) {
        const uint32_t at = first + i;
        row[at / 4u * BD_CPU_PLANE_STEP + at % 4u] = (uint8_t)~from[i];
    }
    for (uint32_t at = first + count; at == row_bytes && row_bytes % 4u != 0; at = ++row_bytes) {
        row[at / 4u * BD_CPU_PLANE_STEP + at % 4u] = 0;
    }
}

bd_status bd_cpu_plane_part_put(bd_backend *backend, void *dst, uint32_t n, uint32_t k,
                                const bd_plane_part *part, bd_error *err) {
    (void)backend;
    (void)err;
    BD_ASSERT(k % 8u == 0 && part->first_row <= n && part->row_count <= n - part->first_row);
    BD_ASSERT(part->first_col % 8u == 0 && part->col_count % 8u == 0);
    BD_ASSERT(part->first_col <= k && part->col_count <= k - part->first_col);
    const uint32_t words = bd_cpu_plane_words(k);
    for (uint32_t r = 0; r < part->row_count; r++) {
        uint8_t *row = (uint8_t *)dst + bd_cpu_plane_offset(words, part->first_row + r, 0);
        const uint8_t *from = (const uint8_t *)part->src + r * part->src_stride_bytes;
        put_bytes(row, from, part->first_col / 8u, part->col_count / 8u, k / 8u);
    }
    return BD_OK;
}

bd_status bd_cpu_rows_put(bd_backend *backend, void *dst, uint64_t offset, const void *src,
                          uint64_t bytes, bd_error *err) {
    (void)backend;
    (void)err;
    if (bytes > 0) memcpy((uint8_t *)dst + offset, src, (size_t)bytes);
    return BD_OK;
}

bd_status bd_cpu_vector_put(bd_backend *backend, void *dst, uint64_t first, const float *src,
                            uint64_t count, bd_error *err) {
    (void)backend;
    (void)err;
    if (count > 0) memcpy((float *)dst + first, src, (size_t)count * sizeof *src);
    return BD_OK;
}
