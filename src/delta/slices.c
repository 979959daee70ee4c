/* slices.c - the arithmetic of cutting a delta anew. See slices.h. Threads: any. */
#include "bitdelta/delta/slices.h"

#include <stdio.h>
#include <string.h>

/* ---- may it be cut? -------------------------------------------------------------------------- */

static bd_status check_multiple(const char *asked, const char *what, uint64_t value, uint64_t of,
                                const char *subject, bd_error *err) {
    if (value % of == 0) return BD_OK;
    return bd_fail(err, BD_E_ARGUMENT, subject,
                   "%s: %s of the base is %llu, not a multiple of %llu", asked, what,
                   (unsigned long long)value, (unsigned long long)of);
}

bd_status bd_delta_check_parts(const bd_model_config *c, uint32_t parts, const char *option,
                               const char *subject, bd_error *err) {
    /* Packed columns are whole bytes; with that, rows of gate and up divide too. */
    const uint64_t step = 8 * (uint64_t)parts, o_columns = (uint64_t)c->heads * c->head_dim;
    char asked[64];
    if (parts == 1) return BD_OK;
    (void)snprintf(asked, sizeof asked, "%s %u", option, parts);
    if (parts == 0 || c->kv_heads == 0)
        return bd_fail(err, BD_E_ARGUMENT, subject, "%s: nothing can be cut so", asked);
    bd_status status = check_multiple(asked, "num_attention_heads", c->heads, parts, subject, err);
    if (status != BD_OK) return status;
    if (c->kv_heads % parts != 0 && parts % c->kv_heads != 0) {
        return bd_fail(err, BD_E_ARGUMENT, subject,
                       "%s: num_key_value_heads of the base is %u; neither is a multiple of the "
                       "other",
                       asked, c->kv_heads);
    }
    status = check_multiple(asked, "num_attention_heads x head_dim (the width of o_proj)",
                            o_columns, step, subject, err);
    if (status != BD_OK) return status;
    return check_multiple(asked, "intermediate_size (the width of down_proj)", c->ffn, step,
                          subject, err);
}

/* ---- the parts ------------------------------------------------------------------------------- */

static bool ends_with(const char *text, const char *end) {
    const size_t text_len = strlen(text), end_len = strlen(end);
    return text_len >= end_len && strcmp(text + text_len - end_len, end) == 0;
}

/* k and v have as many different parts as there are heads, at most one per part. */
static bool kv_parts_of(uint32_t parts, uint32_t kv_heads, uint64_t *out) {
    if (kv_heads == 0 || (kv_heads % parts != 0 && parts % kv_heads != 0)) return false;
    *out = kv_heads < parts ? kv_heads : parts;
    return true;
}

static bool matrix_part(const bd_delta_entry *entry, uint32_t index, uint32_t parts,
                        uint32_t kv_heads, bd_delta_part *out) {
    uint64_t kv_parts = 0;
    const bool is_kv =
        ends_with(entry->name, "k_proj.weight") || ends_with(entry->name, "v_proj.weight");
    if (is_kv && !kv_parts_of(parts, kv_heads, &kv_parts)) return false;
    return bd_delta_part_of(entry->name, entry->shape, index, parts, kv_parts, out);
}

static bool is_cut_table(const bd_delta_entry *entry) {
    return entry->rank == 2 && bd_delta_is_table(entry->name);
}

bool bd_delta_cut_part(const bd_delta_cut *cut, const bd_delta_entry *entry, bd_delta_tensor what,
                       bd_delta_part *out) {
    const uint64_t cols = entry->rank == 2 ? entry->shape[1] : 1;
    *out = (bd_delta_part){.rows = entry->shape[0], .cols = cols};
    if (cut->parts == 0 || cut->part >= cut->parts) return false;
    switch (what) {
    case BD_DELTA_TENSOR_BITS:
        return entry->rank == 2 && matrix_part(entry, cut->part, cut->parts, cut->kv_heads, out);
    case BD_DELTA_TENSOR_SCALES:
        if (entry->rank != 2 || !matrix_part(entry, cut->part, cut->parts, cut->kv_heads, out))
            return false;
        out->first_col = 0;
        out->cols = 1;
        return true;
    case BD_DELTA_TENSOR_WHOLE:
        return is_cut_table(entry) ? matrix_part(entry, cut->part, cut->parts, cut->kv_heads, out)
                                   : true;
    case BD_DELTA_TENSOR_EXTRA:
        out->rows = entry->extra_rows;
        return entry->rank == 2;
    }
    return false;
}

/* ---- the slices ------------------------------------------------------------------------------ */

/* The common part of [a, a + a_len) and [b, b + b_len). */
static uint64_t overlap(uint64_t a, uint64_t a_len, uint64_t b, uint64_t b_len, uint64_t *first) {
    const uint64_t a_end = a + a_len, b_end = b + b_len, end = a_end < b_end ? a_end : b_end;
    *first = a > b ? a : b;
    return end > *first ? end - *first : 0;
}

static bool is_before(const bd_delta_slice *a, const bd_delta_slice *b) {
    return a->row != b->row ? a->row < b->row : a->col < b->col;
}

/* Files that hold the same rows hold the same of the new part, so the first of them has said
 * all. */
static void add_slice(bd_delta_slice *out, uint32_t *count, const bd_delta_slice *slice) {
    uint32_t at = *count;
    for (uint32_t i = 0; i < *count; i++)
        if (out[i].row == slice->row && out[i].col == slice->col) return;
    for (; at > 0 && is_before(slice, &out[at - 1]); at--)
        out[at] = out[at - 1];
    out[at] = *slice;
    (*count)++;
}

bool bd_delta_cut_slices(const bd_delta_cut *cut, const bd_delta_entry *entry, bd_delta_tensor what,
                         bd_delta_slice out[BD_DELTA_SHARDS_MAX], uint32_t *count) {
    const uint32_t shards = cut->shards;
    bd_delta_cut of_file = {.parts = shards, .shards = shards, .kv_heads = cut->kv_heads};
    bd_delta_part mine, held;
    *count = 0;
    if (shards == 0 || shards > BD_DELTA_SHARDS_MAX || !bd_delta_cut_part(cut, entry, what, &mine))
        return false;
    const uint32_t own = (uint32_t)((uint64_t)cut->part * shards / cut->parts);
    uint64_t covered = 0;
    for (uint32_t i = 0; i < shards; i++) {
        bd_delta_slice s = {.file_index = (own + i) % shards};
        of_file.part = s.file_index;
        if (!bd_delta_cut_part(&of_file, entry, what, &held)) return false;
        s.rows = overlap(mine.first_row, mine.rows, held.first_row, held.rows, &s.row);
        s.cols = overlap(mine.first_col, mine.cols, held.first_col, held.cols, &s.col);
        if (s.rows == 0 || s.cols == 0) continue;
        s.file_rows = held.rows;
        s.file_cols = held.cols;
        s.file_row = s.row - held.first_row;
        s.file_col = s.col - held.first_col;
        s.row -= mine.first_row;
        s.col -= mine.first_col;
        add_slice(out, count, &s);
    }
    for (uint32_t i = 0; i < *count; i++)
        covered += out[i].rows * out[i].cols;
    return covered == mine.rows * mine.cols;
}
