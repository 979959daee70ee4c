/* chat_write.c - values as Python's str(), repr() and json.dumps() write them. Threads: any, a run
 * is one thread's. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <utf8proc.h>

#include "chat_internal.h"

/* The shortest digits that read back as the same number, laid out as Python does. */
static void write_float(double value, bd_strbuf *out) {
    char digits[40];
    if (isnan(value) || isinf(value)) {
        bd_strbuf_puts(out, isnan(value) ? "nan" : value > 0 ? "inf" : "-inf");
        return;
    }
    int precision = 0;
    do
        (void)snprintf(digits, sizeof digits, "%.*e", precision, value);
    while (strtod(digits, NULL) != value && ++precision < 17);
    const char *exponent_at = strchr(digits, 'e');
    int exponent = atoi(exponent_at + 1);
    if (exponent < -4 || exponent >= 16) {
        bd_strbuf_append(out, digits, (size_t)(exponent_at - digits));
        bd_strbuf_printf(out, "e%c%02d", exponent < 0 ? '-' : '+', abs(exponent));
        return;
    }
    int places = precision > exponent ? precision - exponent : 1;
    bd_strbuf_printf(out, "%.*f", places, value);
}

static bool is_printable(uint32_t code) {
    if (code < 0x80) return code >= 0x20 && code != 0x7f;
    switch ((int)utf8proc_category((utf8proc_int32_t)code)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZS:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return false;
    default:
        return true;
    }
}

static void write_repr_text(const bd_chat_value *text, bd_strbuf *out) {
    bool single = bd_chat_search(text->text, text->bytes, "'", 1) != NULL;
    bool both = single && bd_chat_search(text->text, text->bytes, "\"", 1) != NULL;
    char quote = single && !both ? '"' : '\'';
    size_t length;
    bd_strbuf_append(out, &quote, 1);
    for (size_t i = 0; i < text->bytes; i += length) {
        uint32_t code = bd_chat_code_at(text->text + i, text->bytes - i, &length);
        if (code == (uint32_t)quote || code == '\\')
            bd_strbuf_printf(out, "\\%c", (int)code);
        else if (code == '\n' || code == '\r' || code == '\t')
            bd_strbuf_puts(out, code == '\n' ? "\\n" : code == '\r' ? "\\r" : "\\t");
        else if (is_printable(code))
            bd_strbuf_append(out, text->text + i, length);
        else
            bd_strbuf_printf(out,
                             code < 0x100     ? "\\x%02x"
                             : code < 0x10000 ? "\\u%04x"
                                              : "\\U%08x",
                             code);
    }
    bd_strbuf_append(out, &quote, 1);
}

static bool write_repr(bd_chat_run *run, const bd_chat_value *value, bd_strbuf *out);

static bool write_list(bd_chat_run *run, const bd_chat_value *value, bd_strbuf *out) {
    const bd_chat_list *list = value->list;
    if (value->flavour > BD_CHAT_TUPLE) {
        if (value->flavour == BD_CHAT_RANGE)
            return bd_chat_fail(run, BD_E_UNSUPPORTED, "writing a range is not supported");
        return bd_chat_fail(run, BD_E_UNSUPPORTED,
                            "writing what was not made a list is not supported");
    }
    bool tuple = value->flavour == BD_CHAT_TUPLE;
    bd_strbuf_puts(out, tuple ? "(" : "[");
    for (size_t i = 0; i < list->count; i++) {
        if (i > 0) bd_strbuf_puts(out, ", ");
        if (!write_repr(run, &list->items[i], out)) return false;
    }
    bd_strbuf_puts(out, !tuple ? "]" : list->count == 1 ? ",)" : ")");
    return true;
}

static bool write_dict(bd_chat_run *run, const bd_chat_dict *dict, bd_strbuf *out) {
    bd_strbuf_puts(out, "{");
    for (size_t i = 0; i < dict->count; i++) {
        if (i > 0) bd_strbuf_puts(out, ", ");
        if (!write_repr(run, &dict->keys[i], out)) return false;
        bd_strbuf_puts(out, ": ");
        if (!write_repr(run, &dict->values[i], out)) return false;
    }
    bd_strbuf_puts(out, "}");
    return true;
}

static bool write_repr(bd_chat_run *run, const bd_chat_value *value, bd_strbuf *out) {
    bool ok;
    if (!bd_chat_spend(run, 1 + (value->kind == BD_CHAT_STRING ? value->bytes / 8 : 0)))
        return false;
    switch ((int)value->kind) {
    case BD_CHAT_STRING:
        write_repr_text(value, out);
        return true;
    case BD_CHAT_UNDEFINED:
        bd_strbuf_puts(out, "Undefined");
        return true;
    case BD_CHAT_LIST:
    case BD_CHAT_DICT:
        if (!bd_chat_enter(run)) return false;
        ok = value->kind == BD_CHAT_LIST ? write_list(run, value, out)
                                         : write_dict(run, value->dict, out);
        bd_chat_leave(run);
        return ok;
    default:
        return bd_chat_write(run, value, out);
    }
}

bool bd_chat_write(bd_chat_run *run, const bd_chat_value *value, bd_strbuf *out) {
    if (!bd_chat_spend(run, 1)) return false;
    switch ((bd_chat_kind)value->kind) {
    case BD_CHAT_UNDEFINED:
        return true;
    case BD_CHAT_NONE:
        bd_strbuf_puts(out, "None");
        return true;
    case BD_CHAT_BOOL:
        bd_strbuf_puts(out, value->boolean ? "True" : "False");
        return true;
    case BD_CHAT_INT:
        bd_strbuf_printf(out, "%lld", (long long)value->integer);
        return true;
    case BD_CHAT_FLOAT:
        write_float(value->number, out);
        return true;
    case BD_CHAT_STRING:
        bd_strbuf_append(out, value->text, value->bytes);
        return bd_chat_spend(run, value->bytes / BD_CHAT_BYTES_PER_STEP);
    case BD_CHAT_LIST:
    case BD_CHAT_DICT:
        return write_repr(run, value, out);
    case BD_CHAT_NAMESPACE:
    case BD_CHAT_LOOP:
    case BD_CHAT_MACRO:
    case BD_CHAT_FUNCTION:
    case BD_CHAT_METHOD:
        break;
    }
    return bd_chat_fail(run, BD_E_UNSUPPORTED, "writing %s is not supported",
                        bd_chat_type_name(value));
}

bool bd_chat_to_text(bd_chat_run *run, const bd_chat_value *value, bd_chat_value *out) {
    bd_strbuf buf;
    if (value->kind == BD_CHAT_STRING) {
        *out = *value;
        return true;
    }
    bd_strbuf_init(&buf, BD_CHAT_OUTPUT_BYTES_MAX);
    if (bd_chat_write(run, value, &buf)) return bd_chat_take(run, &buf, out);
    bd_strbuf_deinit(&buf);
    return false;
}

/* ---- JSON ---- */

typedef struct json_writer {
    bd_chat_run *run;
    const bd_chat_json_style *style;
    bd_strbuf *out;
    size_t level;
} json_writer;

static bool write_json(json_writer *writer, const bd_chat_value *value);

static void write_json_text(const json_writer *writer, const bd_chat_value *text) {
    static const char letters[] = "\"\\\b\f\n\r\t", names[] = "\"\\bfnrt";
    bd_strbuf *out = writer->out;
    size_t length;
    bd_strbuf_puts(out, "\"");
    for (size_t i = 0; i < text->bytes; i += length) {
        uint32_t code = bd_chat_code_at(text->text + i, text->bytes - i, &length);
        const char *letter = code < 0x80 && code ? strchr(letters, (int)code) : NULL;
        if (letter)
            bd_strbuf_printf(out, "\\%c", names[letter - letters]);
        else if (code < 0x20 || (writer->style->ascii && code >= 0x7f && code < 0x10000))
            bd_strbuf_printf(out, "\\u%04x", code);
        else if (writer->style->ascii && code >= 0x10000)
            bd_strbuf_printf(out, "\\u%04x\\u%04x", 0xD800 + ((code - 0x10000) >> 10),
                             0xDC00 + (code & 0x3ff));
        else
            bd_strbuf_append(out, text->text + i, length);
    }
    bd_strbuf_puts(out, "\"");
}

static void new_line(const json_writer *writer) {
    if (!writer->style->pretty) return;
    bd_strbuf_puts(writer->out, "\n");
    for (size_t i = 0; i < writer->level; i++)
        for (int64_t j = 0; j < writer->style->indent; j++)
            bd_strbuf_puts(writer->out, " ");
}

static void separate(const json_writer *writer, const bd_chat_value *given, const char *plain) {
    if (given->text)
        bd_strbuf_append(writer->out, given->text, given->bytes);
    else
        bd_strbuf_puts(writer->out, plain);
}

static bool write_json_key(json_writer *writer, const bd_chat_value *key) {
    if (key->kind == BD_CHAT_STRING) return write_json(writer, key);
    if (key->kind == BD_CHAT_LIST)
        return bd_chat_fail(writer->run, BD_E_FORMAT, "a tuple cannot be a key in JSON");
    bd_strbuf_puts(writer->out, "\"");
    if (!write_json(writer, key)) return false;
    bd_strbuf_puts(writer->out, "\"");
    return true;
}

/* The member to write next, in order or by key. *last: index of the one before. */
static bool next_member(json_writer *writer, const bd_chat_dict *dict, size_t turn, size_t *last) {
    if (!writer->style->sort_keys) {
        *last = turn;
        return true;
    }
    size_t best = SIZE_MAX;
    for (size_t i = 0; i < dict->count; i++) {
        int order = 1;
        if (turn > 0 && !bd_chat_order(writer->run, &dict->keys[i], &dict->keys[*last], &order))
            return false;
        if (order <= 0) continue;
        order = -1;
        if (best != SIZE_MAX &&
            !bd_chat_order(writer->run, &dict->keys[i], &dict->keys[best], &order))
            return false;
        if (order < 0) best = i;
    }
    *last = best == SIZE_MAX ? turn : best;
    return bd_chat_spend(writer->run, dict->count);
}

static bool write_json_members(json_writer *writer, const bd_chat_value *value) {
    bool dict = value->kind == BD_CHAT_DICT;
    size_t count = dict ? value->dict->count : value->list->count, member = 0;
    bd_strbuf_puts(writer->out, dict ? "{" : "[");
    writer->level++;
    for (size_t i = 0; i < count; i++) {
        if (i > 0)
            separate(writer, &writer->style->item_separator, writer->style->pretty ? "," : ", ");
        new_line(writer);
        if (!dict) {
            if (!write_json(writer, &value->list->items[i])) return false;
            continue;
        }
        if (!next_member(writer, value->dict, i, &member) ||
            !write_json_key(writer, &value->dict->keys[member]))
            return false;
        separate(writer, &writer->style->key_separator, ": ");
        if (!write_json(writer, &value->dict->values[member])) return false;
    }
    writer->level--;
    if (count > 0) new_line(writer);
    bd_strbuf_puts(writer->out, dict ? "}" : "]");
    return true;
}

static bool write_json(json_writer *writer, const bd_chat_value *value) {
    bool ok;
    if (!bd_chat_spend(writer->run, 1 + (value->kind == BD_CHAT_STRING ? value->bytes / 16 : 0)))
        return false;
    switch ((int)value->kind) {
    case BD_CHAT_NONE:
        bd_strbuf_puts(writer->out, "null");
        return true;
    case BD_CHAT_BOOL:
        bd_strbuf_puts(writer->out, value->boolean ? "true" : "false");
        return true;
    case BD_CHAT_INT:
        return bd_chat_write(writer->run, value, writer->out);
    case BD_CHAT_FLOAT:
        if (isnan(value->number))
            bd_strbuf_puts(writer->out, "NaN");
        else if (isinf(value->number))
            bd_strbuf_puts(writer->out, value->number > 0 ? "Infinity" : "-Infinity");
        else
            write_float(value->number, writer->out);
        return true;
    case BD_CHAT_STRING:
        write_json_text(writer, value);
        return true;
    case BD_CHAT_LIST:
        if (value->flavour > BD_CHAT_TUPLE) break;
        __attribute__((fallthrough));
    case BD_CHAT_DICT:
        if (!bd_chat_enter(writer->run)) return false;
        ok = write_json_members(writer, value);
        bd_chat_leave(writer->run);
        return ok;
    default:
        break;
    }
    return bd_chat_fail(writer->run, BD_E_FORMAT, "%s cannot be written as JSON",
                        bd_chat_type_name(value));
}

bool bd_chat_write_json(bd_chat_run *run, const bd_chat_value *value,
                        const bd_chat_json_style *style, bd_strbuf *out) {
    json_writer writer = {.run = run, .style = style, .out = out};
    return write_json(&writer, value);
}
