/* json_scan.h - one pass over JSON bytes before a DOM parser sees them: what cJSON lets through and
 * must not. Accepts exactly one RFC 8259 value in strict UTF-8, an optional BOM
 * before it. */
#ifndef BITDELTA_BASE_JSON_SCAN_H
#define BITDELTA_BASE_JSON_SCAN_H

#include <stddef.h>

#include "bitdelta/base/status.h"

typedef struct bd_json_limits {
    uint32_t depth_max; /* nesting levels, at most 1024 */
    size_t nodes_max;   /* values and keys, so that a DOM's memory is bounded before it is built */
    bool allow_nul_escape; /* "\u0000" allowed inside string values, in keys never: a DOM cuts them
                              there */
} bd_json_limits;

typedef struct bd_json_scan {
    size_t nodes;
    size_t offset; /* where the fault is, or the first byte of the value (after a BOM) */
} bd_json_scan;

/* BD_E_FORMAT (message names the fault and the byte offset) or BD_E_LIMIT. Numbers that overflow a
 * double, lone surrogates, control bytes, leading zeros, bytes after the value: all refused. */
BD_MUST_CHECK bd_status bd_json_check(const char *data, size_t bytes, const bd_json_limits *limits,
                                      bd_json_scan *out, bd_error *err);

/* Length of a valid UTF-8 prefix; equals bytes when all is valid (no overlong forms, no
 * surrogates). */
size_t bd_utf8_valid_prefix(const char *data, size_t bytes);

#endif
