// A library that uses the driver while the loader loads and unloads it, with the loader's lock held.
#include <stddef.h>
#include <stdio.h>

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(unsigned long long *ptr, size_t size);
int cuMemFree_v2(unsigned long long ptr);
int cuMemsetD8_v2(unsigned long long ptr, unsigned char value, size_t size);
int cuMemcpyDtoH_v2(void *to, unsigned long long from, size_t size);

static unsigned long long ptr[3];

__attribute__((constructor)) static void starts(void)
{
    void *context = NULL;
    int failed = cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context);
    for (int i = 0; i < 3 && !failed; i++)
        failed = cuMemAlloc_v2(&ptr[i], 16 << 20) || cuMemsetD8_v2(ptr[i], i + 1, 16 << 20);
    for (int i = 0; i < 3 && !failed; i++) {
        unsigned char last = 0;
        failed = cuMemcpyDtoH_v2(&last, ptr[i] + (16 << 20) - 1, 1) || last != i + 1;
    }
    printf("constructor %s\n", failed ? "failed" : "fine");
}

__attribute__((destructor)) static void ends(void)
{
    int code = cuMemFree_v2(ptr[0]);
    printf("destructor %s\n", code == 0 || code == 4 ? "fine" : "failed");
}
