/* fuzz_tokenizer.c - any bytes as tokenizer.json, then, behind a NUL byte, text for it. Ids that
 * come out are known, decoded text is UTF-8, and the streaming detokeniser gives the same. */
#include "fuzz.h"

#include <string.h>

#include "bitdelta/base/json_scan.h"
#include "bitdelta/tokenizer/tokenizer.h"

enum { TEXT_BYTES_MAX = 256, IDS_MAX = 64 };

static void decode(const bd_tokenizer *tokenizer, const int32_t *ids, size_t count, bool skip) {
    bd_error err;
    bd_strbuf whole, stream;
    bd_detok detok;
    bd_error_clear(&err);
    bd_strbuf_init(&whole, 0);
    bd_strbuf_init(&stream, 0);
    BD_ASSERT(bd_tokenizer_decode(tokenizer, ids, count, skip, &whole, &err) == BD_OK);
    BD_ASSERT(bd_utf8_valid_prefix(whole.data, whole.len_bytes) == whole.len_bytes);
    bd_detok_init(&detok, tokenizer, skip);
    for (size_t i = 0; i < count; i++)
        bd_detok_push(&detok, ids[i], &stream);
    bd_detok_flush(&detok, &stream);
    BD_ASSERT(!stream.failed && stream.len_bytes == whole.len_bytes);
    BD_ASSERT(whole.len_bytes == 0 || memcmp(stream.data, whole.data, whole.len_bytes) == 0);
    bd_detok_deinit(&detok);
    bd_strbuf_deinit(&stream);
    bd_strbuf_deinit(&whole);
}

static void encode(const bd_tokenizer *tokenizer, const char *text, size_t bytes, bool special) {
    const bd_encode_options options = {.add_special_tokens = special, .parse_special = special};
    bd_encode_options capped = options;
    bd_token_vec ids = {0};
    bd_error err;
    bd_error_clear(&err);
    const bool valid = bd_utf8_valid_prefix(text, bytes) == bytes;
    bd_status status = bd_tokenizer_encode(tokenizer, text, bytes, &options, &ids, &err);
    if (status != BD_OK) {
        fuzz_check_error(status, &err);
        BD_ASSERT(ids.count == 0 && (status == BD_E_FORMAT) == !valid);
        bd_token_vec_deinit(&ids);
        return;
    }
    BD_ASSERT(valid);
    for (size_t i = 0; i < ids.count; i++)
        BD_ASSERT(bd_tokenizer_is_known(tokenizer, ids.ids[i]));
    decode(tokenizer, ids.ids, ids.count, special);
    if (ids.count > 1) {
        const size_t count = ids.count;
        capped.tokens_max = count - 1;
        status = bd_tokenizer_encode(tokenizer, text, bytes, &capped, &ids, &err);
        BD_ASSERT(status == BD_E_LIMIT && ids.count == count);
    }
    bd_token_vec_deinit(&ids);
}

static void single_tokens(const bd_tokenizer *tokenizer) {
    const uint32_t size = bd_tokenizer_vocab_size(tokenizer);
    BD_ASSERT(size <= BD_TOKENIZER_VOCAB_MAX);
    int32_t ids[IDS_MAX];
    for (uint32_t i = 0; i < IDS_MAX; i++) {
        ids[i] = i == 0 ? -1 : (int32_t)(size - i * (size / IDS_MAX + 1) % (size + 1));
        size_t bytes;
        const char *content = bd_tokenizer_token_content(tokenizer, ids[i], &bytes);
        BD_ASSERT((content != NULL) == bd_tokenizer_is_known(tokenizer, ids[i]));
        BD_ASSERT(content || bytes == 0);
        fuzz_read(content, bytes);
        if (content) BD_ASSERT(bd_tokenizer_token_id(tokenizer, content, bytes) >= 0);
        content = bd_tokenizer_token_bytes(tokenizer, ids[i], &bytes);
        fuzz_read(content, bytes);
    }
    decode(tokenizer, ids, IDS_MAX, false);
    decode(tokenizer, ids, IDS_MAX, true);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    static const char fixed[] = "abab  ca<s> \xc3\xa9 x A\xcc\x81 12345's babc\xe6\x9d\xb1\n\n <|";
    fuzz_part json, text;
    fuzz_split(data, bytes, &json, &text);
    bd_tokenizer *tokenizer;
    bd_error err;
    bd_error_clear(&err);
    const bd_status status =
        bd_tokenizer_parse(&tokenizer, (const char *)json.data, json.bytes, "fuzz.json", &err);
    if (status != BD_OK) {
        BD_ASSERT(!tokenizer);
        fuzz_check_error(status, &err);
        return 0;
    }
    const size_t text_bytes = text.bytes < TEXT_BYTES_MAX ? text.bytes : TEXT_BYTES_MAX;
    single_tokens(tokenizer);
    encode(tokenizer, fixed, sizeof fixed - 1, true);
    encode(tokenizer, (const char *)text.data, text_bytes, true);
    encode(tokenizer, (const char *)text.data, text_bytes, false);
    bd_tokenizer_destroy(tokenizer);
    return 0;
}
