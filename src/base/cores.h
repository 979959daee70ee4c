/* cores.h - how many cores this process may use. Threads: pure reads of /proc and /sys. */
#ifndef BITDELTA_SRC_BASE_CORES_H
#define BITDELTA_SRC_BASE_CORES_H

#include <stdint.h>

/* CPU quota of a control group, rounded up to whole cores; 0 when there is none. proc_cgroup is the
 * text file /proc/self/cgroup, sys_root the directory /sys/fs/cgroup; both v2 and v1 layouts are
 * understood, and the smallest quota on the way up to the root counts. */
uint32_t bd_cgroup_cores(const char *proc_cgroup, const char *sys_root);

#endif
