// A thread that is cancelled inside the driver unwinds through the layer: its handlers run, and others go on.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <unistd.h>

int cuInit(unsigned flags);
int cuLaunchKernel(void);
extern volatile int driver_sleeps, driver_is_asleep;

static int cleaned;
static void clean(void *unused) { (void)unused; cleaned = 1; }

static void *launch(void *unused)
{
    pthread_cleanup_push(clean, NULL);
    cuLaunchKernel();
    pthread_cleanup_pop(0);
    return unused;
}

int main(void)
{
    pthread_t thread;
    void *result = NULL;
    printf("init %d\n", cuInit(0));
    for (int turn = 0; turn < 20; turn++) {
        driver_is_asleep = 0;
        driver_sleeps = 1;
        if (pthread_create(&thread, NULL, launch, NULL)) return 1;
        while (!driver_is_asleep) usleep(100);
        pthread_cancel(thread);
        pthread_join(thread, &result);
        driver_sleeps = 0;
        if (result != PTHREAD_CANCELED || !cleaned) { printf("not cancelled\n"); return 1; }
        cleaned = 0;
        if (cuLaunchKernel() != 7001) return 1;
    }
    printf("fine\n");
    return 0;
}
