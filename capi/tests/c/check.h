/* The little that the C tests need. */
#ifndef CHECK_H
#define CHECK_H

#include <rfdescent.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int checks;

static void check_failed(const char *file, int line, const char *what) {
    fprintf(stderr, "%s:%d: %s; last error: %s\n", file, line, what, rfd_last_error());
    exit(1);
}

#define CHECK(condition)                                      \
    do {                                                      \
        checks++;                                             \
        if (!(condition)) {                                   \
            check_failed(__FILE__, __LINE__, "not " #condition); \
        }                                                     \
    } while (0)

/* The call succeeds. */
#define OK(call) CHECK((call) == RFD_OK)

/* The call fails with this status, and the message holds this text. */
#define FAILS(status, text, call)                               \
    do {                                                        \
        CHECK((call) == (status));                              \
        if (!strstr(rfd_last_error(), text)) {                  \
            check_failed(__FILE__, __LINE__, "no `" text "`");  \
        }                                                       \
    } while (0)

#endif
