/* stop.c - Knuth-Morris-Pratt, one automaton per stop string. */
#include "stop.h"

#include <string.h>

static const uint16_t *make_borders(const bd_text *string, bd_arena *arena) {
    uint16_t *borders = bd_arena_alloc(arena, string->bytes, sizeof *borders);
    if (!borders) return NULL;
    uint16_t length = 0;
    for (size_t i = 1; i < string->bytes; i++) {
        while (length > 0 && string->data[i] != string->data[length])
            length = borders[length - 1];
        if (string->data[i] == string->data[length]) length++;
        borders[i] = length;
    }
    return borders;
}

bool bd_stop_set_init(bd_stop_set *set, const bd_text *strings, uint32_t count, bd_arena *arena) {
    BD_ASSERT(count <= BD_STOP_STRINGS_MAX);
    *set = (bd_stop_set){.count = count, .strings = strings};
    for (uint32_t i = 0; i < count; i++) {
        BD_ASSERT(strings[i].bytes > 0 && strings[i].bytes <= BD_STOP_STRING_BYTES_MAX);
        set->borders[i] = make_borders(&strings[i], arena);
        if (!set->borders[i]) return false;
    }
    return true;
}

/* Position in `text` behind the first full match of string i, or 0. */
static size_t advance(const bd_stop_set *set, bd_stop_state *state, uint32_t i, const char *text,
                      size_t bytes) {
    const bd_text *string = &set->strings[i];
    const uint16_t *borders = set->borders[i];
    uint16_t matched = state->matched[i];
    for (size_t at = 0; at < bytes; at++) {
        if (matched == 0) { /* jump to the next place where a match can start */
            const char *next = memchr(text + at, string->data[0], bytes - at);
            if (!next) break;
            at = (size_t)(next - text);
        }
        while (matched > 0 && text[at] != string->data[matched])
            matched = borders[matched - 1];
        if (text[at] == string->data[matched]) matched++;
        if (matched == string->bytes) return at + 1;
    }
    state->matched[i] = matched;
    return 0;
}

/* Bytes [0, end) of the withheld text followed by the piece. */
static void append_upto(const bd_stop_set *set, const bd_stop_state *state, const char *text,
                        size_t end, bd_strbuf *out) {
    size_t held = state->held_bytes;
    size_t from_held = end < held ? end : held;
    if (from_held > 0) bd_strbuf_append(out, set->strings[state->held_string].data, from_held);
    if (end > held) bd_strbuf_append(out, text, end - held);
}

int bd_stop_feed(const bd_stop_set *set, bd_stop_state *state, const char *text, size_t bytes,
                 bool keep_match, bd_strbuf *out) {
    int best = -1;
    size_t best_start = 0, best_end = 0;
    for (uint32_t i = 0; i < set->count; i++) {
        size_t end = advance(set, state, i, text, bytes);
        if (end == 0) continue;
        end += state->held_bytes; /* counted from the start of the withheld text */
        size_t start = end - set->strings[i].bytes;
        if (best >= 0 && (start > best_start || (start == best_start && end <= best_end))) continue;
        best = (int)i;
        best_start = start;
        best_end = end;
    }
    if (best >= 0) {
        append_upto(set, state, text, keep_match ? best_end : best_start, out);
        return best;
    }
    uint16_t held = 0;
    uint8_t held_string = 0;
    for (uint32_t i = 0; i < set->count; i++) {
        if (state->matched[i] <= held) continue;
        held = state->matched[i];
        held_string = (uint8_t)i;
    }
    append_upto(set, state, text, state->held_bytes + bytes - held, out);
    state->held_bytes = held;
    state->held_string = held_string;
    return -1;
}

void bd_stop_release(const bd_stop_set *set, bd_stop_state *state, bd_strbuf *out) {
    append_upto(set, state, "", state->held_bytes, out);
    *state = (bd_stop_state){0};
}
