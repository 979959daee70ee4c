/* lora.c - see lora.h. y += scale * B (A x), scale = alpha / r, or alpha / sqrt(r) with use_rslora.
 * Of a matrix that is cut by rows a rank has those rows of B and all of A; of one that is cut by
 * columns those columns of A and all of B, which is linear: the ranks' products are summed with the
 * base's. */
#include "lora.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/hf/adapter_config.h"

enum { PART_COUNT = 9, PART_ALIGN = 64, FLOATS_AT_ONCE = 1024 };

typedef struct lora_part { /* a module that may be adapted, and the linears it is made of */
    const char *name;
    bd_linear first, last;
    bool fused; /* exists in Phi-3 instead of its linears */
} lora_part;

static const lora_part parts[PART_COUNT] = {
    {"self_attn.q_proj", BD_LINEAR_Q, BD_LINEAR_Q, false},
    {"self_attn.k_proj", BD_LINEAR_K, BD_LINEAR_K, false},
    {"self_attn.v_proj", BD_LINEAR_V, BD_LINEAR_V, false},
    {"self_attn.o_proj", BD_LINEAR_O, BD_LINEAR_O, false},
    {"mlp.gate_proj", BD_LINEAR_GATE, BD_LINEAR_GATE, false},
    {"mlp.up_proj", BD_LINEAR_UP, BD_LINEAR_UP, false},
    {"mlp.down_proj", BD_LINEAR_DOWN, BD_LINEAR_DOWN, false},
    {"self_attn.qkv_proj", BD_LINEAR_Q, BD_LINEAR_V, true},
    {"mlp.gate_up_proj", BD_LINEAR_GATE, BD_LINEAR_UP, true},
};

typedef struct lora_pair {
    const bd_tensor *a, *b; /* [r, k], [n, r] */
} lora_pair;

struct bd_lora {
    bd_model_config config;
    bd_safetensors *file;
    bd_adapter_config adapter;
    lora_pair *pairs; /* [layers][PART_COUNT] */
    bd_overlay overlays[BD_COMM_RANKS_MAX];
    const bd_overlay *ranks[BD_COMM_RANKS_MAX];
    bd_overlay_linear *linears[BD_COMM_RANKS_MAX]; /* of each rank: [layers][BD_LINEAR_COUNT] */
    bd_overlay_linear table;                       /* embedding and head: nothing */
    const float **norms;                           /* [layers + 1][BD_NORM_COUNT], all NULL */
};

static uint32_t linear_rows(const bd_model_config *config, uint32_t which) {
    if (which == BD_LINEAR_Q) return config->heads * config->head_dim;
    if (which == BD_LINEAR_K || which == BD_LINEAR_V) return config->kv_heads * config->head_dim;
    return which == BD_LINEAR_GATE || which == BD_LINEAR_UP ? config->ffn : config->hidden;
}

static uint32_t linear_cols(const bd_model_config *config, uint32_t which) {
    if (which == BD_LINEAR_O) return config->heads * config->head_dim;
    return which == BD_LINEAR_DOWN ? config->ffn : config->hidden;
}

static uint32_t part_rows(const bd_model_config *config, const lora_part *part) {
    uint32_t rows = 0;
    for (uint32_t which = part->first; which <= part->last; which++)
        rows += linear_rows(config, which);
    return rows;
}

/* ---- adapter_model.safetensors ---- */

/* "base_model.model.model.layers.<n>.<part>.lora_A.weight" */
static bool parse_name(const bd_lora *lora, const char *name, uint32_t *layer, uint32_t *part,
                       bool *is_b) {
    static const char prefix[] = "base_model.model.model.layers.";
    if (strncmp(name, prefix, sizeof prefix - 1) != 0) return false;
    const char *at = name + sizeof prefix - 1;
    const char *digits = at;
    for (*layer = 0; *at >= '0' && *at <= '9' && *layer < BD_LAYERS_MAX; at++) {
        *layer = *layer * 10 + (uint32_t)(*at - '0');
    }
    if (at == digits || *at != '.' || *layer >= lora->config.layers) return false;
    at++;
    const bool phi3 = lora->config.family == BD_FAMILY_PHI3;
    for (*part = 0; *part < PART_COUNT; (*part)++) {
        const lora_part *p = &parts[*part];
        const size_t len = strlen(p->name);
        const bool exists =
            p->fused ? phi3 : !phi3 || p->first == BD_LINEAR_O || p->first == BD_LINEAR_DOWN;
        if (!exists || strncmp(at, p->name, len) != 0) continue;
        *is_b = strcmp(at + len, ".lora_B.weight") == 0;
        if (*is_b || strcmp(at + len, ".lora_A.weight") == 0) return true;
    }
    return false;
}

static bd_status add_tensor(bd_lora *lora, const bd_tensor *tensor, bd_error *err) {
    uint32_t layer, index;
    bool is_b;
    if (!parse_name(lora, tensor->name, &layer, &index, &is_b)) {
        return bd_fail(err, BD_E_UNSUPPORTED, tensor->name,
                       "adapter tensor %s is not A or B of a layer's linear", tensor->name);
    }
    const lora_part *part = &parts[index];
    const uint64_t rows = is_b ? part_rows(&lora->config, part) : lora->adapter.rank;
    const uint64_t cols = is_b ? lora->adapter.rank : linear_cols(&lora->config, part->first);
    if (tensor->rank != 2 || tensor->shape[0] != rows || tensor->shape[1] != cols) {
        return bd_fail(err, BD_E_MISMATCH, tensor->name,
                       "adapter tensor %s does not have the shape [%llu, %llu]", tensor->name,
                       (unsigned long long)rows, (unsigned long long)cols);
    }
    if (tensor->dtype != BD_DTYPE_F32 && tensor->dtype != BD_DTYPE_BF16 &&
        tensor->dtype != BD_DTYPE_F16) {
        return bd_fail(err, BD_E_UNSUPPORTED, tensor->name, "adapter tensor %s has type %s",
                       tensor->name, tensor->dtype_name);
    }
    lora_pair *pair = &lora->pairs[(size_t)layer * PART_COUNT + index];
    *(is_b ? &pair->b : &pair->a) = tensor;
    return BD_OK;
}

static bd_status read_tensors(bd_lora *lora, const char *dir, bd_error *err) {
    char path[1200];
    bd_status s = bd_path_join(path, sizeof path, dir, "adapter_model.safetensors", err);
    if (s == BD_OK) s = bd_safetensors_open(path, true, &lora->file, err);
    if (s != BD_OK) return s;
    for (uint32_t i = 0; s == BD_OK && i < bd_safetensors_count(lora->file); i++) {
        s = add_tensor(lora, bd_safetensors_at(lora->file, i), err);
    }
    bool any = false;
    for (size_t i = 0; s == BD_OK && i < (size_t)lora->config.layers * PART_COUNT; i++) {
        const lora_pair *pair = &lora->pairs[i];
        if (!pair->a != !pair->b) {
            const char *name = pair->a ? pair->a->name : pair->b->name;
            s = bd_fail(err, BD_E_MISMATCH, name, "adapter tensor %s has no counterpart", name);
        }
        any = any || pair->a;
    }
    if (s == BD_OK && !any) s = bd_fail(err, BD_E_FORMAT, path, "%s holds no LoRA tensors", path);
    return s;
}

bd_status bd_lora_open(const char *dir, const bd_model_config *config, bd_lora **out,
                       bd_error *err) {
    *out = NULL;
    bd_lora *lora = calloc(1, sizeof *lora);
    if (!lora) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for an adapter");
    lora->config = *config;
    lora->pairs = calloc((size_t)config->layers * PART_COUNT, sizeof *lora->pairs);
    lora->norms = calloc(((size_t)config->layers + 1) * BD_NORM_COUNT, sizeof *lora->norms);
    bd_status s = BD_OK;
    if (!lora->pairs || !lora->norms) {
        s = bd_fail(err, BD_E_MEMORY, NULL, "no memory for an adapter");
    }
    if (s == BD_OK) s = bd_adapter_config_read(dir, &lora->adapter, err);
    if (s == BD_OK) s = read_tensors(lora, dir, err);
    if (s != BD_OK) {
        bd_lora_close(lora);
        return s;
    }
    *out = lora;
    return BD_OK;
}

void bd_lora_close(bd_lora *lora) {
    if (!lora) return;
    bd_safetensors_close(lora->file);
    free(lora->pairs);
    for (uint32_t r = 0; r < BD_COMM_RANKS_MAX; r++)
        free(lora->linears[r]);
    free(lora->norms);
    free(lora);
}

uint32_t bd_lora_rank(const bd_lora *lora) {
    return lora->adapter.rank;
}

/* ---- on the device ---- */

typedef struct lora_rank { /* where its next matrix goes */
    bd_model *model;
    uint32_t rank, count;
    uint8_t *at;
} lora_rank;

static uint64_t matrix_bytes(uint64_t rows, uint64_t cols) {
    const uint64_t bytes = rows * cols * sizeof(float);
    return (bytes + PART_ALIGN - 1) / PART_ALIGN * PART_ALIGN;
}

static bd_rank_part rank_part(const bd_lora *lora, uint32_t rank, uint32_t count, size_t index,
                              uint32_t which) {
    bd_rank_part part;
    const bd_weight_id id = {
        .kind = BD_WEIGHT_LINEAR, .layer = (uint32_t)(index / PART_COUNT), .which = which};
    BD_ASSERT(bd_rank_part_of(&lora->config, rank, count, id, &part));
    return part;
}

uint64_t bd_lora_device_bytes(const bd_lora *lora, uint32_t rank_count) {
    uint64_t bytes = 0;
    for (size_t i = 0; i < (size_t)lora->config.layers * PART_COUNT; i++) {
        const lora_part *module = &parts[i % PART_COUNT];
        if (!lora->pairs[i].a) continue;
        bytes +=
            matrix_bytes(lora->adapter.rank, rank_part(lora, 0, rank_count, i, module->first).cols);
        for (uint32_t which = module->first; which <= module->last; which++)
            bytes +=
                matrix_bytes(rank_part(lora, 0, rank_count, i, which).rows, lora->adapter.rank);
    }
    return bytes;
}

/* `count` values from value `from` of the tensor on, to value `to` of the matrix at `dst`. */
static bd_status put_values(bd_model *model, void *dst, uint64_t to, const bd_tensor *tensor,
                            uint64_t from, uint64_t count, bd_error *err) {
    float values[FLOATS_AT_ONCE];
    for (uint64_t done = 0; done < count;) {
        const uint64_t n = count - done < FLOATS_AT_ONCE ? count - done : FLOATS_AT_ONCE;
        bd_tensor_to_f32(tensor, from + done, n, values);
        const bd_status s = bd_model_ops(model)->vector_put(bd_model_backend(model), dst, to + done,
                                                            values, n, err);
        if (s != BD_OK) return s;
        done += n;
    }
    return BD_OK;
}

static bd_status put_matrix(lora_rank *rank, const bd_tensor *tensor, const bd_rank_part *part,
                            const float **out, bd_error *err) {
    const uint64_t width = tensor->shape[1];
    const bool whole = part->cols == width; /* rows side by side */
    const uint64_t rows = whole ? 1 : part->rows,
                   cols = whole ? (uint64_t)part->rows * width : part->cols;
    for (uint64_t row = 0; row < rows; row++) {
        const bd_status s =
            put_values(rank->model, rank->at, row * cols, tensor,
                       (part->first_row + row) * width + part->first_col, cols, err);
        if (s != BD_OK) return s;
    }
    *out = (const float *)(const void *)rank->at; /* parts are 64-byte aligned */
    rank->at += matrix_bytes(part->rows, part->cols);
    return BD_OK;
}

static bd_status put_pair(bd_lora *lora, lora_rank *rank, size_t index, bd_error *err) {
    const lora_part *module = &parts[index % PART_COUNT];
    const lora_pair *pair = &lora->pairs[index];
    const uint32_t r = lora->adapter.rank;
    const bd_rank_part cut = rank_part(lora, rank->rank, rank->count, index, module->first);
    const bd_rank_part of_a = {.rows = r, .first_col = cut.first_col, .cols = cut.cols};
    const float *a;
    uint32_t first_row = 0; /* of a fused module's linear: they are rows of one B */
    bd_status s = put_matrix(rank, pair->a, &of_a, &a, err);
    for (uint32_t which = module->first; s == BD_OK && which <= module->last; which++) {
        const bd_rank_part own = rank_part(lora, rank->rank, rank->count, index, which);
        const bd_rank_part of_b = {
            .first_row = first_row + own.first_row, .rows = own.rows, .cols = r};
        bd_overlay_linear *linear =
            &lora->linears[rank->rank][index / PART_COUNT * BD_LINEAR_COUNT + which];
        *linear = (bd_overlay_linear){
            .lora_rank = (uint16_t)r, .lora_scale = lora->adapter.scale, .lora_a = a};
        s = put_matrix(rank, pair->b, &of_b, &linear->lora_b, err);
        first_row += linear_rows(&lora->config, which);
    }
    return s;
}

static bd_status load_rank(bd_lora *lora, lora_rank *rank, bd_error *err) {
    const bd_backend_ops *ops = bd_model_ops(rank->model);
    bd_backend *backend = bd_model_backend(rank->model);
    bd_model_config local;
    bd_status s = bd_model_rank_config(&lora->config, rank->rank, rank->count, &local, err);
    if (s != BD_OK) return s;
    bd_overlay_linear *linears =
        calloc((size_t)lora->config.layers * BD_LINEAR_COUNT, sizeof *linears);
    if (!linears) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for an adapter");
    lora->linears[rank->rank] = linears;
    rank->at = ops->delta_arena(backend);
    for (size_t i = 0; s == BD_OK && i < (size_t)lora->config.layers * PART_COUNT; i++)
        if (lora->pairs[i].a) s = put_pair(lora, rank, i, err);
    if (s == BD_OK && ops->put_flush) s = ops->put_flush(backend, err);
    lora->ranks[rank->rank] = &lora->overlays[rank->rank];
    lora->overlays[rank->rank] = (bd_overlay){
        .vocab = lora->config.vocab,
        .window_tokens = lora->config.window_tokens,
        .linears = linears,
        .block_rows = local.vocab,
        .block_count = 1,
        .embed = &lora->table,
        .head = &lora->table,
        .norms = lora->norms,
        .ranks = rank->rank == 0 && rank->count > 1 ? lora->ranks : NULL,
    };
    return s;
}

bd_status bd_lora_load(bd_lora *lora, bd_model *model, const bd_overlay **overlay, bd_error *err) {
    const uint32_t count = bd_model_rank_count(model);
    for (uint32_t r = 0; r < count; r++) {
        lora_rank rank = {.model = bd_model_rank(model, r), .rank = r, .count = count};
        const bd_status s = load_rank(lora, &rank, err);
        if (s != BD_OK) return s;
    }
    *overlay = &lora->overlays[0];
    return BD_OK;
}
