/* routes.c - paths to routes. Threads: pure. */
#include <string.h>

#include "internal.h"

#define GET_ALLOW  "GET, HEAD, OPTIONS"
#define POST_ALLOW "POST, OPTIONS"

/* Where keys are configured, every route asks for one that does not say `open`. */
static const bd_route public_routes[] = {
    {BD_ROUTE_COMPLETIONS, "completions", "/v1/completions", POST_ALLOW, .post = true,
     .takes_body = true, .needs_model = true, .new_work = true},
    {BD_ROUTE_CHAT, "chat_completions", "/v1/chat/completions", POST_ALLOW, .post = true,
     .takes_body = true, .needs_model = true, .new_work = true},
    {BD_ROUTE_MODELS, "models", "/v1/models", GET_ALLOW, .get = true, .needs_model = true},
    {BD_ROUTE_MODEL, "model", "/v1/models/", GET_ALLOW, .prefix = true, .get = true,
     .needs_model = true},
    {BD_ROUTE_HEALTH, "health", "/health", GET_ALLOW, .get = true, .open = true},
    {BD_ROUTE_HEALTH, "health", "/ping", "GET, HEAD, POST, OPTIONS", .get = true, .post = true,
     .open = true},
    {BD_ROUTE_VERSION, "version", "/version", GET_ALLOW, .get = true, .open = true},
    {BD_ROUTE_METRICS, "metrics", "/metrics", GET_ALLOW, .get = true, .open = true},
    {BD_ROUTE_TOKENIZE, "tokenize", "/tokenize", POST_ALLOW, .post = true, .takes_body = true,
     .needs_model = true, .new_work = true},
    {BD_ROUTE_DETOKENIZE, "detokenize", "/detokenize", POST_ALLOW, .post = true, .takes_body = true,
     .needs_model = true, .new_work = true},
    {BD_ROUTE_TOKENIZER_INFO, "tokenizer_info", "/tokenizer_info", GET_ALLOW, .get = true,
     .needs_model = true},
    {BD_ROUTE_DESCRIPTION, "openapi", "/openapi.json", GET_ALLOW, .get = true, .open = true},
    {BD_ROUTE_LOAD_ADAPTER, "load_lora_adapter", "/v1/load_lora_adapter", POST_ALLOW, .post = true,
     .takes_body = true, .needs_model = true, .new_work = true, .runtime = true},
    {BD_ROUTE_UNLOAD_ADAPTER, "unload_lora_adapter", "/v1/unload_lora_adapter", POST_ALLOW,
     .post = true, .takes_body = true, .needs_model = true, .new_work = true, .runtime = true},
    {.path = NULL},
};

static const bd_route admin_routes[] = {
    {BD_ROUTE_ADMIN_RESCAN, "admin_rescan", "/admin/rescan", POST_ALLOW, .post = true,
     .needs_model = true, .new_work = true},
    {BD_ROUTE_LOAD_ADAPTER, "load_lora_adapter", "/v1/load_lora_adapter", POST_ALLOW, .post = true,
     .takes_body = true, .needs_model = true, .new_work = true},
    {BD_ROUTE_UNLOAD_ADAPTER, "unload_lora_adapter", "/v1/unload_lora_adapter", POST_ALLOW,
     .post = true, .takes_body = true, .needs_model = true, .new_work = true},
    {BD_ROUTE_ADMIN_VARIANTS, "admin_variants", "/admin/variants", GET_ALLOW, .get = true,
     .needs_model = true},
    {BD_ROUTE_ADMIN_RELOAD, "admin_reload", "/admin/reload", POST_ALLOW, .post = true},
    {BD_ROUTE_ADMIN_TENANTS, "admin_tenants", "/admin/tenants", GET_ALLOW, .get = true},
    {BD_ROUTE_ADMIN_VARIANT, "admin_variant", "/admin/variants/", POST_ALLOW, .prefix = true,
     .post = true, .needs_model = true},
    {BD_ROUTE_HEALTH, "health", "/health", GET_ALLOW, .get = true, .open = true},
    {BD_ROUTE_VERSION, "version", "/version", GET_ALLOW, .get = true, .open = true},
    {BD_ROUTE_METRICS, "metrics", "/metrics", GET_ALLOW, .get = true},
    {.path = NULL},
};

/* OPTIONS * */
static const bd_route any_route = {
    .id = BD_ROUTE_ANY, .label = "any", .path = "*", .allow = "GET, HEAD, POST, OPTIONS"};

/* Absolute form to origin form; runs of slashes become one; a slash at the end goes. Percent signs
 * stay: an id may hold an encoded slash. */
static void normalise(char *path) {
    const char *from = path;
    if (strncasecmp(path, "http://", 7) == 0 || strncasecmp(path, "https://", 8) == 0) {
        from = strchr(strstr(path, "://") + 3, '/');
        if (!from) from = "/";
    }
    char *to = path;
    for (; *from; from++)
        if (*from != '/' || to == path || to[-1] != '/') *to++ = *from;
    if (to > path + 1 && to[-1] == '/') to--;
    *to = '\0';
}

const bd_route *bd_route_find(bool admin, char *path, const char **argument) {
    *argument = NULL;
    if (strcmp(path, "*") == 0) return &any_route;
    normalise(path);
    for (const bd_route *route = admin ? admin_routes : public_routes; route->path; route++) {
        size_t bytes = strlen(route->path);
        if (route->prefix ? strncmp(path, route->path, bytes) != 0 : strcmp(path, route->path) != 0)
            continue;
        *argument = path + bytes;
        return route;
    }
    return NULL;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

size_t bd_percent_decode(char *text) {
    char *to = text;
    for (const char *from = text; *from; from++) {
        int high = *from == '%' ? hex_digit(from[1]) : -1;
        int low = high >= 0 ? hex_digit(from[2]) : -1;
        if (low < 0) {
            *to++ = *from;
            continue;
        }
        *to++ = (char)(high << 4 | low);
        from += 2;
    }
    *to = '\0';
    return (size_t)(to - text);
}
