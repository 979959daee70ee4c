/* compress_plan.c - pairs the tensors of the base and the fine-tune and decides what the delta
 * holds. Fused projections (Phi-3) are cut into canonical ones: a row range of a row-major matrix
 * is itself a matrix. Owner: the run; views borrow from the checkpoints. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "compress_internal.h"

#define HEAD_NAME  "lm_head.weight"
#define EMBED_NAME "model.embed_tokens.weight"

typedef struct planner {
    const bd_compress_model *base, *tuned;
    bd_embeddings embeddings;
    uint32_t planes;
    bd_compress_plan *plan;
} planner;

static bd_status no_memory(bd_error *err) {
    return bd_fail(err, BD_E_MEMORY, NULL, "out of memory for the plan");
}

static const char *path_of(const bd_compress_model *model, const bd_tensor *tensor) {
    return bd_checkpoint_file_path(model->checkpoint, tensor->file_index);
}

static bool is_float(const bd_tensor *t) {
    return t->dtype == BD_DTYPE_F32 || t->dtype == BD_DTYPE_BF16 || t->dtype == BD_DTYPE_F16;
}

static void shape_text(const bd_tensor *t, char *out, size_t out_bytes) {
    size_t at = 0;
    out[0] = '\0';
    for (uint32_t i = 0; i < t->rank && at < out_bytes; i++) {
        at += (size_t)snprintf(out + at, out_bytes - at, i ? ", %llu" : "%llu",
                               (unsigned long long)t->shape[i]);
    }
}

/* Rows [first, first + rows) of a matrix whose bytes divide evenly into rows. */
static bd_tensor rows_of(const bd_tensor *t, uint64_t first, uint64_t rows) {
    const uint64_t row_bytes = t->shape[0] ? t->bytes / t->shape[0] : 0;
    bd_tensor view = *t;
    view.shape[0] = rows;
    view.bytes = rows * row_bytes;
    view.offset_bytes += first * row_bytes;
    view.data += first * row_bytes;
    return view;
}

/* ---- one pair -------------------------------------------------------------------------------- */

static bd_status add_item(planner *p, const char *name, bd_delta_kind kind, const bd_tensor *base,
                          const bd_tensor *tuned, bd_error *err) {
    bd_compress_plan *plan = p->plan;
    if (plan->count == plan->cap) {
        const uint32_t cap = plan->cap ? 2 * plan->cap : 256;
        bd_compress_item *items = realloc(plan->items, cap * sizeof *items);
        if (!items) return no_memory(err);
        plan->items = items;
        plan->cap = cap;
    }
    bd_compress_item *item = &plan->items[plan->count];
    *item = (bd_compress_item){.name = strdup(name), .kind = kind, .base = *base, .tuned = *tuned};
    if (!item->name) return no_memory(err);
    plan->count++;
    plan->input_bytes += base->bytes + tuned->bytes;
    return BD_OK;
}

static bd_status check_shapes(const planner *p, const char *name, const bd_tensor *base,
                              const bd_tensor *tuned, uint64_t *extra_rows, bd_error *err) {
    *extra_rows = 0;
    if (base->rank == tuned->rank &&
        memcmp(base->shape, tuned->shape, base->rank * sizeof base->shape[0]) == 0) {
        return BD_OK;
    }
    const bool table = base->rank == 2 && tuned->rank == 2 && base->shape[1] == tuned->shape[1] &&
                       bd_compress_is_embedding(name);
    const bool grown = table && tuned->shape[0] > base->shape[0];
    if (grown && tuned->shape[0] - base->shape[0] <= BD_EXTRA_VOCAB_MAX) {
        *extra_rows = tuned->shape[0] - base->shape[0];
        return BD_OK;
    }
    /* Fewer rows are masked by the vocabulary that config.json says. */
    if (table && !grown && p->tuned->has_config && p->tuned->config.vocab == tuned->shape[0])
        return BD_OK;
    char want[200], got[200];
    shape_text(base, want, sizeof want);
    shape_text(tuned, got, sizeof got);
    return bd_fail(err, BD_E_MISMATCH, name,
                   "%s: tensor \"%s\" has shape [%s], the base's has [%s]%s",
                   path_of(p->tuned, tuned), name, got, want,
                   grown ? "; a variant may add at most 256 rows to the vocabulary" : "");
}

static bd_status add_signed(planner *p, const char *name, const bd_tensor *base,
                            const bd_tensor *tuned, bd_error *err) {
    if (base->shape[1] % 8 != 0 || base->shape[0] == 0 || base->shape[1] == 0) {
        return bd_fail(err, BD_E_UNSUPPORTED, name,
                       "tensor \"%s\": its %llu columns are no multiple of 8", name,
                       (unsigned long long)base->shape[1]);
    }
    return add_item(p, name, BD_DELTA_SIGN, base, tuned, err);
}

/* Neither stays in memory: what is compared here is read again much later. */
static bool same_bytes(const bd_tensor *a, const bd_tensor *b) {
    const bool same = strcmp(a->dtype_name, b->dtype_name) == 0 && a->bytes == b->bytes &&
                      (a->bytes == 0 || memcmp(a->data, b->data, (size_t)a->bytes) == 0);
    bd_tensor_release(a);
    bd_tensor_release(b);
    return same;
}

static bd_status add_whole_if_changed(planner *p, const char *name, const bd_tensor *base,
                                      const bd_tensor *tuned, bd_error *err) {
    if (same_bytes(base, tuned)) {
        p->plan->equal_count++;
        return BD_OK;
    }
    return add_item(p, name, BD_DELTA_FULL, base, tuned, err);
}

static bd_status check_dtype(const bd_compress_model *model, const char *name, const bd_tensor *t,
                             bd_error *err) {
    if (is_float(t)) return BD_OK;
    return bd_fail(err, BD_E_UNSUPPORTED, name,
                   "%s: tensor \"%s\" has dtype %s; F32, BF16 and F16 are supported",
                   path_of(model, t), name, t->dtype_name);
}

static bd_status add_pair(planner *p, const char *name, const bd_tensor *base,
                          const bd_tensor *tuned, bd_error *err) {
    uint64_t extra_rows;
    bd_status status = check_shapes(p, name, base, tuned, &extra_rows, err);
    if (status != BD_OK) return status;
    const bool embedding = base->rank == 2 && bd_compress_is_embedding(name);
    const bool by_sign = base->rank == 2 && bd_compress_is_signed(name);
    if (embedding && p->embeddings == BD_EMBEDDINGS_BASE) {
        if (extra_rows == 0) return BD_OK;
        return bd_fail(err, BD_E_MISMATCH, name,
                       "tensor \"%s\" has added rows, which --embeddings base cannot store", name);
    }
    if (by_sign && ((status = check_dtype(p->base, name, base, err)) != BD_OK ||
                    (status = check_dtype(p->tuned, name, tuned, err)) != BD_OK)) {
        return status;
    }
    /* A head of its own over a tied base, even one that is the base's embedding, is not the
     * variant's embedding. */
    const bool own_head =
        embedding && strcmp(name, HEAD_NAME) == 0 && strcmp(base->name, name) != 0;
    const bd_tensor common = extra_rows ? rows_of(tuned, 0, base->shape[0]) : *tuned;
    const uint32_t before = p->plan->count;
    if (by_sign && !(embedding && p->embeddings == BD_EMBEDDINGS_FULL)) {
        status = add_signed(p, name, base, &common, err);
    } else if (extra_rows || own_head) { /* added rows need an entry to belong to */
        status = add_item(p, name, BD_DELTA_FULL, base, &common, err);
    } else {
        status = add_whole_if_changed(p, name, base, tuned, err);
    }
    if (status != BD_OK || p->plan->count == before) return status;
    p->plan->items[before].extra_rows = extra_rows;
    return p->plan->items[before].kind == BD_DELTA_FULL ? check_dtype(p->tuned, name, tuned, err)
                                                        : BD_OK;
}

/* ---- fused projections ----------------------------------------------------------------------- */

typedef struct fused_part {
    const char *name;
    uint64_t rows;
} fused_part;

static bool has_suffix(const char *name, const char *suffix) {
    const size_t name_len = strlen(name), suffix_len = strlen(suffix);
    return name_len >= suffix_len && strcmp(name + name_len - suffix_len, suffix) == 0;
}

/* Replaces the last `fused` of the name by each part's name. */
static bd_status add_parts(planner *p, const bd_tensor *base, const bd_tensor *tuned,
                           const char *fused, const fused_part *parts, uint32_t count,
                           bd_error *err) {
    const int stem = (int)(strlen(base->name) - strlen(fused));
    uint64_t rows = 0;
    for (uint32_t i = 0; i < count; i++)
        rows += parts[i].rows;
    if (base->rank != 2 || base->shape[0] != rows) {
        return bd_fail(err, BD_E_MISMATCH, base->name,
                       "%s: tensor \"%s\" does not have the %llu rows that config.json says",
                       path_of(p->base, base), base->name, (unsigned long long)rows);
    }
    uint64_t unused;
    bd_status status = check_shapes(p, base->name, base, tuned, &unused, err);
    uint64_t first = 0;
    for (uint32_t i = 0; i < count && status == BD_OK; i++) {
        char name[640];
        if (snprintf(name, sizeof name, "%.*s%s", stem, base->name, parts[i].name) >=
            (int)sizeof name) {
            return bd_fail(err, BD_E_LIMIT, base->name, "tensor name \"%s\" is too long",
                           base->name);
        }
        const bd_tensor b = rows_of(base, first, parts[i].rows),
                        t = rows_of(tuned, first, parts[i].rows);
        status = add_pair(p, name, &b, &t, err);
        first += parts[i].rows;
    }
    return status;
}

static bd_status add_pair_or_parts(planner *p, const bd_tensor *base, const bd_tensor *tuned,
                                   bd_error *err) {
    static const char qkv[] = "self_attn.qkv_proj.weight", gate_up[] = "mlp.gate_up_proj.weight";
    const bool is_qkv = has_suffix(base->name, qkv), is_gate_up = has_suffix(base->name, gate_up);
    if (!is_qkv && !is_gate_up) return add_pair(p, base->name, base, tuned, err);
    const bd_model_config *c = &p->base->config;
    if (!p->base->has_config) {
        return bd_fail(err, BD_E_MISMATCH, base->name,
                       "tensor \"%s\" is fused; the base's config.json is needed to cut it",
                       base->name);
    }
    const uint64_t q_rows = (uint64_t)c->heads * c->head_dim,
                   kv_rows = (uint64_t)c->kv_heads * c->head_dim;
    if (is_qkv) {
        const fused_part parts[] = {{"self_attn.q_proj.weight", q_rows},
                                    {"self_attn.k_proj.weight", kv_rows},
                                    {"self_attn.v_proj.weight", kv_rows}};
        return add_parts(p, base, tuned, qkv, parts, 3, err);
    }
    const fused_part parts[] = {{"mlp.gate_proj.weight", c->ffn}, {"mlp.up_proj.weight", c->ffn}};
    return add_parts(p, base, tuned, gate_up, parts, 2, err);
}

/* ---- all pairs ------------------------------------------------------------------------------- */

/* The head of a tied model is its embedding, so a tied fine-tune of an untied base still has one.
 */
static const bd_tensor *tuned_tensor(const planner *p, const char *name) {
    const bd_tensor *t = bd_checkpoint_find(p->tuned->checkpoint, name);
    if (t || strcmp(name, HEAD_NAME) != 0 || !p->tuned->has_config || !p->tuned->config.tied)
        return t;
    return bd_checkpoint_find(p->tuned->checkpoint, EMBED_NAME);
}

/* The base's head is its embedding. */
static bool is_base_tied(const planner *p) {
    return p->base->has_config ? p->base->config.tied
                               : !bd_checkpoint_find(p->base->checkpoint, HEAD_NAME);
}

/* A head that repeats the embedding byte for byte is what some tools save of a tied model. */
static bool repeats_embedding(const planner *p, const bd_tensor *t) {
    const bd_tensor *embed = bd_checkpoint_find(p->tuned->checkpoint, EMBED_NAME);
    return embed && embed->rank == t->rank && embed->shape[0] == t->shape[0] &&
           same_bytes(embed, t);
}

static bd_status check_surplus(const planner *p, bd_error *err) {
    const bool tied = is_base_tied(p);
    for (uint32_t i = 0; i < bd_checkpoint_count(p->tuned->checkpoint); i++) {
        const bd_tensor *t = bd_checkpoint_at(p->tuned->checkpoint, i);
        if (bd_checkpoint_find(p->base->checkpoint, t->name)) continue;
        if (tied && strcmp(t->name, HEAD_NAME) == 0) continue; /* add_own_head */
        return bd_fail(err, BD_E_MISMATCH, t->name, "%s: tensor \"%s\" is not in the base",
                       path_of(p->tuned, t), t->name);
    }
    return BD_OK;
}

/* The head of an untied fine-tune of a tied base, coded against what the base has for a head: its
 * embedding. */
static bd_status add_own_head(planner *p, bd_error *err) {
    const bd_tensor *base = bd_checkpoint_find(p->base->checkpoint, EMBED_NAME);
    const bd_tensor *head = bd_checkpoint_find(p->tuned->checkpoint, HEAD_NAME);
    if (!base || !head || repeats_embedding(p, head)) return BD_OK;
    if (p->tuned->has_config && p->tuned->config.tied) {
        return bd_fail(err, BD_E_MISMATCH, HEAD_NAME,
                       "%s: tensor \"" HEAD_NAME "\" differs from the embedding although "
                       "config.json says tie_word_embeddings",
                       path_of(p->tuned, head));
    }
    return add_pair(p, HEAD_NAME, base, head, err);
}

static bd_status add_all(planner *p, bd_error *err) {
    const bool tied = is_base_tied(p);
    bd_status status = check_surplus(p, err);
    for (uint32_t i = 0; i < bd_checkpoint_count(p->base->checkpoint) && status == BD_OK; i++) {
        const bd_tensor *base = bd_checkpoint_at(p->base->checkpoint, i);
        if (tied && strcmp(base->name, HEAD_NAME) == 0) continue;
        const bd_tensor *tuned = tuned_tensor(p, base->name);
        if (!tuned) {
            return bd_fail(err, BD_E_MISMATCH, base->name,
                           "%s: tensor \"%s\" of the base is missing",
                           bd_checkpoint_dir(p->tuned->checkpoint), base->name);
        }
        status = add_pair_or_parts(p, base, tuned, err);
    }
    return status == BD_OK && tied ? add_own_head(p, err) : status;
}

/* ---- what the delta holds -------------------------------------------------------------------- */

static int by_place(const void *a, const void *b) {
    const bd_compress_item *x = a, *y = b;
    return bd_compress_order(x->name, y->name);
}

static bd_status describe(const planner *p, bd_error *err) {
    bd_compress_plan *plan = p->plan;
    if (plan->count > 1) qsort(plan->items, plan->count, sizeof *plan->items, by_place);
    plan->entries = calloc((size_t)plan->count + 1, sizeof *plan->entries);
    if (!plan->entries) return no_memory(err);
    for (uint32_t i = 0; i < plan->count; i++) {
        const bd_compress_item *item = &plan->items[i];
        bd_delta_entry *e = &plan->entries[i];
        if (strlen(item->name) > 512) {
            return bd_fail(err, BD_E_LIMIT, item->name, "tensor name \"%s\" is too long",
                           item->name);
        }
        *e = (bd_delta_entry){.name = item->name,
                              .kind = item->kind,
                              .rank = item->base.rank,
                              .extra_rows = item->extra_rows};
        memcpy(e->shape, item->base.shape, sizeof e->shape);
    }
    return bd_compress_list_tensors(plan, p->planes, err);
}

bd_status bd_compress_plan_make(const bd_compress_model *base, const bd_compress_model *tuned,
                                bd_embeddings embeddings, uint32_t planes, uint32_t shards,
                                bd_compress_plan *out, bd_error *err) {
    *out = (bd_compress_plan){.shards = shards, .kv_parts = shards};
    if (base->has_config && base->config.kv_heads < shards) out->kv_parts = base->config.kv_heads;
    planner p = {
        .base = base, .tuned = tuned, .embeddings = embeddings, .planes = planes, .plan = out};
    bd_status status = add_all(&p, err);
    if (status == BD_OK) status = describe(&p, err);
    if (status != BD_OK) bd_compress_plan_free(out);
    return status;
}

void bd_compress_plan_free(bd_compress_plan *plan) {
    for (uint32_t i = 0; i < plan->count; i++)
        free(plan->items[i].name);
    for (uint32_t i = 0; plan->tensors && i < plan->shards * plan->tensor_max; i++) {
        union {
            const char *borrowed;
            char *owned;
        } name = {.borrowed = plan->tensors[i].name};
        free(name.owned);
    }
    free(plan->items);
    free(plan->entries);
    free(plan->tensors);
    *plan = (bd_compress_plan){0};
}
