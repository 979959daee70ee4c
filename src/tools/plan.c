/* plan.c - see plan.h. */
#include "bitdelta/tools/plan.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/strbuf.h"
#include "bitdelta/delta/delta.h"
#include "bitdelta/model/model.h"
#include "bitdelta/model/overlay.h"

enum { KV_BLOCK_TOKENS = 16 };

typedef struct deltas { /* what the manifests of a directory add up to */
    bool looked;        /* there is such a directory */
    uint32_t count, unreadable, extra_rows;
    uint64_t pages, pages_max;     /* of all of them, of the largest */
    bd_strbuf faults, faults_json; /* of those that cannot be read: lines; elements of an array */
} deltas;

typedef struct planned {
    const bd_backend_ops *ops;
    bd_model_config config, rank; /* of the whole model, of the first rank */
    bd_model_options options;
    bd_memory_plan plan;
    deltas found;
    uint64_t page_bytes;
    uint32_t slot_pages; /* pages that --slots counts as one variant */
    bd_status fits;
    bd_error refusal;
} planned;

static void add_fault(deltas *found, const char *dir, const bd_error *err) {
    bd_strbuf_printf(&found->faults, "  %s: %s\n", dir, err->message);
    bd_strbuf_puts(&found->faults_json, found->unreadable++ ? ",{\"path\":" : "{\"path\":");
    bd_strbuf_json_string(&found->faults_json, dir, strlen(dir));
    bd_strbuf_puts(&found->faults_json, ",\"failure\":");
    bd_strbuf_json_string(&found->faults_json, err->message, strlen(err->message));
    bd_strbuf_puts(&found->faults_json, "}");
}

static void add_delta(planned *p, const char *dir) {
    bd_delta delta;
    bd_model_config own;
    bd_error fault;
    if (bd_delta_open(dir, &delta, &fault) != BD_OK) {
        add_fault(&p->found, dir, &fault);
        return;
    }
    const uint64_t pages = bd_overlay_pages_of(&p->rank, p->ops, &delta);
    bd_delta_close(&delta);
    p->found.count++;
    p->found.pages += pages;
    if (pages > p->found.pages_max) p->found.pages_max = pages;
    if (bd_model_config_read_variant(dir, &p->config, &own, NULL) == BD_OK &&
        own.vocab > p->config.vocab)
        p->found.extra_rows = BD_EXTRA_VOCAB_MAX;
}

static bd_status read_deltas(planned *p, const char *deltas_dir, bd_error *err) {
    if (!deltas_dir) return BD_OK;
    DIR *handle = opendir(deltas_dir);
    if (!handle)
        return bd_fail_errno(err, BD_E_NOT_FOUND, deltas_dir, errno,
                             "deltas: the directory %s cannot be read", deltas_dir);
    p->found.looked = true;
    const bd_status parent = bd_delta_check_parent(deltas_dir, err);
    for (struct dirent *entry; parent == BD_OK && (entry = readdir(handle));) {
        char dir[4096];
        bd_error fault;
        const bd_status status = bd_delta_find(deltas_dir, entry->d_name, dir, sizeof dir, &fault);
        if (status == BD_OK) add_delta(p, dir);
        if (status != BD_OK && status != BD_E_NOT_FOUND)
            add_fault(&p->found, dir[0] ? dir : deltas_dir, &fault);
    }
    closedir(handle);
    return parent;
}

static double mib(uint64_t bytes) {
    return (double)bytes / (1024.0 * 1024.0);
}

static void write_text(const planned *p, bd_strbuf *b) {
    const bd_memory_plan *m = &p->plan;
    const uint32_t slots = p->options.delta_slots;
    const uint64_t pages = p->page_bytes ? m->deltas / p->page_bytes : 0;
    const uint64_t kv_tokens = (uint64_t)m->kv_blocks * KV_BLOCK_TOKENS;
    bd_strbuf_printf(b, "backend %s, %u layer%s, vocabulary %u, context %u\n", p->ops->name,
                     p->config.layers, bd_plural(p->config.layers), p->config.vocab,
                     p->options.max_model_len ? p->options.max_model_len : p->config.max_positions);
    if (p->options.rank_count > 1)
        bd_strbuf_printf(b, "%u ranks, each with\n", p->options.rank_count);
    bd_strbuf_printf(b, "%-14s %12s\n", "", "MiB");
    bd_strbuf_printf(b, "%-14s %12.1f\n", "base weights", mib(m->weights));
    bd_strbuf_printf(b, "%-14s %12.1f  steps of %u row%s, %u sequence%s\n", "workspace",
                     mib(m->workspace), p->options.rows_max, bd_plural(p->options.rows_max),
                     p->options.seqs_max, bd_plural(p->options.seqs_max));
    bd_strbuf_printf(b, "%-14s %12.1f  %u row%s of %u\n", "logits", mib(m->logits),
                     p->options.logits_rows_max, bd_plural(p->options.logits_rows_max),
                     p->rank.vocab + p->found.extra_rows);
    const bool small = p->page_bytes < 1u << 20;
    bd_strbuf_printf(
        b, "%-14s %12.1f  %u slot%s = %llu page%s of %.1f %s, %u a one-plane variant\n",
        "delta pages", mib(m->deltas), slots, bd_plural(slots), (unsigned long long)pages,
        bd_plural(pages), mib(p->page_bytes) * (small ? 1024.0 : 1.0), small ? "KiB" : "MiB",
        p->slot_pages);
    const bool least = m->available == 0 && p->options.kv_tokens == 0;
    bd_strbuf_printf(b, "%-14s %12.1f  %llu tokens%s\n", "KV cache", mib(m->kv),
                     (unsigned long long)kv_tokens, least ? " or more, as memory is left" : "");
    bd_strbuf_printf(b, "%-14s %12.1f\n", "total", mib(m->total));
    if (p->options.rank_count > 1)
        bd_strbuf_printf(b, "%-14s %12.1f  at most: the last may have less of the vocabulary\n",
                         "all ranks", mib(m->total * p->options.rank_count));
    if (m->kept)
        bd_strbuf_printf(b, "%-14s %12.1f  of the device, for its context and recordings\n", "kept",
                         mib(m->kept));
    if (m->available) {
        bd_strbuf_printf(b, "%-14s %12.1f\n", "available", mib(m->available));
        bd_strbuf_printf(b, "%-14s %12.1f\n", "remains", mib(m->available) - mib(m->total));
    } else {
        bd_strbuf_puts(b, "available      unknown: no device answers; give --device-bytes\n");
    }
    if (p->found.count || p->found.unreadable)
        bd_strbuf_printf(b, "deltas found: %u, %llu page%s together, the largest %llu%s\n",
                         p->found.count, (unsigned long long)p->found.pages,
                         bd_plural(p->found.pages), (unsigned long long)p->found.pages_max,
                         p->found.unreadable ? "; these cannot be read:" : "");
    else if (p->found.looked)
        bd_strbuf_puts(b, "deltas found: none\n");
    if (p->found.unreadable) bd_strbuf_append(b, p->found.faults.data, p->found.faults.len_bytes);
}

static void write_json(const planned *p, bd_strbuf *b) {
    const bd_memory_plan *m = &p->plan;
    const struct {
        const char *name;
        uint64_t value;
    } numbers[] = {
        {"weights_bytes", m->weights},
        {"workspace_bytes", m->workspace},
        {"logits_bytes", m->logits},
        {"delta_bytes", m->deltas},
        {"kv_bytes", m->kv},
        {"total_bytes", m->total},
        {"all_ranks_bytes", m->total * (p->options.rank_count ? p->options.rank_count : 1)},
        {"kept_bytes", m->kept},
        {"available_bytes", m->available},
        {"page_bytes", p->page_bytes},
        {"tensor_parallel", p->options.rank_count ? p->options.rank_count : 1},
        {"slots", p->options.delta_slots},
        {"pages_per_slot", p->slot_pages},
        {"deltas", p->found.count},
        {"delta_pages", p->found.pages},
        {"deltas_unreadable", p->found.unreadable},
        {"kv_tokens", (uint64_t)m->kv_blocks * KV_BLOCK_TOKENS}};
    bd_strbuf_printf(b, "{\"backend\":\"%s\",\"fits\":%s", p->ops->name,
                     p->fits == BD_OK ? "true" : "false");
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        bd_strbuf_printf(b, ",\"%s\":%llu", numbers[i].name, (unsigned long long)numbers[i].value);
    bd_strbuf_puts(b, ",\"unreadable\":[");
    if (p->found.unreadable)
        bd_strbuf_append(b, p->found.faults_json.data, p->found.faults_json.len_bytes);
    bd_strbuf_puts(b, "]}\n");
}

static bd_status make_plan(const bd_plan_request *r, const bd_backend_ops *ops, planned *p,
                           bd_error *err) {
    *p = (planned){.ops = ops, .fits = BD_OK};
    bd_strbuf_init(&p->found.faults, 0);
    bd_strbuf_init(&p->found.faults_json, 0);
    if (!p->ops)
        return bd_fail(err, BD_E_UNSUPPORTED, "backend", "this program was built without CUDA");
    bd_status s = bd_model_config_read(r->base_dir, &p->config, err);
    if (s == BD_OK) s = bd_model_rank_config(&p->config, 0, r->rank_count, &p->rank, err);
    if (s == BD_OK) s = read_deltas(p, r->deltas_dir, err);
    if (s != BD_OK) return s;
    p->options =
        (bd_model_options){.dir = r->base_dir,
                           .ops = p->ops,
                           .rank_count = r->rank_count,
                           .kernels = r->kernels,
                           .dtype = r->dtype,
                           .device_bytes = r->device_bytes,
                           .max_model_len = r->max_model_len,
                           .rows_max = r->rows_max ? r->rows_max : ops->rows_default,
                           .seqs_max = r->seqs_max,
                           .logits_rows_max = r->logits_rows_max,
                           .kv_block_tokens = KV_BLOCK_TOKENS,
                           .kv_tokens = r->kv_tokens,
                           .rope_tables_max = bd_model_rope_tables(p->found.count, r->slots),
                           .delta_slots = r->slots         ? r->slots
                                          : p->found.count ? p->found.count
                                                           : 1,
                           .extra_vocab_max = p->found.extra_rows};
    p->page_bytes = bd_overlay_page_bytes(&p->rank, p->ops);
    p->slot_pages = bd_overlay_pages_per_variant(&p->rank, p->ops, 1, true);
    do {
        p->fits = bd_model_plan(&p->options, &p->config, &p->plan, &p->refusal);
        /* As serve does: slots that nobody asked for give way. */
    } while (p->fits == BD_E_LIMIT && !r->slots && p->options.delta_slots-- > 1);
    if (p->options.delta_slots == 0) p->options.delta_slots = 1;
    return p->fits == BD_OK || p->fits == BD_E_LIMIT ? BD_OK : p->fits;
}

static bd_status write_plan(const planned *p, bool json, FILE *out, bd_error *err) {
    bd_status s = BD_OK;
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    if (json)
        write_json(p, &text);
    else
        write_text(p, &text);
    if (text.failed || p->found.faults.failed || p->found.faults_json.failed)
        s = bd_fail(err, BD_E_MEMORY, "plan", "out of memory");
    else if (fputs(text.data, out) == EOF || fflush(out) != 0)
        s = bd_fail(err, BD_E_IO, NULL, "cannot write the plan");
    bd_strbuf_deinit(&text);
    return s;
}

static void free_plan(planned *p) {
    bd_strbuf_deinit(&p->found.faults);
    bd_strbuf_deinit(&p->found.faults_json);
}

bd_status bd_plan_run(const bd_plan_request *request, FILE *out, bd_error *err) {
    planned p;
    bd_status s = make_plan(request, bd_backend_table(request->backend), &p, err);
    /* auto: a backend that can do what is asked for. */
    if (s == BD_E_UNSUPPORTED && request->backend == BD_BACKEND_AUTO) {
        free_plan(&p);
        if (err) bd_error_clear(err);
        s = make_plan(request, bd_backend_cpu_ops(), &p, err);
    }
    if (s != BD_OK) {
        if (err && err->status == BD_OK) *err = p.refusal;
    } else if ((s = write_plan(&p, request->json, out, err)) == BD_OK) {
        s = p.fits;
        if (s != BD_OK && err) *err = p.refusal;
    }
    free_plan(&p);
    return s;
}
