/* tidy.h - what clang's analyzer cannot see across files, said in macros. Only tests/tidy.sh
 * includes it, before every source but those that define these functions. */
#ifndef BITDELTA_TESTS_TIDY_H
#define BITDELTA_TESTS_TIDY_H

#include <cjson/cJSON.h>

#include "bitdelta/base/status.h"
#include "bitdelta/openai/error.h"

/* A failure returns its status, which is not BD_OK. */
#define bd_fail(err, status, ...)       ((void)bd_fail(err, status, __VA_ARGS__), (status))
#define bd_fail_errno(err, status, ...) ((void)bd_fail_errno(err, status, __VA_ARGS__), (status))
#define bd_api_fail(...)                ((void)bd_api_fail(__VA_ARGS__), false)
/* These are false for NULL. */
#define cJSON_IsString(item) ((item) != NULL && cJSON_IsString(item))
#define cJSON_IsArray(item)  ((item) != NULL && cJSON_IsArray(item))
#define cJSON_IsObject(item) ((item) != NULL && cJSON_IsObject(item))
#define cJSON_IsNumber(item) ((item) != NULL && cJSON_IsNumber(item))

#endif
