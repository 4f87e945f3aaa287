/* An NVML that says what a file says: FIGURES holds "total free reserved" of one card, then "pid used" a line,
   then "graphics" and again "pid used" a line for processes that draw.
   An empty file means that there is no card. With OLD only the first versions of the calls exist. */
#include <stdio.h>
#include <string.h>

struct memory { unsigned long long total, free, used; };
struct memory2 { unsigned version; unsigned long long total, reserved, free, used; };
struct process1 { unsigned pid; unsigned long long used; };
struct process2 { unsigned pid; unsigned long long used; unsigned gpu, compute; };

static unsigned long long total, available, reserved;
static struct process1 list[64], drawing[64];
static unsigned listed, draw;

static int read_figures(void) {
    FILE *file = fopen(FIGURES, "r");
    int cards = 0;
    char word[16];
    listed = draw = 0;
    if (!file) return 0;
    if (fscanf(file, "%llu %llu %llu", &total, &available, &reserved) == 3) {
        cards = 1;
        while (listed < 64 && fscanf(file, "%u %llu", &list[listed].pid, &list[listed].used) == 2) listed++;
        if (fscanf(file, "%15s", word) == 1)
            while (draw < 64 && fscanf(file, "%u %llu", &drawing[draw].pid, &drawing[draw].used) == 2) draw++;
    }
    fclose(file);
    return cards;
}

int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = read_figures(); return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index) return 2;
    *device = (void *)1;
    return 0;
}
int nvmlDeviceGetUUID(void *device, char *text, unsigned length) {
    snprintf(text, length, "GPU-74657374-2063-6172-6420-6e756d626572"); /* "test card number" */
    return 0;
}
int nvmlDeviceGetName(void *device, char *text, unsigned length) {
    snprintf(text, length, "Fake H200");
    return 0;
}
int nvmlDeviceGetMemoryInfo(void *device, struct memory *memory) {
    memory->total = total;
    memory->free = available;
    memory->used = total - available;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses(void *device, unsigned *count, struct process1 *out) {
    unsigned room = *count;
    *count = listed;
    if (room < listed) return 7;
    memcpy(out, list, listed * sizeof *out);
    return 0;
}
#ifndef OLD
int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory2 *memory) {
    if (memory->version != (sizeof *memory | 2u << 24)) return 25;
    memory->total = total;
    memory->reserved = reserved;
    memory->free = available;
    memory->used = total - reserved - available;
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process2 *out) {
    unsigned room = *count;
    *count = listed;
    if (room < listed) return 7;
    for (unsigned i = 0; i < listed; i++) out[i] = (struct process2){list[i].pid, list[i].used, ~0u, ~0u};
    return 0;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, struct process2 *out) {
    unsigned room = *count;
    *count = draw;
    if (room < draw) return 7;
    for (unsigned i = 0; i < draw; i++) out[i] = (struct process2){drawing[i].pid, drawing[i].used, ~0u, ~0u};
    return 0;
}
#endif
