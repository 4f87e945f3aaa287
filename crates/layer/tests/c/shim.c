// Another preloaded library that counts allocations. BY_HANDLE: it finds the real function in the library itself.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>

static int seen;

int shim_seen(void) { return seen; }

int cuMemAlloc_v2(unsigned long long *ptr, size_t size)
{
#ifdef BY_HANDLE
    void *found = dlsym(dlopen("libcuda.so.1", RTLD_LAZY), "cuMemAlloc_v2");
#else
    void *found = dlsym(RTLD_NEXT, "cuMemAlloc_v2");
#endif
    seen++;
    return ((int (*)(unsigned long long *, size_t))found)(ptr, size);
}
