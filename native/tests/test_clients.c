/*
 * Four threads submit and wait at once, each over its own part of arena and store, with random sizes, places and
 * priorities; every byte read is the one that thread wrote last.
 */
#include "testing.h"

#define CLIENTS 4
#define PART (UINT64_C(512) << 10)
#define ROUNDS 60

struct client {
    fy_daemon *daemon;
    unsigned char *base;
    uint64_t index;
    unsigned char *written; /* what the store's part holds */
};

static void *client_thread(void *argument)
{
    struct client *client = argument;
    uint64_t random = client->index + 1;
    const uint64_t arena = client->index * PART;
    for (uint32_t round = 0; round < ROUNDS; round++) {
        const uint64_t pages = PART / FY__PAGE;
        const uint64_t from = testing_random(&random) % pages * FY__PAGE;
        const uint64_t size = (1 + testing_random(&random) % (pages - from / FY__PAGE)) * FY__PAGE;
        const uint64_t priority = testing_random(&random) % 5;
        fy_ticket ticket = 0;
        unsigned char *data = client->base + arena + from;
        testing_fill(data, size, testing_random(&random));
        memcpy(client->written + from, data, size);
        CHECK_EQUAL(fy_submit_write(client->daemon, arena + from, arena + from, size, priority, round, &ticket), 0);
        CHECK_EQUAL(testing_wait(client->daemon, ticket, NULL), 0);
        memset(client->base + arena, 0x33, PART);
        CHECK_EQUAL(fy_submit_read(client->daemon, arena, arena, PART, priority, round, &ticket), 0);
        CHECK_EQUAL(testing_wait(client->daemon, ticket, NULL), 0);
        CHECK(memcmp(client->base + arena, client->written, PART) == 0);
    }
    return NULL;
}

static void clients(uint32_t backend)
{
    fy_arena *arena = testing_arena(CLIENTS * PART);
    fy_store *store = testing_store(3, 20 << 10, CLIENTS * PART);
    fy_options options = testing_options(backend);
    options.block_size = 24 << 10;
    fy_daemon *daemon = testing_daemon(&options, arena, store);
    struct client all[CLIENTS];
    pthread_t threads[CLIENTS];
    unsigned char *zeros = calloc(CLIENTS, PART);
    CHECK(zeros != NULL);
    CHECK_EQUAL(testing_write(daemon, 0, 0, CLIENTS * PART, NULL), 0); /* the arena is zeros: so is the store now */
    for (uint64_t i = 0; i < CLIENTS; i++) {
        all[i] = (struct client){daemon, fy_arena_base(arena), i, zeros + i * PART};
        CHECK_EQUAL(pthread_create(&threads[i], NULL, client_thread, &all[i]), 0);
    }
    for (uint64_t i = 0; i < CLIENTS; i++)
        CHECK_EQUAL(pthread_join(threads[i], NULL), 0);
    free(zeros);
    testing_close(daemon, arena, store);
}

int main(void)
{
    for (const uint32_t *backend = testing_backends(); *backend != FY_BACKEND_AUTO; backend++)
        clients(*backend);
    return 0;
}
