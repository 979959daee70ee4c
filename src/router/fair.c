/* fair.c - the counters and the heap of those that wait. See fair.h. The owner's thread only. */
#include "bitdelta/router/fair.h"

#include <stdlib.h>

#define NOWHERE UINT32_MAX

struct bd_fair {
    bd_fair_options options;
    bd_fair_flow **heap; /* [capacity], by (key, since) */
    uint32_t count, capacity, flow_count;
    bd_fair_flow *aside;
    bd_fair_flow *last; /* whoever stopped waiting last; NULL: nobody yet, or it was removed */
    double last_key;    /* of one that was removed */
    uint64_t arrivals;
};

bd_status bd_fair_create(const bd_fair_options *options, bd_fair **out, bd_error *err) {
    *out = NULL;
    if (!(options->prompt_cost >= 0.0) || !(options->output_cost >= 0.0) ||
        !(options->load_bytes_per_unit >= 0.0))
        return bd_fail(err, BD_E_ARGUMENT, "fairness", "a cost is negative");
    bd_fair *fair = calloc(1, sizeof *fair);
    if (!fair) return bd_fail(err, BD_E_MEMORY, "fairness", "out of memory");
    fair->options = *options;
    *out = fair;
    return BD_OK;
}

void bd_fair_destroy(bd_fair *fair) {
    if (!fair) return;
    free(fair->heap);
    free(fair);
}

/* ---- The heap ---- */

static double promised_cost(const bd_fair *fair, const bd_fair_flow *flow) {
    return fair->options.prompt_cost * (double)flow->promised / flow->weight;
}

double bd_fair_key(const bd_fair *fair, const bd_fair_flow *flow) {
    return flow->payer.counter + promised_cost(fair, flow);
}

static bool goes_before(const bd_fair *fair, const bd_fair_flow *a, const bd_fair_flow *b) {
    double key_a = bd_fair_key(fair, a), key_b = bd_fair_key(fair, b);
    if (key_a < key_b) return true;
    return !(key_b < key_a) && a->since < b->since;
}

static void put(bd_fair *fair, uint32_t place, bd_fair_flow *flow) {
    fair->heap[place] = flow;
    flow->place = place;
}

static void sift_up(bd_fair *fair, bd_fair_flow *flow) {
    uint32_t at = flow->place;
    while (at > 0 && goes_before(fair, flow, fair->heap[(at - 1) / 2])) {
        put(fair, at, fair->heap[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    put(fair, at, flow);
}

static void sift_down(bd_fair *fair, bd_fair_flow *flow) {
    uint32_t at = flow->place;
    for (;;) {
        uint32_t child = 2 * at + 1;
        if (child >= fair->count) break;
        if (child + 1 < fair->count && goes_before(fair, fair->heap[child + 1], fair->heap[child]))
            child++;
        if (!goes_before(fair, fair->heap[child], flow)) break;
        put(fair, at, fair->heap[child]);
        at = child;
    }
    put(fair, at, flow);
}

static void insert(bd_fair *fair, bd_fair_flow *flow) {
    BD_ASSERT(flow->place == NOWHERE && fair->count < fair->capacity);
    put(fair, fair->count++, flow);
    sift_up(fair, flow);
}

static void take_out(bd_fair *fair, bd_fair_flow *flow) {
    uint32_t place = flow->place;
    BD_ASSERT(place < fair->count && fair->heap[place] == flow);
    bd_fair_flow *moved = fair->heap[--fair->count];
    flow->place = NOWHERE;
    if (moved == flow) return;
    put(fair, place, moved);
    sift_up(fair, moved);
    sift_down(fair, moved);
}

static void moved(bd_fair *fair, bd_fair_flow *flow) {
    if (flow->place == NOWHERE) return;
    sift_up(fair, flow);
    sift_down(fair, flow);
}

/* ---- Flows ---- */

bd_status bd_fair_add(bd_fair *fair, bd_fair_flow *flow, uint32_t id, double weight,
                      bd_error *err) {
    BD_ASSERT(weight > 0.0);
    if (fair->flow_count == fair->capacity) {
        uint32_t capacity = fair->capacity ? 2 * fair->capacity : 16;
        bd_fair_flow **heap = realloc(fair->heap, capacity * sizeof(bd_fair_flow *));
        if (!heap) return bd_fail(err, BD_E_MEMORY, "fairness", "out of memory for a tenant");
        fair->heap = heap;
        fair->capacity = capacity;
    }
    fair->flow_count++;
    *flow = (bd_fair_flow){.payer = {.id = id}, .weight = weight, .place = NOWHERE};
    return BD_OK;
}

void bd_fair_remove(bd_fair *fair, bd_fair_flow *flow) {
    BD_ASSERT(flow->waiting == 0 && fair->flow_count > 0);
    fair->flow_count--;
    if (fair->last != flow) return;
    fair->last = NULL;
    fair->last_key = bd_fair_key(fair, flow);
}

void bd_fair_set_weight(bd_fair *fair, bd_fair_flow *flow, double weight) {
    BD_ASSERT(weight > 0.0);
    flow->weight = weight;
    moved(fair, flow);
}

/* Where a newcomer starts at the least. */
static double level(const bd_fair *fair) {
    if (fair->count > 0) return bd_fair_key(fair, fair->heap[0]);
    return fair->last ? bd_fair_key(fair, fair->last) : fair->last_key;
}

void bd_fair_arrive(bd_fair *fair, bd_fair_flow *flow, uint32_t requests) {
    BD_ASSERT(!fair->aside);
    if (requests == 0) return;
    bool waited = flow->waiting > 0;
    flow->waiting += requests;
    if (waited) return;
    double least = level(fair) - promised_cost(fair, flow);
    if (flow->payer.counter < least) flow->payer.counter = least;
    flow->since = fair->arrivals++;
    insert(fair, flow);
}

void bd_fair_leave(bd_fair *fair, bd_fair_flow *flow, uint32_t requests) {
    BD_ASSERT(flow->waiting >= requests);
    flow->waiting -= requests;
    if (flow->waiting > 0 || requests == 0) return;
    fair->last = flow;
    if (!flow->aside) take_out(fair, flow);
}

/* ---- Charges ---- */

void bd_fair_promise(bd_fair *fair, bd_fair_flow *flow, int64_t tokens) {
    flow->promised += tokens;
    moved(fair, flow);
}

static void charge(bd_fair *fair, bd_fair_flow *flow, double cost) {
    flow->service += cost;
    flow->payer.counter += cost / flow->weight;
    moved(fair, flow);
}

void bd_fair_charge(bd_fair *fair, bd_fair_flow *flow, uint64_t prompt_tokens,
                    uint64_t output_tokens) {
    charge(fair, flow,
           fair->options.prompt_cost * (double)prompt_tokens +
               fair->options.output_cost * (double)output_tokens);
}

void bd_fair_charge_load(bd_fair *fair, bd_fair_flow *flow, uint64_t bytes) {
    flow->loaded_bytes += bytes;
    if (fair->options.load_bytes_per_unit > 0.0)
        charge(fair, flow, (double)bytes / fair->options.load_bytes_per_unit);
}

/* ---- Who is next ---- */

bd_fair_flow *bd_fair_first(const bd_fair *fair) {
    return fair->count > 0 ? fair->heap[0] : NULL;
}

uint32_t bd_fair_waiting(const bd_fair *fair) {
    return fair->count;
}

void bd_fair_set_aside(bd_fair *fair, bd_fair_flow *flow) {
    BD_ASSERT(!flow->aside && flow->waiting > 0);
    take_out(fair, flow);
    flow->aside = true;
    flow->next_aside = fair->aside;
    fair->aside = flow;
}

void bd_fair_take_back(bd_fair *fair) {
    while (fair->aside) {
        bd_fair_flow *flow = fair->aside;
        fair->aside = flow->next_aside;
        flow->aside = false;
        flow->next_aside = NULL;
        if (flow->waiting > 0) insert(fair, flow);
    }
}
