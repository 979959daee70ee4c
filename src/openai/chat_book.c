/* chat_book.c - chat templates by model directory, read once. A replaced variant has other digests,
 * of its weights or of the files beside them, so its files are read again. Threads: any; the lock
 * is not held while files are read. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/log.h"
#include "chat.h"

enum { ENTRIES_MAX = 1024 };

typedef struct book_entry {
    bd_chat *chat;
    char *dir;
    uint8_t digest[32], files_digest[32];
    uint32_t users;
    uint64_t used_at; /* the book's clock */
} book_entry;

struct bd_chat_book {
    bd_chat *base;
    char *override_path;
    pthread_mutex_t lock;
    book_entry *entries; /* guarded by lock, as all below */
    uint32_t count;
    uint64_t clock;
};

static void log_fault(const bd_chat *chat) {
    if (chat->fault.status != BD_OK) bd_log_error("openai", "chat template refused", &chat->fault);
}

bd_status bd_chat_book_create(bd_chat_book **out, const char *base_dir, const char *override_path,
                              bd_error *err) {
    *out = NULL;
    bd_chat_book *book = calloc(1, sizeof *book);
    if (!book) return bd_fail(err, BD_E_MEMORY, "chat", "out of memory");
    bd_status status = BD_OK;
    book->entries = calloc(ENTRIES_MAX, sizeof *book->entries);
    if (override_path) book->override_path = strdup(override_path);
    if (!book->entries || (override_path && !book->override_path)) {
        status = bd_fail(err, BD_E_MEMORY, "chat", "out of memory");
        goto fail;
    }
    const bd_chat_sources sources = {.dir = base_dir, .override_path = override_path};
    if ((status = bd_chat_load(&book->base, &sources, err)) != BD_OK) goto fail;
    if (override_path && book->base->fault.status != BD_OK) {
        if (err) *err = book->base->fault;
        status = book->base->fault.status;
        goto fail;
    }
    log_fault(book->base);
    pthread_mutex_init(&book->lock, NULL);
    *out = book;
    return BD_OK;
fail:
    bd_chat_destroy(book->base);
    free(book->override_path);
    free(book->entries);
    free(book);
    return status;
}

void bd_chat_book_destroy(bd_chat_book *book) {
    if (!book) return;
    for (uint32_t i = 0; i < book->count; i++) {
        BD_ASSERT(book->entries[i].users == 0);
        bd_chat_destroy(book->entries[i].chat);
        free(book->entries[i].dir);
    }
    bd_chat_destroy(book->base);
    pthread_mutex_destroy(&book->lock);
    free(book->override_path);
    free(book->entries);
    free(book);
}

const bd_chat *bd_chat_book_base(const bd_chat_book *book) {
    return book->base;
}

static book_entry *find(bd_chat_book *book, const bd_served *served) {
    for (uint32_t i = 0; i < book->count; i++) {
        book_entry *entry = &book->entries[i];
        if (memcmp(entry->digest, served->digest, sizeof entry->digest) == 0 &&
            memcmp(entry->files_digest, served->files_digest, sizeof entry->files_digest) == 0 &&
            strcmp(entry->dir, served->dir) == 0)
            return entry;
    }
    return NULL;
}

/* A place for one more: the one unused for longest goes. NULL: all are in use. */
static book_entry *make_room(bd_chat_book *book) {
    if (book->count < ENTRIES_MAX) return &book->entries[book->count++];
    book_entry *oldest = NULL;
    for (uint32_t i = 0; i < book->count; i++) {
        book_entry *entry = &book->entries[i];
        if (entry->users == 0 && (!oldest || entry->used_at < oldest->used_at)) oldest = entry;
    }
    if (oldest) {
        bd_chat_destroy(oldest->chat);
        free(oldest->dir);
    }
    return oldest;
}

static const bd_chat *take(bd_chat_book *book, book_entry *entry) {
    entry->users++;
    entry->used_at = ++book->clock;
    return entry->chat;
}

/* Keeps what was read, unless another thread was quicker. */
static const bd_chat *keep(bd_chat_book *book, const bd_served *served, bd_chat *chat, char *dir) {
    const bd_chat *kept = NULL;
    pthread_mutex_lock(&book->lock);
    book_entry *entry = find(book, served);
    if (!entry && (entry = make_room(book))) {
        *entry = (book_entry){.chat = chat, .dir = dir};
        memcpy(entry->digest, served->digest, sizeof entry->digest);
        memcpy(entry->files_digest, served->files_digest, sizeof entry->files_digest);
        chat = NULL;
        dir = NULL;
    }
    if (entry) kept = take(book, entry);
    pthread_mutex_unlock(&book->lock);
    bd_chat_destroy(chat);
    free(dir);
    return kept;
}

bool bd_chat_book_get(bd_chat_book *book, const bd_served *served, const bd_chat **out,
                      bd_api_error *err) {
    *out = book->base;
    if (served->is_base) return true;
    pthread_mutex_lock(&book->lock);
    book_entry *entry = find(book, served);
    if (entry) *out = take(book, entry);
    pthread_mutex_unlock(&book->lock);
    if (entry) return true;
    const bd_chat_sources sources = {served->dir, book->override_path, book->base};
    bd_chat *chat = NULL;
    bd_error fault;
    bd_error_clear(&fault);
    bd_status status = bd_chat_load(&chat, &sources, &fault);
    if (status == BD_E_MEMORY) return bd_out_of_memory(err);
    if (status != BD_OK) {
        bd_log_error("openai", "chat template not read", &fault);
        return bd_api_fail(err, BD_API_VARIANT, "model",
                           "The chat template of the model '%s' cannot be read.", served->name);
    }
    if (chat->owned || chat->template_path) log_fault(chat);
    char *dir = strdup(served->dir);
    if (!dir) {
        bd_chat_destroy(chat);
        return bd_out_of_memory(err);
    }
    *out = keep(book, served, chat, dir);
    return *out || bd_api_fail(err, BD_API_RATE, NULL,
                               "Too many requests are waiting. Please try again later.");
}

void bd_chat_book_release(bd_chat_book *book, const bd_chat *chat) {
    if (!chat || chat == book->base) return;
    pthread_mutex_lock(&book->lock);
    for (uint32_t i = 0; i < book->count; i++)
        if (book->entries[i].chat == chat) book->entries[i].users--;
    pthread_mutex_unlock(&book->lock);
}
