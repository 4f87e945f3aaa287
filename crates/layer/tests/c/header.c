/* Every function of the header is in the library, under this type. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

#include "ebb_pool.h"

#define HAS(name)                                                              \
    do {                                                                       \
        __typeof__(&name) found = (__typeof__(&name))dlsym(RTLD_DEFAULT, #name); \
        if (!found) {                                                          \
            printf("%s is missing\n", #name);                                  \
            return 1;                                                          \
        }                                                                      \
    } while (0)

int main(void) {
    HAS(ebb_pool_alloc);
    HAS(ebb_pool_try_alloc);
    HAS(ebb_pool_free);
    HAS(ebb_pool_malloc);
    HAS(ebb_pool_mfree);
    HAS(ebb_pool_record);
    HAS(ebb_pool_trim);
    HAS(ebb_pool_stats);
    HAS(ebb_pool_class_stats);
    HAS(ebb_pool_reset_peaks);
    HAS(ebb_pool_snapshot);
    HAS(ebb_pool_begin);
    HAS(ebb_pool_end);
    HAS(ebb_pool_forget);
    /* Nothing was allocated, and no driver is there: nothing is to be told, given or freed. */
    struct ebb_pool_figures figures;
    size_t (*stats)(int, struct ebb_pool_figures *, size_t) = (size_t(*)(int, struct ebb_pool_figures *, size_t))dlsym(RTLD_DEFAULT, "ebb_pool_stats");
    void *(*alloc)(ssize_t, int, ebb_stream) = (void *(*)(ssize_t, int, ebb_stream))dlsym(RTLD_DEFAULT, "ebb_pool_alloc");
    if (stats(0, &figures, sizeof figures) != 0 || alloc(0, 0, NULL) != NULL || alloc(4096, 0, NULL) != NULL) {
        printf("something is told\n");
        return 1;
    }
    printf("all there\n");
    return 0;
}
