/* variant.c - a variant's directory opened for serving: its delta.json, what it says of base and
 * name, and the files beside it that differ from the base's. The shards are the loader's. Threads:
 * any; reads files. */
#include <nettle/sha2.h>
#include <nettle/version.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "bitdelta/base/file.h"
#include "bitdelta/hf/checkpoint.h"
#include "bitdelta/tokenizer/chat_template.h"
#include "internal.h"

enum { PATH_BYTES = 4096 };

typedef struct side_file {
    const char *name;
    size_t bytes_max; /* what whoever reads it takes */
} side_file;

/* All that is read of a variant beside delta.json and the shards, which delta.json has sums of. */
static const side_file side_files[] = {{"config.json", 4 << 20},
                                       {"generation_config.json", 4 << 20},
                                       {"tokenizer.json", BD_TOKENIZER_FILE_BYTES_MAX},
                                       {"tokenizer_config.json", 16 << 20},
                                       {"chat_template.jinja", BD_CHAT_TEMPLATE_BYTES_MAX},
                                       {"chat_template.json", 16 << 20}};
enum { SIDE_FILES = sizeof side_files / sizeof side_files[0] };

void bd_queue_take_config(bd_router_queue *queue, const bd_model_config *config) {
    bd_served *served = &queue->served;
    uint32_t limit = bd_model_max_len(queue->router->options.model);
    queue->positions = config->max_positions;
    served->max_model_len = config->max_positions < limit ? config->max_positions : limit;
    served->vocab = config->vocab;
    served->eos_count = config->eos_count;
    memcpy(served->eos_ids, config->eos_ids, sizeof served->eos_ids);
}

/* Each file's number and size, then its bytes. One that is there and cannot be read is found out
 * now, not by the first chat. */
bd_status bd_queue_digest_files(bd_router_queue *queue, bd_error *err) {
    struct sha256_ctx hash;
    sha256_init(&hash);
    for (uint8_t i = 0; i < SIDE_FILES; i++) {
        const side_file *file = &side_files[i];
        char path[PATH_BYTES], *data = NULL;
        size_t bytes = 0;
        bd_status status = bd_path_join(path, sizeof path, queue->dir, file->name, err);
        if (status != BD_OK) return status;
        if (!bd_file_exists(path)) continue;
        status = bd_file_read(path, file->bytes_max, &data, &bytes, err);
        if (status != BD_OK) return status;
        sha256_update(&hash, sizeof i, &i);
        sha256_update(&hash, sizeof bytes, (const uint8_t *)&bytes);
        sha256_update(&hash, bytes, (const uint8_t *)data);
        free(data);
    }
#if NETTLE_VERSION_MAJOR >= 4
    sha256_digest(&hash, queue->served.files_digest);
#else
    sha256_digest(&hash, sizeof queue->served.files_digest, queue->served.files_digest);
#endif
    return BD_OK;
}

static uint64_t mix(uint64_t hash, uint64_t word) {
    hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
    return hash ^ hash >> 29;
}

/* The change time counts too: it cannot be set back by who copies a file with its times. */
static uint64_t mix_file(uint64_t hash, const char *dir, const char *name) {
    char path[PATH_BYTES];
    struct stat info;
    if (bd_path_join(path, sizeof path, dir, name, NULL) != BD_OK || stat(path, &info) != 0)
        return mix(hash, 0);
    const uint64_t words[] = {(uint64_t)info.st_dev,          (uint64_t)info.st_ino,
                              (uint64_t)info.st_size,         (uint64_t)info.st_mtim.tv_sec,
                              (uint64_t)info.st_mtim.tv_nsec, (uint64_t)info.st_ctim.tv_sec,
                              (uint64_t)info.st_ctim.tv_nsec};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++)
        hash = mix(hash, words[i] + 1);
    return hash;
}

bd_variant_mark bd_variant_mark_of(const char *dir) {
    bd_variant_mark mark = {.manifest = mix_file(1, dir, "delta.json"), .side_files = 1};
    for (size_t i = 0; i < SIDE_FILES; i++)
        mark.side_files = mix_file(mark.side_files, dir, side_files[i].name);
    return mark;
}

static bd_status load_tokenizer(bd_router *router, bd_router_queue *queue, bd_error *err) {
    char path[PATH_BYTES];
    queue->served.tokenizer = router->options.tokenizer;
    bd_status status = bd_path_join(path, sizeof path, queue->dir, "tokenizer.json", err);
    if (status != BD_OK) return status;
    if (!bd_file_exists(path)) return BD_OK; /* the base's */
    status = bd_tokenizer_load(&queue->tokenizer, path, err);
    if (status == BD_OK) queue->served.tokenizer = queue->tokenizer;
    return status;
}

/* Here already and not only when it is loaded, so that what cannot be served is not listed. */
static bd_status check_base(const bd_router *router, const bd_delta *delta, bd_error *err) {
    const char *fingerprint = bd_model_fingerprint(router->options.model);
    if (strcmp(delta->base_fingerprint, fingerprint) == 0) return BD_OK;
    const int digits = bd_fingerprint_digits(delta->base_fingerprint, fingerprint);
    return bd_fail(
        err, BD_E_MISMATCH, delta->dir,
        "%s: variant %s was made for base %s with fingerprint %.*s, the base served here "
        "has %.*s",
        delta->dir, delta->variant, delta->base, digits, delta->base_fingerprint, digits,
        fingerprint);
}

/* Logs and metrics of the cache use the served name too. */
static bd_status give_name(bd_router_queue *queue, bd_delta *delta, bd_error *err) {
    const char *name = queue->given_name ? queue->given_name : delta->variant;
    const char *fault = bd_variant_name_fault(name);
    if (fault)
        return bd_fail(err, BD_E_ARGUMENT, queue->dir, "%s: the name \"%.128s\" %s", queue->dir,
                       name, fault);
    memmove(queue->served.name, name, strlen(name) + 1);
    memcpy(delta->variant, queue->served.name, sizeof delta->variant);
    memcpy(queue->served.digest, delta->digest, sizeof queue->served.digest);
    return BD_OK;
}

/* Everything of the directory but the delta itself. */
static bd_status read_side_files(bd_router *router, bd_router_queue *queue, bd_error *err) {
    bd_model_config config;
    bd_status status = bd_model_config_read_variant(
        queue->dir, bd_model_config_of(router->options.model), &config, err);
    if (status != BD_OK) return status;
    uint32_t most = bd_model_logits_width(router->options.model);
    if (config.vocab > most)
        return bd_fail(
            err, BD_E_UNSUPPORTED, "vocab_size",
            "%s: vocab_size %u, there is room for %u; a server that starts with the variant "
            "there makes room for it",
            queue->dir, config.vocab, most);
    bd_queue_take_config(queue, &config);
    status = bd_queue_digest_files(queue, err);
    return status == BD_OK ? load_tokenizer(router, queue, err) : status;
}

bd_status bd_variant_open(bd_router *router, const char *given_name, const char *dir,
                          bd_router_queue **out, bd_delta *delta, bd_error *err) {
    *out = NULL;
    *delta = (bd_delta){.storage = NULL};
    bd_router_queue *queue = bd_queue_create(router, given_name, dir);
    if (!queue) return bd_fail(err, BD_E_MEMORY, dir, "out of memory for the variant's entry");
    queue->mark = bd_variant_mark_of(dir); /* first: what changes meanwhile is seen next time */
    bd_status status = bd_delta_open(dir, delta, err);
    if (status == BD_OK) status = check_base(router, delta, err);
    if (status == BD_OK) status = give_name(queue, delta, err);
    if (status == BD_OK) status = read_side_files(router, queue, err);
    if (status == BD_OK) {
        *out = queue;
        return BD_OK;
    }
    bd_delta_close(delta);
    bd_queue_free(queue);
    return status;
}
