/* metrics.h - counters, gauges and histograms, written as Prometheus text 0.0.4.
 * Owner: the server. Threads: registering takes a lock; add/set/observe are atomic, from any
 * thread. */
#ifndef BITDELTA_BASE_METRICS_H
#define BITDELTA_BASE_METRICS_H

#include "bitdelta/base/strbuf.h"

typedef struct bd_metrics bd_metrics;
typedef struct bd_metric bd_metric; /* one series; lives as long as the registry */

typedef struct bd_label {
    const char *key, *value;
} bd_label;

bd_metrics *bd_metrics_create(size_t series_max); /* NULL when out of memory */
void bd_metrics_destroy(bd_metrics *metrics);

/* Same name and labels: the same series. Beyond series_max the shared series with every label value
 * "other" is returned; never NULL. Strings are copied. Label values are escaped when written. */
bd_metric *bd_metrics_counter(bd_metrics *metrics, const char *name, const char *help,
                              const bd_label *labels, uint32_t label_count);
bd_metric *bd_metrics_gauge(bd_metrics *metrics, const char *name, const char *help,
                            const bd_label *labels, uint32_t label_count);
/* bounds: ascending upper bounds without +Inf, the same for all series of a name. */
bd_metric *bd_metrics_histogram(bd_metrics *metrics, const char *name, const char *help,
                                const double *bounds, uint32_t bound_count, const bd_label *labels,
                                uint32_t label_count);

/* Gauge or counter; a counter ignores what would not raise it. */
void bd_metric_add(bd_metric *metric, double amount);
void bd_metric_set(bd_metric *metric, double value); /* gauge */
void bd_metric_observe(bd_metric *metric, double value);
double bd_metric_value(const bd_metric *metric); /* histogram: how many observations */

/* Families sorted by name, series by labels; histograms from one snapshot. */
void bd_metrics_write(bd_metrics *metrics, bd_strbuf *out);
/* The same, but labels with these keys have this value (NULL: are not there), and series that are
 * then alike are one, their sum. */
void bd_metrics_write_totals(bd_metrics *metrics, const bd_label *hidden, uint32_t hidden_count,
                             bd_strbuf *out);

#endif
