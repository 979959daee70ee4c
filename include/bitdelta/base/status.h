/* status.h - the one error convention: a status value plus an optional message for people.
 * Threads: pure values, no global state. A bd_error belongs to the caller; NULL means "no detail
 * wanted". */
#ifndef BITDELTA_BASE_STATUS_H
#define BITDELTA_BASE_STATUS_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define BD_MUST_CHECK        __attribute__((warn_unused_result))
#define BD_PRINTF(fmt, args) __attribute__((format(printf, fmt, args)))

/* name, HTTP status that fits it, text. BD_AGAIN, BD_BUSY and BD_CANCELLED are outcomes, not
 * errors. */
#define BD_STATUS_LIST(X)                                                                          \
    X(BD_OK, 200, "ok")                                                                            \
    X(BD_AGAIN, 503, "not ready yet")                                                              \
    X(BD_BUSY, 429, "no room now")                                                                 \
    X(BD_CANCELLED, 499, "cancelled")                                                              \
    X(BD_E_ARGUMENT, 400, "invalid argument")                                                      \
    X(BD_E_NOT_FOUND, 404, "not found")                                                            \
    X(BD_E_LIMIT, 400, "limit exceeded")                                                           \
    X(BD_E_FORMAT, 400, "malformed input")                                                         \
    X(BD_E_UNSUPPORTED, 400, "not supported")                                                      \
    X(BD_E_MISMATCH, 400, "does not fit the base model")                                           \
    X(BD_E_CORRUPT, 503, "checksum mismatch")                                                      \
    X(BD_E_LENGTH, 503, "a file has another length than is recorded")                              \
    X(BD_E_IO, 503, "input/output error")                                                          \
    X(BD_E_MEMORY, 503, "out of memory")                                                           \
    X(BD_E_VARIANT, 503, "its load failed or was stopped by an order to unload it")                \
    X(BD_E_DEVICE, 503, "device lost")                                                             \
    X(BD_E_SHUTDOWN, 503, "shutting down")                                                         \
    X(BD_E_INTERNAL, 500, "internal error")

typedef enum bd_status {
#define BD_STATUS_ENUM(name, http, text) name,
    BD_STATUS_LIST(BD_STATUS_ENUM)
#undef BD_STATUS_ENUM
} bd_status;

typedef struct bd_error {
    bd_status status;
    char subject[192]; /* the thing at fault: file, tensor, field; may be empty */
    char message[448]; /* one sentence for people, no trailing newline */
} bd_error;

const char *bd_status_name(bd_status status);
const char *bd_status_text(bd_status status);
int bd_status_http(bd_status status);

/* Fill *err (if not NULL) and return status, so that a function can `return bd_fail(...)`.
 * subject may be NULL; both texts are cut to fit and are valid UTF-8 ('?' for a bad byte). */
bd_status bd_fail(bd_error *err, bd_status status, const char *subject, const char *format, ...)
    BD_PRINTF(4, 5);

/* The same for a failed system call: appends strerror(error_number) to the message. */
bd_status bd_fail_errno(bd_error *err, bd_status status, const char *subject, int error_number,
                        const char *format, ...) BD_PRINTF(5, 6);

void bd_error_clear(bd_error *err);

/* For "%u file%s" in what people read. */
static inline const char *bd_plural(uint64_t count) {
    return count == 1 ? "" : "s";
}

/* Our own invariants; stays on in release builds. Prints expression, file, line and aborts. */
#define BD_ASSERT(condition)                                                                       \
    do {                                                                                           \
        if (!(condition)) bd_assert_failed(#condition, __FILE__, __LINE__);                        \
    } while (0)
#ifdef __cplusplus
[[noreturn]]
#else
_Noreturn
#endif
void bd_assert_failed(const char *expression, const char *file, int line);

#ifdef __cplusplus
}
#endif
#endif
