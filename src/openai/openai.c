/* openai.c - the API object: models, tokenize, detokenize, and the life of a completion. Threads:
 * see openai.h. */
#include <inttypes.h>
#include <nettle/version.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/file.h"
#include "completion.h"

/* Everything that is the same for all names: a client that sees another fingerprint knows that
 * equal requests may have other answers. */
static bd_status start_fingerprint(bd_openai *openai, const bd_openai_options *options,
                                   bd_error *err) {
    struct sha256_ctx *hash = &openai->fingerprint;
    const char *parts[] = {options->base_fingerprint, BD_VERSION, options->numerics};
    char *template = NULL;
    size_t bytes = 0;
    if (options->chat_template_path) {
        bd_status status = bd_file_read(options->chat_template_path, BD_CHAT_TEMPLATE_BYTES_MAX,
                                        &template, &bytes, err);
        if (status != BD_OK) return status;
    }
    sha256_init(hash);
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
        if (parts[i]) sha256_update(hash, strlen(parts[i]) + 1, (const uint8_t *)parts[i]);
    if (template) sha256_update(hash, bytes, (const uint8_t *)template);
    free(template);
    return BD_OK;
}

bd_status bd_openai_create(const bd_openai_options *options, bd_openai **out, bd_error *err) {
    *out = NULL;
    bd_openai *openai = calloc(1, sizeof *openai);
    if (!openai) return bd_fail(err, BD_E_MEMORY, "openai", "out of memory");
    static atomic_uint_fast64_t serials;
    openai->serial = 1 + atomic_fetch_add(&serials, 1);
    openai->router = options->router;
    openai->response_bytes_max =
        options->response_bytes_max > 0 ? options->response_bytes_max : (size_t)256 << 20;
    openai->prompts_max = options->prompts_max > 0 ? options->prompts_max : 1024;
    const bd_served *served = bd_router_served_at(options->router, 0);
    bd_status status = start_fingerprint(openai, options, err);
    if (status == BD_OK && served) {
        /* The base's files also serve the variants that have none of their own. */
        sha256_update(&openai->fingerprint, sizeof served->files_digest, served->files_digest);
        status = bd_chat_book_create(&openai->chats, served->dir, options->chat_template_path, err);
        if (status == BD_OK)
            bd_tokenizer_info_make(served, bd_chat_book_base(openai->chats),
                                   &openai->tokenizer_info);
    }
    if (status != BD_OK) {
        bd_openai_destroy(openai);
        return status;
    }
    *out = openai;
    return BD_OK;
}

void bd_openai_destroy(bd_openai *openai) {
    if (!openai) return;
    bd_chat_book_destroy(openai->chats);
    bd_strbuf_deinit(&openai->tokenizer_info);
    free(openai);
}

static void end_hex(struct sha256_ctx *hash, char *out, size_t digits) {
    uint8_t digest[SHA256_DIGEST_SIZE];
#if NETTLE_VERSION_MAJOR >= 4
    sha256_digest(hash, digest);
#else
    sha256_digest(hash, sizeof digest, digest);
#endif
    bd_openai_hex(digest, digits, out);
}

/* Each thread keeps the last ones that it made: most requests are for few variants. */
enum { KEPT_FINGERPRINTS = 16 };
typedef struct kept_fingerprint {
    uint64_t serial; /* of the bd_openai; 0: none yet */
    uint8_t digest[32], files_digest[32];
    char text[24];
} kept_fingerprint;
static _Thread_local kept_fingerprint kept_fingerprints[KEPT_FINGERPRINTS];

static void make_fingerprint(const bd_openai *openai, const bd_served *served, char out[24]) {
    struct sha256_ctx hash = openai->fingerprint;
    sha256_update(&hash, sizeof served->digest, served->digest);
    sha256_update(&hash, sizeof served->files_digest, served->files_digest);
    memcpy(out, "fp_", 3);
    end_hex(&hash, out + 3, 16);
}

/* The name is no part: it changes no result. */
void bd_openai_fingerprint(const bd_openai *openai, const bd_served *served, char out[24]) {
    kept_fingerprint *kept = &kept_fingerprints[served->digest[0] % KEPT_FINGERPRINTS];
    if (kept->serial != openai->serial ||
        memcmp(kept->digest, served->digest, sizeof kept->digest) != 0 ||
        memcmp(kept->files_digest, served->files_digest, sizeof kept->files_digest) != 0) {
        kept->serial = openai->serial;
        memcpy(kept->digest, served->digest, sizeof kept->digest);
        memcpy(kept->files_digest, served->files_digest, sizeof kept->files_digest);
        make_fingerprint(openai, served, kept->text);
    }
    memcpy(out, kept->text, sizeof kept->text);
}

/* The kernel is asked for the bytes of several ids at once: each call costs as much as making an id
 * does. No byte is given out twice, and each thread has its own. */
enum { RANDOM_BYTES = 512 };
static _Thread_local struct {
    uint8_t bytes[RANDOM_BYTES]; /* the last `left` are still to be given out */
    size_t left;
} unspent;

void bd_openai_random(uint8_t *out, size_t bytes) {
    BD_ASSERT(bytes <= RANDOM_BYTES);
    if (unspent.left < bytes) {
        unspent.left = 0;
        if (getrandom(unspent.bytes, RANDOM_BYTES, GRND_NONBLOCK) == RANDOM_BYTES)
            unspent.left = RANDOM_BYTES;
    }
    if (unspent.left >= bytes) {
        unspent.left -= bytes;
        memcpy(out, unspent.bytes + unspent.left, bytes);
        return;
    }
    uint64_t now = bd_now_us(); /* before the pool is filled: still distinct */
    memset(out, 0, bytes);
    memcpy(out, &now, bytes < sizeof now ? bytes : sizeof now);
}

void bd_openai_hex(const uint8_t *bytes, size_t digits, char *out) {
    for (size_t i = 0; i < digits; i++)
        out[i] = "0123456789abcdef"[bytes[i / 2] >> (i % 2 ? 0 : 4) & 15];
    out[digits] = '\0';
}

bool bd_openai_find_model(const bd_openai *openai, const bd_tenant *tenant, const bd_text *model,
                          const bd_served **out, bd_api_error *err) {
    if (!model->data) {
        *out = bd_router_served_count(openai->router) > 0 ? bd_router_served_at(openai->router, 0)
                                                          : NULL;
        if (*out && bd_tenant_allows(tenant, (*out)->name)) return true;
        *out = NULL;
        return bd_api_fail(err, BD_API_MODEL, "model", "There is no default model: name one.");
    }
    *out = bd_router_find(openai->router, model->data, model->bytes, tenant);
    if (*out) return true;
    bd_api_quoted quoted;
    return bd_api_fail(err, BD_API_MODEL, "model", "The model '%s' does not exist.",
                       bd_api_quote(&quoted, model->data, model->bytes));
}

static void write_card(const bd_served *served, bd_strbuf *out) {
    char hex[17];
    size_t bytes = strlen(served->name);
    struct sha256_ctx hash;
    sha256_init(&hash);
    sha256_update(&hash, bytes, (const uint8_t *)served->name);
    end_hex(&hash, hex, 16);
    bd_strbuf_puts(out, "{\"id\":");
    bd_strbuf_json_string(out, served->name, bytes);
    bd_strbuf_printf(
        out, ",\"object\":\"model\",\"created\":%" PRIu64 ",\"owned_by\":\"bitdelta\",\"root\":",
        served->created_s);
    bd_strbuf_json_string(out, served->name, bytes);
    bd_strbuf_printf(out, ",\"parent\":null,\"max_model_len\":%" PRIu32, served->max_model_len);
    bd_strbuf_printf(
        out,
        ",\"permission\":[{\"id\":\"modelperm-%s\",\"object\":\"model_permission\",\"created\":"
        "%" PRIu64 ",\"allow_create_engine\":false,\"allow_sampling\":true,\"allow_logprobs\":true,"
        "\"allow_search_indices\":false,\"allow_view\":true,\"allow_fine_tuning\":false,"
        "\"organization\":\"*\",\"group\":null,\"is_blocking\":false}]}",
        hex, served->created_s);
}

bool bd_openai_models(const bd_openai *openai, const bd_tenant *tenant, bd_strbuf *out,
                      bd_api_error *err) {
    uint32_t count = 0;
    const bd_served **list = bd_router_list(openai->router, tenant, &count);
    if (!list) return bd_out_of_memory(err);
    bd_strbuf_puts(out, "{\"object\":\"list\",\"data\":[");
    for (uint32_t i = 0; i < count; i++) {
        if (i > 0) bd_strbuf_puts(out, ",");
        write_card(list[i], out);
    }
    bd_strbuf_puts(out, "]}");
    bd_router_list_release(openai->router, list, count);
    return !out->failed || bd_out_of_memory(err);
}

bool bd_openai_model(const bd_openai *openai, const bd_tenant *tenant, const char *id,
                     size_t id_bytes, bd_strbuf *out, bd_api_error *err) {
    const bd_served *served = NULL;
    if (!bd_openai_find_model(openai, tenant, &(bd_text){id, id_bytes}, &served, err)) return false;
    write_card(served, out);
    bd_router_release(openai->router, served);
    return !out->failed || bd_out_of_memory(err);
}

typedef bool (*parse_fn)(const char *body, size_t bytes, uint32_t prompts_max,
                         bd_completion_request *out, bd_api_error *err);

/* NOLINTNEXTLINE(readability-function-size): those of the public functions, and how to parse */
static bd_completion *create(const bd_openai *openai, const bd_tenant *tenant, const char *body,
                             size_t bytes, uint64_t received_us, parse_fn parse,
                             bd_api_error *err) {
    bd_completion *completion = malloc(sizeof *completion);
    if (!completion) {
        bd_out_of_memory(err);
        return NULL;
    }
    memset(completion, 0, offsetof(bd_completion, job.internal.error));
    completion->openai = openai;
    completion->ask.tenant = tenant;
    completion->body_bytes = bytes;
    completion->created_s = bd_wall_seconds();
    const char *prefix = parse == bd_chat_request_parse ? "chatcmpl-" : "cmpl-";
    uint8_t random[16 + sizeof completion->random_seed];
    bd_openai_random(random, sizeof random);
    memcpy(completion->id, prefix, strlen(prefix));
    bd_openai_hex(random, 32, completion->id + strlen(prefix));
    memcpy(&completion->random_seed, random + 16, sizeof completion->random_seed);
    bool ok = parse(body, bytes, openai->prompts_max, &completion->request, err) &&
              bd_completion_prepare(completion, received_us, err);
    if (ok) return completion;
    bd_completion_destroy(completion);
    return NULL;
}

bd_completion *bd_completion_create(const bd_openai *openai, const bd_tenant *tenant,
                                    const char *body, size_t bytes, uint64_t received_us,
                                    bd_api_error *err) {
    return create(openai, tenant, body, bytes, received_us, bd_completion_request_parse, err);
}

bd_completion *bd_chat_completion_create(const bd_openai *openai, const bd_tenant *tenant,
                                         const char *body, size_t bytes, uint64_t received_us,
                                         bd_api_error *err) {
    return create(openai, tenant, body, bytes, received_us, bd_chat_request_parse, err);
}

bool bd_completion_is_stream(const bd_completion *completion) {
    return completion->request.stream;
}

bool bd_completion_failed(const bd_completion *completion) {
    return completion->failed;
}

void bd_completion_submit_quietly(bd_completion *completion, const bd_completion_sink *sink,
                                  void *ctx) {
    completion->sink = sink;
    completion->sink_ctx = ctx;
    completion->reserved = false; /* the router's from here on */
    bd_router_submit_quietly(completion->openai->router, &completion->job);
}

void bd_openai_wake(const bd_openai *openai) {
    bd_router_wake(openai->router);
}

void bd_openai_help(const bd_openai *openai) {
    bd_router_help(openai->router);
}

void bd_completion_submit(bd_completion *completion, const bd_completion_sink *sink, void *ctx) {
    const bd_openai *openai = completion->openai; /* the completion may be gone afterwards */
    bd_completion_submit_quietly(completion, sink, ctx);
    bd_openai_wake(openai);
}

void bd_completion_cancel(bd_completion *completion, bd_status reason) {
    int none = BD_OK;
    (void)atomic_compare_exchange_strong(&completion->cancel_reason, &none, (int)reason);
    bd_router_cancel(completion->openai->router, &completion->job);
}

bool bd_completion_reply(bd_completion *completion, bd_strbuf *out, bd_api_error *err) {
    if (completion->failed) {
        *err = completion->error;
        return false;
    }
    bd_completion_write_body(completion, out);
    return !out->failed || bd_out_of_memory(err);
}

static void choice_deinit(bd_choice *choice) {
    if (choice->detok.tokenizer) bd_detok_deinit(&choice->detok);
    bd_strbuf_deinit(&choice->text);
    bd_strbuf_deinit(&choice->token_ids);
    bd_logprob_lists_deinit(&choice->lists);
}

void bd_completion_destroy(bd_completion *completion) {
    if (!completion) return;
    if (completion->reserved) bd_router_unreserve(completion->openai->router, &completion->ask);
    bd_router_release(completion->openai->router, completion->served);
    for (uint32_t i = 0; completion->choices && i < completion->choice_count; i++)
        choice_deinit(&completion->choices[i]);
    for (uint32_t i = 0; completion->prompts && i < completion->request.prompt_count; i++) {
        bd_token_vec_deinit(&completion->prompts[i].ids);
        bd_strbuf_deinit(&completion->prompts[i].echo);
        free(completion->prompts[i].offsets);
        bd_logprob_lists_deinit(&completion->prompts[i].lists);
        bd_strbuf_deinit(&completion->prompts[i].logprobs);
    }
    free(completion->bias);
    bd_strbuf_deinit(&completion->rendered);
    bd_strbuf_deinit(&completion->head);
    bd_strbuf_deinit(&completion->piece);
    bd_strbuf_deinit(&completion->event);
    bd_completion_request_deinit(&completion->request);
    free(completion);
}
