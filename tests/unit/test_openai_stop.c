/* Stop strings against brute force: random texts over a tiny alphabet (so that strings overlap and
 * nest), cut at random byte places. Expected after each piece: the match with the earliest start
 * (then the longest) in the text so far, and otherwise everything released but the longest suffix
 * that is a proper prefix of some stop string. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "bitdelta/base/clock.h"
#include "bitdelta/base/rng.h"
#include "openai/stop.h"

enum { TEXT_MAX = 200, STOPS_MAX = 6 };

static uint64_t seed;

static uint32_t draw(uint32_t round, uint32_t *position, uint32_t below) {
    return (uint32_t)(bd_rng_uniform(seed, round, (*position)++) * below);
}

/* Index of the best match in text, -1: none; *start: where. */
static int brute_match(const bd_text *stops, uint32_t count, const char *text, size_t bytes,
                       size_t *start) {
    int best = -1;
    *start = bytes + 1;
    for (uint32_t i = 0; i < count; i++) {
        for (size_t at = 0; at + stops[i].bytes <= bytes; at++) {
            if (memcmp(text + at, stops[i].data, stops[i].bytes) != 0) continue;
            bool better = at < *start || (at == *start && stops[i].bytes > stops[best].bytes);
            if (best < 0 || better) {
                best = (int)i;
                *start = at;
            }
            break;
        }
    }
    return best;
}

static size_t brute_held(const bd_text *stops, uint32_t count, const char *text, size_t bytes) {
    for (size_t held = bytes; held > 0; held--)
        for (uint32_t i = 0; i < count; i++)
            if (held < stops[i].bytes && memcmp(text + bytes - held, stops[i].data, held) == 0)
                return held;
    return 0;
}

static void one_round(uint32_t round, const char *alphabet, uint32_t letters, bool keep) {
    char text[TEXT_MAX], stop_bytes[STOPS_MAX][8];
    bd_text stops[STOPS_MAX];
    uint32_t position = 0, count = 1 + draw(round, &position, STOPS_MAX);
    for (uint32_t i = 0; i < count; i++) {
        stops[i] = (bd_text){stop_bytes[i], 1 + draw(round, &position, 7)};
        for (size_t k = 0; k < stops[i].bytes; k++)
            stop_bytes[i][k] = alphabet[draw(round, &position, letters)];
    }
    size_t length = draw(round, &position, TEXT_MAX);
    for (size_t k = 0; k < length; k++)
        text[k] = alphabet[draw(round, &position, letters)];
    bd_arena *arena = bd_arena_create(4096, 1 << 20);
    bd_stop_set set;
    bd_stop_state state = {0};
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    assert_true(bd_stop_set_init(&set, stops, count, arena));
    size_t at = 0;
    int matched = -1;
    while (at < length && matched < 0) {
        size_t piece = draw(round, &position, 12);
        if (piece > length - at) piece = length - at;
        matched = bd_stop_feed(&set, &state, text + at, piece, keep, &out);
        at += piece;
        size_t start, expected = at;
        int best = brute_match(stops, count, text, at, &start);
        if (best >= 0)
            expected = start + (keep ? stops[best].bytes : 0);
        else
            expected = at - brute_held(stops, count, text, at);
        /* Two equal strings are one and the same match. */
        assert_int_equal(matched < 0, best < 0);
        if (best >= 0) assert_int_equal(stops[matched].bytes, stops[best].bytes);
        assert_int_equal(out.len_bytes, expected);
        if (expected > 0) assert_memory_equal(out.data, text, expected);
    }
    if (matched < 0) {
        bd_stop_release(&set, &state, &out);
        assert_int_equal(out.len_bytes, length);
        if (length > 0) assert_memory_equal(out.data, text, length);
    }
    bd_strbuf_deinit(&out);
    bd_arena_destroy(arena);
}

static void test_against_brute_force(void **state) {
    (void)state;
    seed = bd_now_us();
    print_message("seed %llu\n", (unsigned long long)seed);
    for (uint32_t round = 0; round < 40000; round++)
        one_round(round, "abc\0", 1 + round % 4, round % 5 == 0);
}

static void test_long_and_full(void **state) {
    (void)state;
    static char longest[BD_STOP_STRING_BYTES_MAX], text[3 * BD_STOP_STRING_BYTES_MAX];
    memset(longest, 'a', sizeof longest);
    memset(text, 'a', sizeof text);
    longest[sizeof longest - 1] = 'b';
    bd_text stops[BD_STOP_STRINGS_MAX];
    for (int i = 0; i < BD_STOP_STRINGS_MAX; i++)
        stops[i] = (bd_text){longest, sizeof longest};
    bd_arena *arena = bd_arena_create(4096, 1 << 20);
    bd_stop_set set;
    bd_stop_state stop = {0};
    bd_strbuf out;
    bd_strbuf_init(&out, 0);
    assert_true(bd_stop_set_init(&set, stops, BD_STOP_STRINGS_MAX, arena));
    assert_int_equal(bd_stop_feed(&set, &stop, text, sizeof text, false, &out), -1);
    assert_int_equal(out.len_bytes, sizeof text - (sizeof longest - 1));
    assert_true(bd_stop_feed(&set, &stop, "b", 1, false, &out) >= 0);
    assert_int_equal(out.len_bytes, sizeof text - (sizeof longest - 1));
    bd_strbuf_deinit(&out);
    bd_arena_destroy(arena);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_against_brute_force),
        cmocka_unit_test(test_long_and_full),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
