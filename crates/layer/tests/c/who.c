// Two libraries with one name: the caller of RTLD_NEXT is told apart by its address.
#define _GNU_SOURCE
#include <dlfcn.h>

int who(void) { return NUMBER; }

int NEXT_NAME(void)
{
    int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "who");
    return next ? next() : -1;
}
