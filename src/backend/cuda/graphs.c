/* graphs.c - recordings of whole decode steps, one per bucket of rows and number of variants.
 * Made at open from steps of nothing, replayed with one launch for every decode step that fills the
 * same tables. Which variants a step has is data in those tables; what would reach a kernel from
 * the host is compared with the recording (cuda_launch_key), and a step that differs in it is
 * launched operator by operator. Padding rows read token 0 and write their keys to a spare block.
 *
 * Up to CUDA_DECODE_ONLY_ROWS rows that is every step of greedy or sampled decoding whose variants
 * are laid out alike. Beyond, what the fast kernels launch follows from the groups and tiles that
 * each variant's rows make, padding's included: recorded are the base's own steps alone, replayed
 * those of just 32 or 64 rows; the rest is launched, which takes 3% longer there (8B shape, 64 rows
 * of the base: 6.4 ms instead of 6.2).
 *
 * A step with a variant that keeps rows of the vocabulary whole is launched: their addresses are
 * the host's. So is one with a low-rank adapter, which has launches that no recording has.
 *
 * Of several ranks all have recordings or none has, and all replay the same ones, since what a step
 * is compared by follows from its rows and shapes alone: a recorded sum is of the padded rows.
 * While ranks record, nothing runs that waits for another: they meet before and after the steps
 * that load the kernels' code.
 */
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/log.h"
#include "cuda_internal.h"

cuda_launch_key cuda_launch_key_of(const bd_cuda *cuda) {
    cuda_launch_key key;
    memcpy(&key.step, &cuda->step, sizeof key.step); /* with the padding, which compares too */
    memcpy(&key.fast, &cuda->fast_step, sizeof key.fast);
    memcpy(&key.attention, &cuda->attention_step, sizeof key.attention);
    return key;
}

static bool same_key(const bd_cuda *cuda, const cuda_launch_key *key) {
    return memcmp(&key->step, &cuda->step, sizeof key->step) == 0 &&
           memcmp(&key->fast, &cuda->fast_step, sizeof key->fast) == 0 &&
           memcmp(&key->attention, &cuda->attention_step, sizeof key->attention) == 0;
}

/* Adds rows of the base that nobody asked for until the step has `rows`. */
static void pad(cuda_padded *p, const bd_step *step, uint32_t rows) {
    const uint32_t have = step->row_count, segments = step->segment_count;
    memcpy(p->tokens, step->tokens, have * sizeof *p->tokens);
    memcpy(p->positions, step->positions, have * sizeof *p->positions);
    memcpy(p->seq_of_row, step->seq_of_row, have * sizeof *p->seq_of_row);
    memcpy(p->seqs, step->seqs, have * sizeof *p->seqs);
    memcpy(p->segments, step->segments, segments * sizeof *p->segments);
    memcpy(p->logits_rows, step->logits_rows, have * sizeof *p->logits_rows);
    for (uint32_t i = have; i < rows; i++) {
        p->tokens[i] = 0;
        p->positions[i] = 0;
        p->seq_of_row[i] = i;
        p->seqs[i] = (bd_seq){.first_row = i, .row_count = 1, .kv_blocks = &p->spare_block};
        p->logits_rows[i] = (bd_logits_row){.row = i, .seq = i, .target = 0};
    }
    p->step = *step;
    p->step.row_count = p->step.seq_count = p->step.logits_row_count = rows;
    p->step.tokens = p->tokens;
    p->step.positions = p->positions;
    p->step.seq_of_row = p->seq_of_row;
    p->step.seqs = p->seqs;
    p->step.segments = p->segments;
    p->step.logits_rows = p->logits_rows;
    if (rows > have) p->segments[p->step.segment_count++] = (bd_segment){-1, have, rows - have};
}

/* Every row is one sequence's next token and wants logits. */
static bool decodes(const bd_step *step) {
    if (step->row_count == 0 || step->row_count > CUDA_GRAPH_ROWS_MAX ||
        step->overlay_count > CUDA_GRAPH_VARIANTS || step->seq_count != step->row_count ||
        step->logits_row_count != step->row_count || step->segment_count > step->row_count)
        return false;
    for (uint32_t i = 0; i < step->row_count; i++)
        if (step->seqs[i].row_count != 1 || step->seqs[i].first_row != i ||
            step->seq_of_row[i] != i || step->logits_rows[i].row != i ||
            step->logits_rows[i].seq != i)
            return false;
    return true;
}

const cuda_graph *cuda_graph_begin(bd_cuda *cuda, const bd_step *step) {
    if (!cuda->graphs || !decodes(step) || cuda_step_has_whole(step) || cuda->lora.overlays)
        return NULL;
    uint32_t bucket = 0;
    while (1u << bucket < step->row_count)
        bucket++;
    const cuda_graph *graph = &cuda->graphs[bucket][step->overlay_count];
    if (!graph->exec) return NULL;
    pad(cuda->padded, step, 1u << bucket);
    if (cuda_tables_fill(cuda, &cuda->padded->step, true, NULL) != BD_OK) return NULL;
    return same_key(cuda, &graph->key) ? graph : NULL;
}

typedef struct blank { /* a variant of no data, laid out as a real one: fused planes adjacent */
    bd_overlay overlay;
    bd_overlay_linear *linears, *blocks;
} blank;

static bool blank_make(const bd_cuda *cuda, blank *b) {
    const cuda_shape *shape = &cuda->shape;
    const uint32_t rows =
        cuda->options.vocab_block_rows ? cuda->options.vocab_block_rows : shape->vocab;
    const uint32_t blocks = (shape->vocab + rows - 1) / rows;
    b->linears = calloc((size_t)shape->layers * BD_LINEAR_COUNT, sizeof *b->linears);
    b->blocks = calloc(blocks, sizeof *b->blocks);
    if (!b->linears || !b->blocks) return false;
    const uint8_t *bits = cuda->deltas;
    const float *scale = (const float *)(const void *)cuda->deltas;
    for (uint32_t layer = 0; layer < shape->layers; layer++)
        for (uint32_t i = 0; i < BD_LINEAR_COUNT; i++) {
            b->linears[layer * BD_LINEAR_COUNT + i] =
                (bd_overlay_linear){.plane_count = 1, .planes[0] = {bits, scale}};
            bits += k_sign_bytes(shape->linear_n[i], shape->linear_k[i]);
            scale += shape->linear_n[i];
        }
    for (uint32_t i = 0; i < blocks; i++)
        b->blocks[i] = (bd_overlay_linear){.plane_count = 1, .planes[0] = {bits, scale}};
    b->overlay = (bd_overlay){.vocab = shape->vocab,
                              .linears = b->linears,
                              .block_rows = rows,
                              .block_count = blocks,
                              .embed = b->blocks,
                              .head = b->blocks};
    return true;
}

/* One recording: `variants` rows of a variant each, the others the base's. */
static bd_status record_one(bd_cuda *cuda, const blank *b, uint32_t rows, uint32_t variants,
                            bd_backend_forward forward, void *ctx, cuda_graph *out, bd_error *err) {
    const bd_overlay *overlays[CUDA_GRAPH_VARIANTS];
    bd_segment segments[CUDA_GRAPH_VARIANTS];
    for (uint32_t v = 0; v < variants; v++) {
        overlays[v] = &b->overlay;
        segments[v] = (bd_segment){(int32_t)v, v, 1};
    }
    const bd_step none = {.overlays = overlays};
    cuda_padded *p = cuda->padded;
    pad(p, &none, rows); /* all rows, one segment */
    memcpy(p->segments, segments, variants * sizeof *segments);
    p->segments[variants] = (bd_segment){-1, variants, rows - variants};
    p->step.segment_count = variants < rows ? variants + 1 : variants;
    p->step.overlay_count = variants;
    cudaGraph_t graph = NULL;
    bd_status s =
        cuda_check(cuda, cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeRelaxed),
                   "recording a step", err);
    if (s != BD_OK) return s;
    cuda->recording = true;
    cuda_ranks_recording(cuda, true);
    s = forward(ctx, &p->step, err);
    cuda_ranks_recording(cuda, false);
    cuda->recording = false;
    const cudaError_t ended = cudaStreamEndCapture(cuda->stream, &graph);
    /* Of a step that failed the end fails too, and must not be left for the next launch to find. */
    if (s == BD_OK)
        s = cuda_check(cuda, ended, "recording a step", err);
    else
        (void)cudaGetLastError();
    if (s == BD_OK)
        s = cuda_tables_fill(cuda, &p->step, true, err); /* the operators' marks undone */
    if (s == BD_OK) out->key = cuda_launch_key_of(cuda);
    if (s == BD_OK)
        s = cuda_check(cuda, cudaGraphInstantiate(&out->exec, graph, 0), "recording a step", err);
    if (graph) cudaGraphDestroy(graph);
    if (s == BD_OK)
        s = cuda_check(cuda, cudaGraphUpload(out->exec, cuda->stream), "recording a step", err);
    return s;
}

/* Every kernel's code onto the device, which recording alone would not do. */
static bd_status warm(bd_cuda *cuda, uint32_t rows, bd_backend_forward forward, void *ctx,
                      bd_error *err) {
    const bd_step none = {0};
    pad(cuda->padded, &none, rows);
    bd_status s = forward(ctx, &cuda->padded->step, err);
    const bd_comm *comm = cuda->options.comm;
    if (comm) { /* the others have only just been here */
        const uint64_t deadline_us = bd_now_us() + comm->group->wait_us_max;
        return s == BD_OK ? cuda_stream_wait(cuda, deadline_us, err) : s;
    }
    return s == BD_OK ? cuda_check(cuda, cudaStreamSynchronize(cuda->stream), "first step", err)
                      : s;
}

/* Most variants in a recording of `rows` rows. */
static uint32_t variants_most(const bd_backend_options *o, uint32_t rows) {
    if (!o->delta_bytes || rows > CUDA_DECODE_ONLY_ROWS) return 0;
    return rows < CUDA_GRAPH_VARIANTS ? rows : CUDA_GRAPH_VARIANTS;
}

static bool bucket_used(const bd_backend_options *o, uint32_t bucket) {
    const uint32_t rows = 1u << bucket;
    return bucket < CUDA_GRAPH_BUCKETS && rows <= o->rows_max && rows <= o->seqs_max &&
           rows <= o->logits_rows_max;
}

uint32_t cuda_recordings(const bd_backend_options *o) {
    uint32_t count = 0;
    for (uint32_t bucket = 0; bucket_used(o, bucket); bucket++)
        count += variants_most(o, 1u << bucket) + 1;
    return count;
}

static bd_status record_bucket(bd_cuda *cuda, const blank *b, uint32_t bucket,
                               bd_backend_forward forward, void *ctx, uint32_t *count,
                               bd_error *err) {
    const uint32_t rows = 1u << bucket, most = variants_most(&cuda->options, rows);
    bd_status s = BD_OK;
    for (uint32_t v = 0; s == BD_OK && v <= most; v++, ++*count)
        s = record_one(cuda, b, rows, v, forward, ctx, &cuda->graphs[bucket][v], err);
    return s;
}

/* Slower, not wrong: unless the device is lost, or a step that all ranks were to run did not. */
static bd_status give_up(bool fatal, bd_status s, const bd_error *fault, bool *recorded,
                         bd_error *err) {
    *recorded = false;
    *err = *fault;
    if (fatal) return s;
    bd_log_error("cuda", "steps are launched without recordings", fault);
    return BD_OK;
}

/* *recorded: whether it went well so far, here and then everywhere. What is returned is beyond
 * launching steps without recordings. */
static bd_status record_all(bd_cuda *cuda, const blank *b, bd_backend_forward forward, void *ctx,
                            uint32_t *count, bool *recorded, bd_error *err) {
    bd_error fault;
    for (uint32_t bucket = 0; bucket_used(&cuda->options, bucket); bucket++) {
        const uint32_t rows = 1u << bucket;
        bd_status s = cuda_ranks_agree(cuda, recorded, err);
        if (s != BD_OK || !*recorded) return s;
        if ((s = warm(cuda, rows, forward, ctx, &fault)) != BD_OK)
            return give_up(cuda->options.comm || atomic_load(&cuda->lost), s, &fault, recorded,
                           err);
        if ((s = cuda_ranks_agree(cuda, recorded, err)) != BD_OK) return s;
        s = record_bucket(cuda, b, bucket, forward, ctx, count, &fault);
        if (s != BD_OK) s = give_up(atomic_load(&cuda->lost), s, &fault, recorded, err);
        if (s != BD_OK) return s;
    }
    return cuda_ranks_agree(cuda, recorded, err);
}

bd_status cuda_record(bd_backend *backend, bd_backend_forward forward, void *ctx, bd_error *err) {
    bd_error fault;
    if (!err) err = &fault;
    bd_cuda *cuda = cuda_of(backend);
    blank b = {0};
    uint32_t count = 0;
    const uint64_t start_us = bd_now_us();
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    if (s != BD_OK) return s;
    cuda->padded = calloc(1, sizeof *cuda->padded);
    /* Set last: until then steps are launched as they are. */
    cuda_graph(*graphs)[CUDA_GRAPH_VARIANTS + 1] = calloc(CUDA_GRAPH_BUCKETS, sizeof *graphs);
    bool recorded = cuda->padded && graphs && blank_make(cuda, &b);
    if (recorded) {
        cuda->padded->spare_block = cuda->options.kv_block_count;
        cuda->graphs = graphs;
    } else {
        free(graphs);
        (void)bd_fail(&fault, BD_E_MEMORY, "graphs", "out of memory");
        bd_log_error("cuda", "steps are launched without recordings", &fault);
    }
    s = record_all(cuda, &b, forward, ctx, &count, &recorded, err);
    free(b.blocks);
    free(b.linears);
    if (s == BD_OK && recorded)
        bd_log(BD_LOG_INFO, "cuda", "recorded steps=%u ms=%llu", count,
               (unsigned long long)((bd_now_us() - start_us) / 1000u));
    else
        cuda_graphs_close(cuda);
    return s;
}

void cuda_graphs_close(bd_cuda *cuda) {
    for (uint32_t i = 0; cuda->graphs && i < CUDA_GRAPH_BUCKETS; i++)
        for (uint32_t v = 0; v <= CUDA_GRAPH_VARIANTS; v++)
            if (cuda->graphs[i][v].exec) cudaGraphExecDestroy(cuda->graphs[i][v].exec);
    free(cuda->graphs);
    free(cuda->padded);
    cuda->graphs = NULL;
    cuda->padded = NULL;
}
