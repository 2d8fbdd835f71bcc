/* The library's threads: their number, children that are forked before, between and after steps, systems that
 * start no thread, optimizers on several threads, and a library that is unloaded. It is loaded by hand, so
 * that it can be; its argument is its path. */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

/* Above the size from which threads are used, and no multiple of anything. */
#define COUNT 300007

static __typeof__(&rfd_set_threads) set_threads;
static __typeof__(&rfd_adaptive_optimizer_create) create;
static __typeof__(&rfd_step_input_init) input_init;
static __typeof__(&rfd_optimizer_step) take_step;
static __typeof__(&rfd_optimizer_destroy) destroy;
static void *library;

/* The symbol's address, in a way that ISO C allows. */
#define LOAD(place, name) CHECK((*(void **)&(place) = dlsym(library, name)))

static void load(const char *path) {
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
    LOAD(set_threads, "rfd_set_threads");
    LOAD(create, "rfd_adaptive_optimizer_create");
    LOAD(input_init, "rfd_step_input_init");
    LOAD(take_step, "rfd_optimizer_step");
    LOAD(destroy, "rfd_optimizer_destroy");
}

/* rfd_last_error is in the library that check.h does not know of. */
const char *rfd_last_error(void) {
    __typeof__(&rfd_last_error) last;
    *(void **)&last = dlsym(library, "rfd_last_error");
    return last();
}

typedef struct {
    rfd_optimizer *optimizer;
    float *values, *gradient;
} training;

static training begin(void) {
    uint64_t shape = COUNT;
    rfd_tensor_spec spec = {.size = sizeof spec, .name = "t", .shape = &shape, .rank = 1, .dtype = RFD_DTYPE_F32};
    training t = {.values = malloc(COUNT * sizeof(float)), .gradient = malloc(COUNT * sizeof(float))};
    CHECK(t.values && t.gradient);
    for (int i = 0; i < COUNT; i++) {
        t.values[i] = (float)(i % 101) / 101;
        t.gradient[i] = (float)(i % 97) / 97 - 0.5f;
    }
    OK(create(NULL, NULL, &spec, 1, &t.optimizer));
    return t;
}

static void end(training t) {
    destroy(t.optimizer);
    free(t.values);
    free(t.gradient);
}

static void step(training t) {
    rfd_tensor param = {.size = sizeof param, .data = t.values, .count = COUNT, .dtype = RFD_DTYPE_F32};
    rfd_gradient grad = {.size = sizeof grad, .data = t.gradient, .count = COUNT, .dtype = RFD_DTYPE_F32};
    rfd_step_input input;
    OK(input_init(&input, sizeof input));
    input.loss = 1;
    OK(take_step(t.optimizer, &param, &grad, 1, &input, NULL, NULL));
}

/* A hash of the parameters after so many steps from the beginning. */
static uint64_t hash(training t) {
    uint64_t hash = 14695981039346656037u;
    const unsigned char *bytes = (const unsigned char *)t.values;
    for (size_t i = 0; i < COUNT * sizeof(float); i++) {
        hash = (hash ^ bytes[i]) * 1099511628211u;
    }
    return hash;
}

static uint64_t after_steps(int steps) {
    training t = begin();
    for (int i = 0; i < steps; i++) {
        step(t);
    }
    uint64_t found = hash(t);
    end(t);
    return found;
}

static int running_threads(void) {
    DIR *tasks = opendir("/proc/self/task");
    CHECK(tasks);
    int count = 0;
    for (struct dirent *task; (task = readdir(tasks));) {
        count += task->d_name[0] != '.';
    }
    closedir(tasks);
    return count;
}

/* Threads that have been joined may be listed for a moment. */
static int settled_threads(int expected) {
    for (int i = 0; i < 1000 && running_threads() != expected; i++) {
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    return running_threads();
}

/* Waits for a child, which must end well and in time: one that waits for threads that it does not have would
 * never. */
static void joined(pid_t child) {
    CHECK(child > 0);
    int status = 0;
    for (int i = 0; i < 6000; i++) {
        pid_t ended = waitpid(child, &status, WNOHANG);
        CHECK(ended >= 0);
        if (ended == child) {
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
            return;
        }
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    }
    kill(child, SIGKILL);
    CHECK(!"the child hangs");
}

static void numbers(void) {
    OK(set_threads(1));
    uint64_t expected = after_steps(3);
    CHECK(running_threads() == 1);
    for (int count = 2; count <= 5; count++) {
        OK(set_threads((uint32_t)count));
        training t = begin();
        for (int i = 0; i < 3; i++) {
            step(t);
            CHECK(settled_threads(count) == count);
        }
        CHECK(hash(t) == expected);
        end(t);
        CHECK(settled_threads(1) == 1);
    }
    OK(set_threads(0));
    CHECK(after_steps(3) == expected);
}

static void forks(void) {
    OK(set_threads(1));
    uint64_t one = after_steps(1), two = after_steps(2), three = after_steps(3);
    OK(set_threads(3));
    /* Before any thread has started, and with those of the parent at rest. */
    for (int before = 0; before <= 2; before++) {
        training t = begin();
        for (int i = 0; i < before; i++) {
            step(t);
        }
        pid_t child = fork();
        if (child == 0) {
            /* An optimizer of its own, and the one that it has inherited. */
            CHECK(after_steps(2) == two);
            step(t);
            CHECK(hash(t) == (before == 0 ? one : before == 1 ? two : three));
            CHECK(settled_threads(3) == 3);
            pid_t grandchild = fork();
            if (grandchild == 0) {
                CHECK(after_steps(3) == three);
                _exit(0);
            }
            joined(grandchild);
            end(t);
            CHECK(settled_threads(1) == 1);
            _exit(0);
        }
        joined(child);
        /* The parent goes on as if nothing had been. */
        step(t);
        CHECK(hash(t) == (before == 0 ? one : before == 1 ? two : three));
        end(t);
    }
}

static void *ten_steps(void *expected) {
    for (int i = 0; i < 10; i++) {
        CHECK(after_steps(2) == *(uint64_t *)expected);
    }
    return NULL;
}

static void several(void) {
    OK(set_threads(1));
    uint64_t expected = after_steps(2);
    OK(set_threads(3));
    pthread_t threads[3];
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_create(&threads[i], NULL, ten_steps, &expected) == 0);
    }
    /* A child may be made while another thread is at work, and then has no part of that. */
    for (int i = 0; i < 10; i++) {
        pid_t child = fork();
        if (child == 0) {
            CHECK(after_steps(2) == expected);
            _exit(0);
        }
        joined(child);
    }
    for (int i = 0; i < 3; i++) {
        CHECK(pthread_join(threads[i], NULL) == 0);
    }
    CHECK(settled_threads(1) == 1);
}

/* No thread can be had: the step goes on with one, and says so. */
static void none_to_be_had(void) {
    OK(set_threads(1));
    uint64_t expected = after_steps(2);
    int said[2];
    CHECK(pipe(said) == 0);
    pid_t child = fork();
    if (child == 0) {
        CHECK(setrlimit(RLIMIT_NPROC, &(struct rlimit){0, 0}) == 0);
        /* The limit does not bind the superuser. */
        if (geteuid() == 0) {
            CHECK(setgid(65534) == 0 && setuid(65534) == 0);
        }
        training t = begin();
        CHECK(dup2(said[1], 2) == 2);
        OK(set_threads(4));
        step(t);
        step(t);
        CHECK(hash(t) == expected);
        CHECK(running_threads() == 1);
        end(t);
        _exit(0);
    }
    joined(child);
    close(said[1]);
    char text[1000] = {0};
    CHECK(read(said[0], text, sizeof text - 1) > 0);
    CHECK(strstr(text, "starts no more threads") && strstr(text, "1 of 4"));
    /* Once, not with each step. */
    CHECK(strchr(text, '\n') && strchr(text, '\n')[1] == 0);
    close(said[0]);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: %s LIBRARY\n", argv[0]);
        return 2;
    }
    load(argv[1]);
    numbers();
    forks();
    several();
    none_to_be_had();
    OK(set_threads(4));
    after_steps(1);
    /* Nothing of it may run on. */
    CHECK(dlclose(library) == 0);
    CHECK(settled_threads(1) == 1);
    load(argv[1]);
    after_steps(1);
    printf("%d checks passed\n", checks);
}
