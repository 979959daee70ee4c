/* config_file.h - the JSON configuration file. Threads: the caller's. */
#ifndef BITDELTA_SRC_CONFIG_CONFIG_FILE_H
#define BITDELTA_SRC_CONFIG_CONFIG_FILE_H

#include "table.h"

/* Sets the options the file names, on top of what they hold. Errors name the file and the key. */
BD_MUST_CHECK bd_status bd_config_file_load(const char *path, bd_serve_options *options,
                                            bd_error *err);

#endif
