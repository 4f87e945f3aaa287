// A driver that does nothing but say who was called: for the tests of the loader's part.
#include <stddef.h>
#include <string.h>
#include <unistd.h>

int calls_of_alloc;

int cuInit(unsigned flags) { (void)flags; return 0; }
int cuDriverGetVersion(int *version) { *version = 13000; return 0; }
int cuMemAlloc_v2(unsigned long long *ptr, size_t size) { calls_of_alloc++; *ptr = 0x1000 + size; return 0; }
int cuMemFree_v2(unsigned long long ptr) { return ptr == 0x1000 ? 0 : 1; }
volatile int driver_sleeps, driver_is_asleep;

int cuLaunchKernel(void)
{
    if (driver_sleeps) {
        driver_is_asleep = 1;
        sleep(100);
    }
    return 7001;
}

int driver_calls_of_alloc(void) { return calls_of_alloc; }

// An inner entry: not the exported address.
static int inner_launch(void) { return 7002; }

int cuGetProcAddress(const char *name, void **pfn, int version, unsigned long long flags)
{
    (void)flags;
    *pfn = NULL;
    if (strcmp(name, "cuMemAlloc") == 0) *pfn = (void *)cuMemAlloc_v2;
    if (strcmp(name, "cuDriverGetVersion") == 0) *pfn = (void *)cuDriverGetVersion;
    if (strcmp(name, "cuLaunchKernel") == 0) *pfn = (void *)inner_launch;
    if (strcmp(name, "cuGetProcAddress") == 0) *pfn = (void *)cuGetProcAddress;
    return *pfn && version > 0 ? 0 : 500;
}
