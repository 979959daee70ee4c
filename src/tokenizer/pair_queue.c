/* pair_queue.c - the candidate pairs of a long word, lowest rank first and of one rank the
 * leftmost.
 *
 * A heap of (rank, position) does for a word that fits into the caches. Of a huge one each step
 * down such a heap is a wait for memory, so there its pairs lie in one bucket per rank, and the
 * lowest rank's bucket is taken out whole and sorted: the batch. It is walked from left to right
 * and tells ahead which positions come. The heap then only has pairs that turned up since and rank
 * no higher than the batch; its top and the batch's next are compared at each step, so the order is
 * the same. Threads: any; a queue belongs to one call. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define NONE        UINT32_MAX
#define HUGE_WORD   (1u << 16) /* symbols from which buckets are used */
#define AHEAD       12u        /* steps from the announcement of a position to its turn */
#define CHUNK_COUNT 14u

struct bd_pair_chunk { /* a cache line */
    uint32_t next, count;
    uint32_t positions[CHUNK_COUNT];
};

struct bd_pair_bucket {
    uint32_t first, last; /* chunks; NONE: empty */
};

void bd_pair_queue_init(bd_pair_queue *queue) {
    *queue = (bd_pair_queue){0};
}

void bd_pair_queue_deinit(bd_pair_queue *queue) {
    free(queue->heap);
    free(queue->ranks);
    free(queue->buckets);
    free(queue->chunks);
    free(queue->batch);
}

/* Doubles *items. */
static bd_status grow(void **items, size_t *capacity, size_t item_bytes) {
    size_t wanted = *capacity ? *capacity * 2 : 256;
    void *grown = realloc(*items, wanted * item_bytes);
    if (!grown) return BD_E_MEMORY;
    *items = grown;
    *capacity = wanted;
    return BD_OK;
}

bd_status bd_pair_queue_begin(bd_pair_queue *queue, size_t symbol_count, uint32_t merge_count) {
    queue->heap_count = queue->rank_count = queue->batch_count = queue->batch_at = 0;
    queue->bucketed = symbol_count >= HUGE_WORD;
    queue->batch_rank = NONE; /* everything is the heap's */
    if (!queue->bucketed) return BD_OK;
    size_t bytes = ((size_t)merge_count + 1) * sizeof *queue->buckets;
    if (!queue->buckets) { /* of one tokenizer, so of one size */
        queue->buckets = malloc(bytes);
        queue->ranks = malloc(((size_t)merge_count + 1) * sizeof *queue->ranks);
    }
    if (!queue->buckets || !queue->ranks) return BD_E_MEMORY;
    memset(queue->buckets, 0xff, bytes);
    queue->chunk_count = 0;
    queue->free_chunk = NONE;
    queue->begun = false;
    return BD_OK;
}

/* ---- the heap of pairs, and that of ranks whose buckets hold something ---- */

static bd_status heap_push(bd_pair_queue *queue, uint64_t item) {
    if (queue->heap_count == queue->heap_capacity) {
        void *items = queue->heap;
        if (grow(&items, &queue->heap_capacity, sizeof *queue->heap) != BD_OK) return BD_E_MEMORY;
        queue->heap = items;
    }
    uint64_t *heap = queue->heap;
    size_t at = queue->heap_count++;
    for (; at > 0 && heap[(at - 1) / 2] > item; at = (at - 1) / 2)
        heap[at] = heap[(at - 1) / 2];
    heap[at] = item;
    return BD_OK;
}

static void heap_pop(bd_pair_queue *queue) {
    uint64_t *heap = queue->heap, last = heap[--queue->heap_count];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < queue->heap_count) {
        if (child + 1 < queue->heap_count && heap[child + 1] < heap[child]) child++;
        if (heap[child] >= last) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = last;
}

static void ranks_push(bd_pair_queue *queue, uint32_t rank) {
    uint32_t *ranks = queue->ranks;
    size_t at = queue->rank_count++;
    for (; at > 0 && ranks[(at - 1) / 2] > rank; at = (at - 1) / 2)
        ranks[at] = ranks[(at - 1) / 2];
    ranks[at] = rank;
}

static uint32_t ranks_pop(bd_pair_queue *queue) {
    uint32_t *ranks = queue->ranks, top = ranks[0], last = ranks[--queue->rank_count];
    size_t at = 0, child;
    while ((child = 2 * at + 1) < queue->rank_count) {
        if (child + 1 < queue->rank_count && ranks[child + 1] < ranks[child]) child++;
        if (ranks[child] >= last) break;
        ranks[at] = ranks[child];
        at = child;
    }
    ranks[at] = last;
    return top;
}

/* ---- buckets ---- */

/* An empty chunk, or NONE without memory. */
static uint32_t take_chunk(bd_pair_queue *queue) {
    uint32_t chunk = queue->free_chunk;
    if (chunk != NONE) {
        queue->free_chunk = queue->chunks[chunk].next;
    } else {
        if (queue->chunk_count == queue->chunk_capacity) {
            void *items = queue->chunks;
            if (grow(&items, &queue->chunk_capacity, sizeof *queue->chunks) != BD_OK) return NONE;
            queue->chunks = items;
        }
        chunk = (uint32_t)queue->chunk_count++;
    }
    queue->chunks[chunk].next = NONE;
    queue->chunks[chunk].count = 0;
    return chunk;
}

static bd_status bucket_push(bd_pair_queue *queue, uint32_t rank, uint32_t pos) {
    bd_pair_bucket *bucket = &queue->buckets[rank];
    if (bucket->first == NONE || queue->chunks[bucket->last].count == CHUNK_COUNT) {
        uint32_t chunk = take_chunk(queue);
        if (chunk == NONE) return BD_E_MEMORY;
        if (bucket->first == NONE) {
            bucket->first = chunk;
            ranks_push(queue, rank);
        } else {
            queue->chunks[bucket->last].next = chunk;
        }
        bucket->last = chunk;
    }
    bd_pair_chunk *chunk = &queue->chunks[bucket->last];
    chunk->positions[chunk->count++] = pos;
    return BD_OK;
}

static int by_position(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

/* Empties the bucket of the lowest rank into the batch. BD_AGAIN: there is none. */
static bd_status next_batch(bd_pair_queue *queue) {
    if (queue->rank_count == 0) return BD_AGAIN;
    queue->batch_rank = ranks_pop(queue);
    bd_pair_bucket *bucket = &queue->buckets[queue->batch_rank];
    bool sorted = true;
    size_t count = 0;
    for (uint32_t at = bucket->first; at != NONE; at = queue->chunks[at].next) {
        const bd_pair_chunk *chunk = &queue->chunks[at];
        while (count + CHUNK_COUNT > queue->batch_capacity) {
            void *items = queue->batch;
            if (grow(&items, &queue->batch_capacity, sizeof *queue->batch) != BD_OK)
                return BD_E_MEMORY;
            queue->batch = items;
        }
        for (uint32_t i = 0; i < chunk->count; i++, count++) {
            queue->batch[count] = chunk->positions[i];
            if (count > 0 && queue->batch[count] < queue->batch[count - 1]) sorted = false;
        }
    }
    if (!sorted) qsort(queue->batch, count, sizeof *queue->batch, by_position);
    queue->chunks[bucket->last].next = queue->free_chunk;
    queue->free_chunk = bucket->first;
    bucket->first = NONE;
    queue->batch_count = count;
    queue->batch_at = 0;
    return BD_OK;
}

/* ---- both ---- */

bd_status bd_pair_queue_push(bd_pair_queue *queue, uint32_t rank, uint32_t pos) {
    /* Before the first batch is taken all pairs go to buckets. */
    if (queue->bucketed && (!queue->begun || rank > queue->batch_rank))
        return bucket_push(queue, rank, pos);
    return heap_push(queue, (uint64_t)rank << 32 | pos);
}

bd_status bd_pair_queue_pop(bd_pair_queue *queue, uint32_t *rank, uint32_t *pos, uint32_t *soon) {
    queue->begun = true;
    if (queue->heap_count == 0 && queue->batch_at == queue->batch_count) {
        bd_status s = queue->bucketed ? next_batch(queue) : BD_AGAIN;
        if (s != BD_OK) return s;
    }
    uint64_t item = UINT64_MAX;
    if (queue->batch_at < queue->batch_count)
        item = (uint64_t)queue->batch_rank << 32 | queue->batch[queue->batch_at];
    if (queue->heap_count > 0 && queue->heap[0] < item) {
        item = queue->heap[0];
        heap_pop(queue);
    } else {
        queue->batch_at++;
    }
    *rank = (uint32_t)(item >> 32);
    *pos = (uint32_t)item;
    size_t ahead = queue->batch_at + AHEAD;
    *soon = ahead < queue->batch_count ? queue->batch[ahead] : *pos;
    return BD_OK;
}
