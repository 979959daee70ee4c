/* metrics_internal.h - the registry's structures, for those who write it as text. */
#ifndef BITDELTA_SRC_BASE_METRICS_INTERNAL_H
#define BITDELTA_SRC_BASE_METRICS_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#include "bitdelta/base/metrics.h"

typedef enum metric_kind { KIND_COUNTER, KIND_GAUGE, KIND_HISTOGRAM } metric_kind;

typedef struct family family;

struct bd_metric {
    const family *family;
    char *labels;             /* `key="value",...` sorted by key, escaped; "" without labels */
    _Atomic uint64_t value;   /* bits of a double; a histogram's sum */
    _Atomic uint64_t *counts; /* histogram: one per bound, then +Inf; else NULL */
};

struct family {
    char *name, *help;
    metric_kind kind;
    uint32_t bound_count;
    double *bounds;
    bd_metric **series; /* sorted by labels */
    size_t series_count, series_cap;
};

struct bd_metrics {
    pthread_mutex_t lock;
    family **families; /* sorted by name; guarded by lock, as all below */
    size_t family_count, family_cap;
    size_t series_max, series_count;
    family spill_family; /* takes values when memory ran out; never written */
    bd_metric spill;
};

/* One series as it is written: of one metric, or of several added up. */
typedef struct bd_metric_reading {
    const char *labels;
    double value;
    uint64_t *counts; /* [bound_count + 1], of histograms */
} bd_metric_reading;

static inline double bd_metric_load(const _Atomic uint64_t *cell) {
    uint64_t bits = atomic_load(cell);
    double value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

void bd_metric_read(const bd_metric *metric, bd_metric_reading *add);
void bd_family_put_head(const family *fam, bd_strbuf *out);
void bd_family_put(const family *fam, const bd_metric_reading *reading, bd_strbuf *out);
/* Backslash and newline are escaped everywhere, the quote only in label values. */
void bd_metrics_put_escaped(bd_strbuf *out, const char *text, bool quote);
/* Room for the buckets of any histogram; with the lock. NULL: none left. */
uint64_t *bd_metrics_counts(const bd_metrics *metrics);

#endif
