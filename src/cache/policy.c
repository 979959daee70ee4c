/* policy.c - shares of the requests over several spans, mixed by how well each predicts; see
 * policy.h. */
#include "policy.h"

#include <math.h>
#include <string.h>

/* Half-lives of the spans in requests: from the burst of the moment to what has been popular for
 * long. */
static const double span_requests[BD_POLICY_SPANS] = {8, 32, 128, 512, 4096, 32768};

/* Chosen with bench/cache_policy.c. In the ranges given no trace's mean over slots is below the
 * best of LRU, LFU and ARC by more than a tenth of a point (the worst single point by 0.7: diurnal,
 * 448 slots for 1000 variants, by 1.2 with half the WEIGHT_STEP); beyond them some are. COMMON_PART
 * is what a span learns of a request that others foresaw. */
#define UNIFORM_PART 0.01 /* of a prediction, to all variants alike: 0.005 to 0.02 */
#define WEIGHT_STEP  0.02 /* how fast the weights follow: 0.01 to 0.025 */
#define WEIGHT_MIN   1e-4
#define COMMON_PART  0.03 /* 0 to 0.05 */
#define MARGIN       0.25 /* 0.1 to 0.25; long cycles want it large, drift small */

/* A place among the most wanted is worth so many standard errors, MARGIN at most. */
#define PROTECT_ERRORS 1.5

void bd_policy_init(bd_policy *policy, double half_life_s) {
    memset(policy, 0, sizeof *policy);
    policy->half_life_us = (half_life_s > 0 ? half_life_s : 60) * 1e6;
    policy->margin = MARGIN;
    for (int s = 0; s < BD_POLICY_SPANS; s++) {
        policy->weight[s] = 1.0 / BD_POLICY_SPANS;
        policy->decay[s] = exp2(-1 / span_requests[s]);
    }
}

static double decayed(const bd_policy *policy, const bd_policy_item *item, double count, int span) {
    if (count <= 0) return 0;
    double gap = (double)(policy->requests - item->seen);
    return count * exp2(-gap / span_requests[span]);
}

static double count_now(const bd_policy *policy, const bd_policy_item *item, int span) {
    return decayed(policy, item, item->count[span], span);
}

static double share_of(const bd_policy *policy, double count, int span) {
    return policy->total[span] > 0 ? count / policy->total[span] : 0;
}

/* How much each span has to do with this request: its share of having foreseen it. The weights move
 * towards that, so they settle where the mixture of all spans predicts best. */
static void credit_spans(bd_policy *policy, const double *counts, double *credit) {
    double uniform = UNIFORM_PART / (policy->variant_count > 0 ? policy->variant_count : 1);
    double sum = 0;
    for (int s = 0; s < BD_POLICY_SPANS; s++) {
        double foreseen = (1 - UNIFORM_PART) * share_of(policy, counts[s], s) + uniform;
        credit[s] = policy->weight[s] * foreseen;
        sum += credit[s];
    }
    for (int s = 0; s < BD_POLICY_SPANS; s++) {
        credit[s] /= sum;
        policy->weight[s] += WEIGHT_STEP * (credit[s] - policy->weight[s]);
        /* What has been useless for a million requests must be able to come back within a hundred.
         */
        if (policy->weight[s] < WEIGHT_MIN) policy->weight[s] = WEIGHT_MIN;
    }
}

double bd_policy_rate(const bd_policy *policy, const bd_policy_item *item, uint64_t now_us) {
    if (item->rate <= 0) return 0;
    double gap_us = now_us > item->rate_us ? (double)(now_us - item->rate_us) : 0;
    return item->rate * exp2(-gap_us / policy->half_life_us);
}

/* A span counts a request by its credit for it. So a burst that the short spans foresee leaves
 * little trace in the long ones, and does not pass for lasting popularity when it is over. */
void bd_policy_touch(bd_policy *policy, bd_policy_item *item, uint64_t now_us) {
    double counts[BD_POLICY_SPANS], plain[BD_POLICY_SPANS], credit[BD_POLICY_SPANS];
    for (int s = 0; s < BD_POLICY_SPANS; s++) {
        counts[s] = count_now(policy, item, s);
        plain[s] = decayed(policy, item, item->plain[s], s);
    }
    credit_spans(policy, counts, credit);
    policy->requests++;
    for (int s = 0; s < BD_POLICY_SPANS; s++) {
        double part = COMMON_PART + (1 - COMMON_PART) * credit[s];
        policy->total[s] = policy->total[s] * policy->decay[s] + part;
        item->count[s] = counts[s] * policy->decay[s] + part;
        policy->plain_total[s] = policy->plain_total[s] * policy->decay[s] + 1;
        item->plain[s] = plain[s] * policy->decay[s] + 1;
    }
    item->seen = policy->requests;
    /* A steady stream of r requests a second settles at r. */
    const double ln2 = 0.6931471805599453;
    item->rate = bd_policy_rate(policy, item, now_us) + ln2 / policy->half_life_us * 1e6;
    item->rate_us = now_us;
}

double bd_policy_score(const bd_policy *policy, const bd_policy_item *item) {
    double score = 0;
    for (int s = 0; s < BD_POLICY_SPANS; s++)
        score += policy->weight[s] * share_of(policy, count_now(policy, item, s), s);
    return score;
}

/* Half the score and half the same of plain counts: those are steadier, and a place among the most
 * wanted is meant to last; but they take a burst for popularity, which the score does not. *error
 * is that of the difference to another of the same share: a share p that is counted over n requests
 * is off by sqrt(p / n), and n is twice the decayed total. */
static double steady_share(const bd_policy *policy, const bd_policy_item *item, double *error) {
    double share = 0, per_root = 0;
    for (int s = 0; s < BD_POLICY_SPANS; s++) {
        if (policy->plain_total[s] <= 0) continue;
        share +=
            policy->weight[s] * decayed(policy, item, item->plain[s], s) / policy->plain_total[s];
        per_root += policy->weight[s] / sqrt(policy->plain_total[s]);
    }
    share = (share + bd_policy_score(policy, item)) / 2;
    *error = per_root * sqrt(share);
    return share;
}

/* The more is known of two, the smaller the difference that decides between them: else whoever was
 * lucky at first would keep its place from a slightly better one for ever. */
static double protect_value(const bd_policy *policy, const bd_policy_item *item) {
    double error;
    const double share = steady_share(policy, item, &error);
    return item->protected_by_rate ? share + fmin(PROTECT_ERRORS * error, policy->margin * share)
                                   : share;
}

void bd_policy_protect(const bd_policy *policy, bd_policy_item *const *residents, size_t count,
                       uint32_t top, uint32_t pages_max) {
    for (size_t i = 0; i < count; i++) {
        bd_policy_item *item = residents[i];
        item->value = protect_value(policy, item);
        item->protected_by_rate = false;
    }
    uint32_t pages = 0;
    for (uint32_t marked = 0; marked < top; marked++) {
        bd_policy_item *best = NULL;
        for (size_t i = 0; i < count; i++) {
            bd_policy_item *item = residents[i];
            if (item->pinned || item->retired || item->protected_by_rate || item->value <= 0)
                continue;
            if (item->pages > pages_max - pages) continue;
            if (!best || item->value > best->value) best = item;
        }
        if (!best) return;
        best->protected_by_rate = true;
        pages += best->pages;
    }
}

static bool may_go(const bd_policy_item *item) {
    return !item->fixed && !item->pinned && !item->protected_by_rate;
}

/* Value of keeping an item, by the page. The newest resident has not shown yet that it is worth its
 * place; the others have, and keep it against anyone of about their own popularity. That also
 * serves a cycle of more variants than fit: the newcomers replace each other and the rest stays. */
static uint64_t value_residents(const bd_policy *policy, bd_policy_item *const *residents,
                                size_t count) {
    uint32_t newest = 0;
    uint64_t pages = 0;
    for (size_t i = 0; i < count; i++)
        if (residents[i]->admission > newest) newest = residents[i]->admission;
    for (size_t i = 0; i < count; i++) {
        bd_policy_item *item = residents[i];
        if (!may_go(item)) continue;
        double bonus = item->admission == newest ? 1 : 1 + policy->margin;
        item->value = bd_policy_score(policy, item) * bonus / item->pages;
        item->chosen = false;
        pages += item->pages;
    }
    return pages;
}

static bool goes_before(const bd_policy_item *a, const bd_policy_item *b) {
    if (a->value != b->value) return a->value < b->value;
    return a->seen < b->seen; /* unknown both: the one not asked for longest */
}

size_t bd_policy_victims(const bd_policy *policy, bd_policy_item *const *residents, size_t count,
                         uint32_t need_pages, uint32_t *victims) {
    if (need_pages == 0 || value_residents(policy, residents, count) < need_pages) return 0;
    uint64_t freed = 0;
    size_t chosen = 0;
    while (freed < need_pages) {
        size_t worst = count;
        for (size_t i = 0; i < count; i++) {
            if (!may_go(residents[i]) || residents[i]->chosen) continue;
            if (worst == count || goes_before(residents[i], residents[worst])) worst = i;
        }
        residents[worst]->chosen = true;
        freed += residents[worst]->pages;
        victims[chosen++] = (uint32_t)worst;
    }
    /* A large last victim can make earlier small ones unnecessary; the best of them stay first. */
    for (size_t i = chosen; i-- > 0;) {
        uint32_t pages = residents[victims[i]]->pages;
        if (freed - pages < need_pages) continue;
        freed -= pages;
        memmove(&victims[i], &victims[i + 1], (chosen - i - 1) * sizeof *victims);
        chosen--;
    }
    return chosen;
}
