/* team.c - see team.h.
 * One job at a time: the owner publishes it under the lock and wakes the threads, runs rank 0's
 * part itself, and waits for the others. A rank that fails aborts the group, so that nobody waits
 * for it for long, and after a failed step the ranks are lost for good: they may have gone
 * different ways.
 *
 * A gate is asked on rank 0. The others pass an index after it, and void what it has voided: later
 * or earlier than rank 0 by some layers, which only rows that mean nothing can tell. */
#include "team.h"

#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "bitdelta/base/clock.h"

#define RANK_WAIT_US 60000000u

typedef enum team_job { TEAM_NONE, TEAM_OPEN, TEAM_STEP, TEAM_STOP } team_job;

typedef struct team_rank {
    bd_team *team;
    bd_model *model;
    bd_comm *comm;
    pthread_t thread; /* ranks 1 and up */
    bool started;
    uint64_t jobs_done; /* guarded by the team's lock */
    bd_status status;   /* of the last job; its thread's until jobs_done says it is over */
    bd_error error;
    bd_step step;                /* this rank's view of the running one */
    const bd_overlay **overlays; /* [overlays_max] */
    bool *voided;                /* [overlays_max] */
    bd_token_result *results;    /* [logits_rows_max] */
} team_rank;

struct bd_team {
    uint32_t count, overlays_max;
    uint64_t wait_us;
    const bd_comm_ops *comm_ops;
    bd_comm_group *group;
    pthread_mutex_t lock;
    pthread_cond_t posted, done, passed;
    /* Guarded by lock: */
    team_job job;
    uint64_t job_number;
    bool gate_over; /* rank 0 has passed all it will */
    uint32_t gate_passed;
    bool *gate_voided; /* [overlays_max] */
    /* What the job is about; written before it is posted. */
    const bd_model_options *options;
    const bd_weight_list *list;
    const bd_step *step;
    bool gated;
    /* The owner's: */
    bool lost;
    bd_error loss;
    team_rank ranks[BD_COMM_RANKS_MAX];
};

/* ---- Errors ---- */

static bool from_comm(const bd_error *error) {
    return strcmp(error->subject, "tensor_parallel") == 0;
}

/* The fault itself, not what followed from it on other ranks; count: none. */
static uint32_t rank_at_fault(const bd_team *team) {
    uint32_t found = team->count;
    for (uint32_t r = team->count; r-- > 0;) {
        const team_rank *rank = &team->ranks[r];
        if (rank->status == BD_OK) continue;
        if (found == team->count || !from_comm(&rank->error) ||
            from_comm(&team->ranks[found].error))
            found = r;
    }
    return found;
}

static bd_status report(const bd_team *team, bd_error *err) {
    const uint32_t r = rank_at_fault(team);
    if (r == team->count) return BD_OK;
    const team_rank *rank = &team->ranks[r];
    if (from_comm(&rank->error)) {
        if (err) *err = rank->error;
        return rank->status;
    }
    return bd_fail(err, rank->status, rank->error.subject, "rank %u: %s", r, rank->error.message);
}

/* ---- A rank's part of a job ---- */

static void set_status(bd_team *team, uint32_t r, bd_status status, const bd_error *error) {
    team_rank *rank = &team->ranks[r];
    rank->status = status;
    rank->error = *error;
    if (status != BD_OK && team->group) team->comm_ops->abort(team->group);
}

static void open_rank(bd_team *team, uint32_t r) {
    team_rank *rank = &team->ranks[r];
    bd_error error = {0};
    bd_status s = team->comm_ops->open(team->group, r, rank->model->backend_options.device_index,
                                       &rank->comm, &error);
    rank->model->backend_options.comm = rank->comm;
    if (s == BD_OK) s = bd_model_open_rank(rank->model, team->options, team->list, &error);
    set_status(team, r, s, &error);
}

/* Waits until rank 0 has passed `index`, then voids what it has. */
static bd_status pass_behind(void *ctx, uint32_t index, bd_error *err) {
    team_rank *rank = ctx;
    bd_team *team = rank->team;
    (void)err; /* rank 0's fault comes by the group */
    pthread_mutex_lock(&team->lock);
    while (team->gate_passed <= index && !team->gate_over)
        pthread_cond_wait(&team->passed, &team->lock);
    pthread_mutex_unlock(&team->lock);
    const bd_backend_ops *ops = rank->model->ops;
    for (uint32_t i = 0; i < rank->step.overlay_count; i++) {
        pthread_mutex_lock(&team->lock);
        const bool now = team->gate_voided[i] && !rank->voided[i];
        pthread_mutex_unlock(&team->lock);
        if (!now) continue;
        rank->voided[i] = true;
        if (ops->step_void) ops->step_void(rank->model->backend, &rank->step, i);
    }
    return BD_OK;
}

/* The step with this rank's overlays. */
static void view_step(team_rank *rank, uint32_t r, const bd_step *step) {
    BD_ASSERT(step->overlay_count <= rank->team->overlays_max);
    for (uint32_t i = 0; i < step->overlay_count; i++) {
        BD_ASSERT(step->overlays[i]->ranks != NULL);
        rank->overlays[i] = step->overlays[i]->ranks[r];
        rank->voided[i] = false;
    }
    rank->step = *step;
    rank->step.overlays = rank->overlays;
}

static void step_rank(bd_team *team, uint32_t r) {
    team_rank *rank = &team->ranks[r];
    bd_error error = {0};
    view_step(rank, r, team->step);
    bd_status s = bd_model_forward_rank(rank->model, &rank->step, team->gated ? pass_behind : NULL,
                                        rank, &error);
    /* Rank 0 has the step's deadline; this one's is only there to be some. */
    if (s == BD_OK)
        s = rank->model->ops->step_wait(rank->model->backend, &rank->step,
                                        bd_now_us() + team->wait_us, rank->results, &error);
    set_status(team, r, s, &error);
}

static void *rank_main(void *arg) {
    team_rank *rank = arg;
    bd_team *team = rank->team;
    const uint32_t r = rank->model->rank;
    char name[16];
    (void)snprintf(name, sizeof name, "bd-exec-%u", r);
    pthread_setname_np(pthread_self(), name);
    for (;;) {
        pthread_mutex_lock(&team->lock);
        while (team->job_number == rank->jobs_done)
            pthread_cond_wait(&team->posted, &team->lock);
        const team_job job = team->job;
        pthread_mutex_unlock(&team->lock);
        if (job == TEAM_OPEN) open_rank(team, r);
        if (job == TEAM_STEP) step_rank(team, r);
        pthread_mutex_lock(&team->lock);
        rank->jobs_done++;
        pthread_cond_signal(&team->done);
        pthread_mutex_unlock(&team->lock);
        if (job == TEAM_STOP) return NULL;
    }
}

/* ---- The owner's side ---- */

static void post(bd_team *team, team_job job) {
    pthread_mutex_lock(&team->lock);
    team->job = job;
    team->job_number++;
    team->gate_over = false;
    team->gate_passed = 0;
    memset(team->gate_voided, 0, team->overlays_max * sizeof *team->gate_voided);
    pthread_cond_broadcast(&team->posted);
    pthread_mutex_unlock(&team->lock);
}

/* With the lock held. */
static bool all_done(const bd_team *team) {
    for (uint32_t r = 1; r < team->count; r++)
        if (team->ranks[r].started && team->ranks[r].jobs_done != team->job_number) return false;
    return true;
}

/* false: a rank did not come back in time. */
static bool join(bd_team *team, uint64_t timeout_us) {
    pthread_mutex_lock(&team->lock);
    team->gate_over = true;
    pthread_cond_broadcast(&team->passed);
    while (!all_done(team) && bd_cond_wait_us(&team->done, &team->lock, &timeout_us))
        continue;
    const bool done = all_done(team);
    pthread_mutex_unlock(&team->lock);
    return done;
}

/* All ranks have been heard, or the one that hangs is named. */
static bd_status finish(bd_team *team, bd_error *err) {
    bd_status s;
    /* Rank 0 may be the first to be done; if it failed, it has aborted the group already. */
    bool done = join(team, team->wait_us);
    if (!done && team->ranks[0].status == BD_OK) {
        team->comm_ops->abort(team->group);
        done = join(team, team->wait_us);
    }
    s = done ? report(team, err)
             : bd_fail(err, BD_E_DEVICE, "tensor_parallel", "a rank does not come back");
    return s;
}

static bd_status lose(bd_team *team, bd_status status, bd_error *err) {
    bd_error cause = {0};
    if (err) cause = *err;
    team->lost = true;
    (void)bd_fail(&team->loss, BD_E_DEVICE, cause.subject, "%s",
                  cause.status == status ? cause.message : bd_status_text(status));
    if (err) *err = team->loss;
    return BD_E_DEVICE;
}

bd_status bd_team_open(bd_team *team, const bd_model_options *options, const bd_weight_list *list,
                       bd_error *err) {
    team->options = options;
    team->list = list;
    bd_model *first = team->ranks[0].model;
    for (uint32_t r = 1; r < team->count; r++)
        memcpy(team->ranks[r].model->fingerprint, first->fingerprint, sizeof first->fingerprint);
    post(team, TEAM_OPEN);
    open_rank(team, 0);
    /* Reading weights takes as long as it takes. */
    while (!join(team, team->wait_us))
        continue;
    return report(team, err);
}

typedef struct front_gate {
    bd_team *team;
    bd_layer_gate gate;
    void *ctx;
} front_gate;

static bd_status pass_first(void *ctx, uint32_t index, bd_error *err) {
    const front_gate *front = ctx;
    bd_team *team = front->team;
    const bd_status s = front->gate(front->ctx, index, err);
    if (s != BD_OK) return s;
    pthread_mutex_lock(&team->lock);
    team->gate_passed = index + 1;
    pthread_cond_broadcast(&team->passed);
    pthread_mutex_unlock(&team->lock);
    return BD_OK;
}

static bd_status forward_all(bd_team *team, const bd_step *step, bd_layer_gate gate, void *gate_ctx,
                             bd_error *err) {
    if (team->lost) {
        if (err) *err = team->loss;
        return BD_E_DEVICE;
    }
    front_gate front = {team, gate, gate_ctx};
    bd_error error = {0};
    team->step = step;
    team->gated = gate != NULL;
    post(team, TEAM_STEP);
    const bd_status s =
        bd_model_forward_rank(team->ranks[0].model, step, gate ? pass_first : NULL, &front, &error);
    set_status(team, 0, s, &error);
    if (s == BD_OK) return BD_OK;
    return lose(team, finish(team, err), err);
}

/* They sample by the same numbers; one that does not has gone astray. */
static bd_status check_agreement(const bd_team *team, const bd_step *step,
                                 const bd_token_result *results, bd_error *err) {
    for (uint32_t r = 1; r < team->count && results; r++) {
        const bd_token_result *others = team->ranks[r].results;
        for (uint32_t i = 0; i < step->logits_row_count; i++) {
            if (others[i].id == results[i].id && others[i].fault == results[i].fault) continue;
            return bd_fail(err, BD_E_INTERNAL, "tensor_parallel",
                           "rank %u has token %d where rank 0 has %d", r, others[i].id,
                           results[i].id);
        }
    }
    return BD_OK;
}

static bd_status wait_all(bd_team *team, const bd_step *step, uint64_t deadline_us,
                          bd_token_result *results, bd_error *err) {
    bd_error error = {0};
    const bd_model *first = team->ranks[0].model;
    bd_status s = first->ops->step_wait(first->backend, step, deadline_us, results, &error);
    set_status(team, 0, s, &error);
    s = finish(team, err);
    if (s != BD_OK) return lose(team, s, err);
    return check_agreement(team, step, results, err);
}

bd_status bd_model_forward(bd_model *model, const bd_step *step, bd_layer_gate gate, void *gate_ctx,
                           bd_error *err) {
    return model->team ? forward_all(model->team, step, gate, gate_ctx, err)
                       : bd_model_forward_rank(model, step, gate, gate_ctx, err);
}

bd_status bd_model_wait(bd_model *model, const bd_step *step, uint64_t deadline_us,
                        bd_token_result *results, bd_error *err) {
    return model->team ? wait_all(model->team, step, deadline_us, results, err)
                       : model->ops->step_wait(model->backend, step, deadline_us, results, err);
}

void bd_model_step_void(bd_model *model, const bd_step *step, uint32_t overlay) {
    if (model->ops->step_void) model->ops->step_void(model->backend, step, overlay);
    if (!model->team) return;
    bd_team *team = model->team;
    pthread_mutex_lock(&team->lock);
    team->gate_voided[overlay] = true;
    pthread_mutex_unlock(&team->lock);
}

bd_status bd_model_logits_get(bd_model *model, uint32_t index, float *out, bd_error *err) {
    if (!model->team) return model->ops->logits_get(model->backend, index, out, err);
    const bd_backend_options *options = &model->backend_options;
    const uint32_t each = options->vocab_each, extra = options->extra_vocab_max;
    float *row = calloc((size_t)each + extra, sizeof *row);
    if (!row) return bd_fail(err, BD_E_MEMORY, "logits", "no memory for a row of logits");
    bd_status s = BD_OK;
    for (uint32_t r = 0; s == BD_OK && r < model->rank_count; r++) {
        const bd_model *rank = bd_model_rank(model, r);
        s = model->ops->logits_get(rank->backend, index, row, err);
        if (s != BD_OK) break;
        memcpy(out + rank->backend_options.vocab_first, row, rank->local.vocab * sizeof *row);
        memcpy(out + model->config.vocab, row + each, extra * sizeof *row);
    }
    free(row);
    return s;
}

/* ---- Create and destroy ---- */

bd_model *bd_team_rank(bd_team *team, uint32_t rank) {
    BD_ASSERT(rank < team->count);
    return team->ranks[rank].model;
}

static bd_status start_thread(team_rank *rank, bd_error *err) {
    sigset_t all, before;
    sigfillset(&all); /* signals are the main thread's */
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const int rc = pthread_create(&rank->thread, NULL, rank_main, rank);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (rc != 0)
        return bd_fail_errno(err, BD_E_MEMORY, "bd-exec", rc, "the thread of rank %u did not start",
                             rank->model->rank);
    rank->started = true;
    return BD_OK;
}

static bd_status make_rank(bd_team *team, uint32_t r, const bd_model_options *options,
                           bd_error *err) {
    team_rank *rank = &team->ranks[r];
    rank->team = team;
    const bd_status s = bd_model_create(options->ops, r, team->count, &rank->model, err);
    if (s != BD_OK) return s;
    rank->overlays = calloc(team->overlays_max, sizeof *rank->overlays);
    rank->voided = calloc(team->overlays_max, sizeof *rank->voided);
    rank->results = calloc(options->logits_rows_max, sizeof *rank->results);
    if (!rank->overlays || !rank->voided || !rank->results)
        return bd_fail(err, BD_E_MEMORY, "tensor_parallel", "no memory for rank %u", r);
    return start_thread(rank, err);
}

static void free_rank(team_rank *rank) {
    free(rank->overlays);
    free(rank->voided);
    free(rank->results);
    bd_model_free(rank->model);
}

static void init_sync(bd_team *team) {
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->posted, NULL);
    pthread_cond_init(&team->passed, NULL);
    pthread_cond_init(&team->done, &monotonic);
    pthread_condattr_destroy(&monotonic);
}

bd_status bd_team_create(bd_model *first, const bd_model_options *options, bd_team **out,
                         bd_error *err) {
    *out = NULL;
    if (!options->ops->comm)
        return bd_fail(err, BD_E_UNSUPPORTED, "tensor_parallel",
                       "the %s backend runs the model on one rank, %u were asked for",
                       options->ops->name, first->rank_count);
    if (options->seqs_max == 0 || options->logits_rows_max == 0)
        return bd_fail(err, BD_E_ARGUMENT, "seqs_max", "a step needs a sequence and a logits row");
    bd_team *team = calloc(1, sizeof *team);
    if (!team) return bd_fail(err, BD_E_MEMORY, "tensor_parallel", "no memory for the ranks");
    init_sync(team);
    team->count = first->rank_count;
    team->overlays_max = options->seqs_max;
    team->wait_us = options->rank_wait_us ? options->rank_wait_us : RANK_WAIT_US;
    team->comm_ops = options->ops->comm();
    team->ranks[0] = (team_rank){.team = team, .model = first};
    *out = team; /* also when what follows fails: closing the model destroys it */
    team->gate_voided = calloc(team->overlays_max, sizeof *team->gate_voided);
    if (!team->gate_voided)
        return bd_fail(err, BD_E_MEMORY, "tensor_parallel", "no memory for the ranks");
    bd_status s = team->comm_ops->group_create(team->count, team->wait_us, &team->group, err);
    for (uint32_t r = 1; s == BD_OK && r < team->count; r++)
        s = make_rank(team, r, options, err);
    return s;
}

bool bd_team_destroy(bd_team *team) {
    if (!join(team, team->wait_us)) return false;
    if (team->gate_voided) post(team, TEAM_STOP);
    for (uint32_t r = 1; r < team->count; r++)
        if (team->ranks[r].started) pthread_join(team->ranks[r].thread, NULL);
    bd_model *first = team->ranks[0].model;
    /* Backends before their comms, which recorded steps may use. */
    if (first->backend) first->ops->close(first->backend);
    first->backend = NULL;
    for (uint32_t r = 1; r < team->count; r++)
        free_rank(&team->ranks[r]);
    for (uint32_t r = 0; r < team->count; r++)
        if (team->ranks[r].comm) team->comm_ops->close(team->ranks[r].comm);
    if (team->group) team->comm_ops->group_destroy(team->group);
    pthread_cond_destroy(&team->posted);
    pthread_cond_destroy(&team->passed);
    pthread_cond_destroy(&team->done);
    pthread_mutex_destroy(&team->lock);
    free(team->gate_voided);
    free(team);
    return true;
}
