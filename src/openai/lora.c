/* lora.c - the bodies of POST /v1/load_lora_adapter and /v1/unload_lora_adapter, in vLLM's shape.
 * Threads: any. */
#include <string.h>

#include "bitdelta/openai/openai.h"
#include "request.h"

typedef struct lora_body {
    bd_text name, path;
    bool load_inplace;
} lora_body;

static const bd_field lora_fields[] = {
    {.name = "lora_name", .kind = BD_FIELD_STRING, .offset = offsetof(lora_body, name)},
    {.name = "lora_path", .kind = BD_FIELD_STRING, .offset = offsetof(lora_body, path)},
    {.name = "load_inplace", .kind = BD_FIELD_BOOL, .offset = offsetof(lora_body, load_inplace)},
};

/* A NUL would end the name or path early and mean another one. */
static bool copy_text(const char *param, const bd_text *text, char *out, size_t max,
                      bd_api_error *err) {
    if (text->bytes >= max)
        return bd_api_fail(err, BD_API_LONG_STRING, param, "Invalid '%s': at most %zu bytes.",
                           param, max - 1);
    if (memchr(text->data, '\0', text->bytes))
        return bd_api_fail(err, BD_API_VALUE, param, "Invalid '%s': it holds a NUL.", param);
    memcpy(out, text->data, text->bytes);
    out[text->bytes] = '\0';
    return true;
}

static bool take_body(const lora_body *body, bool load, bd_lora_request *out, bd_api_error *err) {
    bool name = body->name.data && body->name.bytes > 0;
    bool path = body->path.data && body->path.bytes > 0;
    if (load && (!name || !path))
        return bd_api_fail(err, BD_API_MISSING, name ? "lora_path" : "lora_name",
                           "Both 'lora_name' and 'lora_path' must be provided.");
    if (!name)
        return bd_api_fail(err, BD_API_MISSING, "lora_name",
                           "either 'lora_name' and 'lora_int_id' needs to be provided.");
    out->load_inplace = body->load_inplace;
    return copy_text("lora_name", &body->name, out->name, sizeof out->name, err) &&
           (!load || copy_text("lora_path", &body->path, out->path, sizeof out->path, err));
}

bool bd_openai_lora_request(const char *body, size_t bytes, bool load, bd_lora_request *out,
                            bd_api_error *err) {
    lora_body parsed = {0};
    bd_field_context context = {.object = &parsed};
    bd_view root;
    *out = (bd_lora_request){.load_inplace = false};
    bool ok = bd_body_open(body, bytes, &root, &context.arena, err) &&
              bd_fields_parse(&context, lora_fields, sizeof lora_fields / sizeof lora_fields[0],
                              root, err) &&
              take_body(&parsed, load, out, err);
    bd_arena_destroy(context.arena);
    return ok;
}
