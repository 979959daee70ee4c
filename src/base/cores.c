/* cores.c - usable cores: the affinity mask, cut by the CPU quota of the control group. */
#include "cores.h"

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/file.h"
#include "bitdelta/base/pool.h"

enum { CORES_MAX = 1024, CGROUP_TEXT_MAX = 1 << 16 };

static char *read_text(const char *path) {
    char *text = NULL;
    size_t bytes = 0;
    return bd_file_read(path, CGROUP_TEXT_MAX, &text, &bytes, NULL) == BD_OK ? text : NULL;
}

static uint32_t cores_of(long long quota_us, long long period_us) {
    if (quota_us <= 0 || period_us <= 0) return 0;
    long long cores = quota_us / period_us + (quota_us % period_us != 0);
    return cores > CORES_MAX ? CORES_MAX : (uint32_t)cores;
}

/* v2: one file "max 100000" or "150000 100000". */
static uint32_t quota_v2(const char *dir) {
    char path[4096];
    if (bd_path_join(path, sizeof path, dir, "cpu.max", NULL) != BD_OK) return 0;
    char *text = read_text(path);
    if (!text) return 0;
    char *end = text;
    long long quota_us = strtoll(text, &end, 10); /* "max" reads as 0 */
    uint32_t cores = end == text ? 0 : cores_of(quota_us, strtoll(end, NULL, 10));
    free(text);
    return cores;
}

/* v1: two files, quota -1 when there is none. */
static uint32_t quota_v1(const char *dir) {
    static const char *const k_names[2] = {"cpu.cfs_quota_us", "cpu.cfs_period_us"};
    long long values[2] = {0, 0};
    for (int i = 0; i < 2; i++) {
        char path[4096];
        if (bd_path_join(path, sizeof path, dir, k_names[i], NULL) != BD_OK) return 0;
        char *text = read_text(path);
        if (!text) return 0;
        values[i] = strtoll(text, NULL, 10);
        free(text);
    }
    return cores_of(values[0], values[1]);
}

/* The smallest quota from the group itself up to the mount's root. In a container the group's path
 * is the host's and may not exist below the mount; the walk then still ends at the root, which is
 * the container. */
static uint32_t smallest_quota(const char *mount, const char *group,
                               uint32_t (*quota)(const char *)) {
    char path[4096];
    while (*group == '/')
        group++;
    if (bd_path_join(path, sizeof path, mount, group, NULL) != BD_OK) return quota(mount);
    uint32_t smallest = 0;
    const size_t root_len = strlen(mount);
    for (;;) {
        uint32_t cores = quota(path);
        if (cores > 0 && (smallest == 0 || cores < smallest)) smallest = cores;
        char *slash = strrchr(path, '/');
        if (!slash || (size_t)(slash - path) < root_len) return smallest;
        *slash = '\0';
    }
}

/* True when the comma-separated list has the word "cpu". */
static bool lists_cpu(const char *list) {
    for (;;) {
        size_t len = strcspn(list, ",");
        if (len == 3 && memcmp(list, "cpu", 3) == 0) return true;
        if (!list[len]) return false;
        list += len + 1;
    }
}

/* line: "0::/path" (v2) or "4:cpu,cpuacct:/path" (v1). */
static uint32_t quota_of_line(char *line, const char *sys_root) {
    char *controllers = strchr(line, ':');
    if (!controllers) return 0;
    char *group = strchr(controllers + 1, ':');
    if (!group) return 0;
    controllers++;
    *group++ = '\0';
    if (*controllers == '\0') return smallest_quota(sys_root, group, quota_v2);
    if (!lists_cpu(controllers)) return 0;
    char mount[4096];
    if (bd_path_join(mount, sizeof mount, sys_root, controllers, NULL) == BD_OK) {
        uint32_t cores = smallest_quota(mount, group, quota_v1);
        if (cores > 0) return cores;
    }
    /* The joined controllers usually have a link under the short name too. */
    if (bd_path_join(mount, sizeof mount, sys_root, "cpu", NULL) != BD_OK) return 0;
    return smallest_quota(mount, group, quota_v1);
}

uint32_t bd_cgroup_cores(const char *proc_cgroup, const char *sys_root) {
    char *text = read_text(proc_cgroup);
    if (!text) return 0;
    uint32_t smallest = 0;
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        uint32_t cores = quota_of_line(line, sys_root);
        if (cores > 0 && (smallest == 0 || cores < smallest)) smallest = cores;
    }
    free(text);
    return smallest;
}

/* The mask grows until the kernel's fits; machines of more than 1024 cores need more than
 * cpu_set_t. */
static uint32_t affinity_cores(void) {
    for (int cpus = 1024; cpus <= 1 << 18; cpus *= 2) {
        cpu_set_t *set = CPU_ALLOC((size_t)cpus);
        if (!set) return 1;
        size_t bytes = CPU_ALLOC_SIZE((size_t)cpus);
        int count = sched_getaffinity(0, bytes, set) == 0 ? CPU_COUNT_S(bytes, set) : -1;
        CPU_FREE(set);
        if (count > 0) return count > CORES_MAX ? CORES_MAX : (uint32_t)count;
    }
    return 1;
}

uint32_t bd_usable_cores(void) {
    uint32_t cores = affinity_cores();
    uint32_t quota = bd_cgroup_cores("/proc/self/cgroup", "/sys/fs/cgroup");
    return quota > 0 && quota < cores ? quota : cores;
}
