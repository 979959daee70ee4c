/* tls.c - the certificate of the public listener. libmicrohttpd speaks TLS through GnuTLS and asks
 * here, for each handshake, what to show; so that a renewed certificate needs no restart.
 * Owner: the server. Threads: create, reload and destroy from one thread at a time; the callback on
 * the shards'. */
#include "tls.h"

#include <gnutls/abstract.h>
#include <gnutls/gnutls.h>
#include <gnutls/x509.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/log.h"

enum { CHAIN_MAX = 16, PEM_BYTES_MAX = 1 << 20, KEY_ID_BYTES = 64 };

typedef struct identity {
    struct identity *older;
    gnutls_pcert_st chain[CHAIN_MAX]; /* the server's own first */
    unsigned count;
    gnutls_privkey_t key;
} identity;

struct bd_tls {
    char *certificate_path, *key_path;
    _Atomic(identity *) current;
    /* A handshake may still use any of them: none goes before the server. They are small, and come
     * as often as someone renews a certificate. */
    identity *all;
};

static void identity_destroy(identity *one) {
    for (unsigned i = 0; i < one->count; i++)
        gnutls_pcert_deinit(&one->chain[i]);
    if (one->key) gnutls_privkey_deinit(one->key);
    free(one);
}

static bd_status fault_of(bd_error *err, const char *path, const char *what, int code) {
    return bd_fail(err, code == GNUTLS_E_MEMORY_ERROR ? BD_E_MEMORY : BD_E_FORMAT, path, "%s: %s",
                   what, gnutls_strerror(code));
}

static bd_status read_chain(identity *one, const char *path, bd_error *err) {
    char *text = NULL;
    size_t bytes = 0;
    bd_status status = bd_file_read(path, PEM_BYTES_MAX, &text, &bytes, err);
    if (status != BD_OK) return status;
    const gnutls_datum_t pem = {.data = (unsigned char *)text, .size = (unsigned)bytes};
    unsigned count = CHAIN_MAX;
    int code = gnutls_pcert_list_import_x509_raw(one->chain, &count, &pem, GNUTLS_X509_FMT_PEM, 0);
    free(text);
    if (code < 0) return fault_of(err, path, "not a PEM file of certificates", code);
    one->count = count;
    return BD_OK;
}

static bd_status read_key(identity *one, const char *path, bd_error *err) {
    char *text = NULL;
    size_t bytes = 0;
    bd_status status = bd_file_read(path, PEM_BYTES_MAX, &text, &bytes, err);
    if (status != BD_OK) return status;
    const gnutls_datum_t pem = {.data = (unsigned char *)text, .size = (unsigned)bytes};
    int code = gnutls_privkey_init(&one->key);
    if (code >= 0)
        code = gnutls_privkey_import_x509_raw(one->key, &pem, GNUTLS_X509_FMT_PEM, NULL, 0);
    explicit_bzero(text, bytes);
    free(text);
    return code < 0 ? fault_of(err, path, "not an unencrypted PEM private key", code) : BD_OK;
}

/* Both halves of one pair? */
static bd_status check_pair(const bd_tls *tls, identity *one, bd_error *err) {
    unsigned char shown[KEY_ID_BYTES], owned[KEY_ID_BYTES];
    size_t shown_bytes = sizeof shown, owned_bytes = sizeof owned;
    gnutls_pubkey_t public = NULL;
    int code = gnutls_pubkey_init(&public);
    if (code >= 0) code = gnutls_pubkey_import_privkey(public, one->key, 0, 0);
    if (code >= 0)
        code = gnutls_pubkey_get_key_id(public, GNUTLS_KEYID_USE_SHA256, owned, &owned_bytes);
    if (code >= 0)
        code = gnutls_pubkey_get_key_id(one->chain[0].pubkey, GNUTLS_KEYID_USE_SHA256, shown,
                                        &shown_bytes);
    if (public) gnutls_pubkey_deinit(public);
    if (code < 0) return fault_of(err, tls->key_path, "the key cannot be used", code);
    if (shown_bytes == owned_bytes && memcmp(shown, owned, shown_bytes) == 0) return BD_OK;
    return bd_fail(err, BD_E_FORMAT, tls->key_path,
                   "this is not the key of the certificate in %.256s", tls->certificate_path);
}

/* What clients will refuse is no reason not to start, but to say so. */
static void report(const bd_tls *tls, identity *one) {
    gnutls_x509_crt_t leaf = NULL;
    if (gnutls_pcert_export_x509(&one->chain[0], &leaf) < 0) return;
    const time_t now = time(NULL), from = gnutls_x509_crt_get_activation_time(leaf),
                 to = gnutls_x509_crt_get_expiration_time(leaf);
    gnutls_x509_crt_deinit(leaf);
    char until[40] = "?";
    struct tm parts;
    if (gmtime_r(&to, &parts)) (void)strftime(until, sizeof until, "%Y-%m-%dT%H:%M:%SZ", &parts);
    const bool bad = now < from || now > to;
    bd_log(bad ? BD_LOG_WARN : BD_LOG_INFO, "http", "tls certificate=%s chain=%u until=%s%s",
           tls->certificate_path, one->count, until,
           now < from ? " (not valid yet)"
           : bad      ? " (expired)"
                      : "");
}

bd_status bd_tls_reload(bd_tls *tls, bd_error *err) {
    identity *one = calloc(1, sizeof *one);
    if (!one) return bd_fail(err, BD_E_MEMORY, "tls", "out of memory");
    bd_status status = read_chain(one, tls->certificate_path, err);
    if (status == BD_OK) status = read_key(one, tls->key_path, err);
    if (status == BD_OK) status = check_pair(tls, one, err);
    if (status != BD_OK) {
        identity_destroy(one);
        return status;
    }
    one->older = tls->all;
    tls->all = one;
    atomic_store(&tls->current, one);
    report(tls, one);
    return BD_OK;
}

bd_status bd_tls_create(bd_tls **out, const char *certificate_path, const char *key_path,
                        bd_error *err) {
    *out = NULL;
    if (MHD_is_feature_supported(MHD_FEATURE_HTTPS_CERT_CALLBACK) != MHD_YES)
        return bd_fail(err, BD_E_UNSUPPORTED, "tls_cert",
                       "this libmicrohttpd was built without TLS");
    bd_tls *tls = calloc(1, sizeof *tls);
    if (!tls) return bd_fail(err, BD_E_MEMORY, "tls", "out of memory");
    tls->certificate_path = strdup(certificate_path);
    tls->key_path = strdup(key_path);
    bd_status status = tls->certificate_path && tls->key_path
                           ? bd_tls_reload(tls, err)
                           : bd_fail(err, BD_E_MEMORY, "tls", "out of memory");
    if (status != BD_OK) {
        bd_tls_destroy(tls);
        return status;
    }
    *out = tls;
    return BD_OK;
}

void bd_tls_destroy(bd_tls *tls) {
    if (!tls) return;
    while (tls->all) {
        identity *one = tls->all;
        tls->all = one->older;
        identity_destroy(one);
    }
    free(tls->certificate_path);
    free(tls->key_path);
    free(tls);
}

void bd_tls_attach(bd_tls *tls, struct MHD_Connection *connection) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);
    if (info && info->tls_session) gnutls_session_set_ptr(info->tls_session, tls);
}

bool bd_tls_send(struct MHD_Connection *connection, const char *data, size_t bytes) {
    const union MHD_ConnectionInfo *info =
        MHD_get_connection_info(connection, MHD_CONNECTION_INFO_GNUTLS_SESSION);
    if (!info || !info->tls_session) return false;
    (void)gnutls_record_send(info->tls_session, data, bytes);
    return true;
}

/* NOLINTNEXTLINE(readability-function-size): the parameters are the library's */
int bd_tls_certificate(gnutls_session_t session, const gnutls_datum_t *ca_names, int ca_count,
                       const gnutls_pk_algorithm_t *algorithms, int algorithm_count,
                       gnutls_pcert_st **chain, unsigned *count, gnutls_privkey_t *key) {
    (void)ca_names;
    (void)ca_count;
    (void)algorithms;
    (void)algorithm_count;
    const bd_tls *tls = gnutls_session_get_ptr(session);
    identity *one = tls ? atomic_load(&tls->current) : NULL;
    if (!one) return -1;
    *chain = one->chain;
    *count = one->count;
    *key = one->key;
    return 0;
}
