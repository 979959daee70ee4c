/* compress_progress.c - bytes, rate and time left, on a terminal, in a log or as JSON lines. Owner:
 * the run. */
#include <string.h>
#include <unistd.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/strbuf.h"

#include "compress_internal.h"

#define INTERVAL_US 500000u

void bd_progress_begin(bd_progress *progress, FILE *stream, bool json, uint64_t total_bytes) {
    const uint64_t now = bd_now_us();
    *progress = (bd_progress){.stream = stream,
                              .json = json,
                              .total_bytes = total_bytes,
                              .start_us = now,
                              .last_us = now};
    progress->terminal = !json && stream && isatty(fileno(stream));
}

double bd_progress_seconds(const bd_progress *progress) {
    return (double)(bd_now_us() - progress->start_us) / 1e6;
}

static void print_json(const bd_progress *p, const char *what, double rate, double eta) {
    bd_strbuf line;
    bd_strbuf_init(&line, 0);
    bd_strbuf_printf(&line,
                     "{\"event\":\"progress\",\"bytes_done\":%llu,\"bytes_total\":%llu,\"bytes_per_"
                     "second\":%.0f,"
                     "\"eta_seconds\":%.1f,\"tensor\":",
                     (unsigned long long)p->done_bytes, (unsigned long long)p->total_bytes, rate,
                     eta);
    bd_strbuf_json_string(&line, what, strlen(what));
    bd_strbuf_puts(&line, "}\n");
    if (!line.failed) (void)fputs(line.data, p->stream);
    bd_strbuf_deinit(&line);
}

void bd_progress_add(bd_progress *progress, uint64_t bytes, const char *what) {
    const uint64_t now = bd_now_us();
    progress->done_bytes += bytes;
    const bool last = progress->done_bytes >= progress->total_bytes;
    if (!progress->stream || (!last && now - progress->last_us < INTERVAL_US)) return;
    progress->last_us = now;
    const double seconds = bd_progress_seconds(progress);
    const double rate = seconds > 0.0 ? (double)progress->done_bytes / seconds : 0.0;
    const double eta =
        rate > 0.0 ? (double)(progress->total_bytes - progress->done_bytes) / rate : 0.0;
    if (progress->json) {
        print_json(progress, what, rate, eta);
    } else {
        const double share = progress->total_bytes ? 100.0 * (double)progress->done_bytes /
                                                         (double)progress->total_bytes
                                                   : 100.0;
        (void)fprintf(progress->stream, "%s%5.1f%%  %.2f of %.2f GB  %.2f GB/s  %.0f s left %s",
                      progress->terminal ? "\r" : "", share, (double)progress->done_bytes / 1e9,
                      (double)progress->total_bytes / 1e9, rate / 1e9, eta,
                      progress->terminal && !last ? " " : "\n");
    }
    (void)fflush(progress->stream);
}
