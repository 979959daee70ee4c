/* tenants_admit.c - what a tenant may still use: requests and tokens a minute, sequences at once.
 * Each step is one critical section of the tenant's account. Threads: any. */
#include "tenants_internal.h"

const uint64_t bd_tenant_wait_bounds_us[BD_TENANT_WAIT_BOUNDS] = {
    10000, 50000, 100000, 250000, 500000, 1000000, 2500000, 5000000, 10000000, 60000000};

/* Nobody knows when a running request ends. */
enum { SEQUENCES_RETRY_S = 1 };

static bd_tenant_account *account_of(const bd_tenant *tenant) {
    return tenant->internal->account;
}

static void lock_account(bd_tenant_account *account, uint64_t now_us) {
    pthread_mutex_lock(&account->lock);
    bd_bucket_refill(&account->requests, now_us);
    bd_bucket_refill(&account->tokens, now_us);
}

static uint32_t whole_seconds(uint64_t us) {
    uint64_t seconds = us / 1000000 + (us % 1000000 > 0);
    return seconds == 0 ? 1 : seconds > UINT32_MAX ? UINT32_MAX : (uint32_t)seconds;
}

/* An estimate may be too high: no more than the bucket can hold. */
static uint64_t reserved(const bd_tenant_account *account, uint64_t tokens) {
    const bd_bucket *bucket = &account->tokens;
    return bucket->rate > 0 && tokens > bucket->burst ? bucket->burst : tokens;
}

static void check_limits(const bd_tenant_account *account, const bd_ask *ask, bd_refused *why) {
    *why = (bd_refused){.limit = BD_LIMIT_NONE};
    uint64_t wait_us = bd_bucket_wait_us(&account->requests, 1);
    if (wait_us > 0) why->limit = BD_LIMIT_REQUESTS;
    uint64_t tokens_us = bd_bucket_wait_us(&account->tokens, reserved(account, ask->tokens));
    if (tokens_us > wait_us) {
        why->limit = BD_LIMIT_TOKENS;
        wait_us = tokens_us;
    }
    const uint32_t max = account->sequences_max;
    if (bd_bucket_wait_us(&account->tokens, ask->least) == UINT64_MAX) {
        why->limit = BD_LIMIT_TOKENS;
        why->never = true;
        why->most = account->tokens.burst;
    } else if (max > 0 && ask->choices > max) {
        *why = (bd_refused){.limit = BD_LIMIT_SEQUENCES, .never = true, .most = max};
    } else if (why->limit != BD_LIMIT_NONE) {
        why->retry_after_s = whole_seconds(wait_us);
    } else if (max > 0 && account->use.sequences_now + ask->choices > max) {
        *why = (bd_refused){.limit = BD_LIMIT_SEQUENCES, .retry_after_s = SEQUENCES_RETRY_S};
    }
}

static void count_refused(bd_tenant_use *use, const bd_refused *why) {
    if (why->never)
        use->too_large++;
    else
        use->limited[why->limit]++;
}

bd_status bd_tenant_admit(bd_ask *ask, uint64_t now_us, bd_refused *why) {
    if (!ask->tenant) return BD_OK;
    bd_tenant_account *account = account_of(ask->tenant);
    bd_tenant_use *use = &account->use;
    lock_account(account, now_us);
    check_limits(account, ask, why);
    bool fits = why->limit == BD_LIMIT_NONE;
    if (fits) {
        ask->tokens = reserved(account, ask->tokens);
        bd_bucket_take(&account->requests, 1);
        bd_bucket_take(&account->tokens, ask->tokens);
        use->admitted++;
        use->requests_now++;
        use->sequences_now += ask->choices;
    } else {
        count_refused(use, why);
    }
    pthread_mutex_unlock(&account->lock);
    return fits ? BD_OK : BD_BUSY;
}

/* Only the difference: what flowed in since, up to a full bucket, stays. */
static void change_tokens(bd_bucket *bucket, uint64_t from, uint64_t to) {
    if (to < from)
        bd_bucket_give(bucket, from - to);
    else
        bd_bucket_take(bucket, to - from);
}

bd_status bd_tenant_correct(bd_ask *ask, uint64_t least, uint64_t tokens, uint64_t now_us,
                            bd_refused *why) {
    if (!ask->tenant) {
        ask->tokens = tokens;
        return BD_OK;
    }
    bd_tenant_account *account = account_of(ask->tenant);
    lock_account(account, now_us);
    bool fits = bd_bucket_wait_us(&account->tokens, least) != UINT64_MAX;
    if (fits) {
        tokens = reserved(account, tokens);
        change_tokens(&account->tokens, ask->tokens, tokens);
        ask->tokens = tokens;
    } else {
        *why = (bd_refused){.limit = BD_LIMIT_TOKENS, .never = true, .most = account->tokens.burst};
        count_refused(&account->use, why);
    }
    pthread_mutex_unlock(&account->lock);
    return fits ? BD_OK : BD_BUSY;
}

static void leave(bd_tenant_use *use, const bd_ask *ask) {
    BD_ASSERT(use->requests_now > 0 && use->sequences_now >= ask->choices);
    use->requests_now--;
    use->sequences_now -= ask->choices;
}

void bd_tenant_undo(const bd_ask *ask, uint64_t now_us) {
    if (!ask->tenant) return;
    bd_tenant_account *account = account_of(ask->tenant);
    lock_account(account, now_us);
    bd_bucket_give(&account->requests, 1);
    bd_bucket_give(&account->tokens, ask->tokens);
    account->use.admitted--;
    account->use.limited[BD_LIMIT_NONE]++;
    leave(&account->use, ask);
    pthread_mutex_unlock(&account->lock);
}

void bd_tenant_settle(const bd_ask *ask, uint64_t prompt_tokens, uint64_t new_tokens,
                      bd_tenant_result result, uint64_t now_us) {
    if (!ask->tenant) return;
    bd_tenant_account *account = account_of(ask->tenant);
    uint64_t used = prompt_tokens + new_tokens;
    lock_account(account, now_us);
    change_tokens(&account->tokens, ask->tokens, used);
    account->use.results[result]++;
    account->use.prompt_tokens += prompt_tokens;
    account->use.new_tokens += new_tokens;
    leave(&account->use, ask);
    pthread_mutex_unlock(&account->lock);
}

void bd_tenant_waited(const bd_tenant *tenant, uint64_t wait_us) {
    if (!tenant) return;
    bd_tenant_account *account = account_of(tenant);
    uint32_t bucket = 0;
    while (bucket < BD_TENANT_WAIT_BOUNDS && wait_us > bd_tenant_wait_bounds_us[bucket])
        bucket++;
    pthread_mutex_lock(&account->lock);
    account->use.waits[bucket]++;
    account->use.wait_us += wait_us;
    pthread_mutex_unlock(&account->lock);
}
