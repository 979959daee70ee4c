/* cpu_sample.h - what sampling from a whole row of logits and from the ranks' most likely tokens
 * have in common. Threads: pure functions; any worker. */
#ifndef BITDELTA_BACKEND_CPU_CPU_SAMPLE_H
#define BITDELTA_BACKEND_CPU_CPU_SAMPLE_H

#include "cpu.h"

#define BD_CPU_GREEDY_BELOW 1e-5f /* of a temperature */

typedef struct bd_cpu_candidates { /* edited logits of one row with their probabilities */
    const float *logits;           /* ascending ids */
    double *weights;               /* exp((logit - max) / temperature); the largest is 1 */
    uint32_t count;
} bd_cpu_candidates;

/* The index of the candidate drawn. Candidates that no cut keeps change nothing, so it is the same
 * with or without them. */
uint32_t bd_cpu_draw(const bd_cpu_candidates *c, const bd_sampling *sampling, double uniform);
/* The result of logits row `index` from all its logits, [bd_cpu_id_end]. */
void bd_cpu_sample_whole(const bd_cpu *cpu, const bd_step *step, uint32_t index,
                         const float *logits, uint32_t worker);

/* By descending logit, then id. */
static inline bool bd_cpu_before(float logit, uint32_t id, float other_logit, uint32_t other_id) {
    return logit > other_logit || (logit == other_logit && id < other_id);
}

static inline bd_token_result *bd_cpu_result(const bd_cpu *cpu, uint32_t index) {
    return (bd_token_result *)cpu->buffers[BD_CPU_RESULTS] + index;
}

#endif
