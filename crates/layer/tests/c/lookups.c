// Who answers for which name, by every way of the loader. Prints the same lines with and without the library, except for
// the names that it hooks.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

static const char *owner(void *address)
{
    Dl_info info;
    if (!address) return "null";
    if (!dladdr(address, &info)) return "unknown";
    const char *slash = strrchr(info.dli_fname, '/');
    return slash ? slash + 1 : info.dli_fname;
}

static void show(const char *how, void *handle, const char *name)
{
    dlerror();
    void *found = dlsym(handle, name);
    const char *error = dlerror();
    printf("%s %s: %s%s\n", how, name, owner(found), !found && !(error && strstr(error, name)) ? " (no error text)" : "");
}

int who_next(void);

int main(void)
{
    show("default", RTLD_DEFAULT, "cuInit");
    show("default", RTLD_DEFAULT, "nvmlDeviceGetMemoryInfo");
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!driver) { printf("%s\n", dlerror()); return 1; }
    show("handle", driver, "cuMemAlloc_v2");
    show("handle", driver, "cuDriverGetVersion");
    show("handle", driver, "cuMemcpyHtoD_v2");
    show("handle", driver, "cuNothing");
    show("handle", driver, "curl_easy_init");
    show("default", RTLD_DEFAULT, "cuInit");
    dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    show("global", RTLD_DEFAULT, "cuInit");
    show("global", RTLD_DEFAULT, "cuDriverGetVersion");
    void *math = dlopen("libm.so.6", RTLD_NOW);
    double (*cosine)(double) = (double (*)(double))dlsym(math, "cos");
    printf("cos 0 = %g\n", cosine(0));
    printf("dlvsym memcpy: %s\n", owner(dlvsym(RTLD_DEFAULT, "memcpy", "GLIBC_2.2.5")));
    printf("dlvsym nothing: %s\n", owner(dlvsym(RTLD_DEFAULT, "memcpy", "GLIBC_9")));
    printf("dlvsym driver: %s\n", owner(dlvsym(driver, "cuInit", "NONE")));
    int (*mine)(void) = (int (*)(void))dlsym(RTLD_DEFAULT, "who");
    int (*next)(void) = (int (*)(void))dlsym(RTLD_NEXT, "who");
    printf("who: default %d, next %d, next of the first %d\n", mine(), next(), who_next());
    return 0;
}
