// A signal that all threads of the program block is for whoever reads it: no thread of a library may take it.
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <unistd.h>

int cuInit(unsigned flags);
int cuDevicePrimaryCtxRetain(void **context, int device);
int cuCtxSetCurrent(void *context);
int cuMemAlloc_v2(unsigned long long *ptr, size_t size);
int cuMemFree_v2(unsigned long long ptr);
int cuMemsetD8_v2(unsigned long long ptr, unsigned char value, size_t size);

int main(void)
{
    void *context = NULL;
    unsigned long long ptr;
    sigset_t wanted;
    int which = 0;
    if (cuInit(0) || cuDevicePrimaryCtxRetain(&context, 0) || cuCtxSetCurrent(context)) return 1;
    if (cuMemAlloc_v2(&ptr, 8 << 20) || cuMemsetD8_v2(ptr, 1, 8 << 20)) return 1;
    sigemptyset(&wanted);
    sigaddset(&wanted, SIGUSR1);
    if (pthread_sigmask(SIG_BLOCK, &wanted, NULL)) return 1;
    for (int turn = 0; turn < 50; turn++)
        if (kill(getpid(), SIGUSR1) || sigwait(&wanted, &which) || which != SIGUSR1) return 1;
    printf("free %d\n", cuMemFree_v2(ptr));
    return 0;
}
