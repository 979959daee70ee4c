/* ranks.c - see ranks.h, and bd_model_rank_config and bd_rank_part_of in model.h. */
#include "ranks.h"

#include "names.h"

typedef struct need { /* `what` of the model must be a multiple of `per_rank` times the ranks */
    const char *what;
    uint64_t value, per_rank;
} need;

static bd_status check(const bd_model_config *config, uint32_t count, bd_error *err) {
    const uint64_t q = (uint64_t)config->heads * config->head_dim;
    const need needs[] = {
        {"attention heads", config->heads, 1},
        {"rows of the feed-forward block", config->ffn, 1},
        {"columns of o_proj, in bytes of eight signs,", q, 8},
        {"columns of down_proj, in bytes of eight signs,", config->ffn, 8},
    };
    for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++) {
        const need *n = &needs[i];
        if (n->value % (n->per_rank * count) == 0) continue;
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "%llu %s do not divide by %u ranks (%llu is not a multiple of %llu)",
                       (unsigned long long)n->value, n->what, count, (unsigned long long)n->value,
                       (unsigned long long)(n->per_rank * count));
    }
    if (config->kv_heads % count != 0 && count % config->kv_heads != 0)
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "%u key-value heads can neither be divided by nor repeated for %u ranks",
                       config->kv_heads, count);
    const uint64_t each = bd_rank_vocab_rows(config, count);
    if (each * (count - 1) >= config->vocab)
        return bd_fail(
            err, BD_E_UNSUPPORTED, "tensor_parallel",
            "a vocabulary of %u in parts of %llu leaves nothing for the last of %u ranks",
            config->vocab, (unsigned long long)each, count);
    return BD_OK;
}

bd_status bd_model_rank_config(const bd_model_config *config, uint32_t rank, uint32_t rank_count,
                               bd_model_config *out, bd_error *err) {
    *out = *config;
    if (rank_count <= 1) return BD_OK;
    if (rank_count > BD_COMM_RANKS_MAX || (rank_count & (rank_count - 1)) != 0)
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "the model can be split over 1, 2, 4 or 8 ranks, not %u", rank_count);
    BD_ASSERT(rank < rank_count);
    const bd_status s = check(config, rank_count, err);
    if (s != BD_OK) return s;
    const uint32_t each = bd_rank_vocab_rows(config, rank_count),
                   left = config->vocab - rank * each;
    out->heads = config->heads / rank_count;
    out->kv_heads = config->kv_heads > rank_count ? config->kv_heads / rank_count : 1;
    out->ffn = config->ffn / rank_count;
    out->vocab = left < each ? left : each;
    return BD_OK;
}

static void cut_rows(bd_rank_part *part, uint32_t index, uint32_t parts) {
    part->rows /= parts;
    part->first_row = index * part->rows;
}

static bool is_row_parallel(uint32_t which) {
    return which == BD_LINEAR_O || which == BD_LINEAR_DOWN;
}

bool bd_rank_part_of(const bd_model_config *config, uint32_t rank, uint32_t rank_count,
                     bd_weight_id id, bd_rank_part *out) {
    const bool table = id.kind == BD_WEIGHT_EMBED || id.kind == BD_WEIGHT_HEAD;
    *out = (bd_rank_part){.rows = config->vocab, .cols = config->hidden};
    if (!table) BD_ASSERT(bd_weight_shape(config, id, &out->rows, &out->cols));
    if (rank_count <= 1 || id.kind == BD_WEIGHT_NORM) return true;
    if (table) {
        const uint32_t each = bd_rank_vocab_rows(config, rank_count);
        out->first_row = rank * each;
        out->rows = config->vocab - out->first_row < each ? config->vocab - out->first_row : each;
        return true;
    }
    if (is_row_parallel(id.which)) {
        if (id.kind == BD_WEIGHT_BIAS) return rank == 0;
        out->cols /= rank_count;
        out->first_col = rank * out->cols;
        return true;
    }
    uint32_t parts = rank_count;
    if ((id.which == BD_LINEAR_K || id.which == BD_LINEAR_V) && config->kv_heads < parts)
        parts = config->kv_heads;
    cut_rows(out, rank * parts / rank_count, parts);
    return true;
}
