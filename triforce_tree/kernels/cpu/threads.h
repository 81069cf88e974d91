/* Shares work among threads so that other programs on the same processors delay it little.
 *
 * The calling thread takes tasks until none is left, and then waits for tasks that helper threads have begun. A helper
 * that the system does not run takes no task, so it causes no delay. A waiting thread polls for a short time and then
 * sleeps. If the system displaces a helper during a task, the caller has to wait for it, and the next calls use no
 * helpers for a while. Results must not depend on which thread runs a task. */
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Runs task ``number`` of a call on thread ``worker``: 0 is the caller, helpers have numbers 1, 2, ... */
typedef void (*Task)(const void *argument, int64_t number, int64_t worker);

enum {
    LOOKS = 32,      /* polls between two looks at the clock */
    STACK = 1 << 20, /* bytes of a helper's stack */
    /* Nanoseconds for which a helper polls for the next call, and the caller for the end of tasks, before they sleep;
     * delay after which a thread counts as displaced; first and longest pause of helpers after a displacement. A pause
     * is twice as long as the last if the displacement happens again soon. */
    HELPER_LOOKS = 50000,
    CALLER_LOOKS = 100000,
    DISPLACED = 300000,
    FIRST_PAUSE = 10000000,
    LONGEST_PAUSE = 320000000,
};

static struct {
    _Alignas(64) _Atomic uint64_t open;       /* threads of the call << 32 | tasks that no thread has taken */
    _Alignas(64) _Atomic uint32_t unfinished; /* number of tasks */
    _Atomic uint32_t caller_sleeps;
    _Alignas(64) _Atomic uint32_t calls, asleep; /* number of calls, which wraps around; sleeping helpers */
    _Atomic int64_t paused_until, pause;         /* nanoseconds */
    atomic_flag used;
    Task task;
    const void *argument;
    int64_t count, helpers;
    pid_t process;
} pool = {.used = ATOMIC_FLAG_INIT};

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * (int64_t)1000000000 + time.tv_nsec;
}

static void sleep_while(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void wake(_Atomic uint32_t *word, int64_t count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, (int)count, NULL, NULL, 0);
}

static int has_task(uint64_t open, int64_t worker) { return (uint32_t)open && worker < (int64_t)(open >> 32); }

/* Takes tasks of the current call until none is left. */
static void take_tasks(int64_t worker) {
    uint64_t open = atomic_load(&pool.open);
    while (has_task(open, worker)) {
        if (!atomic_compare_exchange_weak(&pool.open, &open, open - 1))
            continue;
        /* The call does not end before this task, so task, argument and count belong to it. */
        pool.task(pool.argument, pool.count - (uint32_t)open, worker);
        if (atomic_fetch_sub(&pool.unfinished, 1) == 1 && atomic_load(&pool.caller_sleeps))
            wake(&pool.unfinished, 1);
        open = atomic_load(&pool.open);
    }
}

/* Pauses helpers, because a thread was displaced at ``time``. */
static void pause_helpers(int64_t time) {
    const int64_t until = atomic_load(&pool.paused_until), before = atomic_load(&pool.pause);
    if (time < until)
        return;
    const int64_t longer = time < until + 2 * before ? 2 * before : FIRST_PAUSE;
    const int64_t pause = longer < LONGEST_PAUSE ? longer : LONGEST_PAUSE;
    atomic_store(&pool.pause, pause);
    atomic_store(&pool.paused_until, time + pause);
}

static void *help(void *number) {
    const int64_t worker = (intptr_t)number;
    for (;;) {
        const int64_t start = now();
        for (int64_t last = start; last < start + HELPER_LOOKS && last >= atomic_load(&pool.paused_until);) {
            for (int i = 0; i < LOOKS && !has_task(atomic_load(&pool.open), worker); i++)
                __builtin_ia32_pause();
            if (has_task(atomic_load(&pool.open), worker))
                break;
            const int64_t time = now();
            if (time > last + DISPLACED)
                pause_helpers(time);
            last = time;
        }
        const uint32_t calls = atomic_load(&pool.calls);
        if (!has_task(atomic_load(&pool.open), worker)) {
            atomic_fetch_add(&pool.asleep, 1);
            if (!has_task(atomic_load(&pool.open), worker))
                sleep_while(&pool.calls, calls);
            atomic_fetch_sub(&pool.asleep, 1);
        }
        take_tasks(worker);
    }
    return NULL;
}

/* Starts up to ``wanted`` helpers, fewer if memory or threads do not suffice. */
static void start_helpers(int64_t wanted) {
    if (pool.process != getpid()) /* a fork does not copy other threads */
        pool.process = getpid(), pool.helpers = 0, pool.asleep = 0;
    if (pool.helpers >= wanted)
        return;
    /* Helpers block all signals, which are for the program's own threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, STACK);
    for (pthread_t thread; pool.helpers < wanted; pool.helpers++)
        if (pthread_create(&thread, &attributes, help, (void *)(intptr_t)(pool.helpers + 1)))
            break;
    pthread_attr_destroy(&attributes);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Waits until no task is unfinished; the call began at ``begun``. */
static void wait_for_helpers(int64_t begun) {
    const int64_t own = now();
    int64_t time = own;
    while (atomic_load(&pool.unfinished) && time < own + CALLER_LOOKS) {
        for (int i = 0; i < LOOKS && atomic_load(&pool.unfinished); i++)
            __builtin_ia32_pause();
        time = now();
    }
    if (atomic_load(&pool.unfinished)) {
        atomic_store(&pool.caller_sleeps, 1);
        for (uint32_t left; (left = atomic_load(&pool.unfinished));)
            sleep_while(&pool.unfinished, left);
        atomic_store(&pool.caller_sleeps, 0);
        time = now();
    }
    /* The last tasks of helpers take no longer than the caller's work in this call, unless a helper was displaced. */
    if (time - own > DISPLACED + (own - begun))
        pause_helpers(time);
}

/* Runs ``count`` (below 2^32) tasks on at most ``threads`` threads. The calling thread runs all of them inside a task,
 * or while another call uses the helpers. */
static void share(Task task, const void *argument, int64_t count, int64_t threads) {
    if (threads < 2 || count < 2 || atomic_flag_test_and_set(&pool.used)) {
        for (int64_t number = 0; number < count; number++)
            task(argument, number, 0);
        return;
    }
    start_helpers(threads - 1);
    const int64_t begun = now();
    const int alone = begun < atomic_load(&pool.paused_until);
    pool.task = task, pool.argument = argument, pool.count = count;
    atomic_store(&pool.unfinished, count);
    atomic_store(&pool.open, (uint64_t)(alone ? 1 : threads) << 32 | count);
    if (!alone) {
        atomic_fetch_add(&pool.calls, 1);
        if (atomic_load(&pool.asleep))
            wake(&pool.calls, pool.helpers);
    }
    take_tasks(0);
    if (atomic_load(&pool.unfinished))
        wait_for_helpers(begun);
    atomic_flag_clear(&pool.used);
}
