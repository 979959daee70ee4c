/* The metrics registry: the text format byte by byte, limits, and updates from several threads.
 * Also run under the thread sanitizer. */
#include "base_support.h"

#include <math.h>
#include <pthread.h>

#include "bitdelta/base/metrics.h"

static char *write_text(bd_metrics *metrics) {
    bd_strbuf buf;
    bd_strbuf_init(&buf, 0);
    bd_strbuf_puts(&buf, "");
    bd_metrics_write(metrics, &buf);
    assert_false(buf.failed);
    return buf.data;
}

static void test_text(void **state) {
    (void)state;
    bd_metrics *metrics = bd_metrics_create(100);
    assert_non_null(metrics);
    bd_metric *z = bd_metrics_gauge(metrics, "z_depth", "last", NULL, 0);
    bd_metric *b = bd_metrics_counter(metrics, "a_total", "back\\slash\nline \"quoted\"",
                                      (bd_label[]){{"model", "b\"q\\\n"}, {"code", "200"}}, 2);
    bd_metric *a = bd_metrics_counter(metrics, "a_total", "ignored",
                                      (bd_label[]){{"model", "a\xff"}, {"code", "200"}}, 2);
    /* Another order of the labels is the same series. */
    assert_ptr_equal(a, bd_metrics_counter(metrics, "a_total", "x",
                                           (bd_label[]){{"code", "200"}, {"model", "a\xff"}}, 2));
    const double bounds[] = {0.005, 0.5, 10};
    bd_metric *h = bd_metrics_histogram(metrics, "m_seconds", "time", bounds, 3, NULL, 0);
    bd_metric *labelled =
        bd_metrics_histogram(metrics, "m_seconds", "time", bounds, 3, (bd_label[]){{"k", "v"}}, 1);
    bd_metric_set(z, -(double)INFINITY);
    bd_metric_add(b, 3);
    bd_metric_add(a, 0.25);
    bd_metric_add(a, -5); /* a counter only rises */
    bd_metric_add(a, (double)NAN);
    bd_metric_observe(h, 0.005); /* a bound belongs to its bucket */
    bd_metric_observe(h, 0.4);
    bd_metric_observe(h, 1000);
    bd_metric_observe(h, (double)NAN);
    bd_metric_observe(labelled, 1);
    assert_true(bd_metric_value(a) == 0.25);
    assert_true(bd_metric_value(h) == 3);
    char *text = write_text(metrics);
    assert_string_equal(text, "# HELP a_total back\\\\slash\\nline \"quoted\"\n"
                              "# TYPE a_total counter\n"
                              "a_total{code=\"200\",model=\"a\xef\xbf\xbd\"} 0.25\n"
                              "a_total{code=\"200\",model=\"b\\\"q\\\\\\n\"} 3\n"
                              "# HELP m_seconds time\n"
                              "# TYPE m_seconds histogram\n"
                              "m_seconds_bucket{le=\"0.005\"} 1\n"
                              "m_seconds_bucket{le=\"0.5\"} 2\n"
                              "m_seconds_bucket{le=\"10\"} 2\n"
                              "m_seconds_bucket{le=\"+Inf\"} 3\n"
                              "m_seconds_sum 1000.405\n"
                              "m_seconds_count 3\n"
                              "m_seconds_bucket{k=\"v\",le=\"0.005\"} 0\n"
                              "m_seconds_bucket{k=\"v\",le=\"0.5\"} 0\n"
                              "m_seconds_bucket{k=\"v\",le=\"10\"} 1\n"
                              "m_seconds_bucket{k=\"v\",le=\"+Inf\"} 1\n"
                              "m_seconds_sum{k=\"v\"} 1\n"
                              "m_seconds_count{k=\"v\"} 1\n"
                              "# HELP z_depth last\n"
                              "# TYPE z_depth gauge\n"
                              "z_depth -Inf\n");
    free(text);
    bd_metric_set(z, 1.5);
    bd_metric_add(z, -2);
    assert_true(bd_metric_value(z) == -0.5);
    bd_metrics_destroy(metrics);
    bd_metrics_destroy(NULL);
}

static void test_series_limit(void **state) {
    (void)state;
    bd_metrics *metrics = bd_metrics_create(50);
    bd_metric *first = NULL;
    for (int i = 0; i < 1000; i++) {
        char name[16];
        snprintf(name, sizeof name, "v%d", i);
        bd_metric *metric = bd_metrics_counter(metrics, "x_total", "x",
                                               (bd_label[]){{"model", name}, {"c", "1"}}, 2);
        assert_non_null(metric);
        bd_metric_add(metric, 1);
        if (i == 0) first = metric;
    }
    assert_true(bd_metric_value(first) == 1);
    bd_metric *other =
        bd_metrics_counter(metrics, "x_total", "x", (bd_label[]){{"model", "new"}, {"c", "2"}}, 2);
    assert_true(bd_metric_value(other) == 950);
    /* A known series is still found, and a family without labels still exists. */
    assert_ptr_equal(first, bd_metrics_counter(metrics, "x_total", "x",
                                               (bd_label[]){{"model", "v0"}, {"c", "1"}}, 2));
    bd_metric_add(bd_metrics_counter(metrics, "y_total", "y", NULL, 0), 2);
    char *text = write_text(metrics);
    assert_non_null(strstr(text, "x_total{c=\"other\",model=\"other\"} 950\n"));
    assert_non_null(strstr(text, "y_total 2\n"));
    assert_null(strstr(text, "v50\""));
    free(text);
    bd_metrics_destroy(metrics);
}

/* Series that differ only in what is hidden are one; the others stay as they are. */
static void test_totals(void **state) {
    (void)state;
    bd_metrics *metrics = bd_metrics_create(100);
    const double bounds[] = {1, 2};
    static const char *const models[] = {"zen", "zen-c", "b\"q\\,x=\"\n"};
    for (int i = 0; i < 3; i++) {
        const bd_label labels[] = {{"model_name", models[i]}, {"result", i == 2 ? "bad" : "ok"}};
        bd_metric_add(bd_metrics_counter(metrics, "a_total", "a", labels, 2), i + 1);
        bd_metric *h = bd_metrics_histogram(metrics, "h_seconds", "h", bounds, 2, labels, 1);
        for (int k = 0; k <= i; k++)
            bd_metric_observe(h, i);
        bd_metric_add(bd_metrics_counter(metrics, "v_total", "v",
                                         (bd_label[]){{"variant", models[i]}, {"z", "1"}}, 2),
                      10);
    }
    bd_metric_set(bd_metrics_gauge(metrics, "z_depth", "z", NULL, 0), 7);
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    const bd_label hidden[] = {{"model_name", "zen\"1"}, {"variant", NULL}};
    bd_metrics_write_totals(metrics, hidden, 2, &out);
    assert_false(out.failed);
    assert_string_equal(out.data, "# HELP a_total a\n# TYPE a_total counter\n"
                                  "a_total{model_name=\"zen\\\"1\",result=\"bad\"} 3\n"
                                  "a_total{model_name=\"zen\\\"1\",result=\"ok\"} 3\n"
                                  "# HELP h_seconds h\n# TYPE h_seconds histogram\n"
                                  "h_seconds_bucket{model_name=\"zen\\\"1\",le=\"1\"} 3\n"
                                  "h_seconds_bucket{model_name=\"zen\\\"1\",le=\"2\"} 6\n"
                                  "h_seconds_bucket{model_name=\"zen\\\"1\",le=\"+Inf\"} 6\n"
                                  "h_seconds_sum{model_name=\"zen\\\"1\"} 8\n"
                                  "h_seconds_count{model_name=\"zen\\\"1\"} 6\n"
                                  "# HELP v_total v\n# TYPE v_total counter\nv_total{z=\"1\"} 30\n"
                                  "# HELP z_depth z\n# TYPE z_depth gauge\nz_depth 7\n");
    bd_strbuf_deinit(&out);
    bd_metrics_destroy(metrics);
}

typedef struct shared {
    bd_metrics *metrics;
    bd_metric *counter, *histogram;
} shared;

enum { THREADS = 4, ROUNDS = 5000 };

static void *update(void *arg) {
    const shared *self = arg;
    for (int i = 0; i < ROUNDS; i++) {
        char name[16];
        snprintf(name, sizeof name, "%d", i % 50);
        bd_metric_add(self->counter, 0.5);
        bd_metric_observe(self->histogram, i % 2 == 0 ? 0.5 : 2);
        if (i % 10 == 0) {
            bd_metric_add(bd_metrics_gauge(self->metrics, "g", "g", (bd_label[]){{"n", name}}, 1),
                          1);
        }
    }
    return NULL;
}

/* While values change, every snapshot has +Inf equal to the count and buckets that rise. */
static void test_threads(void **state) {
    (void)state;
    const double bounds[] = {1};
    shared self = {.metrics = bd_metrics_create(1000)};
    self.counter = bd_metrics_counter(self.metrics, "c_total", "c", NULL, 0);
    self.histogram = bd_metrics_histogram(self.metrics, "h", "h", bounds, 1, NULL, 0);
    pthread_t threads[THREADS];
    for (int i = 0; i < THREADS; i++) {
        assert_int_equal(pthread_create(&threads[i], NULL, update, &self), 0);
    }
    for (int i = 0; i < 200; i++) {
        char *text = write_text(self.metrics);
        unsigned low, all, count;
        const char *at = strstr(text, "h_bucket{le=\"1\"}");
        assert_int_equal(sscanf(at, "h_bucket{le=\"1\"} %u h_bucket{le=\"+Inf\"} %u", &low, &all),
                         2);
        assert_int_equal(sscanf(strstr(text, "h_count "), "h_count %u", &count), 1);
        assert_int_equal(all, count);
        assert_true(low <= all);
        free(text);
    }
    for (int i = 0; i < THREADS; i++)
        pthread_join(threads[i], NULL);
    assert_true(bd_metric_value(self.counter) == THREADS * ROUNDS * 0.5);
    assert_true(bd_metric_value(self.histogram) == THREADS * ROUNDS);
    double sum = 0;
    for (int i = 0; i < 50; i += 10) {
        char name[16];
        snprintf(name, sizeof name, "%d", i);
        sum +=
            bd_metric_value(bd_metrics_gauge(self.metrics, "g", "g", (bd_label[]){{"n", name}}, 1));
    }
    assert_true(sum == THREADS * ROUNDS / 10);
    bd_metrics_destroy(self.metrics);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),
        cmocka_unit_test(test_totals),
        cmocka_unit_test(test_series_limit),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
