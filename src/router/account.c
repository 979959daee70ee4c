/* account.c - whose turn it is: an account per tenant with its virtual counter (fair.h), and a line
 * for each variant that the tenant has requests waiting for. bd-sched only, but for the writing of
 * metrics: it reads, under accounts_lock, what bd-sched shows in atomics. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* ---- Accounts ---- */

static bd_router_account *account_of_payer(bd_payer *payer) {
    return (bd_router_account *)(void *)payer; /* first member of the first member */
}

static bd_router_account *make_account(bd_router *router, const bd_tenant *tenant) {
    const double weight = bd_tenant_weight(tenant);
    bd_router_account *account = calloc(1, sizeof *account);
    if (!account) return NULL;
    if (bd_fair_add(router->fair, &account->flow, bd_tenant_id(tenant), weight, NULL) != BD_OK) {
        free(account);
        return NULL;
    }
    if (tenant) memcpy(account->name, tenant->name, sizeof account->name);
    if (bd_map_put(router->accounts, account->name, strlen(account->name), account) != BD_OK) {
        bd_fair_remove(router->fair, &account->flow);
        free(account);
        return NULL;
    }
    pthread_mutex_lock(&router->accounts_lock);
    account->next = router->accounts_first;
    router->accounts_first = account;
    router->account_count++;
    pthread_mutex_unlock(&router->accounts_lock);
    return account;
}

/* The account of a job's tenant, with the weight that it has now; NULL: out of memory. One that
 * left the file and came back has the account of before: its series go on, and what it was served
 * is not forgotten. */
static bd_router_account *account_for(bd_router *router, const bd_tenant *tenant) {
    const char *name = tenant ? tenant->name : "";
    bd_router_account *account = bd_map_get(router->accounts, name, strlen(name));
    if (!account) return make_account(router, tenant);
    const double weight = bd_tenant_weight(tenant);
    if (account->flow.weight < weight || weight < account->flow.weight)
        bd_fair_set_weight(router->fair, &account->flow, weight);
    return account;
}

bd_status bd_accounts_create(bd_router *router, bd_error *err) {
    pthread_mutex_init(&router->accounts_lock, NULL);
    router->accounts = bd_map_create(16);
    router->lines = bd_map_create(64);
    if (!router->accounts || !router->lines)
        return bd_fail(err, BD_E_MEMORY, "router", "out of memory for tenants");
    bd_status status = bd_fair_create(&router->options.fair, &router->fair, err);
    if (status == BD_OK && router->options.metrics) {
        router->held = bd_metrics_counter(
            router->options.metrics, "bitdelta_fair_held_total",
            "Turns in which a tenant's requests waited for those of a less served one.", NULL, 0);
        router->idle = bd_metrics_counter(
            router->options.metrics, "bitdelta_idle_with_ready_total",
            "Turns that left the device without work that was there: a fault.", NULL, 0);
    }
    return status;
}

void bd_accounts_destroy(bd_router *router) {
    while (router->accounts_first) {
        bd_router_account *account = router->accounts_first;
        router->accounts_first = account->next;
        BD_ASSERT(!account->first);
        free(account);
    }
    bd_map_destroy(router->accounts);
    bd_map_destroy(router->lines);
    bd_fair_destroy(router->fair);
    pthread_mutex_destroy(&router->accounts_lock);
}

/* For metrics. `version` is odd while values change: who reads it before and after knows whether
 * all values are of one moment. */
static void show(bd_router *router, bd_router_account *account) {
    atomic_fetch_add(&router->shown_version, 1);
    atomic_store(&account->shown.counter, account->flow.payer.counter);
    atomic_store(&account->shown.service, account->flow.service);
    atomic_store(&account->shown.load_bytes, (double)account->flow.loaded_bytes);
    atomic_store(&account->shown.waiting, account->flow.waiting);
    atomic_fetch_add(&router->shown_version, 1);
}

/* ---- Lines ---- */

typedef struct line_key {
    const void *queue, *account;
} line_key;

static bd_router_line *make_line(bd_router_queue *queue, bd_router_account *account) {
    bd_router *router = queue->router;
    const line_key key = {queue, account};
    bd_router_line *line = calloc(1, sizeof *line);
    if (!line) return NULL;
    if (bd_map_put(router->lines, &key, sizeof key, line) != BD_OK) {
        free(line);
        return NULL;
    }
    line->queue = queue;
    line->account = account;
    line->prev = account->last;
    if (account->last)
        account->last->next = line;
    else
        account->first = line;
    account->last = line;
    account->line_count++;
    line->next_of_queue = queue->lines;
    if (queue->lines) queue->lines->prev_of_queue = line;
    queue->lines = line;
    return line;
}

static void drop_line(bd_router_line *line) {
    bd_router_account *account = line->account;
    const line_key key = {line->queue, account};
    (void)bd_map_take(line->queue->router->lines, &key, sizeof key);
    if (account->cursor == line) account->cursor = line->next;
    if (line->prev)
        line->prev->next = line->next;
    else
        account->first = line->next;
    if (line->next)
        line->next->prev = line->prev;
    else
        account->last = line->prev;
    account->line_count--;
    if (line->prev_of_queue)
        line->prev_of_queue->next_of_queue = line->next_of_queue;
    else
        line->queue->lines = line->next_of_queue;
    if (line->next_of_queue) line->next_of_queue->prev_of_queue = line->prev_of_queue;
    free(line);
}

static bool goes_before(const bd_job *a, const bd_job *b) {
    if (a->params.priority != b->params.priority) return a->params.priority < b->params.priority;
    return a->internal.arrival < b->internal.arrival;
}

/* Lower priorities first, equal ones as they came: one that was set aside has its place again. */
static void insert_job(bd_router_line *line, bd_job *job) {
    bd_job *before = line->last;
    while (before && goes_before(job, before))
        before = before->internal.prev;
    bd_job *after = before ? before->internal.next : line->first;
    job->internal.prev = before;
    job->internal.next = after;
    if (before)
        before->internal.next = job;
    else
        line->first = job;
    if (after)
        after->internal.prev = job;
    else
        line->last = job;
    if (job->params.priority != 0) line->account->ranked++;
}

bd_status bd_line_append(bd_router_queue *queue, bd_job *job) {
    bd_router *router = queue->router;
    bd_router_account *account = account_for(router, job->tenant);
    if (!account) return BD_E_MEMORY;
    const line_key key = {queue, account};
    bd_router_line *line = bd_map_get(router->lines, &key, sizeof key);
    if (!line) line = make_line(queue, account);
    if (!line) return BD_E_MEMORY;
    job->internal.line = line;
    insert_job(line, job);
    if (account->flow.waiting == 0) account->blocked_us = 0;
    bd_fair_arrive(router->fair, &account->flow, job->internal.choice_count - job->internal.added);
    show(router, account);
    return BD_OK;
}

void bd_line_leave(bd_router_line *line, uint32_t choices) {
    bd_fair_leave(line->queue->router->fair, &line->account->flow, choices);
    show(line->queue->router, line->account);
}

void bd_line_remove(bd_job *job, uint32_t choices_left) {
    bd_router_line *line = job->internal.line;
    bd_job *prev = job->internal.prev, *next = job->internal.next;
    if (prev)
        prev->internal.next = next;
    else
        line->first = next;
    if (next)
        next->internal.prev = prev;
    else
        line->last = prev;
    job->internal.prev = job->internal.next = NULL;
    job->internal.line = NULL;
    if (job->params.priority != 0) line->account->ranked--;
    bd_line_leave(line, choices_left);
    if (!line->first) drop_line(line);
}

/* ---- What the engine and the cache do for an account ---- */

void bd_router_charge(void *ctx, bd_payer *payer, int64_t promised, uint32_t prompt_tokens,
                      uint32_t output_tokens) {
    bd_router *router = ctx;
    bd_router_account *account = account_of_payer(payer);
    if (promised != 0) bd_fair_promise(router->fair, &account->flow, promised);
    if (prompt_tokens + output_tokens == 0) return;
    bd_fair_charge(router->fair, &account->flow, prompt_tokens, output_tokens);
    show(router, account);
}

void bd_account_charge_load(bd_router *router, bd_router_account *account, uint64_t bytes) {
    bd_fair_charge_load(router->fair, &account->flow, bytes);
    show(router, account);
}

/* ---- Metrics ---- */

enum { READ_TRIES = 1000 };

typedef struct shown_row {
    const char *name;
    double values[4];
} shown_row;

static void read_rows(const bd_router *router, shown_row *rows) {
    for (const bd_router_account *a = router->accounts_first; a; a = a->next)
        *rows++ = (shown_row){a->name,
                              {atomic_load(&a->shown.counter), atomic_load(&a->shown.service),
                               atomic_load(&a->shown.load_bytes), atomic_load(&a->shown.waiting)}};
}

/* The values of one moment, so that tenants can be compared. bd-sched does not wait for those who
 * read; who has no luck a thousand times takes what is there. */
static shown_row *read_moment(bd_router *router, uint32_t *count) {
    *count = router->account_count;
    shown_row *rows = calloc(*count > 0 ? *count : 1, sizeof *rows);
    for (uint32_t i = 0; rows && i < READ_TRIES; i++) {
        uint64_t before = atomic_load(&router->shown_version);
        read_rows(router, rows);
        if (before % 2 == 0 && atomic_load(&router->shown_version) == before) break;
    }
    return rows;
}

void bd_router_write_fairness(bd_router *router, bd_strbuf *out) {
    static const struct {
        const char *name, *type, *help;
    } families[] = {
        {"bitdelta_tenant_virtual_tokens", "gauge",
         "Virtual token counter: service divided by weight, lifted after idling."},
        {"bitdelta_tenant_service_tokens_total", "counter",
         "Tokens computed and generated, by their weights, and loads caused."},
        {"bitdelta_tenant_load_bytes_total", "counter", "Bytes of the loads that it caused."},
        {"bitdelta_tenant_waiting", "gauge", "Sequences that wait to run."}};
    uint32_t count;
    pthread_mutex_lock(&router->accounts_lock);
    shown_row *rows = read_moment(router, &count);
    pthread_mutex_unlock(&router->accounts_lock);
    if (!rows) out->failed = true;
    for (size_t f = 0; rows && f < sizeof families / sizeof families[0]; f++) {
        bool headed = false;
        for (uint32_t i = 0; i < count; i++) {
            if (rows[i].name[0] == '\0') continue;
            if (!headed)
                bd_strbuf_printf(out, "# HELP %s %s\n# TYPE %s %s\n", families[f].name,
                                 families[f].help, families[f].name, families[f].type);
            headed = true;
            bd_strbuf_printf(out, "%s{tenant=\"%s\"} %.17g\n", families[f].name, rows[i].name,
                             rows[i].values[f]);
        }
    }
    free(rows);
}
