/* loads.c - those who wait for a variant to be resident without a request: prefetching and the
 * order to load. A wait asks for pages until it has them or gives up, then waits for the load as a
 * request does; but a lease that comes before the load has ended says nothing of how it will end:
 * it is given back, and the wait asks again. bd-sched, but for begin. */
#include <stdlib.h>

#include "bitdelta/base/clock.h"
#include "internal.h"

enum { GIVE_UP_US = 60000000 };

static void unlink_wait(bd_load_wait *wait) {
    bd_router *router = wait->router;
    if (wait->prev)
        wait->prev->next = wait->next;
    else
        router->loads_first = wait->next;
    if (wait->next) wait->next->prev = wait->prev;
    if (!wait->waiting) router->loads_asking--;
}

static void end_wait(bd_load_wait *wait, bd_status status, const bd_error *err) {
    bd_router *router = wait->router;
    const bd_served *served = wait->served;
    if (wait->done) wait->done(wait, status, err);
    free(wait);
    bd_router_release(router, served);
}

static void on_ready(bd_cache_waiter *waiter, bd_status status, const bd_lease *lease,
                     const bd_error *err) {
    bd_load_wait *wait = (bd_load_wait *)(void *)((char *)waiter - offsetof(bd_load_wait, waiter));
    if (status == BD_OK) {
        const bool early = lease->load != NULL;
        const uint64_t now_us = bd_now_us();
        bd_lease own = *lease;
        bd_cache_release(wait->router->options.cache, &own, now_us);
        if (early) {
            wait->begun = true;
            wait->waiting = false;
            wait->ask_us = now_us + BD_ROUTER_ASK_AGAIN_US;
            wait->router->loads_asking++;
            return;
        }
    }
    unlink_wait(wait);
    end_wait(wait, status == BD_OK ? BD_OK : BD_E_VARIANT, err);
}

/* false: it is over. */
static bool ask(bd_load_wait *wait, uint64_t now_us) {
    bd_cache *cache = wait->router->options.cache;
    bd_variant *variant = wait->served->variant;
    bd_lease lease;
    bd_error err;
    bd_status status = BD_BUSY;
    bd_variant_info info;
    bd_cache_info(cache, variant, now_us, &info);
    if (wait->begun && (info.state == BD_VARIANT_ABSENT || info.state == BD_VARIANT_DRAINING)) {
        (void)bd_fail(&err, BD_E_VARIANT, wait->served->name,
                      "the variant was unloaded while it was loading");
        unlink_wait(wait);
        end_wait(wait, BD_E_VARIANT, &err);
        return false;
    }
    bool room =
        !wait->while_free || info.state != BD_VARIANT_ABSENT || bd_cache_pages_free(cache) > 0;
    if (room) {
        wait->waiter.ready = on_ready;
        status = bd_cache_acquire(cache, variant, now_us, &lease, &wait->waiter, &err);
    } else {
        (void)bd_fail(&err, BD_BUSY, wait->served->name, "no pages of delta memory are free");
    }
    wait->ask_us = now_us + BD_ROUTER_ASK_AGAIN_US;
    if (status == BD_AGAIN) {
        wait->waiting = true;
        wait->router->loads_asking--;
        return true;
    }
    if (status == BD_BUSY && room && now_us < wait->give_up_us) return true;
    if (status == BD_OK) {
        const bool early = lease.load != NULL;
        bd_cache_release(cache, &lease, now_us);
        wait->begun |= early;
        if (early) return true;
    }
    unlink_wait(wait);
    end_wait(wait, status, status == BD_OK ? NULL : &err);
    return false;
}

static void run_begin(bd_call *call, bd_engine *engine) {
    bd_load_wait *wait = (bd_load_wait *)call;
    bd_router *router = wait->router;
    (void)engine;
    if (router->closed) {
        end_wait(wait, router->closed_error.status, &router->closed_error);
        return;
    }
    uint64_t now_us = bd_now_us();
    wait->give_up_us = now_us + GIVE_UP_US;
    wait->next = router->loads_first;
    if (router->loads_first) router->loads_first->prev = wait;
    router->loads_first = wait;
    router->loads_asking++;
    (void)ask(wait, now_us);
}

bd_status bd_load_begin(bd_router *router, const bd_served *served, bool while_free,
                        void (*done)(bd_load_wait *wait, bd_status status, const bd_error *err),
                        bd_change *change) {
    bd_load_wait *wait = calloc(1, sizeof *wait);
    if (!wait) return BD_E_MEMORY;
    atomic_fetch_add(&bd_queue_of(served)->holders, 1);
    *wait = (bd_load_wait){.router = router,
                           .served = served,
                           .while_free = while_free,
                           .done = done,
                           .change = change};
    wait->call.run = run_begin;
    bd_engine_post(router->options.engine, &wait->call);
    return BD_OK;
}

void bd_loads_before_step(bd_router *router, uint64_t now_us, bool cache_changed) {
    if (router->loads_asking == 0) return;
    bd_load_wait *next;
    for (bd_load_wait *wait = router->loads_first; wait; wait = next) {
        next = wait->next;
        if (!wait->waiting && (cache_changed || now_us >= wait->ask_us)) (void)ask(wait, now_us);
    }
}

void bd_loads_close(bd_router *router, const bd_error *err) {
    while (router->loads_first) {
        bd_load_wait *wait = router->loads_first;
        if (wait->waiting) bd_cache_wait_cancel(router->options.cache, &wait->waiter);
        unlink_wait(wait);
        end_wait(wait, err->status, err);
    }
}
