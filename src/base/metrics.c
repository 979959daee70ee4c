/* metrics.c - the registry of series and the Prometheus text writer.
 * Owner: the server. Registering and writing hold the lock; values are atomics that never take it.
 */
#include "bitdelta/base/metrics.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "metrics_internal.h"
#include "utf8.h"

/* What a caller asks for; its strings are borrowed and copied when the family is new. */
typedef struct family_spec {
    const char *name, *help;
    metric_kind kind;
    uint32_t bound_count;
    const double *bounds;
} family_spec;

static void store_double(_Atomic uint64_t *cell, double value) {
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    atomic_store(cell, bits);
}

static void add_double(_Atomic uint64_t *cell, double amount) {
    uint64_t before = atomic_load(cell), after;
    do {
        double sum;
        memcpy(&sum, &before, sizeof sum);
        sum += amount;
        memcpy(&after, &sum, sizeof after);
    } while (!atomic_compare_exchange_weak(cell, &before, after));
}

/* --- registry --- */

bd_metrics *bd_metrics_create(size_t series_max) {
    bd_metrics *metrics = calloc(1, sizeof *metrics);
    if (!metrics) return NULL;
    if (pthread_mutex_init(&metrics->lock, NULL) != 0) {
        free(metrics);
        return NULL;
    }
    metrics->series_max = series_max;
    metrics->spill_family.kind = KIND_GAUGE; /* accepts add and set; observe finds no buckets */
    metrics->spill.family = &metrics->spill_family;
    return metrics;
}

static void series_destroy(bd_metric *metric) {
    free(metric->labels);
    free(metric->counts);
    free(metric);
}

static void family_destroy(family *fam) {
    for (size_t i = 0; i < fam->series_count; i++)
        series_destroy(fam->series[i]);
    free(fam->series);
    free(fam->bounds);
    free(fam->help);
    free(fam->name);
    free(fam);
}

void bd_metrics_destroy(bd_metrics *metrics) {
    if (!metrics) return;
    for (size_t i = 0; i < metrics->family_count; i++)
        family_destroy(metrics->families[i]);
    free(metrics->families);
    pthread_mutex_destroy(&metrics->lock);
    free(metrics);
}

static bool name_valid(const char *name, bool colon) {
    if (!*name || (*name >= '0' && *name <= '9')) return false;
    for (; *name; name++) {
        char c = *name;
        bool letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
        if (!letter && !(c >= '0' && c <= '9') && !(colon && c == ':')) return false;
    }
    return true;
}

/* Backslash and newline are escaped everywhere, the quote only in label values. Invalid UTF-8 would
 * fail the whole scrape, so it becomes U+FFFD. */
void bd_metrics_put_escaped(bd_strbuf *out, const char *text, bool quote) {
    size_t len = strlen(text);
    for (size_t i = 0; i < len;) {
        bool valid;
        size_t step = bd_utf8_step((const uint8_t *)text + i, len - i, &valid);
        if (!valid) {
            bd_strbuf_puts(out, "\xef\xbf\xbd");
        } else if (text[i] == '\n') {
            bd_strbuf_puts(out, "\\n");
        } else {
            if (text[i] == '\\' || (quote && text[i] == '"')) bd_strbuf_puts(out, "\\");
            bd_strbuf_append(out, text + i, step);
        }
        i += step;
    }
}

enum { LABELS_MAX = 16 };

/* `key="value",...` in the order of the keys, so that the same set is the same text. NULL: out of
 * memory. */
static char *labels_text(const bd_label *labels, uint32_t count, const char *every_value) {
    BD_ASSERT(count <= LABELS_MAX);
    const bd_label *sorted[LABELS_MAX];
    for (uint32_t i = 0; i < count; i++) {
        BD_ASSERT(name_valid(labels[i].key, false));
        uint32_t at = i;
        for (; at > 0 && strcmp(sorted[at - 1]->key, labels[i].key) > 0; at--) {
            sorted[at] = sorted[at - 1];
        }
        sorted[at] = &labels[i];
    }
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bd_strbuf_puts(&text, "");
    for (uint32_t i = 0; i < count; i++) {
        if (i > 0) bd_strbuf_puts(&text, ",");
        bd_strbuf_puts(&text, sorted[i]->key);
        bd_strbuf_puts(&text, "=\"");
        bd_metrics_put_escaped(&text, every_value ? every_value : sorted[i]->value, true);
        bd_strbuf_puts(&text, "\"");
    }
    if (text.failed) {
        bd_strbuf_deinit(&text);
        return NULL;
    }
    return text.data;
}

/* Room for one pointer more in an array of pointers. */
static bool grow_pointers(void **array, size_t count, size_t *cap) {
    if (count < *cap) return true;
    size_t next = *cap == 0 ? 8 : *cap * 2;
    void *bigger = realloc(*array, next * sizeof(void *));
    if (!bigger) return false;
    *array = bigger;
    *cap = next;
    return true;
}

/* Index of the family, or where it belongs. */
static size_t family_position(const bd_metrics *metrics, const char *name, bool *found) {
    size_t low = 0, high = metrics->family_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(metrics->families[middle]->name, name);
        if (order == 0) {
            *found = true;
            return middle;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    *found = false;
    return low;
}

static size_t series_position(const family *fam, const char *labels, bool *found) {
    size_t low = 0, high = fam->series_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        int order = strcmp(fam->series[middle]->labels, labels);
        if (order == 0) {
            *found = true;
            return middle;
        }
        if (order < 0) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    *found = false;
    return low;
}

static family *family_create(const family_spec *spec) {
    family *fam = calloc(1, sizeof *fam);
    if (!fam) return NULL;
    fam->kind = spec->kind;
    fam->bound_count = spec->bound_count;
    fam->name = strdup(spec->name);
    fam->help = strdup(spec->help);
    fam->bounds = calloc((size_t)spec->bound_count + 1, sizeof *fam->bounds);
    if (!fam->name || !fam->help || !fam->bounds) {
        family_destroy(fam);
        return NULL;
    }
    for (uint32_t i = 0; i < spec->bound_count; i++) {
        BD_ASSERT(isfinite(spec->bounds[i]) && (i == 0 || spec->bounds[i] > spec->bounds[i - 1]));
        fam->bounds[i] = spec->bounds[i];
    }
    return fam;
}

/* The family of that name, made if new. NULL: out of memory. */
static family *family_of(bd_metrics *metrics, const family_spec *wanted) {
    bool found;
    size_t at = family_position(metrics, wanted->name, &found);
    if (found) {
        const family *have = metrics->families[at];
        BD_ASSERT(have->kind == wanted->kind && have->bound_count == wanted->bound_count);
        return metrics->families[at];
    }
    void *array = metrics->families;
    if (!grow_pointers(&array, metrics->family_count, &metrics->family_cap)) return NULL;
    metrics->families = array;
    family *fam = family_create(wanted);
    if (!fam) return NULL;
    memmove(&metrics->families[at + 1], &metrics->families[at],
            (metrics->family_count - at) * sizeof fam);
    metrics->families[at] = fam;
    metrics->family_count++;
    return fam;
}

/* The series with these labels, made if new; takes over the label text. NULL: out of memory. */
static bd_metric *series_of(bd_metrics *metrics, family *fam, char *labels) {
    bool found;
    size_t at = series_position(fam, labels, &found);
    if (found) {
        BD_ASSERT(fam->series);
        free(labels);
        return fam->series[at];
    }
    void *array = fam->series;
    bool grown = grow_pointers(&array, fam->series_count, &fam->series_cap);
    fam->series = array;
    bd_metric *metric = grown ? calloc(1, sizeof *metric) : NULL;
    if (metric && fam->kind == KIND_HISTOGRAM) {
        metric->counts = calloc((size_t)fam->bound_count + 1, sizeof *metric->counts);
    }
    if (!metric || (fam->kind == KIND_HISTOGRAM && !metric->counts)) {
        free(metric);
        free(labels);
        return NULL;
    }
    metric->family = fam;
    metric->labels = labels;
    memmove(&fam->series[at + 1], &fam->series[at], (fam->series_count - at) * sizeof metric);
    fam->series[at] = metric;
    fam->series_count++;
    metrics->series_count++;
    return metric;
}

static bd_metric *register_series(bd_metrics *metrics, const family_spec *wanted,
                                  const bd_label *labels, uint32_t label_count) {
    BD_ASSERT(name_valid(wanted->name, true));
    bd_metric *metric = NULL;
    pthread_mutex_lock(&metrics->lock);
    family *fam = family_of(metrics, wanted);
    char *text = fam ? labels_text(labels, label_count, NULL) : NULL;
    if (text) {
        bool known;
        series_position(fam, text, &known);
        if (!known && metrics->series_count >= metrics->series_max) {
            free(text);
            text = labels_text(labels, label_count, "other");
        }
    }
    if (text) metric = series_of(metrics, fam, text);
    pthread_mutex_unlock(&metrics->lock);
    return metric ? metric : &metrics->spill;
}

bd_metric *bd_metrics_counter(bd_metrics *metrics, const char *name, const char *help,
                              const bd_label *labels, uint32_t label_count) {
    const family_spec spec = {.name = name, .help = help, .kind = KIND_COUNTER};
    return register_series(metrics, &spec, labels, label_count);
}

bd_metric *bd_metrics_gauge(bd_metrics *metrics, const char *name, const char *help,
                            const bd_label *labels, uint32_t label_count) {
    const family_spec spec = {.name = name, .help = help, .kind = KIND_GAUGE};
    return register_series(metrics, &spec, labels, label_count);
}

bd_metric *bd_metrics_histogram(bd_metrics *metrics, const char *name, const char *help,
                                const double *bounds, uint32_t bound_count, const bd_label *labels,
                                uint32_t label_count) {
    const family_spec spec = {.name = name,
                              .help = help,
                              .kind = KIND_HISTOGRAM,
                              .bounds = bounds,
                              .bound_count = bound_count};
    return register_series(metrics, &spec, labels, label_count);
}

/* --- values --- */

void bd_metric_add(bd_metric *metric, double amount) {
    BD_ASSERT(metric->family->kind != KIND_HISTOGRAM);
    /* A counter only rises; the comparison also drops a NaN, which would stay for ever. */
    if (metric->family->kind == KIND_COUNTER && !(amount > 0)) return;
    add_double(&metric->value, amount);
}

void bd_metric_set(bd_metric *metric, double value) {
    BD_ASSERT(metric->family->kind != KIND_HISTOGRAM);
    store_double(&metric->value, value);
}

void bd_metric_observe(bd_metric *metric, double value) {
    if (!metric->counts || isnan(value)) return;
    const family *fam = metric->family;
    uint32_t bucket = 0;
    while (bucket < fam->bound_count && value > fam->bounds[bucket])
        bucket++;
    atomic_fetch_add(&metric->counts[bucket], 1);
    add_double(&metric->value, value);
}

double bd_metric_value(const bd_metric *metric) {
    if (!metric->counts) return bd_metric_load(&metric->value);
    uint64_t total = 0;
    for (uint32_t i = 0; i <= metric->family->bound_count; i++) {
        total += atomic_load(&metric->counts[i]);
    }
    return (double)total;
}

/* --- text --- */

static void put_value(bd_strbuf *out, double value) {
    if (isnan(value)) {
        bd_strbuf_puts(out, "NaN");
    } else if (isinf(value)) {
        bd_strbuf_puts(out, value > 0 ? "+Inf" : "-Inf");
    } else {
        bd_strbuf_json_number(out, value);
    }
}

/* `name_suffix{labels}`, without braces when there are no labels. */
static void put_name(bd_strbuf *out, const family *fam, const char *suffix, const char *labels) {
    bd_strbuf_puts(out, fam->name);
    bd_strbuf_puts(out, suffix);
    if (*labels) bd_strbuf_printf(out, "{%s}", labels);
    bd_strbuf_puts(out, " ");
}

static void put_bucket(bd_strbuf *out, const family *fam, const char *labels, uint32_t index,
                       uint64_t count) {
    bd_strbuf_printf(out, "%s_bucket{%s%sle=\"", fam->name, labels, *labels ? "," : "");
    put_value(out, index < fam->bound_count ? fam->bounds[index] : (double)INFINITY);
    bd_strbuf_printf(out, "\"} %llu\n", (unsigned long long)count);
}

/* The count is what the buckets add up to, so that the two always agree. */
static void put_histogram(bd_strbuf *out, const family *fam, const bd_metric_reading *reading) {
    uint64_t total = 0;
    for (uint32_t i = 0; i <= fam->bound_count; i++) {
        total += reading->counts[i];
        put_bucket(out, fam, reading->labels, i, total);
    }
    put_name(out, fam, "_sum", reading->labels);
    put_value(out, reading->value);
    bd_strbuf_puts(out, "\n");
    put_name(out, fam, "_count", reading->labels);
    bd_strbuf_printf(out, "%llu\n", (unsigned long long)total);
}

void bd_metric_read(const bd_metric *metric, bd_metric_reading *add) {
    add->value += bd_metric_load(&metric->value);
    for (uint32_t i = 0; metric->counts && i <= metric->family->bound_count; i++)
        add->counts[i] += atomic_load(&metric->counts[i]);
}

void bd_family_put_head(const family *fam, bd_strbuf *out) {
    static const char *const k_types[] = {"counter", "gauge", "histogram"};
    bd_strbuf_printf(out, "# HELP %s ", fam->name);
    bd_metrics_put_escaped(out, fam->help, false);
    bd_strbuf_printf(out, "\n# TYPE %s %s\n", fam->name, k_types[fam->kind]);
}

void bd_family_put(const family *fam, const bd_metric_reading *reading, bd_strbuf *out) {
    if (fam->kind == KIND_HISTOGRAM) {
        put_histogram(out, fam, reading);
        return;
    }
    put_name(out, fam, "", reading->labels);
    put_value(out, reading->value);
    bd_strbuf_puts(out, "\n");
}

static void put_family(bd_strbuf *out, const family *fam, uint64_t *counts) {
    if (fam->series_count == 0) return;
    bd_family_put_head(fam, out);
    for (size_t i = 0; i < fam->series_count; i++) {
        bd_metric_reading reading = {.labels = fam->series[i]->labels, .counts = counts};
        memset(counts, 0, (fam->bound_count + (size_t)1) * sizeof *counts);
        bd_metric_read(fam->series[i], &reading);
        bd_family_put(fam, &reading, out);
    }
}

uint64_t *bd_metrics_counts(const bd_metrics *metrics) {
    size_t most = 1;
    for (size_t i = 0; i < metrics->family_count; i++)
        if (metrics->families[i]->bound_count >= most)
            most = metrics->families[i]->bound_count + (size_t)1;
    return calloc(most, sizeof(uint64_t));
}

void bd_metrics_write(bd_metrics *metrics, bd_strbuf *out) {
    pthread_mutex_lock(&metrics->lock);
    uint64_t *counts = bd_metrics_counts(metrics);
    if (!counts) out->failed = true;
    for (size_t i = 0; counts && i < metrics->family_count; i++)
        put_family(out, metrics->families[i], counts);
    free(counts);
    pthread_mutex_unlock(&metrics->lock);
}
