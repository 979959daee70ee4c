/* policy.h - which resident variant gives way. Pure functions over small structs, so that
 * bench/cache_policy.c can replay traces over the very code that serves. Owner and thread: whoever
 * holds the structs; nothing is allocated.
 *
 * Each variant's share of the requests is estimated over several spans of recent requests at once
 * (decayed counts). The spans form a mixture: each is weighted by how much it had to do with the
 * requests that came, and counts a request by the same measure. The score of a variant is its share
 * in the mixture: how likely the next request is for it. Variants of about the same score do not
 * trade places: who has just come in must be better by a margin to stay. */
#ifndef BITDELTA_SRC_CACHE_POLICY_H
#define BITDELTA_SRC_CACHE_POLICY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BD_POLICY_SPANS 6

typedef struct bd_policy {
    double half_life_us;    /* of rates per second */
    double margin;          /* a newcomer must be this much likelier than whom it replaces */
    uint64_t requests;      /* counted so far; the clock of the spans */
    uint32_t variant_count; /* known variants */
    double weight[BD_POLICY_SPANS]; /* sum 1 */
    double decay[BD_POLICY_SPANS];  /* per request */
    double total[BD_POLICY_SPANS];  /* of all variants' counts, decayed alike */
    double plain_total[BD_POLICY_SPANS];
} bd_policy;

typedef struct bd_policy_item {
    double count[BD_POLICY_SPANS]; /* as of request number `seen` */
    double plain[BD_POLICY_SPANS]; /* every request as one, whoever foresaw it */
    uint64_t seen;
    double rate; /* requests per second, decayed to rate_us */
    uint64_t rate_us;
    uint32_t pages;         /* what evicting it frees */
    uint32_t admission;     /* grows with each admission; the newest is on probation */
    bool fixed;             /* pinned, leased or loading: not a victim */
    bool pinned;            /* by the operator */
    bool retired;           /* nobody new will want it: not protected by rate */
    bool protected_by_rate; /* set by bd_policy_protect */
    double value;           /* scratch of the ranking under way */
    bool chosen;            /* scratch */
} bd_policy_item;

void bd_policy_init(bd_policy *policy, double half_life_s);
/* A request for the item arrived, whether it is resident or not. */
void bd_policy_touch(bd_policy *policy, bd_policy_item *item, uint64_t now_us);
double bd_policy_rate(const bd_policy *policy, const bd_policy_item *item, uint64_t now_us);
double bd_policy_score(const bd_policy *policy, const bd_policy_item *item);

/* Marks up to `top` residents of the largest share of the requests, of at most pages_max pages
 * together, but none that is pinned or retired; those marked before keep their place unless another
 * is better by the margin, or by what chance alone hardly makes out of nothing. */
void bd_policy_protect(const bd_policy *policy, bd_policy_item *const *residents, size_t count,
                       uint32_t top, uint32_t pages_max);
/* Picks victims until they free need_pages: indices into residents in *victims (room for count),
 * worst first. Returns how many, 0 when all of them together would not do (then nobody need go). */
size_t bd_policy_victims(const bd_policy *policy, bd_policy_item *const *residents, size_t count,
                         uint32_t need_pages, uint32_t *victims);

#endif
