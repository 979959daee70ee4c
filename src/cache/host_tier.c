/* host_tier.c - blocks of host memory and the thread that gets it; see host_tier.h. The free list
 * has room for all blocks from the start; the thread adds to the steps under the lock, the cache's
 * thread takes what is new from there. */
#include "host_tier.h"

#include <inttypes.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bitdelta/base/log.h"

#define BLOCK_BYTES     UINT64_C(262144)
#define BLOCK_BYTES_MAX (UINT64_C(8) << 20)
#define STEP_BYTES      (UINT64_C(1) << 30)

typedef struct host_step {
    uint8_t *memory;
    uint64_t bytes;
} host_step;

struct bd_host_tier {
    bd_host_options options;
    pthread_t thread;
    _Atomic bool stop;
    host_step *steps;
    uint32_t step_cap;
    _Atomic uint32_t step_count; /* complete ones; written by the thread */
    uint32_t steps_seen;         /* the cache's thread from here on */
    void **free_blocks;
    uint64_t free_count, total_blocks;
};

static void *system_alloc(void *ctx, uint64_t bytes) {
    (void)ctx;
    void *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

static void system_free(void *ctx, void *memory, uint64_t bytes) {
    (void)ctx;
    munmap(memory, bytes);
}

static void *get_steps(void *arg) {
    bd_host_tier *tier = arg;
    pthread_setname_np(pthread_self(), "bd-host");
    uint64_t left = tier->options.bytes;
    for (uint32_t i = 0; i < tier->step_cap && !atomic_load(&tier->stop); i++) {
        const uint64_t bytes = left < tier->options.step_bytes ? left : tier->options.step_bytes;
        void *memory = tier->options.memory.alloc(tier->options.memory.ctx, bytes);
        if (!memory) {
            bd_log(BD_LOG_WARN, "cache",
                   "host memory for deltas ends at bytes=%" PRIu64 " of %" PRIu64
                   ": no more is to be had",
                   tier->options.bytes - left, tier->options.bytes);
            break;
        }
        tier->steps[i] = (host_step){memory, bytes};
        atomic_store_explicit(&tier->step_count, i + 1, memory_order_release);
        left -= bytes;
    }
    return NULL;
}

uint64_t bd_host_block_bytes(uint64_t page_bytes, uint64_t host_bytes) {
    uint64_t bytes = BLOCK_BYTES;
    while (bytes < BLOCK_BYTES_MAX && 2 * bytes <= page_bytes / 2 && 2 * bytes <= host_bytes)
        bytes *= 2;
    return bytes;
}

static void fill_defaults(bd_host_options *options) {
    if (options->block_bytes == 0) options->block_bytes = BLOCK_BYTES;
    if (options->step_bytes == 0) options->step_bytes = STEP_BYTES;
    options->step_bytes -= options->step_bytes % options->block_bytes;
    options->bytes -= options->bytes % options->block_bytes;
    if (options->memory.alloc && options->memory.free) return;
    options->memory = (bd_host_memory){.alloc = system_alloc, .free = system_free};
}

bd_status bd_host_tier_create(const bd_host_options *options, bd_host_tier **out, bd_error *err) {
    *out = NULL;
    bd_host_tier *tier = calloc(1, sizeof *tier);
    if (!tier) goto fail_memory;
    tier->options = *options;
    fill_defaults(&tier->options);
    const uint64_t blocks = tier->options.bytes / tier->options.block_bytes;
    const uint64_t step = tier->options.step_bytes;
    const uint64_t steps = tier->options.bytes / step + (tier->options.bytes % step != 0);
    if (blocks == 0 || blocks > UINT32_MAX) {
        bd_fail(err, BD_E_ARGUMENT, "cache.host_bytes",
                "%" PRIu64 " bytes of host memory are not between one and 2^32 blocks of %" PRIu64
                " bytes",
                options->bytes, tier->options.block_bytes);
        free(tier);
        return BD_E_ARGUMENT;
    }
    const long pages = sysconf(_SC_PHYS_PAGES), page_bytes = sysconf(_SC_PAGESIZE);
    const uint64_t machine = pages > 0 ? (uint64_t)pages * (uint64_t)page_bytes : UINT64_MAX;
    if (tier->options.bytes > machine)
        bd_log(BD_LOG_WARN, "cache",
               "host_bytes=%" PRIu64 " is more than the %" PRIu64 " bytes of this machine's memory",
               tier->options.bytes, machine);
    tier->step_cap = (uint32_t)steps;
    tier->steps = calloc(steps, sizeof *tier->steps);
    tier->free_blocks = calloc(blocks, sizeof(void *));
    if (!tier->steps || !tier->free_blocks) goto fail_memory;
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int rc = pthread_create(&tier->thread, NULL, get_steps, tier);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0) {
        bd_fail_errno(err, BD_E_MEMORY, "cache.host_bytes", rc, "no thread to get host memory");
        goto fail;
    }
    *out = tier;
    return BD_OK;
fail_memory:
    bd_fail(err, BD_E_MEMORY, "cache.host_bytes", "out of memory for the lists of host memory");
fail:
    if (tier) {
        free(tier->steps);
        free(tier->free_blocks);
    }
    free(tier);
    return BD_E_MEMORY;
}

void bd_host_tier_destroy(bd_host_tier *tier) {
    if (!tier) return;
    atomic_store(&tier->stop, true);
    pthread_join(tier->thread, NULL);
    BD_ASSERT(tier->free_count == tier->total_blocks);
    for (uint32_t i = 0; i < atomic_load(&tier->step_count); i++)
        tier->options.memory.free(tier->options.memory.ctx, tier->steps[i].memory,
                                  tier->steps[i].bytes);
    free(tier->steps);
    free(tier->free_blocks);
    free(tier);
}

/* Blocks of steps that came since the last look. */
static void look(bd_host_tier *tier) {
    const uint32_t count = atomic_load_explicit(&tier->step_count, memory_order_acquire);
    for (; tier->steps_seen < count; tier->steps_seen++) {
        const host_step *step = &tier->steps[tier->steps_seen];
        for (uint64_t at = 0; at < step->bytes; at += tier->options.block_bytes)
            tier->free_blocks[tier->free_count++] = step->memory + at;
        tier->total_blocks += step->bytes / tier->options.block_bytes;
    }
}

uint64_t bd_host_tier_used_bytes(const bd_host_tier *tier) {
    return (tier->total_blocks - tier->free_count) * tier->options.block_bytes;
}

uint64_t bd_host_tier_total_bytes(bd_host_tier *tier) {
    look(tier);
    return tier->total_blocks * tier->options.block_bytes;
}

static uint64_t blocks_for(const bd_host_tier *tier, uint64_t bytes) {
    return bytes / tier->options.block_bytes + (bytes % tier->options.block_bytes != 0);
}

uint64_t bd_host_tier_need_bytes(const bd_host_tier *tier, uint64_t bytes) {
    return blocks_for(tier, bytes) * tier->options.block_bytes;
}

uint64_t bd_host_tier_free_bytes(bd_host_tier *tier) {
    look(tier);
    return tier->free_count * tier->options.block_bytes;
}

bd_load_host *bd_host_tier_take(bd_host_tier *tier, uint64_t bytes) {
    look(tier);
    const uint64_t count = blocks_for(tier, bytes);
    if (count == 0 || count > tier->free_count) return NULL;
    bd_load_host *entry = calloc(1, sizeof *entry + count * sizeof(void *));
    if (!entry) return NULL;
    void **blocks = (void **)(entry + 1);
    for (uint64_t i = 0; i < count; i++)
        blocks[i] = tier->free_blocks[--tier->free_count];
    entry->blocks = blocks;
    entry->block_bytes = tier->options.block_bytes;
    entry->bytes = bytes;
    return entry;
}

void bd_host_tier_give(bd_host_tier *tier, bd_load_host *entry) {
    if (!entry) return;
    bd_load_host_clear(entry);
    for (uint64_t i = 0; i < blocks_for(tier, entry->bytes); i++)
        tier->free_blocks[tier->free_count++] = entry->blocks[i];
    free(entry);
}
