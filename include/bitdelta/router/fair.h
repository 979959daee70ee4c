/* fair.h - weighted virtual token counters: who among those that wait is next.
 * Pure data: no clock, no I/O, no lock. Owner: whoever made it (the router); one thread. The flows'
 * memory is the owner's too; after bd_fair_add nothing allocates.
 *
 * A flow's virtual counter is what was done for it divided by its weight: prompt tokens computed
 * and tokens generated, each kind with its own cost, and the bytes of loads that it caused. It is
 * charged as things happen. The order of those that wait is by virtual counter plus what is
 * promised already: prompts that were let in and are still to be computed. So nobody lets in a
 * hundred prompts before the first is charged.
 *
 * Who comes back after having had nothing waiting is lifted to the least of those that wait (to
 * whoever stopped waiting last if nobody does), so that idling earns nothing. Two flows f and g
 * that wait all the time get service within |S_f/w_f - S_g/w_g| <= 2 max(cost) M / min(w), M being
 * the tokens, prompt and output, of all requests that are let in at once (Sheng et al., Fairness in
 * Serving Large Language Models, arXiv:2401.00588); whoever lets a flow pass that is not the first
 * adds how far behind the first it was. */
#ifndef BITDELTA_ROUTER_FAIR_H
#define BITDELTA_ROUTER_FAIR_H

#include "bitdelta/engine/engine.h"

typedef struct bd_fair bd_fair;

typedef struct bd_fair_options {
    double prompt_cost, output_cost; /* of a token; >= 0 */
    double load_bytes_per_unit;      /* bytes of a load that cost 1; 0: loads are free */
} bd_fair_options;

typedef struct bd_fair_flow { /* zero before add; only read by others than fair.c */
    bd_payer payer;           /* first member; payer.counter: virtual, lifts included */
    double weight;
    double service;   /* what it got, in cost units, not divided by the weight */
    int64_t promised; /* prompt tokens let in and not computed yet */
    uint64_t loaded_bytes;
    uint32_t waiting;                /* requests not let in yet */
    uint32_t place;                  /* in the heap; internal */
    uint64_t since;                  /* orders those with equal counters; internal */
    bool aside;                      /* internal */
    struct bd_fair_flow *next_aside; /* internal */
} bd_fair_flow;

BD_MUST_CHECK bd_status bd_fair_create(const bd_fair_options *options, bd_fair **out,
                                       bd_error *err);
void bd_fair_destroy(bd_fair *fair); /* the flows are the owner's; NULL is fine */
/* A new flow, as if it had been idle so far. id: different for each. weight > 0. */
BD_MUST_CHECK bd_status bd_fair_add(bd_fair *fair, bd_fair_flow *flow, uint32_t id, double weight,
                                    bd_error *err);
void bd_fair_remove(bd_fair *fair, bd_fair_flow *flow); /* nothing waits */
/* From now on; what was charged stays as it was. weight > 0. */
void bd_fair_set_weight(bd_fair *fair, bd_fair_flow *flow, double weight);

/* `requests` more wait, or fewer: let in or gone. */
void bd_fair_arrive(bd_fair *fair, bd_fair_flow *flow, uint32_t requests);
void bd_fair_leave(bd_fair *fair, bd_fair_flow *flow, uint32_t requests);

/* tokens < 0: computed, or will not be computed after all. */
void bd_fair_promise(bd_fair *fair, bd_fair_flow *flow, int64_t tokens);
void bd_fair_charge(bd_fair *fair, bd_fair_flow *flow, uint64_t prompt_tokens,
                    uint64_t output_tokens);
void bd_fair_charge_load(bd_fair *fair, bd_fair_flow *flow, uint64_t bytes);

/* What orders those that wait: payer.counter + promised * prompt_cost / weight. */
double bd_fair_key(const bd_fair *fair, const bd_fair_flow *flow);
/* The first of those that wait, NULL: none, or all are set aside. */
bd_fair_flow *bd_fair_first(const bd_fair *fair);
uint32_t bd_fair_waiting(const bd_fair *fair); /* flows, but for those set aside */
/* Leaves the flow out of bd_fair_first until all are taken back. Nobody may arrive meanwhile. */
void bd_fair_set_aside(bd_fair *fair, bd_fair_flow *flow);
void bd_fair_take_back(bd_fair *fair);

#endif
