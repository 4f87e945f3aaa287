// Frees memory after exit has begun, from handlers that were registered before and after the driver started.
#include <stdio.h>
#include <stdlib.h>
#include <stddef.h>

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(unsigned long long *ptr, size_t size);
int cuMemFree_v2(unsigned long long ptr);
int cuMemsetD8_v2(unsigned long long ptr, unsigned char value, size_t size);

static unsigned long long early, late;

static void free_early(void) { int code = cuMemFree_v2(early); printf("early %s\n", code == 0 || code == 4 ? "fine" : "bad"); }
static void free_late(void) { int code = cuMemFree_v2(late); printf("late %s\n", code == 0 || code == 4 ? "fine" : "bad"); }

int main(void)
{
    void *context = NULL;
    atexit(free_early);
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
    atexit(free_late);
    if (cuMemAlloc_v2(&early, 5 << 20) || cuMemAlloc_v2(&late, 300)) return 1;
    if (cuMemsetD8_v2(early, 1, 5 << 20)) return 1;
    return 0;
}
