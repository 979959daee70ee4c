/* fast.c - see fast.h. Choices follow from shapes and the step's rows alone, so a step repeated is
 * bitwise equal. */
#include "fast.h"

#include <stdlib.h>

#include "cuda_internal.h"

static const uint32_t tile_tokens[3] = {256, 128, 64};

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                              const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                              const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                              CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* Row-major [rows, cols] bf16 in boxes of box_rows x 64, 128-byte swizzle. L2 promotion of 256
 * bytes was measured to cost 3-8% of the memory's read rate with 128-byte rows. */
static bool map_make(encode_fn encode, CUtensorMap *map, const void *data, uint64_t rows,
                     uint64_t cols, uint32_t box_rows) {
    const cuuint64_t size[2] = {cols, rows}, stride[1] = {cols * 2};
    const cuuint32_t box[2] = {64, box_rows}, step[2] = {1, 1};
    union { /* the driver does not write through it, but its prototype lacks const */
        const void *in;
        void *out;
    } address = {.in = data};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, address.out, size, stride, box, step,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

static encode_fn encoder(void) {
    union {
        void *data;
        encode_fn function;
    } entry = {.data = NULL};
    enum cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry.data, 12000,
                                         cudaEnableDefault, &found) != cudaSuccess)
        return NULL;
    return found == cudaDriverEntryPointSuccess ? entry.function : NULL;
}

static void group_shape(const bd_cuda *cuda, bd_group group, cuda_group *out) {
    static const bd_linear firsts[CUDA_GROUPS] = {BD_LINEAR_Q, BD_LINEAR_O, BD_LINEAR_GATE,
                                                  BD_LINEAR_DOWN};
    static const uint32_t counts[CUDA_GROUPS] = {3, 1, 2, 1};
    out->first = firsts[group];
    out->count = counts[group];
    out->k = cuda->shape.linear_k[out->first];
    bool aligned = true;
    for (uint32_t i = 0; i < out->count; i++) {
        out->n += cuda->shape.linear_n[out->first + i];
        /* Sign chunks hold 128 rows: a fused matrix's planes are one plane only at such seams. */
        if (out->count > 1 && cuda->shape.linear_n[out->first + i] % 128) aligned = false;
    }
    out->fast = aligned && out->k % 256 == 0 && out->k <= 65536 && out->n % 8 == 0;
}

static bool group_maps(bd_cuda *cuda, encode_fn encode, bd_group group) {
    static const uint32_t box_rows[X_BOX_COUNT] = {128, 64, 32, 16, 8};
    cuda_group *g = &cuda->fast.groups[group];
    const uint32_t rows = cuda->options.rows_max;
    g->x_data = group == BD_GROUP_O      ? cuda->attn
                : group == BD_GROUP_DOWN ? cuda->act
                                         : cuda->normed;
    g->y_data = g->count > 1 ? cuda->fast.fused : (uint16_t *)(void *)cuda->proj;
    for (uint32_t i = 0; i < X_BOX_COUNT; i++)
        if (!map_make(encode, &g->x[i], g->x_data, rows, g->k, box_rows[i])) return false;
    for (uint32_t layer = 0; layer < cuda->shape.layers; layer++)
        if (!map_make(encode, &cuda->fast.w[layer][group], cuda->linears[layer][g->first], g->n,
                      g->k, 128))
            return false;
    return map_make(encode, &g->y, g->y_data, rows, g->n, 32);
}

void cuda_fast_open(bd_cuda *cuda) {
    cuda_fast *fast = &cuda->fast;
    int major = 0;
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda->device);
    cudaDeviceGetAttribute(&fast->sm_count, cudaDevAttrMultiProcessorCount, cuda->device);
    if (fast->sm_count > CUDA_SM_MAX) fast->sm_count = CUDA_SM_MAX;
    const encode_fn encode = encoder();
    fast->w = calloc(cuda->shape.layers, sizeof *fast->w);
    fast->usable =
        major == 9 && encode && fast->w &&
        cudaMemset(fast->workspace, 0, k_decode_workspace_bytes(fast->sm_count)) == cudaSuccess &&
        cudaMemset(fast->tickets, 0, CUDA_TICKETS * sizeof *fast->tickets) == cudaSuccess;
    for (uint32_t group = 0; group < CUDA_GROUPS; group++) {
        group_shape(cuda, (bd_group)group, &fast->groups[group]);
        if (!fast->usable || !fast->groups[group].fast ||
            !group_maps(cuda, encode, (bd_group)group))
            fast->groups[group].fast = false;
    }
}

void cuda_fast_close(bd_cuda *cuda) {
    free(cuda->fast.w);
}

/* Whether the planes (and biases) of a fused group follow each other in this overlay, or are all
 * absent. */
static bool fused_adjacent(const bd_cuda *cuda, const bd_overlay_linear *linears,
                           const cuda_group *g) {
    const bd_overlay_linear *first = &linears[g->first];
    const uint8_t *bits = first->planes[0].bits;
    const float *scale = first->planes[0].scale, *bias = first->bias;
    for (uint32_t i = 0; i < g->count; i++) {
        const bd_overlay_linear *l = &linears[g->first + i];
        const uint32_t n = cuda->shape.linear_n[g->first + i];
        if (l->plane_count != first->plane_count || (l->bias == NULL) != (first->bias == NULL))
            return false;
        if (l->plane_count && (l->planes[0].bits != bits || l->planes[0].scale != scale))
            return false;
        if (l->bias && l->bias != bias) return false;
        bits += k_sign_bytes(n, g->k);
        scale += n;
        if (bias) bias += n;
    }
    return true;
}

static bool overlays_usable(const bd_cuda *cuda, const bd_step *step) {
    for (uint32_t v = 0; v < step->overlay_count; v++)
        for (uint32_t layer = 0; layer < cuda->shape.layers; layer++) {
            const bd_overlay_linear *linears = &step->overlays[v]->linears[layer * BD_LINEAR_COUNT];
            for (uint32_t i = 0; i < BD_LINEAR_COUNT; i++)
                if (linears[i].plane_count > 1) return false;
            for (uint32_t g = 0; g < CUDA_GROUPS; g++)
                if (cuda->fast.groups[g].fast && cuda->fast.groups[g].count > 1 &&
                    !fused_adjacent(cuda, linears, &cuda->fast.groups[g]))
                    return false;
        }
    return true;
}

static bool tiles_fill(bd_cuda *cuda, const bd_step *step, cuda_fast_step *d) {
    for (uint32_t t = 0; t < 3; t++) {
        uint32_t count = 0;
        for (uint32_t s = 0; s < step->segment_count; s++)
            count += (step->segments[s].row_count + tile_tokens[t] - 1) / tile_tokens[t];
        k_gemm_tile *tiles =
            cuda_upload_reserve(cuda, count, sizeof *tiles, (const void **)&d->tiles[t]);
        if (!tiles) return false;
        for (uint32_t s = 0; s < step->segment_count; s++) {
            const bd_segment *segment = &step->segments[s];
            const uint32_t end = segment->first_row + segment->row_count;
            for (uint32_t row = segment->first_row; row < end; row += tile_tokens[t]) {
                const uint32_t stop = row + tile_tokens[t] < end ? row + tile_tokens[t] : end;
                tiles[d->tile_count[t]++] =
                    (k_gemm_tile){(int32_t)row, (int32_t)stop, segment->overlay, 0};
            }
        }
    }
    return true;
}

static bool slots_fill(bd_cuda *cuda, const bd_step *step, cuda_fast_step *d) {
    int32_t *columns = cuda_upload_reserve(cuda, CUDA_DECODE_ROWS_MAX, sizeof *columns,
                                           (const void **)&d->columns);
    int32_t *slot =
        cuda_upload_reserve(cuda, CUDA_DECODE_ROWS_MAX, sizeof *slot, (const void **)&d->slot);
    if (!columns || !slot) return false;
    for (uint32_t s = 0; s < step->segment_count; s++) {
        const bd_segment *segment = &step->segments[s];
        int32_t at = -1;
        if (segment->overlay >= 0) {
            for (at = 0; at < (int32_t)d->variants && columns[at] != segment->overlay; at++)
                continue;
            if (at == (int32_t)d->variants) columns[d->variants++] = segment->overlay;
        }
        for (uint32_t row = segment->first_row; row < segment->first_row + segment->row_count;
             row++)
            slot[row] = at;
    }
    return true;
}

bool cuda_fast_step_fill(bd_cuda *cuda, const bd_step *step) {
    cuda_fast_step *d = &cuda->fast_step;
    *d = (cuda_fast_step){.usable = cuda->fast.usable && overlays_usable(cuda, step),
                          .decode = step->row_count <= CUDA_DECODE_ROWS_MAX};
    if (!d->usable) return true;
    for (uint32_t s = 0; s < step->segment_count; s++)
        d->any_delta |= step->segments[s].overlay >= 0;
    return d->decode ? slots_fill(cuda, step, d) : tiles_fill(cuda, step, d);
}

int cuda_fast_planes_nb(const bd_step *step) {
    int nb = 1;
    while (nb < (int)step->row_count)
        nb *= 2;
    return nb;
}

bool cuda_fast_wants_planes(const bd_cuda *cuda, uint32_t layer) {
    const cuda_fast_step *d = &cuda->fast_step;
    return d->usable && d->decode && d->variants && layer < cuda->shape.layers &&
           cuda->fast.groups[BD_GROUP_QKV].fast && cuda->fast.groups[BD_GROUP_GATE_UP].fast;
}

static bd_status decode(bd_cuda *cuda, const bd_step *step, uint32_t layer, bd_group group,
                        bd_error *err) {
    cuda_fast *fast = &cuda->fast;
    const cuda_group *g = &fast->groups[group];
    const cuda_fast_step *d = &cuda->fast_step;
    const int nb = cuda_fast_planes_nb(step);
    const bool after_norm = group == BD_GROUP_QKV || group == BD_GROUP_GATE_UP;
    if (d->variants && !(after_norm && d->planes_made)) {
        const cudaError_t error =
            k_planes_bf16(fast->planes, fast->plane_scale, fast->plane_sum, g->x_data,
                          (int)step->row_count, (int)g->k, nb, cuda->stream);
        const bd_status s = cuda_check(cuda, error, "bit planes", err);
        if (s != BD_OK) return s;
    }
    const k_decode_args args = {
        .w = fast->w[layer][group],
        .x = g->x[nb == 16 ? X_BOX_16 : X_BOX_8],
        .w_data = cuda->linears[layer][g->first],
        .planes = fast->planes,
        .scale = fast->plane_scale,
        .sum = fast->plane_sum,
        .overlays = cuda->step.linears +
                    (size_t)(layer * BD_LINEAR_COUNT + g->first) * cuda->step.overlay_count,
        .columns = d->columns,
        .slot = d->slot,
        .bias = cuda_group_bias(cuda, layer, group),
        .y = g->y_data,
        .workspace = fast->workspace,
        .ticket = &fast->tickets[fast->next_ticket++ % CUDA_TICKETS],
        .rows = (int32_t)step->row_count,
        .n = (int32_t)g->n,
        .k = (int32_t)g->k,
        .variants = (int32_t)d->variants,
        .sm_count = fast->sm_count,
        .pdl = d->variants > 0 ||
               after_norm}; /* the kernel before is a norm or the one that makes the planes */
    return cuda_check(cuda, k_decode_bf16(&args, nb, cuda->stream), "decode", err);
}

/* Relative cost of a main-loop pass over K by tile size, measured on an H200; a split halves the
 * pass and adds a reduction. */
static const double pass_cost[3] = {1.0, 0.55, 0.33};

static void choose_tile(const cuda_fast *fast, const cuda_group *g, const cuda_fast_step *d,
                        uint32_t *best, int *best_split) {
    double least = 1e300;
    const double clusters = fast->sm_count / 2;
    const uint32_t pairs = (g->n + 255) / 256;
    for (uint32_t t = 0; t < 3; t++)
        for (int split = 1; split <= 2; split++) {
            if (split == 2 && g->k % 512) continue;
            const double items = (double)d->tile_count[t] * pairs * split;
            const double waves = (double)(uint64_t)((items + clusters - 1) / clusters);
            const double cost = waves * (pass_cost[t] / split + (split == 2 ? 0.06 : 0.0));
            if (cost < least - 1e-9) least = cost, *best = t, *best_split = split;
        }
}

static bd_status prefill(bd_cuda *cuda, uint32_t layer, bd_group group, bd_error *err) {
    const cuda_fast *fast = &cuda->fast;
    const cuda_group *g = &fast->groups[group];
    const cuda_fast_step *d = &cuda->fast_step;
    uint32_t t = 0;
    int split = 1;
    choose_tile(fast, g, d, &t, &split);
    const k_gemm_args args = {.w = fast->w[layer][group],
                              .x = g->x[t == 0   ? X_BOX_128
                                        : t == 1 ? X_BOX_64
                                                 : X_BOX_32],
                              .y = g->y,
                              .w_data = cuda->linears[layer][g->first],
                              .y_data = g->y_data,
                              .bias = cuda_group_bias(cuda, layer, group),
                              .overlays = cuda->step.linears +
                                          (size_t)(layer * BD_LINEAR_COUNT + g->first) *
                                              cuda->step.overlay_count,
                              .tiles = d->tiles[t],
                              .tile_count = (int32_t)d->tile_count[t],
                              .n = (int32_t)g->n,
                              .k = (int32_t)g->k,
                              .group = 8,
                              .sm_count = fast->sm_count};
    if (t == 0 && split == 1)
        return cuda_check(cuda, k_gemm_waves_bf16(&args, d->any_delta, cuda->stream), "prefill",
                          err);
    return cuda_check(cuda,
                      k_gemm_bf16(&args, (int)tile_tokens[t], split, d->any_delta, cuda->stream),
                      "prefill", err);
}

bd_status cuda_fast_linear(bd_cuda *cuda, const bd_step *step, uint32_t layer, bd_group group,
                           bd_error *err) {
    return cuda->fast_step.decode ? decode(cuda, step, layer, group, err)
                                  : prefill(cuda, layer, group, err);
}
