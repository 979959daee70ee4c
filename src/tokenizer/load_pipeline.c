/* load_pipeline.c - normalizer, pre-tokenizer and post-processor. Threads: the loading one. */
#include <stdlib.h>
#include <string.h>

#include "load.h"

#define TEMPLATE_TOKENS_MAX 256u

typedef bd_status (*component_fn)(bd_load *load, const cJSON *object, const char *type);

/* Calls one() for the component, or for each part of a "Sequence" (which may not nest). */
static bd_status each_component(bd_load *load, const cJSON *object, const char *where,
                                const char *parts_key, component_fn one) {
    const char *type;
    const cJSON *parts, *part;
    bd_status s;
    if (!object) return BD_OK;
    if ((s = bd_load_type(load, object, where, &type)) != BD_OK) return s;
    if (strcmp(type, "Sequence") != 0) return one(load, object, type);
    if ((s = bd_load_array(load, object, where, parts_key, &parts)) != BD_OK) return s;
    cJSON_ArrayForEach(part, parts) {
        if ((s = bd_load_type(load, part, where, &type)) != BD_OK) return s;
        if ((s = one(load, part, type)) != BD_OK) return s;
    }
    return BD_OK;
}

static bd_status too_many(bd_load *load, const char *where, uint32_t count_max) {
    return bd_fail(load->err, BD_E_LIMIT, load->name, "%s: more than %u parts", where, count_max);
}

/* ---- Normalizer ---- */

static bd_status normalize_texts(bd_load *load, bd_normalize_step *step, const char *pattern,
                                 const char *content) {
    step->pattern = strdup(pattern);
    step->content = strdup(content);
    load->tokenizer->normalize_count++; /* destroy() frees both from here on */
    if (!step->pattern || !step->content) return bd_load_memory(load);
    step->pattern_bytes = strlen(pattern);
    step->content_bytes = strlen(content);
    return BD_OK;
}

static bd_status normalizer_one(bd_load *load, const cJSON *object, const char *type) {
    bd_tokenizer *t = load->tokenizer;
    const char *where = "normalizer", *pattern = "", *content = "";
    bool regex = false;
    bd_status s = BD_OK;
    if (t->normalize_count == BD_STEPS_MAX) return too_many(load, where, BD_STEPS_MAX);
    bd_normalize_step *step = &t->normalize[t->normalize_count];
    if (!strcmp(type, "NFC")) {
        step->kind = BD_NORMALIZE_NFC;
    } else if (!strcmp(type, "Prepend")) {
        step->kind = BD_NORMALIZE_PREPEND;
        s = bd_load_string(load, object, where, "prepend", &content);
    } else if (!strcmp(type, "Replace")) {
        step->kind = BD_NORMALIZE_REPLACE;
        s = bd_load_pattern(load, object, where, &pattern, &regex);
        if (s == BD_OK && regex) return bd_load_unsupported(load, where, "Replace by", "Regex");
        if (s == BD_OK) s = bd_load_string(load, object, where, "content", &content);
    } else {
        return bd_load_unsupported(load, where, "type", type);
    }
    return s == BD_OK ? normalize_texts(load, step, pattern, content) : s;
}

bd_status bd_load_normalizer(bd_load *load, const cJSON *object) {
    return each_component(load, object, "normalizer", "normalizers", normalizer_one);
}

/* ---- Pre-tokenizer ---- */

static bd_status add_split(bd_load *load, const char *pattern, bool regex, bool keep_gaps) {
    bd_tokenizer *t = load->tokenizer;
    if (t->split_count == BD_STEPS_MAX) return too_many(load, "pre_tokenizer", BD_STEPS_MAX);
    bd_split_step *step = &t->split[t->split_count];
    step->kind = regex ? bd_split_kind_of(pattern) : BD_SPLIT_PCRE2;
    step->keep_gaps = keep_gaps;
    if (step->kind == BD_SPLIT_PCRE2) {
        char message[128] = "";
        bd_status s = bd_pattern_compile(&step->code, pattern, !regex, message);
        if (s == BD_E_MEMORY) return bd_load_memory(load);
        if (s != BD_OK)
            return bd_fail(load->err, BD_E_UNSUPPORTED, load->name,
                           "pre_tokenizer: the pattern \"%.80s\" is not supported: %s", pattern,
                           message);
    }
    t->split_count++;
    return BD_OK;
}

static bd_status split_one(bd_load *load, const cJSON *object) {
    const char *where = "pre_tokenizer", *pattern, *behavior;
    bool regex, invert;
    bd_status s;
    if ((s = bd_load_pattern(load, object, where, &pattern, &regex)) != BD_OK) return s;
    if ((s = bd_load_string(load, object, where, "behavior", &behavior)) != BD_OK) return s;
    if ((s = bd_load_bool(load, object, where, "invert", 0, &invert)) != BD_OK) return s;
    /* Isolated: matches and gaps are words. Removed and inverted: the gaps are what is removed. */
    bool isolated = !strcmp(behavior, "Isolated");
    if (!isolated && !(!strcmp(behavior, "Removed") && invert))
        return bd_load_unsupported(load, where, "Split behavior", behavior);
    return add_split(load, pattern, regex, isolated);
}

/* A step that needs no pattern compiled. */
static bd_status add_known_split(bd_load *load, bd_split_kind kind) {
    bd_tokenizer *t = load->tokenizer;
    if (t->split_count == BD_STEPS_MAX) return too_many(load, "pre_tokenizer", BD_STEPS_MAX);
    t->split[t->split_count++] = (bd_split_step){.kind = kind, .keep_gaps = true};
    return BD_OK;
}

static bd_status digits_one(bd_load *load, const cJSON *object) {
    bool alone;
    bd_status s = bd_load_bool(load, object, "pre_tokenizer", "individual_digits", 0, &alone);
    return s == BD_OK ? add_known_split(load, alone ? BD_SPLIT_DIGIT : BD_SPLIT_DIGITS) : s;
}

static bd_status byte_level_one(bd_load *load, const cJSON *object) {
    bd_tokenizer *t = load->tokenizer;
    const char *where = "pre_tokenizer";
    bool prefix, regex;
    bd_status s = bd_load_bool(load, object, where, "add_prefix_space", -1, &prefix);
    if (s != BD_OK) return s;
    if ((s = bd_load_bool(load, object, where, "use_regex", 1, &regex)) != BD_OK) return s;
    if (prefix && t->split_count > 0)
        return bd_load_unsupported(load, where, "after another part, ByteLevel with",
                                   "add_prefix_space");
    t->add_prefix_space = prefix;
    t->bpe.byte_level = true;
    return regex ? add_known_split(load, BD_SPLIT_GPT2) : BD_OK;
}

static bd_status pre_tokenizer_one(bd_load *load, const cJSON *object, const char *type) {
    /* ByteLevel turns text into bytes, so it comes last. */
    if (load->tokenizer->bpe.byte_level)
        return bd_load_unsupported(load, "pre_tokenizer", "after ByteLevel, type", type);
    if (!strcmp(type, "ByteLevel")) return byte_level_one(load, object);
    if (!strcmp(type, "Split")) return split_one(load, object);
    if (!strcmp(type, "Digits")) return digits_one(load, object);
    return bd_load_unsupported(load, "pre_tokenizer", "type", type);
}

bd_status bd_load_pre_tokenizer(bd_load *load, const cJSON *object) {
    return each_component(load, object, "pre_tokenizer", "pretokenizers", pre_tokenizer_one);
}

/* ---- Post-processor ---- */

typedef struct template_ids {
    int32_t before[TEMPLATE_TOKENS_MAX], after[TEMPLATE_TOKENS_MAX];
    uint32_t before_count, after_count;
    bool sequence_seen;
} template_ids;

static bd_status template_token(bd_load *load, const cJSON *object, const cJSON *tokens,
                                template_ids *ids) {
    const char *where = "post_processor", *name;
    const cJSON *list, *item;
    bd_status s = bd_load_string(load, object, where, "id", &name);
    if (s != BD_OK) return s;
    const cJSON *token = bd_load_member(tokens, name);
    if (!cJSON_IsObject(token))
        return bd_fail(load->err, BD_E_FORMAT, load->name, "%s: no special token \"%.80s\"", where,
                       name);
    if ((s = bd_load_array(load, token, where, "ids", &list)) != BD_OK) return s;
    cJSON_ArrayForEach(item, list) {
        uint32_t id, *count = ids->sequence_seen ? &ids->after_count : &ids->before_count;
        if ((s = bd_load_id(load, item, where, &id)) != BD_OK) return s;
        if (!bd_tokenizer_is_known(load->tokenizer, (int32_t)id))
            return bd_fail(load->err, BD_E_FORMAT, load->name, "%s: id %u is no token", where, id);
        if (*count == TEMPLATE_TOKENS_MAX) return too_many(load, where, TEMPLATE_TOKENS_MAX);
        (ids->sequence_seen ? ids->after : ids->before)[(*count)++] = (int32_t)id;
    }
    return BD_OK;
}

static bd_status template_read(bd_load *load, const cJSON *object, template_ids *ids) {
    const char *where = "post_processor", *name;
    const cJSON *single, *piece;
    bd_status s = bd_load_array(load, object, where, "single", &single);
    if (s != BD_OK) return s;
    cJSON_ArrayForEach(piece, single) {
        const cJSON *token = bd_load_member(piece, "SpecialToken");
        const cJSON *sequence = bd_load_member(piece, "Sequence");
        if (token) {
            s = template_token(load, token, bd_load_member(object, "special_tokens"), ids);
            if (s != BD_OK) return s;
            continue;
        }
        if ((s = bd_load_string(load, sequence, where, "id", &name)) != BD_OK) return s;
        if (strcmp(name, "A") != 0 || ids->sequence_seen)
            return bd_load_unsupported(load, where, "a template with sequence", name);
        ids->sequence_seen = true;
    }
    if (ids->sequence_seen) return BD_OK;
    return bd_fail(load->err, BD_E_FORMAT, load->name, "%s: the template has no sequence A", where);
}

static bd_status copy_ids(int32_t **list, uint32_t *list_count, const int32_t *ids,
                          uint32_t count) {
    *list = calloc((size_t)count + 1, sizeof **list);
    if (!*list) return BD_E_MEMORY;
    memcpy(*list, ids, count * sizeof *ids);
    *list_count = count;
    return BD_OK;
}

static bd_status post_processor_one(bd_load *load, const cJSON *object, const char *type) {
    bd_tokenizer *t = load->tokenizer;
    if (!strcmp(type, "ByteLevel")) return BD_OK; /* only changes offsets */
    if (strcmp(type, "TemplateProcessing") != 0)
        return bd_load_unsupported(load, "post_processor", "type", type);
    /* The library takes what the first template made for a pair of sequences. */
    if (t->prefix) return bd_load_unsupported(load, "post_processor", "a second", type);
    template_ids ids = {.sequence_seen = false};
    bd_status s = template_read(load, object, &ids);
    if (s != BD_OK) return s;
    if (copy_ids(&t->prefix, &t->prefix_count, ids.before, ids.before_count) != BD_OK ||
        copy_ids(&t->suffix, &t->suffix_count, ids.after, ids.after_count) != BD_OK)
        return bd_load_memory(load);
    return BD_OK;
}

bd_status bd_load_post_processor(bd_load *load, const cJSON *object) {
    return each_component(load, object, "post_processor", "processors", post_processor_one);
}
