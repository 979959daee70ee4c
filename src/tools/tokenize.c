/* tokenize.c - `bitdelta tokenize`. Owner: main. Threads: the main thread only. */
#include "bitdelta/tools/tokenize.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/json_scan.h"
#include "bitdelta/tokenizer/tokenizer.h"
#include "json_line.h"

typedef struct line_job {
    const bd_tokenizer *tokenizer;
    char subject[48]; /* "line 17" */
    bd_token_vec ids;
    bd_strbuf text, out;
    bd_error *err;
} line_job;

static bd_status flag_get(line_job *job, bd_json_span object, const char *key, bool *flag) {
    bd_json_span value;
    if (!bd_json_object_get(object, key, &value) || bd_json_bool(value, flag)) return BD_OK;
    return bd_fail(job->err, BD_E_FORMAT, job->subject, "\"%s\" must be true or false", key);
}

static bd_status encode_line(line_job *job, bd_json_span object) {
    bd_encode_options options = {.add_special_tokens = true, .parse_special = true};
    bd_json_span text;
    bd_status s;
    if (!bd_json_object_get(object, "text", &text) || !bd_json_string_append(text, &job->text))
        return bd_fail(job->err, BD_E_FORMAT, job->subject, "\"text\" must be a string");
    if (job->text.failed) return bd_fail(job->err, BD_E_MEMORY, job->subject, "out of memory");
    s = flag_get(job, object, "add_special_tokens", &options.add_special_tokens);
    if (s == BD_OK) s = flag_get(job, object, "parse_special", &options.parse_special);
    if (s != BD_OK) return s;
    s = bd_tokenizer_encode(job->tokenizer, job->text.data ? job->text.data : "",
                            job->text.len_bytes, &options, &job->ids, job->err);
    if (s != BD_OK) return s;
    bd_strbuf_puts(&job->out, "{\"ids\":[");
    for (size_t i = 0; i < job->ids.count; i++) {
        char number[16];
        int bytes = snprintf(number, sizeof number, i > 0 ? ",%d" : "%d", job->ids.ids[i]);
        bd_strbuf_append(&job->out, number, (size_t)bytes);
    }
    bd_strbuf_puts(&job->out, "]}\n");
    return BD_OK;
}

static bd_status decode_line(line_job *job, bd_json_span object) {
    bd_json_span list, item;
    bool skip_special = true;
    size_t cursor = 0;
    if (!bd_json_object_get(object, "ids", &list) || list.text[0] != '[')
        return bd_fail(job->err, BD_E_FORMAT, job->subject, "\"ids\" must be an array");
    bd_status s = flag_get(job, object, "skip_special_tokens", &skip_special);
    if (s != BD_OK) return s;
    bd_detok detok;
    bd_detok_init(&detok, job->tokenizer, skip_special);
    while (s == BD_OK && bd_json_array_next(list, &cursor, &item)) {
        int32_t id;
        if (bd_json_int32(item, &id) && id >= 0) /* one that no token has is passed over */
            bd_detok_push(&detok, id, &job->text);
        else
            s = bd_fail(job->err, BD_E_FORMAT, job->subject,
                        "\"ids\" must hold 32-bit integers from 0 on");
    }
    bd_detok_flush(&detok, &job->text);
    bd_detok_deinit(&detok);
    if (s != BD_OK) return s;
    if (job->text.failed) return bd_fail(job->err, BD_E_MEMORY, job->subject, "out of memory");
    bd_strbuf_puts(&job->out, "{\"text\":");
    bd_strbuf_json_string(&job->out, job->text.data ? job->text.data : "", job->text.len_bytes);
    bd_strbuf_puts(&job->out, "}\n");
    return BD_OK;
}

static bd_status one_line(line_job *job, const char *line, size_t bytes, bool decode) {
    static const bd_json_limits limits = {
        .depth_max = 32, .nodes_max = (size_t)1 << 26, .allow_nul_escape = true};
    bd_json_scan scan = {0};
    bd_error fault;
    bd_error_clear(&fault);
    if (bd_json_check(line, bytes, &limits, &scan, &fault) != BD_OK)
        return bd_fail(job->err, BD_E_FORMAT, job->subject, "%.300s", fault.message);
    bd_json_span object = bd_json_span_of(line + scan.offset, bytes - scan.offset);
    if (object.text[0] != '{')
        return bd_fail(job->err, BD_E_FORMAT, job->subject, "a line must be a JSON object");
    job->ids.count = 0;
    bd_strbuf_clear(&job->text);
    bd_strbuf_clear(&job->out);
    bd_status s = decode ? decode_line(job, object) : encode_line(job, object);
    if (s != BD_OK) return s;
    if (job->out.failed) return bd_fail(job->err, BD_E_MEMORY, job->subject, "out of memory");
    /* Flushed line by line: whoever writes a line may wait for its answer. */
    if (fwrite(job->out.data, 1, job->out.len_bytes, stdout) != job->out.len_bytes ||
        fflush(stdout) != 0)
        return bd_fail_errno(job->err, BD_E_IO, "stdout", errno, "cannot write");
    return BD_OK;
}

static bool is_blank(const char *line, size_t bytes) {
    for (size_t i = 0; i < bytes; i++)
        if (!strchr(" \t\r\n", line[i]) || line[i] == '\0') return false;
    return true;
}

static bd_status all_lines(line_job *job, bool decode) {
    char *line = NULL;
    size_t capacity = 0;
    bd_status s = BD_OK;
    for (size_t number = 1; s == BD_OK; number++) {
        ssize_t bytes = getline(&line, &capacity, stdin);
        if (bytes < 0) break;
        snprintf(job->subject, sizeof job->subject, "line %zu", number);
        if (!is_blank(line, (size_t)bytes)) s = one_line(job, line, (size_t)bytes, decode);
    }
    if (s == BD_OK && ferror(stdin))
        s = bd_fail_errno(job->err, BD_E_IO, "stdin", errno, "cannot read");
    free(line);
    return s;
}

int bd_tokenize_main(const char *tokenizer_path, bool decode, bd_error *err) {
    bd_tokenizer *tokenizer;
    bd_status s = bd_tokenizer_load(&tokenizer, tokenizer_path, err);
    if (s == BD_OK) {
        line_job job = {.tokenizer = tokenizer, .err = err};
        bd_strbuf_init(&job.text, 0);
        bd_strbuf_init(&job.out, 0);
        s = all_lines(&job, decode);
        bd_strbuf_deinit(&job.text);
        bd_strbuf_deinit(&job.out);
        bd_token_vec_deinit(&job.ids);
        bd_tokenizer_destroy(tokenizer);
    }
    if (s == BD_OK) return 0;
    return s == BD_E_INTERNAL ? 3 : 1;
}
