/* fuzz_chat_template.c - any bytes as a chat template, and behind the first NUL byte as the JSON
 * object of its variables. A refusal has a message; a rendering is valid UTF-8. */
#include "fuzz.h"

#include <string.h>

#include "bitdelta/base/json_scan.h"
#include "bitdelta/tokenizer/chat_template.h"

static const char plain[] =
    "{\"messages\":[{\"role\":\"system\",\"content\":\"Be  kind\"},{\"role\":\"user\",\"content\":"
    "[{\"type\":\"text\",\"text\":\"\\u00e9t\\u00e9\"}]},{\"role\":\"assistant\",\"content\":\"<"
    "think>a"
    "</"
    "think>b\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":{\"x\":1.5,\"y\":[true,"
    "null]}}}]},{\"role\":\"user\",\"content\":\"it's\"}],\"tools\":[{\"function\":{\"name\":\"f\","
    "\"parameters\":{\"type\":\"object\"}}}],\"bos_token\":\"<s>\",\"eos_token\":\"</s>\","
    "\"add_generation_prompt\":true}";

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static const bd_json_limits limits = {
        .depth_max = 64, .nodes_max = 100000, .allow_nul_escape = true};
    fuzz_part source, json;
    fuzz_split(data, bytes, &source, &json);
    bd_chat_template *tmpl;
    bd_error err;
    bd_error_clear(&err);
    bd_status status =
        bd_chat_template_parse(&tmpl, (const char *)source.data, source.bytes, "template", &err);
    if (status != BD_OK) {
        fuzz_check_error(status, &err);
        return 0;
    }
    bd_strbuf given, out;
    bd_json_scan scan = {0};
    bd_strbuf_init(&given, 0);
    bd_strbuf_init(&out, (size_t)1 << 20);
    if (json.present) bd_strbuf_append(&given, json.data, json.bytes);
    bool usable = json.present && given.data &&
                  bd_json_check(given.data, given.len_bytes, &limits, &scan, NULL) == BD_OK &&
                  given.data[scan.offset] == '{';
    const bd_chat_variable variable = {.json = usable ? given.data + scan.offset : plain};
    status = bd_chat_template_render(tmpl, &variable, 1, 1772886600, &out, &err);
    if (status != BD_OK)
        fuzz_check_error(status, &err);
    else
        BD_ASSERT(bd_utf8_valid_prefix(out.data, out.len_bytes) == out.len_bytes);
    bd_strbuf_deinit(&given);
    bd_strbuf_deinit(&out);
    bd_chat_template_destroy(tmpl);
    return 0;
}
