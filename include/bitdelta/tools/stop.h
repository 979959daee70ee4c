/* stop.h - SIGINT, SIGTERM and SIGHUP while something half done lies on the disk: the first is
 * noted, so that the run can take that away before the process dies of it; the same again kills at
 * once. That nobody reads its progress any more (SIGPIPE) stops no run. Threads: one run of one
 * tool at a time. */
#ifndef BITDELTA_TOOLS_STOP_H
#define BITDELTA_TOOLS_STOP_H

#include "bitdelta/base/status.h"

void bd_stop_begin(void); /* from here on signals are noted, but for those that are ignored */
void bd_stop_end(void);   /* as before, but for SIGPIPE; nothing without a begin */
/* BD_CANCELLED, naming what is given up, once a signal was noted. */
BD_MUST_CHECK bd_status bd_stop_check(const char *path, bd_error *err);
int bd_stop_signal(void); /* the one that was noted, 0: none */

#endif
