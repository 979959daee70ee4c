/* compress_names.c - which tensors are coded by sign, and the order of the file. Threads: any. */
#include <stdlib.h>
#include <string.h>

#include "compress_internal.h"

static bool ends_with(const char *text, const char *end) {
    const size_t text_len = strlen(text), end_len = strlen(end);
    return text_len >= end_len && strcmp(text + text_len - end_len, end) == 0;
}

bool bd_compress_is_embedding(const char *name) {
    return ends_with(name, "embed_tokens.weight") || ends_with(name, "lm_head.weight");
}

bool bd_compress_is_signed(const char *name) {
    static const char *const ends[] = {
        "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight",
        "self_attn.o_proj.weight", "mlp.gate_proj.weight",    "mlp.up_proj.weight",
        "mlp.down_proj.weight",
    };
    for (size_t i = 0; i < sizeof ends / sizeof ends[0]; i++) {
        if (ends_with(name, ends[i])) return true;
    }
    return bd_compress_is_embedding(name);
}

typedef struct place {
    uint32_t section; /* 0 embedding, 1 layers, 2 the rest, 3 head */
    uint64_t layer;
    uint32_t part;
} place;

/* Index of the part "self_attn.q_proj" of a layer; those without a place of their own come last. */
static uint32_t part_of(const char *part, size_t part_len) {
    static const char *const parts[] = {
        "input_layernorm",  "self_attn.q_proj", "self_attn.k_proj",
        "self_attn.v_proj", "self_attn.o_proj", "post_attention_layernorm",
        "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj",
    };
    uint32_t i = 0;
    while (i < sizeof parts / sizeof parts[0] &&
           !(strlen(parts[i]) == part_len && memcmp(parts[i], part, part_len) == 0)) {
        i++;
    }
    return i;
}

/* "...layers.<n>.<part>.weight" or ".bias", the first such place in the name. */
static bool place_in_layer(const char *name, place *out) {
    for (const char *at = strstr(name, "layers."); at; at = strstr(at + 1, "layers.")) {
        const char *digits = at + strlen("layers.");
        const size_t digit_count = strspn(digits, "0123456789");
        const char *part = digits + digit_count + 1;
        if (digit_count == 0 || digits[digit_count] != '.') continue;
        const size_t end = ends_with(part, ".weight") ? strlen(".weight")
                           : ends_with(part, ".bias") ? strlen(".bias")
                                                      : 0;
        if (end == 0) continue;
        *out = (place){.section = 1,
                       .layer = strtoull(digits, NULL, 10),
                       .part = part_of(part, strlen(part) - end)};
        return true;
    }
    return false;
}

static place place_of(const char *name) {
    place p;
    if (place_in_layer(name, &p)) return p;
    p = (place){.section = strstr(name, "embed_tokens") ? 0u : strstr(name, "lm_head") ? 3u : 2u};
    return p;
}

int bd_compress_order(const char *a, const char *b) {
    const place x = place_of(a), y = place_of(b);
    if (x.section != y.section) return x.section < y.section ? -1 : 1;
    if (x.layer != y.layer) return x.layer < y.layer ? -1 : 1;
    if (x.part != y.part) return x.part < y.part ? -1 : 1;
    return strcmp(a, b);
}
