/* shim_faults.c - chosen calls fail, wait, or do less than they were asked for (see shim.h). */
#define _GNU_SOURCE
#include "shim.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define YEAR (365 * 24 * 3600)

static const char *const fault_names[] = {"", "eio", "enospc", "eagain", "eintr", "short", "flip", "slow", "erofs", "late",
                                          "kill", "torn", "clock"};

static enum fault fault;
static uint64_t fault_first, fault_last;
static atomic_uint_fast64_t counted;

void read_fault(const char *text)
{
    char how[16] = "";
    if (sscanf(text, "%lu:%lu:%15s", &fault_first, &fault_last, how) != 3)
        return;
    for (size_t i = 1; i < sizeof fault_names / sizeof fault_names[0]; i++)
        if (strcmp(how, fault_names[i]) == 0)
            fault = (enum fault)i;
}

/* Counts a call that the fault applies to. 0: it is none of those that are struck, else its number. */
static uint64_t chosen(void)
{
    const uint64_t number = 1 + atomic_fetch_add(&counted, 1);
    if (number < fault_first || number > fault_last)
        return 0;
    count_fault();
    return number;
}

/* Which kinds of calls a fault can be done to. */
static bool applies(enum call call)
{
    switch (fault) {
    case NONE:
    case CLOCK: return false;
    case SHORT: return call == READ || call == WRITE;
    case FLIP: return call == READ;
    case TORN: return call == WRITE;
    case LATE: return call == FLUSH || call == FLUSH_FOLDER;
    case ENOSPC_FAULT:
        return call == CREATE || call == WRITE || call == RENAME || call == LINK || call == RESIZE || call == ALLOCATE ||
               call == MKDIR || call == FLUSH;
    case EROFS_FAULT: return call != READ && call != OPEN && call != FLUSH && call != FLUSH_FOLDER;
    case EAGAIN_FAULT:
    case EINTR_FAULT: return call == READ || call == WRITE || call == FLUSH || call == ALLOCATE;
    default: return true;
    }
}

enum fault struck(enum call call, struct record *record)
{
    if (!applies(call))
        return NONE;
    const uint64_t number = chosen();
    if (number == 0)
        return NONE;
    if (record != NULL)
        record->fault = fault;
    if (fault == KILL)
        (void)kill(getpid(), SIGKILL);
    if (fault == LATE)
        (void)usleep(20000);
    if (fault == SLOW) /* some longer than others: what began later may end sooner */
        (void)usleep((useconds_t)(1000 * (1 + number * 7 % 10)));
    return fault;
}

bool fails(enum fault how)
{
    switch (how) {
    case EIO_FAULT: errno = EIO; return true;
    case ENOSPC_FAULT: errno = ENOSPC; return true;
    case EAGAIN_FAULT: errno = EAGAIN; return true;
    case EINTR_FAULT: errno = EINTR; return true;
    case EROFS_FAULT: errno = EROFS; return true;
    default: return false;
    }
}

/* Moves what the wall's clock shows by a year, and by a year back at the next reading. */
void move_clock(struct timespec *now)
{
    if (fault != CLOCK)
        return;
    const uint64_t number = chosen();
    if (number != 0)
        now->tv_sec += number % 2 == 0 ? YEAR : -YEAR;
}
