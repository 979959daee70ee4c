/* metrics_totals.c - the registry as text in which some labels are not shown: series that differ in
 * nothing else are added up. Threads: any. */
#include <stdlib.h>

#include "metrics_internal.h"

typedef struct shown {
    char *labels; /* owned */
    const bd_metric *metric;
} shown;

/* The end of a label's value: the quote that no backslash precedes. */
static const char *end_of_value(const char *text) {
    while (*text && *text != '"')
        text += *text == '\\' && text[1] ? 2 : 1;
    return text;
}

static const bd_label *find_hidden(const bd_label *hidden, uint32_t count, const char *key,
                                   size_t bytes) {
    for (uint32_t i = 0; i < count; i++)
        if (strlen(hidden[i].key) == bytes && memcmp(hidden[i].key, key, bytes) == 0)
            return &hidden[i];
    return NULL;
}

/* `key="value",...` without what is hidden. NULL: out of memory. */
static char *visible_labels(const char *labels, const bd_label *hidden, uint32_t count) {
    bd_strbuf text;
    bd_strbuf_init(&text, 0);
    bd_strbuf_puts(&text, "");
    while (*labels) {
        const char *value = strchr(labels, '=') + 2, *end = end_of_value(value);
        size_t key_bytes = (size_t)(value - 2 - labels);
        const bd_label *rule = find_hidden(hidden, count, labels, key_bytes);
        if (text.len_bytes > 0 && (!rule || rule->value)) bd_strbuf_puts(&text, ",");
        if (!rule) {
            bd_strbuf_append(&text, labels, (size_t)(end + 1 - labels));
        } else if (rule->value) {
            bd_strbuf_append(&text, labels, key_bytes + 2);
            bd_metrics_put_escaped(&text, rule->value, true);
            bd_strbuf_puts(&text, "\"");
        }
        labels = end + 1;
        if (*labels == ',') labels++;
    }
    if (!text.failed) return text.data;
    bd_strbuf_deinit(&text);
    return NULL;
}

static int compare_shown(const void *a, const void *b) {
    return strcmp(((const shown *)a)->labels, ((const shown *)b)->labels);
}

static void put_groups(const family *fam, const shown *list, uint64_t *counts, bd_strbuf *out) {
    bd_family_put_head(fam, out);
    for (size_t i = 0; i < fam->series_count;) {
        bd_metric_reading reading = {.labels = list[i].labels, .counts = counts};
        memset(counts, 0, (fam->bound_count + (size_t)1) * sizeof *counts);
        size_t first = i;
        for (; i < fam->series_count && strcmp(list[i].labels, list[first].labels) == 0; i++)
            bd_metric_read(list[i].metric, &reading);
        bd_family_put(fam, &reading, out);
    }
}

static void put_family(const family *fam, const bd_label *hidden, uint32_t hidden_count,
                       uint64_t *counts, bd_strbuf *out) {
    if (fam->series_count == 0) return;
    shown *list = calloc(fam->series_count, sizeof *list);
    bool ok = list != NULL;
    for (size_t i = 0; ok && i < fam->series_count; i++) {
        list[i].metric = fam->series[i];
        list[i].labels = visible_labels(fam->series[i]->labels, hidden, hidden_count);
        ok = list[i].labels != NULL;
    }
    if (ok) {
        qsort(list, fam->series_count, sizeof *list, compare_shown);
        put_groups(fam, list, counts, out);
    } else {
        out->failed = true;
    }
    for (size_t i = 0; list && i < fam->series_count; i++)
        free(list[i].labels);
    free(list);
}

void bd_metrics_write_totals(bd_metrics *metrics, const bd_label *hidden, uint32_t hidden_count,
                             bd_strbuf *out) {
    pthread_mutex_lock(&metrics->lock);
    uint64_t *counts = bd_metrics_counts(metrics);
    if (!counts) out->failed = true;
    for (size_t i = 0; counts && i < metrics->family_count; i++)
        put_family(metrics->families[i], hidden, hidden_count, counts, out);
    free(counts);
    pthread_mutex_unlock(&metrics->lock);
}
