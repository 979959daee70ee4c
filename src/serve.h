/* serve.h - `bitdelta serve`: builds the server from its parts, runs it until a signal, takes it
 * down in order. */
#ifndef BD_SERVE_H
#define BD_SERVE_H

#include "bitdelta/config/options.h"

/* Main thread; returns after a clean drain. SIGTERM and SIGINT drain, a second one ends the process
 * at once; SIGHUP reads the tenants and looks for variants again. *wrong_usage: an option was
 * refused that the command line may have given. */
bd_status bd_serve_run(const bd_serve_options *options, bool *wrong_usage, bd_error *err);

#endif
