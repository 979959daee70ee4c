/* test_router_fair.c - the virtual token counters alone: against a plain model in whole numbers
 * under random operations, and a simulated server against the bound of the paper they are from. */
#include "base_support.h"

#include <malloc.h>

#include "bitdelta/router/fair.h"

enum { COST = 12 }; /* of a prompt token, a multiple of every weight: whole numbers stay whole */

static const bd_fair_options k_options = {
    .prompt_cost = COST, .output_cost = 2 * COST, .load_bytes_per_unit = 1.0};

static uint32_t below(uint64_t *random, uint32_t n) {
    return (uint32_t)(support_random(random) % n);
}

/* ---- Against a model ---- */

typedef struct model_flow {
    int64_t counter, service, promised, weight, waiting;
    uint64_t since;
    bool aside;
} model_flow;

typedef struct model {
    model_flow *flows;
    uint32_t count;
    int64_t last; /* index; -1: nobody stopped waiting yet */
    uint64_t arrivals;
} model;

static int64_t model_key(const model_flow *f) {
    return f->counter + COST * f->promised / f->weight;
}

static int64_t model_first(const model *m) {
    int64_t best = -1;
    for (uint32_t i = 0; i < m->count; i++) {
        const model_flow *f = &m->flows[i];
        if (f->waiting == 0 || f->aside) continue;
        const model_flow *b = best < 0 ? NULL : &m->flows[best];
        if (!b || model_key(f) < model_key(b) ||
            (model_key(f) == model_key(b) && f->since < b->since))
            best = i;
    }
    return best;
}

static void model_arrive(model *m, uint32_t index, uint32_t requests) {
    model_flow *f = &m->flows[index];
    if (f->waiting == 0) {
        int64_t first = model_first(m), from = first >= 0 ? first : m->last;
        int64_t level = from >= 0 ? model_key(&m->flows[from]) : 0;
        if (model_key(f) < level) f->counter += level - model_key(f);
        f->since = m->arrivals++;
    }
    f->waiting += requests;
}

static void model_leave(model *m, uint32_t index, uint32_t requests) {
    m->flows[index].waiting -= requests;
    if (m->flows[index].waiting == 0) m->last = index;
}

static int64_t weight_of(uint64_t *random) {
    static const int64_t weights[] = {1, 2, 3, 4, 6, 12};
    return weights[below(random, 6)];
}

typedef struct pair { /* the thing and its model */
    bd_fair *fair;
    bd_fair_flow *flows;
    model m;
} pair;

static void operate(pair *p, uint64_t *random) {
    uint32_t index = below(random, p->m.count), n = 1 + below(random, 40);
    bd_fair_flow *flow = &p->flows[index];
    model_flow *f = &p->m.flows[index];
    switch (below(random, 7)) {
    case 0:
    case 1:
        bd_fair_arrive(p->fair, flow, n);
        model_arrive(&p->m, index, n);
        break;
    case 2:
        if (f->waiting == 0) return;
        n = below(random, 3) ? (uint32_t)f->waiting : below(random, (uint32_t)f->waiting + 1);
        if (n == 0) return;
        bd_fair_leave(p->fair, flow, n);
        model_leave(&p->m, index, n);
        break;
    case 3: {
        int64_t tokens = f->promised > 0 && below(random, 2)
                             ? -(int64_t)below(random, (uint32_t)f->promised + 1)
                             : (int64_t)n;
        bd_fair_promise(p->fair, flow, tokens);
        f->promised += tokens;
        break;
    }
    case 4: {
        uint32_t output = below(random, 5);
        bd_fair_charge(p->fair, flow, n, output);
        f->service += COST * (n + 2 * output);
        f->counter += COST * (n + 2 * output) / f->weight;
        break;
    }
    case 5:
        bd_fair_charge_load(p->fair, flow, (uint64_t)n * COST);
        f->service += n * COST;
        f->counter += n * COST / f->weight;
        break;
    default:
        if (below(random, 4) > 0) return;
        f->weight = weight_of(random);
        bd_fair_set_weight(p->fair, flow, (double)f->weight);
    }
}

static void check_first(const pair *p) {
    int64_t first = model_first(&p->m);
    assert_ptr_equal(bd_fair_first(p->fair), first < 0 ? NULL : &p->flows[first]);
}

/* All that wait, in order, some of them leaving while they are set aside. */
static void check_order(pair *p, uint64_t *random) {
    for (int64_t first; (first = model_first(&p->m)) >= 0;) {
        check_first(p);
        bd_fair_flow *flow = &p->flows[first];
        bd_fair_set_aside(p->fair, flow);
        p->m.flows[first].aside = true;
        if (below(random, 8) > 0) continue;
        uint32_t waiting = flow->waiting;
        bd_fair_leave(p->fair, flow, waiting);
        model_leave(&p->m, (uint32_t)first, waiting);
    }
    check_first(p);
    bd_fair_take_back(p->fair);
    for (uint32_t i = 0; i < p->m.count; i++) {
        const model_flow *f = &p->m.flows[i];
        p->m.flows[i].aside = false;
        assert_true(p->flows[i].payer.counter == (double)f->counter);
        assert_true(p->flows[i].service == (double)f->service);
        assert_true(bd_fair_key(p->fair, &p->flows[i]) == (double)model_key(f));
        assert_int_equal(p->flows[i].waiting, f->waiting);
    }
    check_first(p);
}

static void run_model(uint32_t count, uint32_t operations, uint32_t check_every, uint64_t *random) {
    pair p = {.m = {.count = count, .last = -1}};
    assert_int_equal(bd_fair_create(&k_options, &p.fair, NULL), BD_OK);
    p.flows = calloc(count, sizeof *p.flows);
    p.m.flows = calloc(count, sizeof *p.m.flows);
    assert_non_null(p.flows);
    assert_non_null(p.m.flows);
    for (uint32_t i = 0; i < count; i++) {
        p.m.flows[i].weight = weight_of(random);
        assert_int_equal(bd_fair_add(p.fair, &p.flows[i], i, (double)p.m.flows[i].weight, NULL),
                         BD_OK);
    }
    const size_t before = mallinfo2().uordblks;
    for (uint32_t i = 1; i <= operations; i++) {
        operate(&p, random);
        if (check_every < 100) check_first(&p);
        if (i % check_every == 0) check_order(&p, random);
    }
    assert_int_equal(mallinfo2().uordblks, before); /* whoever is known costs no memory */
    bd_fair_destroy(p.fair);
    free(p.flows);
    free(p.m.flows);
}

static void test_model(void **state) {
    (void)state;
    uint64_t random = support_seed();
    for (uint32_t round = 0; round < 60; round++)
        run_model(1 + below(&random, 30), 2000, 50, &random);
}

static void test_ten_thousand(void **state) {
    (void)state;
    uint64_t random = support_seed();
    run_model(10000, 40000, 40000, &random);
}

/* ---- A server ---- */

enum { FLOWS = 6, ROOM = 600, SEQUENCES = 40, PROMPT_MAX = 120, OUTPUT_MAX = 60, CHUNK = 32 };

typedef struct sim_sequence {
    uint32_t flow, prompt, output; /* left to do */
    uint32_t room;                 /* 0: the place is free */
} sim_sequence;

typedef struct sim_flow {
    bd_fair_flow flow;
    uint32_t prompt_max, output_max;
    uint32_t prompt, output; /* of the next request; 0: none */
    bool backlogged;         /* always has one more */
} sim_flow;

typedef struct sim {
    bd_fair *fair;
    sim_flow flows[FLOWS];
    sim_sequence sequences[SEQUENCES];
    uint32_t room_used;
    uint64_t random;
} sim;

static void sim_arrive(sim *s, uint32_t index) {
    sim_flow *f = &s->flows[index];
    if (f->prompt > 0) return;
    f->prompt = 1 + below(&s->random, f->prompt_max);
    f->output = 1 + below(&s->random, f->output_max);
    bd_fair_arrive(s->fair, &f->flow, 1);
}

static sim_sequence *free_place(sim *s) {
    for (uint32_t i = 0; i < SEQUENCES; i++)
        if (s->sequences[i].room == 0) return &s->sequences[i];
    return NULL;
}

/* As long as the head of the first fits. */
static void sim_admit(sim *s) {
    bd_fair_flow *first;
    sim_sequence *place;
    while ((first = bd_fair_first(s->fair)) && (place = free_place(s))) {
        sim_flow *f = (sim_flow *)(void *)first;
        uint32_t room = f->prompt + f->output;
        if (s->room_used + room > ROOM) return;
        *place = (sim_sequence){first->payer.id, f->prompt, f->output, room};
        s->room_used += room;
        bd_fair_promise(s->fair, first, f->prompt);
        f->prompt = 0;
        if (f->backlogged) { /* the next is there already: it never stops waiting */
            f->prompt = 1 + below(&s->random, f->prompt_max);
            f->output = 1 + below(&s->random, f->output_max);
        } else {
            bd_fair_leave(s->fair, first, 1);
        }
    }
    assert_true(s->room_used > 0 || !bd_fair_first(s->fair)); /* work is conserved */
}

static void sim_step(sim *s) {
    sim_admit(s);
    for (uint32_t i = 0; i < SEQUENCES; i++) {
        sim_sequence *q = &s->sequences[i];
        if (q->room == 0) continue;
        bd_fair_flow *flow = &s->flows[q->flow].flow;
        uint32_t rows = q->prompt < CHUNK ? q->prompt : CHUNK;
        q->prompt -= rows;
        if (rows > 0) bd_fair_promise(s->fair, flow, -(int64_t)rows);
        uint32_t output = q->prompt == 0;
        bd_fair_charge(s->fair, flow, rows, output);
        q->output -= output;
        bool stops = below(&s->random, 50) == 0; /* earlier than it might have */
        if (q->output > 0 && !stops) continue;
        bd_fair_promise(s->fair, flow, -(int64_t)q->prompt);
        s->room_used -= q->room;
        q->room = 0;
    }
}

static void sim_open(sim *s, uint64_t seed, const double *weights) {
    *s = (sim){.random = seed};
    assert_int_equal(bd_fair_create(&k_options, &s->fair, NULL), BD_OK);
    for (uint32_t i = 0; i < FLOWS; i++) {
        assert_int_equal(bd_fair_add(s->fair, &s->flows[i].flow, i, weights[i], NULL), BD_OK);
        s->flows[i].prompt_max = PROMPT_MAX;
        s->flows[i].output_max = OUTPUT_MAX;
    }
}

/* U of the paper, in service by weight: what may be let in at once, at the dearer cost. */
static double unit_of(double weight_min) {
    return 2.0 * COST * ROOM / weight_min;
}

static double share(const sim *s, uint32_t index) {
    return s->flows[index].flow.service / s->flows[index].flow.weight;
}

/* Flows 0 and 1 wait all the time, 1 with prompts ten times as long; the others come and go. */
static void run_bound(uint64_t seed, double weight) {
    const double weights[FLOWS] = {1.0, weight, 2.0, 1.0, 6.0, 4.0};
    sim s;
    sim_open(&s, seed, weights);
    s.flows[0].prompt_max = PROMPT_MAX / 10;
    for (uint32_t i = 0; i < 2; i++) {
        s.flows[i].backlogged = true;
        sim_arrive(&s, i);
    }
    double least = 0.0, most = 0.0;
    for (uint32_t step = 0; step < 20000; step++) {
        uint32_t other = 2 + below(&s.random, FLOWS - 2);
        if (step / 2000 % 2 == 0 && below(&s.random, 3) == 0) sim_arrive(&s, other);
        sim_step(&s);
        double difference = share(&s, 0) - share(&s, 1);
        if (difference < least) least = difference;
        if (difference > most) most = difference;
    }
    /* Of every interval: the greatest rise or fall of the difference. */
    assert_true(most - least <= 2.0 * unit_of(1.0));
    assert_true(share(&s, 0) > 20.0 * unit_of(1.0)); /* so that the bound says something */
    bd_fair_destroy(s.fair);
}

static void test_bound(void **state) {
    (void)state;
    uint64_t random = support_seed();
    for (uint32_t round = 0; round < 10; round++) {
        run_bound(support_random(&random), 1.0);
        run_bound(support_random(&random), 3.0);
    }
}

/* Flow 2 is idle while 0 and 1 are served, then has more than enough to do: from there on it gets
 * no more than its share. So do others that were never there before, and one that comes when
 * nobody waits any more. */
static void run_back(uint64_t seed, bool pause) {
    const double weights[FLOWS] = {1.0, 1.0, 1.0, 1.0, 1.0, 1.0};
    sim s;
    sim_open(&s, seed, weights);
    sim_arrive(&s, 2);
    for (uint32_t i = 0; i < 2; i++) {
        s.flows[i].backlogged = true;
        sim_arrive(&s, i);
    }
    for (uint32_t step = 0; step < 10000; step++)
        sim_step(&s);
    for (uint32_t i = 0; pause && i < 2; i++)
        s.flows[i].backlogged = false;
    for (uint32_t step = 0; pause && (s.room_used > 0 || bd_fair_first(s.fair)); step++)
        sim_step(&s);
    double before[4];
    for (uint32_t i = 0; i < 4; i++) {
        before[i] = share(&s, i);
        s.flows[i].backlogged = true;
        if (i != 1) sim_arrive(&s, i);
    }
    sim_arrive(&s, 1);
    assert_true(before[0] - before[2] > 20.0 * unit_of(1.0));
    for (uint32_t step = 0; step < 5000; step++) {
        sim_step(&s);
        double gained[4];
        for (uint32_t i = 0; i < 4; i++)
            gained[i] = share(&s, i) - before[i];
        for (uint32_t i = 0; i < 4; i++)
            for (uint32_t k = 0; k < 4; k++)
                assert_true(gained[i] - gained[k] <= 2.0 * unit_of(1.0));
    }
    bd_fair_destroy(s.fair);
}

static void test_idle_then_back(void **state) {
    (void)state;
    uint64_t random = support_seed();
    for (uint32_t round = 0; round < 10; round++)
        run_back(support_random(&random), round % 2 == 1);
}

/* ---- The rest ---- */

static void test_removed(void **state) {
    (void)state;
    bd_fair *fair;
    bd_fair_flow flows[3] = {0};
    assert_int_equal(bd_fair_create(&k_options, &fair, NULL), BD_OK);
    for (uint32_t i = 0; i < 2; i++)
        assert_int_equal(bd_fair_add(fair, &flows[i], i, 2.0, NULL), BD_OK);
    bd_fair_arrive(fair, &flows[0], 2);
    bd_fair_charge(fair, &flows[0], 100, 10);
    bd_fair_charge_load(fair, &flows[0], 360);
    assert_true(flows[0].service == 120.0 * COST + 360.0);
    assert_true(flows[0].payer.counter == (120.0 * COST + 360.0) / 2.0);
    assert_int_equal(flows[0].loaded_bytes, 360);
    bd_fair_leave(fair, &flows[0], 2);
    bd_fair_remove(fair, &flows[0]);
    /* Its level stays, as does the place of those that remain. */
    assert_int_equal(bd_fair_add(fair, &flows[2], 2, 1.0, NULL), BD_OK);
    bd_fair_arrive(fair, &flows[2], 1);
    assert_true(flows[2].payer.counter == 60.0 * COST + 180.0);
    assert_true(flows[2].service == 0.0);
    assert_ptr_equal(bd_fair_first(fair), &flows[2]);
    bd_fair_leave(fair, &flows[2], 1);
    assert_null(bd_fair_first(fair));
    bd_fair_destroy(fair);
    bd_fair_destroy(NULL);
}

static void test_options(void **state) {
    (void)state;
    bd_fair *fair;
    bd_error err;
    const bd_fair_options bad[] = {{.prompt_cost = -1.0},
                                   {.output_cost = -0.5},
                                   {.load_bytes_per_unit = -2.0},
                                   {.prompt_cost = __builtin_nan("")}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(bd_fair_create(&bad[i], &fair, &err), BD_E_ARGUMENT);
    /* Loads may be free. */
    bd_fair_flow flow = {0};
    const bd_fair_options free_loads = {.prompt_cost = 1.0, .output_cost = 1.0};
    assert_int_equal(bd_fair_create(&free_loads, &fair, &err), BD_OK);
    assert_int_equal(bd_fair_add(fair, &flow, 7, 1.0, &err), BD_OK);
    bd_fair_charge_load(fair, &flow, 1000);
    assert_true(flow.service == 0.0 && flow.payer.counter == 0.0);
    assert_int_equal(flow.loaded_bytes, 1000);
    bd_fair_destroy(fair);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_model),   cmocka_unit_test(test_ten_thousand),
        cmocka_unit_test(test_bound),   cmocka_unit_test(test_idle_then_back),
        cmocka_unit_test(test_removed), cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
