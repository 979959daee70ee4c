/* tokenize.h - `bitdelta tokenize`: JSON lines on stdin to JSON lines on stdout.
 * Threads: the main thread only. */
#ifndef BITDELTA_TOOLS_TOKENIZE_H
#define BITDELTA_TOOLS_TOKENIZE_H

#include "bitdelta/base/status.h"

/* Encode lines {"text":s,"add_special_tokens":b,"parse_special":b} (both flags optional, true) to
 * {"ids":[...]}, or with decode lines {"ids":[...],"skip_special_tokens":b} (optional, true) to
 * {"text":s}. Empty lines are passed over. Stops at the first faulty line, which err names by
 * number. Returns the process's exit status (0, 1 or 3); nothing but results goes to stdout, err is
 * for the caller to print. */
int bd_tokenize_main(const char *tokenizer_path, bool decode, bd_error *err);

#endif
