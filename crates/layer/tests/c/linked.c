// A program that is linked with the driver, under several preloaded libraries.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

int cuInit(unsigned flags);
int cuMemAlloc_v2(unsigned long long *ptr, size_t size);
int cuMemFree_v2(unsigned long long ptr);
int cuLaunchKernel(void);
int driver_calls_of_alloc(void);
int cuGetProcAddress(const char *name, void **pfn, int version, unsigned long long flags);

static const char *owner(void *address)
{
    Dl_info info;
    if (!address || !dladdr(address, &info)) return "null";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash ? slash + 1 : info.dli_fname;
}

int main(void)
{
    unsigned long long ptr = 0;
    printf("init %d\n", cuInit(0));
    int result = cuMemAlloc_v2(&ptr, 16);
    printf("alloc %d %llx\n", result, ptr);
    int (*seen)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "shim_seen");
    printf("driver %d, shim %d\n", driver_calls_of_alloc(), seen ? seen() : -1);
    printf("free of nobody's %d, of the driver's %d\n", cuMemFree_v2(1), cuMemFree_v2(0x1000));
    printf("launch %d\n", cuLaunchKernel());
    const char *names[] = {"cuMemAlloc", "cuDriverGetVersion", "cuLaunchKernel", "cuGetProcAddress", "cuNothing"};
    for (int i = 0; i < 5; i++) {
        void *pfn = (void *)1;
        result = cuGetProcAddress(names[i], &pfn, 13000, 0);
        printf("%s: %d %s\n", names[i], result, owner(pfn));
    }
    void *newer = NULL;
    cuGetProcAddress("cuLaunchKernel", &newer, 99000, 0);
    printf("of a newer version: %s\n", owner(newer));
    return 0;
}
