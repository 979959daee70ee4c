/* generate.c - `bitdelta generate`: the prompt in chunks, then one token after the other. See
 * generate.h. */
#include "bitdelta/tools/generate.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/strbuf.h"
#include "bitdelta/tokenizer/tokenizer.h"
#include "npy.h"
#include "session.h"

enum {
    CHUNK_TOKENS_DEFAULT = 256,
    CHUNK_TOKENS_MAX = 8192,
    DUMP_CHUNK_TOKENS_MAX = 256,
    PATH_BYTES = 1200
};

typedef struct generation {
    const bd_generate_request *request;
    bd_session_options session_options;
    bd_model_config config;
    bd_tokenizer *tokenizer; /* NULL: none, ids only */
    bd_session *session;
    bd_token_vec ids; /* prompt, then what was generated */
    size_t prompt_count;
    float *logprobs; /* [max_tokens] */
    uint32_t new_count;
    bd_token_result *results; /* [chunk] */
    int32_t *targets;         /* [chunk], for rows that are only dumped */
    bd_npy npy;
    float *row; /* [logits width of the model] */
    bd_detok detok;
    bool detok_open;
    bd_strbuf text;
} generation;

/* ---- What to run ---- */

static bd_status check_request(const bd_generate_request *r, bd_error *err) {
    const int variants =
        (r->delta_dir != NULL) + (r->finetuned_dir != NULL) + (r->lora_dir != NULL);
    if (!r->base_dir) return bd_fail(err, BD_E_ARGUMENT, "--base", "generate needs --base DIR");
    if (variants > 1) {
        return bd_fail(err, BD_E_ARGUMENT, "--delta",
                       "only one of --delta, --finetuned and --lora may be given");
    }
    if (!r->prompt == !r->prompt_ids) {
        return bd_fail(err, BD_E_ARGUMENT, "--prompt",
                       "generate needs one of --prompt and --prompt-ids");
    }
    if (r->chunk_tokens > CHUNK_TOKENS_MAX) {
        return bd_fail(err, BD_E_ARGUMENT, "--chunk-tokens", "--chunk-tokens is more than %d",
                       CHUNK_TOKENS_MAX);
    }
    if (!(r->temperature >= 0) || !(r->top_p >= 0 && r->top_p <= 1)) {
        return bd_fail(err, BD_E_ARGUMENT, "--temperature",
                       "--temperature below 0 or --top-p outside 0..1");
    }
    return BD_OK;
}

static bd_status push_id(bd_token_vec *vec, int32_t id, bd_error *err) {
    if (vec->count == vec->capacity) {
        const size_t capacity = vec->capacity ? 2 * vec->capacity : 64;
        int32_t *grown = realloc(vec->ids, capacity * sizeof *grown);
        if (!grown) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for the token ids");
        vec->ids = grown;
        vec->capacity = capacity;
    }
    vec->ids[vec->count++] = id;
    return BD_OK;
}

/* The variant's own tokenizer if it has one, else the base's, else none. */
static bd_status load_tokenizer(generation *g, bd_error *err) {
    const bd_generate_request *r = g->request;
    const char *dirs[] = {r->delta_dir, r->finetuned_dir, r->lora_dir, r->base_dir};
    for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
        char path[PATH_BYTES];
        if (!dirs[i]) continue;
        const bd_status s = bd_path_join(path, sizeof path, dirs[i], "tokenizer.json", err);
        if (s != BD_OK) return s;
        if (bd_file_exists(path)) return bd_tokenizer_load(&g->tokenizer, path, err);
    }
    return BD_OK;
}

static bd_status make_prompt(generation *g, bd_error *err) {
    const bd_generate_request *r = g->request;
    bd_status s = BD_OK;
    if (r->prompt_ids) {
        for (size_t i = 0; s == BD_OK && i < r->prompt_id_count; i++)
            s = push_id(&g->ids, r->prompt_ids[i], err);
    } else if (!g->tokenizer) {
        s = bd_fail(err, BD_E_NOT_FOUND, "tokenizer.json", "--prompt needs a tokenizer.json in %s",
                    r->base_dir);
    } else {
        const bd_encode_options encode = {.add_special_tokens = true, .parse_special = true};
        s = bd_tokenizer_encode(g->tokenizer, r->prompt, strlen(r->prompt), &encode, &g->ids, err);
    }
    if (s != BD_OK) return s;
    g->prompt_count = g->ids.count;
    if (g->prompt_count == 0)
        return bd_fail(err, BD_E_ARGUMENT, "--prompt", "the prompt has no tokens");
    for (size_t i = 0; i < g->ids.count; i++) {
        if (g->ids.ids[i] < 0 || (uint32_t)g->ids.ids[i] >= g->config.vocab) {
            return bd_fail(err, BD_E_LIMIT, "--prompt-ids",
                           "token id %d is outside the vocabulary of %u", g->ids.ids[i],
                           g->config.vocab);
        }
    }
    if (g->prompt_count > g->config.max_positions ||
        r->max_tokens > g->config.max_positions - g->prompt_count) {
        return bd_fail(err, BD_E_LIMIT, "--max-tokens",
                       "%zu prompt token%s and %u new one%s are more than the model's %u positions",
                       g->prompt_count, bd_plural(g->prompt_count), r->max_tokens,
                       bd_plural(r->max_tokens), g->config.max_positions);
    }
    return BD_OK;
}

/* ---- Running it ---- */

static uint32_t chunk_tokens(const generation *g) {
    uint32_t chunk = g->request->chunk_tokens ? g->request->chunk_tokens : CHUNK_TOKENS_DEFAULT;
    if (g->request->dump_logits && chunk > DUMP_CHUNK_TOKENS_MAX) chunk = DUMP_CHUNK_TOKENS_MAX;
    return chunk < g->prompt_count ? chunk : (uint32_t)g->prompt_count;
}

static bd_status make_buffers(generation *g, uint32_t chunk, bd_error *err) {
    g->logprobs = calloc((size_t)g->request->max_tokens + 1, sizeof *g->logprobs);
    g->results = calloc(chunk, sizeof *g->results);
    g->targets = calloc(chunk, sizeof *g->targets);
    if (!g->logprobs || !g->results || !g->targets) {
        return bd_fail(err, BD_E_MEMORY, NULL, "no memory for the results");
    }
    return BD_OK;
}

static bd_status dump_rows(generation *g, uint32_t count, bd_error *err) {
    bd_model *model = bd_session_model(g->session);
    for (uint32_t i = 0; i < count; i++) {
        bd_status s = bd_model_logits_get(model, i, g->row, err);
        if (s == BD_OK) s = bd_npy_append(&g->npy, g->row, err);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

/* One feed of ids [first, first + count); the last of them is sampled from when `sample`. */
static bd_status run_rows(generation *g, size_t first, uint32_t count, bool sample, bd_error *err) {
    const bd_generate_request *r = g->request;
    const bd_sampling sampling = {
        .temperature = r->greedy ? 0.0f : r->temperature,
        .top_p = r->top_p > 0 ? r->top_p : 1.0f,
        .seed = r->seed,
    };
    const bool dump = r->dump_logits != NULL;
    const uint32_t logits_count = dump ? count : sample ? 1 : 0;
    for (uint32_t i = 0; i < logits_count; i++)
        g->targets[i] = sample && i + 1 == logits_count ? -1 : 0;
    const bd_status s = bd_session_feed(g->session, g->ids.ids + first, count, logits_count,
                                        g->targets, &sampling, g->results, err);
    if (s != BD_OK) return s;
    if (sample) g->results[0] = g->results[logits_count - 1];
    return dump ? dump_rows(g, logits_count, err) : BD_OK;
}

static bool is_eos(const generation *g, int32_t id) {
    for (uint32_t i = 0; i < g->config.eos_count; i++) {
        if (g->config.eos_ids[i] == id) return true;
    }
    return false;
}

/* Text for people appears as it is made; for JSON it is collected. */
static bd_status show_token(generation *g, int32_t id, bd_error *err) {
    if (!g->tokenizer) {
        if (!g->request->json) printf("%s%d", g->new_count > 1 ? " " : "", id);
        return BD_OK;
    }
    bd_detok_push(&g->detok, id, &g->text);
    if (g->text.failed) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for the text");
    if (!g->request->json && g->text.data) {
        fwrite(g->text.data, 1, g->text.len_bytes, stdout);
        fflush(stdout);
        bd_strbuf_clear(&g->text);
    }
    return BD_OK;
}

static bd_status generate(generation *g, uint32_t chunk, bd_error *err) {
    const uint32_t wanted = g->request->max_tokens;
    for (size_t at = 0; at < g->prompt_count;) {
        const size_t left = g->prompt_count - at;
        const uint32_t n = left < chunk ? (uint32_t)left : chunk;
        const bd_status s = run_rows(g, at, n, wanted > 0 && n == left, err);
        if (s != BD_OK) return s;
        at += n;
    }
    while (g->new_count < wanted) {
        const bd_token_result token = g->results[0];
        g->logprobs[g->new_count++] = token.logprob;
        bd_status s = push_id(&g->ids, token.id, err);
        if (s == BD_OK) s = show_token(g, token.id, err);
        if (s != BD_OK) return s;
        if (g->new_count == wanted || (!g->request->ignore_eos && is_eos(g, token.id))) break;
        s = run_rows(g, g->ids.count - 1, 1, true, err);
        if (s != BD_OK) return s;
    }
    return BD_OK;
}

/* ---- What came out ---- */

static void write_ids(bd_strbuf *out, const int32_t *ids, size_t count) {
    for (size_t i = 0; i < count; i++)
        bd_strbuf_printf(out, "%s%d", i ? "," : "", ids[i]);
}

static bd_status write_json(generation *g, bd_error *err) {
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    bd_strbuf_puts(&out, "{\"prompt_ids\":[");
    write_ids(&out, g->ids.ids, g->prompt_count);
    bd_strbuf_puts(&out, "],\"ids\":[");
    write_ids(&out, g->ids.ids + g->prompt_count, g->new_count);
    bd_strbuf_puts(&out, "],\"text\":");
    if (g->tokenizer) {
        bd_strbuf_json_string(&out, g->text.data ? g->text.data : "", g->text.len_bytes);
    } else {
        bd_strbuf_puts(&out, "null");
    }
    bd_strbuf_puts(&out, ",\"logprobs\":[");
    for (uint32_t i = 0; i < g->new_count; i++) {
        if (i) bd_strbuf_puts(&out, ",");
        bd_strbuf_json_float(&out, g->logprobs[i]);
    }
    bd_strbuf_puts(&out, "]}\n");
    bd_status s = out.failed ? bd_fail(err, BD_E_MEMORY, NULL, "no memory for the output") : BD_OK;
    if (s == BD_OK) fwrite(out.data, 1, out.len_bytes, stdout);
    bd_strbuf_deinit(&out);
    return s;
}

static bd_status finish(generation *g, bd_error *err) {
    bd_status s = BD_OK;
    if (g->tokenizer) {
        bd_detok_flush(&g->detok, &g->text);
        if (g->text.failed) s = bd_fail(err, BD_E_MEMORY, NULL, "no memory for the text");
    }
    if (s == BD_OK && g->request->dump_logits) s = bd_npy_finish(&g->npy, err);
    if (s != BD_OK) return s;
    if (g->request->json) {
        s = write_json(g, err);
    } else {
        if (g->text.data) fwrite(g->text.data, 1, g->text.len_bytes, stdout);
        fputc('\n', stdout);
    }
    if (s == BD_OK && (fflush(stdout) != 0 || ferror(stdout))) {
        s = bd_fail_errno(err, BD_E_IO, "stdout", errno, "cannot write the output");
    }
    return s;
}

/* Rows are as wide as the model's vocabulary or, where that is larger, the variant's. */
static bd_status open_dump(generation *g, bd_error *err) {
    const uint32_t vocab = bd_model_logits_width(bd_session_model(g->session));
    g->row = calloc(vocab, sizeof *g->row);
    if (!g->row) return bd_fail(err, BD_E_MEMORY, NULL, "no memory for a row of logits");
    return bd_npy_open(&g->npy, g->request->dump_logits, vocab, err);
}

static bd_status open_all(generation *g, uint32_t *chunk, bd_error *err) {
    bd_status s = bd_session_config(&g->session_options, &g->config, err);
    if (s == BD_OK && g->request->dump_logits) s = bd_npy_check(g->request->dump_logits, err);
    if (s == BD_OK) s = load_tokenizer(g, err);
    if (s == BD_OK) s = make_prompt(g, err);
    if (s != BD_OK) return s;
    *chunk = chunk_tokens(g);
    g->session_options.tokens_max = (uint32_t)g->prompt_count + g->request->max_tokens;
    g->session_options.rows_max = *chunk;
    g->session_options.logits_rows_max = g->request->dump_logits ? *chunk : 1;
    s = make_buffers(g, *chunk, err);
    if (s == BD_OK) s = bd_session_open(&g->session_options, &g->session, err);
    if (s == BD_OK && g->request->dump_logits) s = open_dump(g, err);
    if (s == BD_OK && g->tokenizer) {
        bd_detok_init(&g->detok, g->tokenizer, true);
        g->detok_open = true;
        if (!bd_detok_skip(&g->detok, g->ids.ids, g->prompt_count)) {
            s = bd_fail(err, BD_E_MEMORY, NULL, "no memory for the text");
        }
    }
    return s;
}

static void close_all(generation *g) {
    if (g->detok_open) bd_detok_deinit(&g->detok);
    bd_npy_abort(&g->npy);
    bd_strbuf_deinit(&g->text);
    bd_session_close(g->session);
    bd_tokenizer_destroy(g->tokenizer);
    bd_token_vec_deinit(&g->ids);
    free(g->logprobs);
    free(g->results);
    free(g->targets);
    free(g->row);
}

int bd_generate_main(const bd_generate_request *request, bd_error *err) {
    generation g = {
        .request = request,
        .session_options =
            {
                .base_dir = request->base_dir,
                .delta_dir = request->delta_dir,
                .finetuned_dir = request->finetuned_dir,
                .lora_dir = request->lora_dir,
                .backend = request->backend,
                .dtype = request->dtype,
                .kernels = request->kernels,
                .device_index = request->device_index,
                .rank_count = request->rank_count,
                .thread_count = request->thread_count,
            },
    };
    uint32_t chunk = 0;
    bd_strbuf_init(&g.text, 0);
    bd_status s = check_request(request, err);
    if (s == BD_OK) s = open_all(&g, &chunk, err);
    if (s == BD_OK) s = generate(&g, chunk, err);
    if (s == BD_OK) s = finish(&g, err);
    close_all(&g);
    if (s == BD_OK) return 0;
    return s == BD_E_ARGUMENT ? 2 : s == BD_E_INTERNAL ? 3 : 1;
}
