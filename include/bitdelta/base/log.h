/* log.h - one line per event on stderr, `key=value` pairs. Threads: any; a line is one write(2).
 * While stderr takes no more, lines are dropped and counted: no thread waits for a reader.
 * Prompts, completions and keys are never logged. Errors are returned by the rooms below http and
 * logged once, by whoever handles them. */
#ifndef BITDELTA_BASE_LOG_H
#define BITDELTA_BASE_LOG_H

#include "bitdelta/base/status.h"

typedef enum bd_log_level { BD_LOG_ERROR, BD_LOG_WARN, BD_LOG_INFO, BD_LOG_DEBUG } bd_log_level;

/* Process-wide level (default BD_LOG_INFO); the only mutable global besides the stop flag. */
void bd_log_level_set(bd_log_level level);
bool bd_log_enabled(bd_log_level level);

/* Room for about 1 MiB of lines where stderr is a pipe and the system lets us have it. */
void bd_log_widen(void);

/* `t=<monotonic seconds> level=info mod=<module> <text>`; control bytes in the text become '?',
 * lines are cut at 2048 bytes. */
void bd_log(bd_log_level level, const char *module, const char *format, ...) BD_PRINTF(3, 4);
void bd_log_error(const char *module, const char *what, const bd_error *err);

#endif
