/* A check that also counts with -DNDEBUG, and says where it failed. */
#ifndef CHECK_H
#define CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            fprintf(stderr, "%s:%d: failed: %s\n", __FILE__, __LINE__, #condition);   \
            exit(1);                                                                  \
        }                                                                             \
    } while (0)

#define CHECK_EQUAL(found, expected)                                                          \
    do {                                                                                      \
        long long found_ = (long long)(found), expected_ = (long long)(expected);             \
        if (found_ != expected_) {                                                            \
            fprintf(stderr, "%s:%d: %s is %lld, expected %lld\n", __FILE__, __LINE__, #found, \
                    found_, expected_);                                                       \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

#endif
