/*
 * The pool of libebb.so, for programs and frameworks that want their memory in it.
 *
 * The library has to be preloaded (`ebb run`); these functions are then found by dlsym. Memory that they give leaves the card when
 * somebody else needs it, and is back at the same address before the program's next call. All of them may be called from every thread.
 */
#ifndef EBB_POOL_H
#define EBB_POOL_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A stream of the runtime (cudaStream_t) or of the driver (CUstream); null is the default stream. */
typedef void *ebb_stream;

/*
 * A block for work of `stream` on `device`, which the runtime's numbers name. Null if there is no room, after waiting for some; null for no bytes.
 * Its address is a multiple of 512. While `stream` is captured it comes from a private pool of the capture, and nobody else gets it
 * before the graph and all its instances are gone. With PyTorch's types (CUDAPluggableAllocator).
 */
void *ebb_pool_alloc(ssize_t size, int device, ebb_stream stream);

/* The same for callers that free caches of their own when there is no room, and try again: null after a short wait (torch.cuda.MemPool). */
void *ebb_pool_try_alloc(ssize_t size, int device, ebb_stream stream);

/* Frees it. Later work of `stream` may have it at once; other work, when `stream` has come so far. `size` is not looked at. */
void ebb_pool_free(void *ptr, ssize_t size, int device, ebb_stream stream);

/* The same two without streams: freeing waits for the device. With CuPy's types (CFunctionAllocator); `param` is not looked at. */
void *ebb_pool_malloc(void *param, size_t size, int device);
void ebb_pool_mfree(void *param, void *ptr, int device);

/* Another stream uses the block, too: freeing it waits, without blocking, for what that stream has then. 0, or -1 if no block begins there. */
int ebb_pool_record(void *ptr, ebb_stream stream);

/* Gives back what nothing lives in, on one device or, with -1, on all: how many bytes. Waits for work that may use it. */
uint64_t ebb_pool_trim(int device);

/* In bytes where nothing else is said. Peaks are since the start or ebb_pool_reset_peaks. */
struct ebb_pool_figures {
    uint64_t requested;              /* what the held blocks were asked for */
    uint64_t allocated;              /* what they take */
    uint64_t cached;                 /* blocks that threads keep for the next one of the same size */
    uint64_t active;                 /* held or kept, and freed while other streams use them */
    uint64_t reserved;               /* physical memory */
    uint64_t reserved_peak;
    uint64_t allocated_peak;         /* with what is kept */
    uint64_t mapped;                 /* addresses with memory behind them; more than reserved by the stitched views */
    uint64_t idle;                   /* physical memory that nothing lives in */
    uint64_t internal_fragmentation; /* inside blocks */
    uint64_t external_fragmentation; /* between blocks */
    uint64_t largest_free;           /* the largest block that takes no call of the driver */
    uint64_t blocks;                 /* how many live */
    uint64_t blocks_total;           /* how many there ever were */
    uint64_t chunks;                 /* how many handles of the driver */
    uint64_t views;                  /* how many stitched views */
    uint64_t map_calls;              /* how many, ever */
    uint64_t unmap_calls;            /* how many, ever */
    uint64_t created_total;          /* ever */
    uint64_t released_total;         /* ever */
    uint64_t refused;                /* how many allocations found no room */
    uint64_t records;                /* about what the pool's own records take in host memory */
    uint64_t shadows;                /* how many granules' addresses show another one that their small blocks were brought to */
    uint64_t meshed_total;           /* how many granules were brought together with others, ever */
    uint64_t copied_total;           /* bytes that were copied for it on the device, ever */
};

/* Writes at most `size` bytes of a device's figures. How large they are, or 0 if nothing was allocated there. */
size_t ebb_pool_stats(int device, struct ebb_pool_figures *figures, size_t size);

/* Figures of blocks that take from one power of two bytes (included) to the next. */
struct ebb_pool_class {
    uint64_t from;       /* the power of two */
    uint64_t blocks;     /* how many are held */
    uint64_t requested;  /* what these were asked for */
    uint64_t allocated;  /* what they take */
    uint64_t cached;     /* blocks that threads keep */
    uint64_t made_total; /* how many ever came from the pool; what threads kept and had again is not counted again */
};

/*
 * Writes `count` classes of a device at most, the smallest first, each into `each` bytes (sizeof(struct ebb_pool_class)). How many classes there
 * are, 64 at the most; 0 if nothing was allocated there. Their `requested`, `allocated` and `cached` add up to those of ebb_pool_stats.
 */
size_t ebb_pool_class_stats(int device, struct ebb_pool_class *classes, size_t count, size_t each);
void ebb_pool_reset_peaks(int device);

/* Writes a file that torch.cuda.memory's tools read (`python -m torch.cuda._memory_viz`). 0, or -1. */
int ebb_pool_snapshot(int device, const char *path);

/*
 * From begin to end the calling thread's blocks on `device` come from a private pool of that number: nobody else gets them before
 * ebb_pool_forget. For graphs that are launched with a pool of their own. 0, or -1 if the device is not managed.
 */
int ebb_pool_begin(int device, uint64_t pool);
void ebb_pool_end(int device, uint64_t pool);
void ebb_pool_forget(int device, uint64_t pool);

#ifdef __cplusplus
}
#endif

#endif
