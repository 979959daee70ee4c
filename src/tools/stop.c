/* stop.c - see stop.h. The handler does nothing but note the number. */
#include "bitdelta/tools/stop.h"

#include <signal.h>
#include <string.h>

static const int k_signals[] = {SIGINT, SIGTERM, SIGHUP};
enum { SIGNALS = sizeof k_signals / sizeof k_signals[0] };

static volatile sig_atomic_t g_noted;
static struct sigaction g_before[SIGNALS];
static bool g_begun;

static void note(int number) {
    g_noted = number;
}

void bd_stop_begin(void) {
    if (g_begun) return;
    g_noted = 0;
    struct sigaction action = {.sa_handler = note, .sa_flags = SA_RESTART | (int)SA_RESETHAND};
    sigfillset(&action.sa_mask);
    for (size_t i = 0; i < SIGNALS; i++) {
        if (sigaction(k_signals[i], NULL, &g_before[i]) != 0) g_before[i].sa_handler = SIG_IGN;
        /* What is ignored was made so by nohup or a shell, for good. */
        if (g_before[i].sa_handler != SIG_IGN) (void)sigaction(k_signals[i], &action, NULL);
    }
    signal(SIGPIPE, SIG_IGN); /* stays so: the report comes after the end */
    g_begun = true;
}

void bd_stop_end(void) {
    if (!g_begun) return;
    g_begun = false;
    for (size_t i = 0; i < SIGNALS; i++)
        if (g_before[i].sa_handler != SIG_IGN) (void)sigaction(k_signals[i], &g_before[i], NULL);
}

bd_status bd_stop_check(const char *path, bd_error *err) {
    const int number = g_noted;
    if (number == 0) return BD_OK;
    return bd_fail(err, BD_CANCELLED, path, "%s: given up: %s", path, strsignal(number));
}

int bd_stop_signal(void) {
    return g_noted;
}
