/* ranks.c - see ranks.h. The parts' loaders write the parts' atomics; whenever one of them moved
 * on, its thread looks at all loads under the lock and brings the whole ones up to date. */
#include "ranks.h"

#include <pthread.h>
#include <stdlib.h>

typedef struct whole_load {
    struct whole_load *next;
    bd_load *load; /* the submitter's */
    bool joined;   /* its early overlay is out */
    bd_load parts[BD_COMM_RANKS_MAX];
    void **pages;        /* [count][page_count] */
    bd_load_host *hosts; /* [count] what the parts have of load->host; NULL: it has none */
} whole_load;

struct bd_loader_ranks {
    bd_loader_options options;
    bd_ranks_source source;
    bd_loader *loaders[BD_COMM_RANKS_MAX];
    pthread_mutex_t lock;
    whole_load *loads; /* guarded by lock */
    bd_metric *seconds;
};

/* ---- What the parts add up to ---- */

static bd_load_early *early_of(const bd_load *part) {
    return atomic_load_explicit(&((bd_load *)(uintptr_t)part)->early, memory_order_acquire);
}

/* Ranks read side by side, so that the sum of what they have read tells how far they are. */
static bd_load_early *add_early(const bd_loader_ranks *ranks, const whole_load *whole) {
    const uint32_t count = early_of(&whole->parts[0])->count;
    bd_load_early *sum = calloc(1, sizeof *sum + count * sizeof sum->end_bytes[0]);
    if (!sum) return NULL;
    sum->count = count;
    for (uint32_t r = 0; r < ranks->source.count; r++) {
        const bd_load_early *part = early_of(&whole->parts[r]);
        BD_ASSERT(part->count == count);
        sum->bytes += part->bytes;
        for (uint32_t i = 0; i < count; i++)
            sum->end_bytes[i] += part->end_bytes[i];
    }
    return sum;
}

/* Once every rank's part can be read early, the whole can. Without it it starts nothing early, no
 * worse. */
static void publish_early(const bd_loader_ranks *ranks, whole_load *whole) {
    bd_overlay *overlays[BD_COMM_RANKS_MAX];
    if (!whole->load->stream || whole->joined) return;
    for (uint32_t r = 0; r < ranks->source.count; r++) {
        if (!early_of(&whole->parts[r])) return;
        overlays[r] = early_of(&whole->parts[r])->overlay;
    }
    bd_load_early *early = add_early(ranks, whole);
    if (!early) return;
    ranks->source.join(overlays, ranks->source.count);
    whole->joined = true;
    early->overlay = overlays[0];
    atomic_store_explicit(&whole->load->early, early, memory_order_release);
}

static bool publish_ready(const bd_loader_ranks *ranks, const whole_load *whole) {
    uint32_t least = UINT32_MAX;
    for (uint32_t r = 0; r < ranks->source.count; r++) {
        bd_load *part = &((whole_load *)(uintptr_t)whole)->parts[r];
        const uint32_t ready = atomic_load_explicit(&part->ready_count, memory_order_acquire);
        if (ready < least) least = ready;
    }
    if (least == atomic_load(&whole->load->ready_count)) return false;
    atomic_store_explicit(&whole->load->ready_count, least, memory_order_release);
    return true;
}

/* true: every part has ended. A part that failed ends the others. */
static bool parts_over(const bd_loader_ranks *ranks, whole_load *whole) {
    uint32_t over = 0;
    bool failed = false;
    for (uint32_t r = 0; r < ranks->source.count; r++) {
        if (!bd_load_finished(&whole->parts[r])) continue;
        over++;
        failed = failed || whole->parts[r].status != BD_OK;
    }
    for (uint32_t r = 0; failed && r < ranks->source.count; r++)
        atomic_store(&whole->parts[r].cancel, true);
    return over == ranks->source.count;
}

/* ---- The end of a load ---- */

/* The part at fault: those that were stopped for its sake come after it. NULL: none. */
static const bd_load *part_at_fault(const bd_loader_ranks *ranks, const whole_load *whole) {
    const bd_load *found = NULL;
    for (uint32_t r = 0; r < ranks->source.count; r++) {
        const bd_load *part = &whole->parts[r];
        if (part->status == BD_OK) continue;
        if (!found || (found->status == BD_CANCELLED && part->status != BD_CANCELLED)) found = part;
    }
    return found;
}

/* Overlays that nobody has seen as one. */
static void drop_overlays(const bd_loader_ranks *ranks, whole_load *whole) {
    for (uint32_t r = 0; r < ranks->source.count; r++) {
        const bd_load *part = &whole->parts[r];
        bd_load_early *early = early_of(part);
        bd_overlay *overlay = early ? early->overlay : part->overlay;
        if (!overlay) continue;
        const bd_loader_source source = ranks->source.source_of(ranks->source.ctx, r);
        source.overlay_destroy(overlay);
    }
}

static void take_overlays(const bd_loader_ranks *ranks, whole_load *whole) {
    bd_overlay *overlays[BD_COMM_RANKS_MAX];
    for (uint32_t r = 0; r < ranks->source.count; r++)
        overlays[r] = whole->parts[r].overlay;
    if (!whole->joined) ranks->source.join(overlays, ranks->source.count);
    whole->load->overlay = overlays[0];
}

/* A copy that all ranks together have filled is the submitter's, with what each has of it. */
static void end_host(const bd_loader_ranks *ranks, whole_load *whole, bool right) {
    bd_load_host *host = whole->load->host;
    if (!host || host->filled) return;
    free(whole->hosts[0].claims);
    for (uint32_t r = 0; r < ranks->source.count; r++) {
        whole->hosts[r].claims = NULL;
        if (!right) bd_load_host_clear(&whole->hosts[r]);
    }
    if (!right) {
        free(whole->hosts);
        return;
    }
    host->parts = whole->hosts;
    host->part_count = ranks->source.count;
    host->filled = true;
}

static void end_load(const bd_loader_ranks *ranks, whole_load *whole) {
    bd_load *load = whole->load;
    const bd_load *fault = part_at_fault(ranks, whole);
    load->status = fault ? fault->status : BD_OK;
    if (fault) load->error = fault->error;
    load->started_us = UINT64_MAX;
    for (uint32_t r = 0; r < ranks->source.count; r++) {
        const bd_load *part = &whole->parts[r];
        if (part->started_us < load->started_us) load->started_us = part->started_us;
        if (part->finished_us > load->finished_us) load->finished_us = part->finished_us;
        if (part->pages_used > load->pages_used) load->pages_used = part->pages_used;
    }
    if (!fault)
        take_overlays(ranks, whole);
    else if (!whole->joined)
        drop_overlays(ranks, whole);
    for (uint32_t r = 0; r < ranks->source.count; r++)
        free(early_of(&whole->parts[r]));
    end_host(ranks, whole, !fault);
    if (!fault && ranks->seconds)
        bd_metric_observe(ranks->seconds, (double)(load->finished_us - load->started_us) * 1e-6);
    free(whole->pages);
    free(whole);
    atomic_store_explicit(&load->finished, true, memory_order_release);
}

/* A loader's thread: something moved on. */
static void look(void *ctx) {
    bd_loader_ranks *ranks = ctx;
    bool moved = false;
    pthread_mutex_lock(&ranks->lock);
    for (whole_load **link = &ranks->loads; *link;) {
        whole_load *whole = *link;
        publish_early(ranks, whole);
        if (publish_ready(ranks, whole)) moved = true;
        if (!parts_over(ranks, whole)) {
            link = &whole->next;
            continue;
        }
        *link = whole->next;
        end_load(ranks, whole);
        moved = true;
    }
    pthread_mutex_unlock(&ranks->lock);
    if (moved && ranks->options.notify) ranks->options.notify(ranks->options.notify_ctx);
}

/* ---- Submit ---- */

/* Of a copy in host memory all ranks take what they need, or each file is written by one of those
 * that read it. */
static bool share_host(const bd_loader_ranks *ranks, whole_load *whole) {
    const uint32_t count = ranks->source.count;
    bd_load_host *host = whole->load->host;
    if (!host) return true;
    if (host->filled) {
        BD_ASSERT(host->part_count == count);
        whole->hosts = host->parts;
        return true;
    }
    _Atomic bool *claims = calloc(whole->load->delta->shard_count, sizeof *claims);
    whole->hosts = calloc(count, sizeof *whole->hosts);
    if (!claims || !whole->hosts) {
        free(claims);
        free(whole->hosts);
        return false;
    }
    for (uint32_t r = 0; r < count; r++)
        whole->hosts[r] = (bd_load_host){.blocks = host->blocks,
                                         .block_bytes = host->block_bytes,
                                         .bytes = host->bytes,
                                         .claims = claims};
    return true;
}

static whole_load *make_whole(const bd_loader_ranks *ranks, bd_load *load) {
    const uint32_t count = ranks->source.count;
    whole_load *whole = calloc(1, sizeof *whole);
    if (!whole) return NULL;
    whole->load = load;
    whole->pages = calloc((size_t)count * load->page_count, sizeof *whole->pages);
    if (!whole->pages || !share_host(ranks, whole)) {
        free(whole->pages);
        free(whole);
        return NULL;
    }
    for (uint32_t r = 0; r < count; r++) {
        void **pages = whole->pages + (size_t)r * load->page_count;
        for (uint32_t i = 0; i < load->page_count; i++)
            pages[i] = ranks->source.page_on(ranks->source.ctx, r, load->pages[i]);
        whole->parts[r] = (bd_load){.delta = load->delta,
                                    .pages = pages,
                                    .page_count = load->page_count,
                                    .stream = load->stream,
                                    .host = whole->hosts ? &whole->hosts[r] : NULL,
                                    .whole = load};
    }
    return whole;
}

bd_status bd_loader_ranks_submit(bd_loader_ranks *ranks, bd_load *load, bd_error *err) {
    if (!load->delta || !load->pages || load->page_count == 0)
        return bd_fail(err, BD_E_ARGUMENT, "load", "a load needs a delta and pages");
    whole_load *whole = make_whole(ranks, load);
    if (!whole) return bd_fail(err, BD_E_MEMORY, load->delta->variant, "out of memory to load it");
    pthread_mutex_lock(&ranks->lock);
    whole->next = ranks->loads; /* under the lock: a part may end before the next is submitted */
    ranks->loads = whole;
    bd_status status = bd_loader_submit(ranks->loaders[0], &whole->parts[0], err);
    if (status != BD_OK) {
        ranks->loads = whole->next;
        end_host(ranks, whole, false);
        free(whole->pages);
        free(whole);
    }
    for (uint32_t r = 1; status == BD_OK && r < ranks->source.count; r++) {
        bd_load *part = &whole->parts[r];
        bd_error error;
        const bd_status taken = bd_loader_submit(ranks->loaders[r], part, &error);
        if (taken == BD_OK) continue; /* the part is its loader's now */
        part->status = taken;
        part->error = error;
        atomic_store_explicit(&part->finished, true, memory_order_release);
    }
    pthread_mutex_unlock(&ranks->lock);
    return status;
}

const bd_loader *bd_loader_ranks_first(const bd_loader_ranks *ranks) {
    return ranks->loaders[0];
}

/* ---- Create and destroy ---- */

bd_status bd_loader_ranks_create(const bd_loader_options *options, const bd_ranks_source *source,
                                 bd_loader_ranks **out, bd_error *err) {
    *out = NULL;
    BD_ASSERT(source->count >= 1 && source->count <= BD_COMM_RANKS_MAX);
    bd_loader_ranks *ranks = calloc(1, sizeof *ranks);
    if (!ranks) return bd_fail(err, BD_E_MEMORY, "loader", "out of memory for the loaders");
    ranks->options = *options;
    ranks->source = *source;
    pthread_mutex_init(&ranks->lock, NULL);
    bd_loader_options own = *options;
    own.notify = look;
    own.notify_ctx = ranks;
    bd_status status = BD_OK;
    for (own.rank = 0; own.rank < source->count && status == BD_OK; own.rank++) {
        const bd_loader_source of_rank = source->source_of(source->ctx, own.rank);
        status = bd_loader_create_with(&own, &of_rank, &ranks->loaders[own.rank], err);
    }
    if (status != BD_OK) {
        bd_loader_ranks_destroy(ranks);
        return status;
    }
    ranks->seconds = bd_loader_seconds(options->metrics);
    *out = ranks;
    return BD_OK;
}

void bd_loader_ranks_destroy(bd_loader_ranks *ranks) {
    if (!ranks) return;
    for (uint32_t r = 0; r < ranks->source.count; r++)
        bd_loader_destroy(ranks->loaders[r]);
    BD_ASSERT(!ranks->loads);
    pthread_mutex_destroy(&ranks->lock);
    free(ranks);
}
