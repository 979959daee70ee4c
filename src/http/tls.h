/* tls.h - see tls.c. */
#ifndef BITDELTA_HTTP_TLS_H
#define BITDELTA_HTTP_TLS_H

#include <gnutls/abstract.h>
#include <microhttpd.h>

#include "bitdelta/base/status.h"

/* No protocol below TLS 1.2. */
#define BD_TLS_PRIORITIES "NORMAL:-VERS-ALL:+VERS-TLS1.3:+VERS-TLS1.2"

typedef struct bd_tls bd_tls;

/* Reads both PEM files; errors name the file at fault. The certificate's may hold a chain. */
BD_MUST_CHECK bd_status bd_tls_create(bd_tls **out, const char *certificate_path,
                                      const char *key_path, bd_error *err);
void bd_tls_destroy(bd_tls *tls); /* after the last connection; NULL is fine */
/* Reads them again, for handshakes from now on. On failure those from before stay. */
BD_MUST_CHECK bd_status bd_tls_reload(bd_tls *tls, bd_error *err);
/* With the start of a connection, before its handshake. */
void bd_tls_attach(bd_tls *tls, struct MHD_Connection *connection);
/* Past the library. false: the connection is a plain one. */
bool bd_tls_send(struct MHD_Connection *connection, const char *data, size_t bytes);
/* A gnutls_certificate_retrieve_function2. */
int bd_tls_certificate(gnutls_session_t session, const gnutls_datum_t *ca_names, int ca_count,
                       const gnutls_pk_algorithm_t *algorithms, int algorithm_count,
                       gnutls_pcert_st **chain, unsigned *count, gnutls_privkey_t *key);

#endif
