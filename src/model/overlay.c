/* overlay.c - the host structure that tells operators where a variant's bits, scales, norms and
 * biases are. See overlay.h. One allocation holds the overlay and all its tables. */
#include <nettle/sha2.h>
#include <nettle/version.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "internal.h"
#include "overlay_internal.h"
#include "rope.h"

typedef struct overlay_box {
    bd_overlay overlay; /* first: what callers hold */
    bd_model *model;
    bd_overlay *ranks[BD_COMM_RANKS_MAX]; /* of the first of several joined; it owns the others */
    uint32_t rank_count;
    bd_overlay_linear *linears;      /* [layer][BD_LINEAR_COUNT] */
    bd_overlay_linear *embed, *head; /* [block]; the same for tied models */
    const float **norms;             /* [layers + 1][BD_NORM_COUNT] */
    const void **whole[4];           /* pages of rows: full embedding and head, added ones */
    bool rope_held;
} overlay_box;

enum { FULL_EMBED, FULL_HEAD, EXTRA_EMBED, EXTRA_HEAD };

static bd_overlay_rows rows_of(const overlay_box *box, uint32_t which, uint32_t count,
                               const bd_layout *layout) {
    return (bd_overlay_rows){
        .count = count, .block_rows = layout->whole_rows, .blocks = box->whole[which]};
}

/* Without a head of its own a tied model's is its embedding. */
static void describe_whole(overlay_box *box, const bd_plan_storage *storage) {
    const bd_layout *layout = &storage->layout;
    const uint32_t vocab = box->model->local.vocab;
    bd_overlay *overlay = &box->overlay;
    overlay->extra_rows = storage->extra_rows;
    overlay->full_embed = rows_of(box, FULL_EMBED, storage->full_embed ? vocab : 0, layout);
    overlay->full_head = rows_of(box, FULL_HEAD, storage->full_head ? vocab : 0, layout);
    overlay->extra_embed = rows_of(box, EXTRA_EMBED, storage->extra_rows, layout);
    overlay->extra_head = rows_of(box, EXTRA_HEAD, storage->extra_rows, layout);
    if (storage->own_head || !box->model->config.tied) return;
    overlay->full_head = overlay->full_embed;
    overlay->extra_head = overlay->extra_embed;
}

static bd_status box_create(bd_model *model, const bd_plan_storage *storage, overlay_box **out,
                            bd_error *err) {
    const bd_model_config *config = &model->config;
    const bd_layout *layout = &storage->layout;
    const bool shared = config->tied && !storage->own_head;
    const size_t full_pages = bd_layout_whole_pages(layout, model->local.vocab),
                 extra_pages = bd_layout_whole_pages(layout, storage->extra_rows);
    const size_t linears = (size_t)config->layers * BD_LINEAR_COUNT;
    const size_t tables = (size_t)layout->block_count * (shared ? 1 : 2);
    const size_t norms = ((size_t)config->layers + 1) * BD_NORM_COUNT;
    overlay_box *box =
        calloc(1, sizeof *box + (linears + tables) * sizeof *box->linears +
                      norms * sizeof *box->norms + 2 * (full_pages + extra_pages) * sizeof(void *));
    if (!box) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for an overlay");
    box->model = model;
    box->linears = (bd_overlay_linear *)(box + 1);
    box->embed = box->linears + linears;
    box->head = shared ? box->embed : box->embed + layout->block_count;
    box->norms = (const float **)(box->linears + linears + tables);
    const void **whole = (const void **)(box->norms + norms);
    box->whole[FULL_EMBED] = whole;
    box->whole[FULL_HEAD] = whole + full_pages;
    box->whole[EXTRA_EMBED] = whole + 2 * full_pages;
    box->whole[EXTRA_HEAD] = whole + 2 * full_pages + extra_pages;
    box->overlay = (bd_overlay){
        .vocab = config->vocab,
        .window_tokens = config->window_tokens,
        .linears = box->linears,
        .block_rows = layout->block_rows,
        .block_count = layout->block_count,
        .embed = box->embed,
        .head = box->head,
        .norms = box->norms,
    };
    describe_whole(box, storage);
    *out = box;
    return BD_OK;
}

static bd_overlay_linear *linear_of(overlay_box *box, const bd_piece_target *target) {
    if (target->id.kind == BD_WEIGHT_EMBED) return &box->embed[target->block];
    if (target->id.kind == BD_WEIGHT_HEAD) return &box->head[target->block];
    return &box->linears[(size_t)target->id.layer * BD_LINEAR_COUNT + target->id.which];
}

static void point(overlay_box *box, const bd_piece_target *target, const uint8_t *at) {
    const bool head = target->id.kind == BD_WEIGHT_HEAD;
    if (target->part == BD_PART_FULL || target->part == BD_PART_EXTRA) {
        const int first = target->part == BD_PART_FULL ? FULL_EMBED : EXTRA_EMBED;
        box->whole[first + (head ? 1 : 0)][target->block] = at;
        return;
    }
    const float *vector = (const float *)(const void *)at; /* parts are 64-byte aligned */
    if (target->id.kind == BD_WEIGHT_NORM) {
        box->norms[(size_t)target->id.layer * BD_NORM_COUNT + target->id.which] = vector;
        return;
    }
    bd_overlay_linear *linear = linear_of(box, target);
    if (target->id.kind == BD_WEIGHT_BIAS) {
        linear->bias = vector;
    } else if (target->part == BD_PART_SCALES) {
        linear->planes[target->plane].scale = vector;
    } else {
        linear->planes[target->plane].bits = at;
        if (linear->plane_count <= target->plane)
            linear->plane_count = (uint8_t)(target->plane + 1);
    }
}

/* Added rows and the vocabulary that config.json says must agree. */
static bd_status check_vocab(const overlay_box *box, const char *path, uint32_t vocab,
                             bd_error *err) {
    const uint32_t base = box->model->config.vocab, extra = box->overlay.extra_rows;
    if (vocab > base ? vocab - base == extra : extra == 0) return BD_OK;
    return bd_fail(err, BD_E_MISMATCH, "vocab_size",
                   "%s: vocab_size %u, but the base has %u rows and the delta adds %u", path, vocab,
                   base, extra);
}

/* Keys and values come of the frequencies too, and the digest says whose they are. A table's index
 * would not do: it is given to another once its variant is gone. */
static bd_status digest_rope(bd_overlay *overlay, const bd_rope_config *rope, bd_error *err) {
    float inv_freq[BD_ROTARY_DIM_MAX / 2], scale;
    const bd_status s = bd_rope_table(rope, inv_freq, &scale, err);
    if (s != BD_OK) return s;
    struct sha256_ctx hash;
    sha256_init(&hash);
    sha256_update(&hash, sizeof overlay->digest, overlay->digest);
    sha256_update(&hash, sizeof scale, (const uint8_t *)&scale);
    sha256_update(&hash, rope->rotary_dim / 2 * sizeof *inv_freq, (const uint8_t *)inv_freq);
#if NETTLE_VERSION_MAJOR >= 4
    sha256_digest(&hash, overlay->digest);
#else
    sha256_digest(&hash, sizeof overlay->digest, overlay->digest);
#endif
    return BD_OK;
}

/* What a variant's own config.json changes. */
static bd_status apply_config(overlay_box *box, const bd_delta *delta, bd_error *err) {
    const bd_model_config *base = &box->model->config;
    char path[1200];
    bd_model_config own;
    bd_status s = bd_path_join(path, sizeof path, delta->dir, "config.json", err);
    if (s != BD_OK) return s;
    if (!bd_file_exists(path)) return check_vocab(box, delta->dir, base->vocab, err);
    s = bd_model_config_read_variant(delta->dir, base, &own, err);
    if (s != BD_OK) return s;
    s = check_vocab(box, path, own.vocab, err);
    if (s != BD_OK) return s;
    if (own.window_tokens != 0 && base->window_tokens == 0) {
        return bd_fail(err, BD_E_UNSUPPORTED, "sliding_window",
                       "%s: a sliding window of %u where the base has none", path,
                       own.window_tokens);
    }
    if (own.rope.rotary_dim != base->rope.rotary_dim) {
        return bd_fail(err, BD_E_UNSUPPORTED, "partial_rotary_factor",
                       "%s: another rotary dimension than the base's", path);
    }
    box->overlay.vocab = own.vocab;
    box->overlay.window_tokens = own.window_tokens;
    s = digest_rope(&box->overlay, &own.rope, err);
    if (s != BD_OK) return s;
    s = bd_model_rope_acquire(box->model, &own.rope, &box->overlay.rope_table, err);
    box->rope_held = s == BD_OK;
    return s;
}

bd_status bd_overlay_create(bd_model *model, const bd_delta *delta, const bd_overlay_plan *plan,
                            void *const *pages, bd_overlay **out, bd_error *err) {
    const bd_plan_storage *storage = plan->storage;
    overlay_box *box = NULL;
    *out = NULL;
    bd_status s = box_create(model, storage, &box, err);
    if (s != BD_OK) return s;
    memcpy(box->overlay.digest, delta->digest, sizeof box->overlay.digest);
    for (uint32_t i = 0; i < plan->piece_count; i++) {
        const bd_overlay_piece *piece = &plan->pieces[i];
        const uint8_t *page = pages[piece->page];
        point(box, &storage->targets[i], page + piece->page_offset_bytes);
    }
    s = apply_config(box, delta, err);
    if (s != BD_OK) {
        free(box);
        return s;
    }
    *out = &box->overlay;
    return BD_OK;
}

void bd_overlay_join(bd_overlay *const *overlays, uint32_t count) {
    BD_ASSERT(count >= 1 && count <= BD_COMM_RANKS_MAX);
    overlay_box *first = (overlay_box *)overlays[0];
    if (count == 1) return;
    for (uint32_t r = 0; r < count; r++) {
        BD_ASSERT(overlays[r]->ranks == NULL);
        first->ranks[r] = overlays[r];
    }
    first->rank_count = count;
    first->overlay.ranks = (const bd_overlay *const *)first->ranks;
}

uint32_t bd_overlay_pages_for(const bd_model *model, const bd_delta *delta) {
    return bd_overlay_pages_of(&model->local, model->ops, delta);
}

void *bd_overlay_page_on(bd_model *model, uint32_t rank, void *page) {
    const bd_model *other = bd_model_rank(model, rank);
    const uint8_t *arena = model->ops->delta_arena(model->backend);
    const size_t offset = (size_t)((const uint8_t *)page - arena);
    return (uint8_t *)other->ops->delta_arena(other->backend) + offset;
}

void bd_overlay_destroy(bd_overlay *overlay) {
    if (!overlay) return;
    overlay_box *box = (overlay_box *)overlay;
    for (uint32_t r = 1; r < box->rank_count; r++)
        bd_overlay_destroy(box->ranks[r]);
    if (box->rope_held) bd_model_rope_release(box->model, box->overlay.rope_table);
    free(box);
}
