/* chat_logprobs.c - log-probabilities in the form of chat completions. Threads: any. */
#include "chat.h"

static void put_token(bd_strbuf *out, const bd_token_names *names, int32_t id, float logprob) {
    size_t count = 0;
    const char *bytes =
        names->tokenizer ? bd_tokenizer_token_bytes(names->tokenizer, id, &count) : NULL;
    bd_strbuf_puts(out, "{\"token\":");
    bd_token_name_write(names, id, out);
    bd_strbuf_puts(out, ",\"logprob\":");
    bd_logprob_write(logprob, out);
    bd_strbuf_puts(out, ",\"bytes\":[");
    for (size_t i = 0; bytes && i < count; i++)
        bd_strbuf_printf(out, "%s%u", i > 0 ? "," : "", (unsigned)(unsigned char)bytes[i]);
    bd_strbuf_puts(out, "]");
}

void bd_chat_logprob_add(bd_strbuf *list, const bd_token_names *names, const bd_token_result *token,
                         uint32_t alternatives) {
    if (list->len_bytes > 0) bd_strbuf_puts(list, ",");
    put_token(list, names, token->id, token->logprob);
    bd_strbuf_puts(list, ",\"top_logprobs\":[");
    if (alternatives > token->top_count) alternatives = token->top_count;
    for (uint32_t i = 0; i < alternatives; i++) {
        /* The same number as the token's own. */
        bool actual = token->top_ids[i] == token->id;
        if (i > 0) bd_strbuf_puts(list, ",");
        put_token(list, names, token->top_ids[i], actual ? token->logprob : token->top_logprobs[i]);
        bd_strbuf_puts(list, "}");
    }
    bd_strbuf_puts(list, "]}");
}
