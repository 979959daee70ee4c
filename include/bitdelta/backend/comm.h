/* comm.h - how the ranks of one model meet: sums and gathers between their devices.
 * A group is made once for all ranks of this process and shared; each rank's thread opens its own
 * comm from it. Owner of the group: the model; of a comm: the rank, whose executor thread makes all
 * calls but abort.
 *
 * Every rank makes the same calls with the same sizes in the same order. Calls are in the order of
 * `stream` (the CPU has none: NULL, done at the return). Every rank gets the same bits. Nothing
 * allocates after open.
 *
 * A wait for a peer ends: by its coming, by the group's wait_us_max, or by abort. After the last
 * two the group is broken for good: this and every later call of any rank is BD_E_DEVICE. Where
 * calls are asynchronous that may come to light only in poll, which is to be called while a step
 * is waited for. */
#ifndef BITDELTA_BACKEND_COMM_H
#define BITDELTA_BACKEND_COMM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "bitdelta/base/status.h"

#define BD_COMM_RANKS_MAX 8u

typedef struct bd_comm_ops bd_comm_ops;

typedef struct bd_comm_group { /* first member of each implementation's */
    const bd_comm_ops *ops;
    uint32_t rank_count;
    uint64_t wait_us_max;
    void *device; /* what a backend keeps with its group; else NULL */
} bd_comm_group;

typedef struct bd_comm { /* first member of each implementation's */
    const bd_comm_ops *ops;
    bd_comm_group *group;
    uint32_t rank, rank_count;
    /* Set by the caller while its stream records: calls launch nothing then, and one that fails
     * spoils the recording, not the group. */
    bool recording;
} bd_comm;

typedef enum bd_comm_type { BD_COMM_F32, BD_COMM_BF16, BD_COMM_F16 } bd_comm_type;

struct bd_comm_ops {
    const char *name; /* "local", "nccl", "p2p" */

    /* Once, before any rank opens. rank_count: 2 .. BD_COMM_RANKS_MAX. nccl: loads the library and
     * makes the unique id; BD_E_UNSUPPORTED names what is missing. */
    bd_status (*group_create)(uint32_t rank_count, uint64_t wait_us_max, bd_comm_group **out,
                              bd_error *err);
    void (*group_destroy)(bd_comm_group *group); /* after every comm; NULL is fine */

    /* Each rank on its own thread, all at once: returns when all have come. device_index: the
     * rank's (CUDA). */
    bd_status (*open)(bd_comm_group *group, uint32_t rank, uint32_t device_index, bd_comm **out,
                      bd_error *err);
    void (*close)(bd_comm *comm); /* waits for nobody; NULL is fine */

    /* data[i] = the sum of all ranks' data[i], in place. local: F32 alone, summed in the order of
     * the ranks. */
    bd_status (*all_reduce)(bd_comm *comm, void *data, uint64_t count, bd_comm_type type,
                            void *stream, bd_error *err);
    /* receive[r * bytes ..] = rank r's send[0, bytes). send may be its own place in receive. */
    bd_status (*all_gather)(bd_comm *comm, const void *send, void *receive, uint64_t bytes,
                            void *stream, bd_error *err);
    /* BD_OK, or the fault of calls launched earlier. Does not wait. */
    bd_status (*poll)(bd_comm *comm, bd_error *err);

    /* Any thread, any time between group_create and group_destroy: breaks the group and wakes
     * whoever waits in it. */
    void (*abort)(bd_comm_group *group);
};

/* Threads of this process through its memory. */
const bd_comm_ops *bd_comm_local_ops(void);

#endif
