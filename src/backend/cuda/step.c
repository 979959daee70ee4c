/* step.c - a step's tables: laid out in pinned memory, copied to the device in one piece by the
 * first kernel (upload.cu says why not by a copy); results back. Layout depends only on the step,
 * so the device addresses are known while the host copy is being filled. */
#include <math.h>
#include <string.h>
#include <time.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/rng.h"
#include "cuda_internal.h"
#include "lora.h"
#include "upload.h"

static size_t embed_blocks_max(const cuda_shape *shape) {
    /* A block holds at least one row of bits per byte of a page; pages are 2 MiB or more. */
    const size_t per_block = (2u << 20) / (k_sign_bytes(128, shape->hidden) / 128 + 4);
    return shape->vocab / per_block + 2;
}

size_t cuda_upload_bytes(const bd_backend_options *o, const cuda_shape *shape) {
    const size_t blocks_per_seq =
        (o->max_model_len + o->kv_block_tokens - 1) / o->kv_block_tokens + 1u;
    const size_t items = (size_t)shape->layers * BD_LINEAR_COUNT + 2 * embed_blocks_max(shape);
    size_t bytes = (size_t)o->rows_max * (6 * 4 + sizeof(k_segment) + sizeof(k_tile));
    bytes += o->seqs_max * (sizeof(k_seq) + blocks_per_seq * 4);
    bytes +=
        o->logits_rows_max * (2 * 4 + sizeof(k_segment) + sizeof(k_tile) + sizeof(k_sample_row));
    bytes += (size_t)o->rows_max * CUDA_TILES * sizeof(k_gemm_tile);
    bytes += (size_t)o->logits_rows_max * CUDA_TILES * sizeof(k_gemm_tile);
    bytes += 2 * CUDA_DECODE_ROWS_MAX * (2 * 4 + sizeof(k_gemm_tile)); /* of the head too */
    bytes += (size_t)CUDA_EDITS_MAX * sizeof(k_edit);
    bytes += ((size_t)o->rows_max / K_ATTENTION_ROWS + o->seqs_max) * sizeof(k_attention_tile);
    bytes += (size_t)o->seqs_max * K_ATTENTION_SPLITS * sizeof(k_attention_item);
    bytes += o->rows_max * sizeof(void *) + o->logits_rows_max * (sizeof(k_tile) + 4); /* whole.c */
    bytes += CUDA_OVERLAYS_MAX * (items * sizeof(k_overlay_linear) +
                                  (shape->layers + 1u) * BD_NORM_COUNT * sizeof(void *));
    if (o->lora_rank_max)
        bytes += CUDA_OVERLAYS_MAX * items * sizeof(k_lora_linear) +
                 ((size_t)o->rows_max + o->logits_rows_max) * sizeof(k_lora_tile);
    return bytes + 64 * 256;
}

void *cuda_upload_reserve(bd_cuda *cuda, size_t count, size_t element_bytes, const void **device) {
    const size_t bytes = (count * element_bytes + 255u) & ~(size_t)255u;
    if (bytes > cuda->upload.cap_bytes - cuda->upload.used_bytes) return NULL;
    void *host = cuda->upload.host + cuda->upload.used_bytes;
    *device = cuda->upload.device + cuda->upload.used_bytes;
    cuda->upload.used_bytes += bytes;
    return host;
}
#define RESERVE(count, type, device)                                                               \
    ((type *)cuda_upload_reserve(cuda, (count), sizeof(type), (const void **)(device)))

static uint32_t tiles_fill(k_tile *tiles, const k_segment *segments, uint32_t segment_count,
                           uint32_t row_count, uint32_t *rows_max) {
    uint32_t count = 0, segment = 0;
    *rows_max = 0;
    for (uint32_t row = 0; row < row_count; row += K_TILE_TOKENS) {
        const uint32_t end = row + K_TILE_TOKENS < row_count ? row + K_TILE_TOKENS : row_count;
        while (segment < segment_count && (uint32_t)segments[segment].end_row <= row)
            segment++;
        uint32_t last = segment;
        while (last < segment_count && (uint32_t)segments[last].first_row < end)
            last++;
        tiles[count++] = (k_tile){(int32_t)row, (int32_t)end, (int32_t)segment, (int32_t)last};
        if (end - row > *rows_max) *rows_max = end - row;
    }
    return count;
}

uint32_t cuda_row_window(const bd_cuda *cuda, const bd_step *step, uint32_t row) {
    uint32_t s = 0;
    while (s + 1 < step->segment_count && row >= step->segments[s + 1].first_row)
        s++;
    const int32_t overlay = step->segments[s].overlay;
    return overlay >= 0 ? step->overlays[overlay]->window_tokens : cuda->config->window_tokens;
}

static bool rows_fill(bd_cuda *cuda, const bd_step *step, bool fixed) {
    cuda_step *d = &cuda->step;
    int32_t *tokens = RESERVE(step->row_count, int32_t, &d->tokens),
            *positions = RESERVE(step->row_count, int32_t, &d->positions);
    int32_t *seq_of_row = RESERVE(step->row_count, int32_t, &d->seq_of_row),
            *overlay = RESERVE(step->row_count, int32_t, &d->row_overlay);
    int32_t *rope = RESERVE(step->row_count, int32_t, &d->row_rope),
            *window = RESERVE(step->row_count, int32_t, &d->row_window);
    k_segment *segments =
        RESERVE(fixed ? step->row_count + 1 : step->segment_count, k_segment, &d->segments);
    k_tile *tiles = RESERVE(step->row_count / K_TILE_TOKENS + 1u, k_tile, &d->tiles);
    if (!tokens || !positions || !seq_of_row || !overlay || !rope || !window || !segments || !tiles)
        return false;
    memcpy(tokens, step->tokens, step->row_count * 4u);
    memcpy(positions, step->positions, step->row_count * 4u);
    memcpy(seq_of_row, step->seq_of_row, step->row_count * 4u);
    d->planes_max = 0;
    for (uint32_t i = 0; i < step->segment_count; i++) {
        const bd_segment *s = &step->segments[i];
        const bd_overlay *o = s->overlay >= 0 ? step->overlays[s->overlay] : NULL;
        segments[i] =
            (k_segment){s->overlay, (int32_t)s->first_row, (int32_t)(s->first_row + s->row_count)};
        for (uint32_t row = s->first_row; row < s->first_row + s->row_count; row++) {
            overlay[row] = s->overlay;
            rope[row] = o ? (int32_t)o->rope_table : 0;
            window[row] = (int32_t)(o ? o->window_tokens : cuda->config->window_tokens);
        }
    }
    d->tile_count =
        tiles_fill(tiles, segments, step->segment_count, step->row_count, &d->tile_rows_max);
    return true;
}

static bool seqs_fill(bd_cuda *cuda, const bd_step *step) {
    size_t at = 0;
    const uint32_t per = cuda->options.kv_block_tokens;
    k_seq *seqs = RESERVE(step->seq_count, k_seq, &cuda->step.seqs);
    if (!seqs) return false;
    for (uint32_t i = 0; i < step->seq_count; i++) {
        const bd_seq *s = &step->seqs[i];
        seqs[i] = (k_seq){(int32_t)s->first_row, (int32_t)s->row_count,
                          (int32_t)s->kv_before_tokens, (int32_t)at};
        at += (s->kv_before_tokens + s->row_count + per - 1) / per;
    }
    return true;
}

/* Reserved last: its size is the only one that varies between steps of one shape. */
static bool blocks_fill(bd_cuda *cuda, const bd_step *step) {
    const uint32_t per = cuda->options.kv_block_tokens;
    size_t blocks = 0, at = 0;
    for (uint32_t i = 0; i < step->seq_count; i++)
        blocks += (step->seqs[i].kv_before_tokens + step->seqs[i].row_count + per - 1) / per;
    int32_t *table = RESERVE(blocks, int32_t, &cuda->step.kv_blocks);
    if (!table) return false;
    for (uint32_t i = 0; i < step->seq_count; i++) {
        const bd_seq *s = &step->seqs[i];
        const size_t count = (s->kv_before_tokens + s->row_count + per - 1) / per;
        memcpy(table + at, s->kv_blocks, count * 4);
        at += count;
    }
    return true;
}

/* Ids of a row, of the base's vocabulary and what its variant adds; the others are -inf. */
static uint32_t row_vocab(const bd_cuda *cuda, const bd_overlay *overlay) {
    const uint32_t most = cuda->vocab_total + (overlay ? overlay->extra_rows : 0);
    return overlay && overlay->vocab < most ? overlay->vocab : most;
}

static void sample_row_fill(k_sample_row *out, const bd_cuda *cuda, const bd_step *step,
                            const bd_logits_row *row, const bd_overlay *overlay) {
    const bd_seq *seq = &step->seqs[row->seq];
    const bd_sampling *p = &seq->sampling;
    *out = (k_sample_row){.target = row->target,
                          .top_count = row->top_count,
                          .vocab = (int32_t)row_vocab(cuda, overlay),
                          .top_k = p->top_k,
                          .temperature = p->temperature,
                          .top_p = p->top_p,
                          .min_p = p->min_p,
                          .uniform =
                              (float)bd_rng_uniform(p->seed, p->choice, step->positions[row->row])};
    if (out->uniform >= 1.0f)
        out->uniform = 0x1.fffffep-1f; /* rounding to float32 must stay below one */
}

static bool logits_fill(bd_cuda *cuda, const bd_step *step, bool fixed) {
    cuda_step *d = &cuda->step;
    const uint32_t count = step->logits_row_count;
    int32_t *rows = RESERVE(count, int32_t, &d->logits_rows),
            *overlays = RESERVE(count, int32_t, &d->logits_overlay);
    k_segment *segments = RESERVE(count, k_segment, &d->logits_segments);
    k_tile *tiles = RESERVE(count / K_TILE_TOKENS + 1u, k_tile, &d->logits_tiles);
    k_sample_row *samples = RESERVE(count, k_sample_row, &d->sample_rows);
    size_t edit_count = 0, at = 0;
    for (uint32_t i = 0; i < count; i++)
        if (step->logits_rows[i].target < 0)
            edit_count += step->seqs[step->logits_rows[i].seq].edit_count;
    const size_t edits_max = fixed ? CUDA_GRAPH_EDITS : CUDA_EDITS_MAX;
    k_edit *edits =
        edit_count <= edits_max ? RESERVE(fixed ? edits_max : edit_count, k_edit, &d->edits) : NULL;
    if (!rows || !overlays || !segments || !tiles || !samples || !edits) return false;
    uint32_t segment_count = 0, segment = 0;
    for (uint32_t i = 0; i < count; i++) {
        const bd_logits_row *row = &step->logits_rows[i];
        while (segment + 1 < step->segment_count &&
               row->row >= step->segments[segment + 1].first_row)
            segment++;
        while (row->row < step->segments[segment].first_row)
            segment--;
        const int32_t overlay = step->segments[segment].overlay;
        rows[i] = (int32_t)row->row;
        overlays[i] = overlay;
        if (segment_count && segments[segment_count - 1].overlay == overlay)
            segments[segment_count - 1].end_row++;
        else
            segments[segment_count++] = (k_segment){overlay, (int32_t)i, (int32_t)i + 1};
        sample_row_fill(&samples[i], cuda, step, row,
                        overlay >= 0 ? step->overlays[overlay] : NULL);
        if (row->target >= 0) continue;
        const bd_seq *seq = &step->seqs[row->seq];
        samples[i].first_edit = (int32_t)at;
        samples[i].edit_count = (int32_t)seq->edit_count;
        for (uint32_t e = 0; e < seq->edit_count; e++)
            edits[at++] =
                (k_edit){seq->edits[e].token, seq->edits[e].repetition, seq->edits[e].add};
    }
    d->logits_tile_count =
        tiles_fill(tiles, segments, segment_count, count, &d->logits_tile_rows_max);
    return true;
}

static void linear_fill(k_overlay_linear *out, const bd_overlay_linear *in, uint32_t *planes_max) {
    *out = (k_overlay_linear){.bias = in->bias, .plane_count = in->plane_count};
    for (uint32_t p = 0; p < in->plane_count; p++) {
        out->bits[p] = in->planes[p].bits;
        out->scale[p] = in->planes[p].scale;
    }
    if (in->plane_count > *planes_max) *planes_max = in->plane_count;
}

static bd_status overlays_check(bd_cuda *cuda, const bd_step *step, bd_error *err) {
    if (step->overlay_count > CUDA_OVERLAYS_MAX)
        return bd_fail(err, BD_E_LIMIT, "step", "%u variants in one step, at most %u",
                       step->overlay_count, CUDA_OVERLAYS_MAX);
    return cuda_lora_check(cuda, step, err);
}

static bool overlays_fill(bd_cuda *cuda, const bd_step *step) {
    cuda_step *d = &cuda->step;
    const uint32_t layers = cuda->shape.layers, n = step->overlay_count,
                   count = layers * BD_LINEAR_COUNT;
    d->overlay_count = n;
    const uint32_t known = n ? cuda->options.vocab_block_rows : 0;
    d->block_rows = known ? known : cuda->shape.vocab;
    d->block_count = (cuda->shape.vocab + d->block_rows - 1) / d->block_rows;
    for (uint32_t v = 0; v < n; v++)
        if (step->overlays[v]->block_count)
            d->block_rows = step->overlays[v]->block_rows,
            d->block_count = step->overlays[v]->block_count;
    const size_t items = count + 2u * (size_t)d->block_count;
    k_overlay_linear *table = RESERVE(items * n, k_overlay_linear, &d->linears);
    const float **norms =
        RESERVE((layers + 1u) * (size_t)BD_NORM_COUNT * n, const float *, &d->norms);
    if (!table || !norms) return false;
    for (uint32_t v = 0; v < n; v++) {
        const bd_overlay *o = step->overlays[v];
        static const bd_overlay_linear none = {0};
        for (uint32_t i = 0; i < count; i++)
            linear_fill(&table[(size_t)i * n + v], &o->linears[i], &d->planes_max);
        for (uint32_t b = 0; b < d->block_count; b++) {
            linear_fill(&table[(size_t)(count + b) * n + v], o->embed ? &o->embed[b] : &none,
                        &d->planes_max);
            linear_fill(&table[(size_t)(count + d->block_count + b) * n + v],
                        o->head ? &o->head[b] : &none, &d->planes_max);
        }
        for (uint32_t i = 0; i < (layers + 1u) * BD_NORM_COUNT; i++)
            norms[(size_t)i * n + v] = o->norms ? o->norms[i] : NULL;
    }
    return true;
}

bd_status cuda_tables_fill(bd_cuda *cuda, const bd_step *step, bool fixed, bd_error *err) {
    cuda->upload.used_bytes = 0;
    /* Cleared with their padding: recordings are found by comparing bytes. */
    memset(&cuda->step, 0, sizeof cuda->step);
    memset(&cuda->fast_step, 0, sizeof cuda->fast_step);
    memset(&cuda->attention_step, 0, sizeof cuda->attention_step);
    cuda->qkv_half = cuda->proj_half = cuda->proj_partial = false;
    if (rows_fill(cuda, step, fixed) && seqs_fill(cuda, step) && logits_fill(cuda, step, fixed) &&
        overlays_fill(cuda, step) && cuda_fast_step_fill(cuda, step) &&
        cuda_attention_fill(cuda, step, fixed) && cuda_whole_fill(cuda, step) &&
        cuda_lora_fill(cuda, step) && blocks_fill(cuda, step))
        return BD_OK;
    return bd_fail(err, BD_E_LIMIT, "step", "its tables exceed %zu bytes", cuda->upload.cap_bytes);
}

bd_status cuda_step_begin(bd_backend *backend, const bd_step *step, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    BD_ASSERT(step->row_count <= cuda->options.rows_max &&
              step->logits_row_count <= cuda->options.logits_rows_max);
    cuda->replay = NULL;
    if (atomic_load(&cuda->lost))
        return bd_fail(err, BD_E_DEVICE, "device", "the GPU was lost earlier");
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    if (s == BD_OK) s = overlays_check(cuda, step, err);
    if (s != BD_OK) return s;
    if (cuda->recording) return cuda_tables_fill(cuda, step, true, err);
    cuda->replay = cuda_graph_begin(cuda, step);
    if (!cuda->replay && (s = cuda_tables_fill(cuda, step, false, err)) != BD_OK) return s;
    return cuda_check(
        cuda,
        k_put_bytes(cuda->upload.device, cuda->upload.host, cuda->upload.used_bytes, cuda->stream),
        "step tables", err);
}

/* A step takes about what the one before took: until shortly before that there is time to sleep,
 * whose end is late by 50 us and more, and past it the step is long, or hangs. */
uint32_t cuda_wait_pause_us(uint64_t waited_us, uint64_t expected_us) {
    enum { LATE_US = 60, SPIN_US = 300, SLEEP_US = 200, LONG_SLEEP_US = 20 };
    const uint64_t lead_us = expected_us / 8 < SPIN_US ? expected_us / 8 : SPIN_US;
    if (waited_us > expected_us + SPIN_US) return LONG_SLEEP_US;
    if (waited_us + lead_us + LATE_US + LONG_SLEEP_US > expected_us) return 0;
    const uint64_t left_us = expected_us - lead_us - LATE_US - waited_us;
    return left_us < SLEEP_US ? (uint32_t)left_us : SLEEP_US;
}

/* Polled, not synchronised: a hung kernel must not hang the thread. */
bd_status cuda_stream_wait(bd_cuda *cuda, uint64_t deadline_us, bd_error *err) {
    bd_status s = cuda_check(cuda, cudaEventRecord(cuda->step_done, cuda->stream), "step", err);
    const uint64_t start = bd_now_us();
    uint64_t *expected_us = &cuda->waited_us[cuda->replay != NULL];
    while (s == BD_OK) {
        const cudaError_t error = cudaEventQuery(cuda->step_done);
        if (error == cudaSuccess) break;
        if (error != cudaErrorNotReady) return cuda_check(cuda, error, "step", err);
        const uint64_t now = bd_now_us();
        if (now >= deadline_us) {
            atomic_store(&cuda->lost, true);
            return bd_fail(err, BD_E_DEVICE, "step", "no answer from the GPU within the deadline");
        }
        const uint32_t pause_us = cuda_wait_pause_us(now - start, *expected_us);
        if (pause_us == 0) continue;
        if (cuda->options.comm) s = cuda_ranks_poll(cuda, err);
        nanosleep(&(struct timespec){.tv_nsec = pause_us * 1000L}, NULL);
    }
    *expected_us = bd_now_us() - start;
    /* A kernel that waited for another rank in vain has ended too. */
    return s == BD_OK && cuda->options.comm ? cuda_ranks_poll(cuda, err) : s;
}

bd_status cuda_step_wait(bd_backend *backend, const bd_step *step, uint64_t deadline_us,
                         bd_token_result *results, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    const size_t bytes = step->logits_row_count * sizeof(k_sample_result);
    bd_status s = BD_OK;
    if (bytes)
        s = cuda_check(cuda,
                       cudaMemcpyAsync(cuda->results_host, cuda->results, bytes,
                                       cudaMemcpyDeviceToHost, cuda->stream),
                       "results", err);
    if (s == BD_OK) s = cuda_stream_wait(cuda, deadline_us, err);
    if (s != BD_OK) return s;
    for (uint32_t i = 0; i < step->logits_row_count; i++) {
        const k_sample_result *from = &cuda->results_host[i];
        results[i] = (bd_token_result){.id = from->id,
                                       .logprob = from->logprob,
                                       .rank = from->rank,
                                       .top_count = step->logits_rows[i].top_count,
                                       .fault = from->fault != 0};
        memcpy(results[i].top_ids, from->top_ids, sizeof results[i].top_ids);
        memcpy(results[i].top_logprobs, from->top_logprobs, sizeof results[i].top_logprobs);
    }
    return BD_OK;
}

bd_status cuda_logits_get(bd_backend *backend, uint32_t index, float *out, bd_error *err) {
    bd_cuda *cuda = cuda_of(backend);
    const size_t vocab = cuda->shape.vocab, each = bd_vocab_each(&cuda->options);
    const float *row = cuda->logits + index * (size_t)cuda->logits_width;
    bd_status s = cuda_check(cuda, cudaSetDevice(cuda->device), "device", err);
    if (s == BD_OK)
        s = cuda_check(
            cuda,
            cudaMemcpy(out, row + cuda->options.vocab_first, vocab * 4, cudaMemcpyDeviceToHost),
            "logits", err);
    for (size_t i = vocab; i < each; i++)
        out[i] = -INFINITY; /* a last rank has fewer */
    if (s != BD_OK || !cuda->options.extra_vocab_max) return s;
    return cuda_check(cuda,
                      cudaMemcpy(out + each, row + cuda->vocab_total,
                                 cuda->options.extra_vocab_max * 4u, cudaMemcpyDeviceToHost),
                      "logits", err);
}
