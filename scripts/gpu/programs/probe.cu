// A driver-API program that knows nothing of ebb: it measures launches, allocations and copies, holds memory and checks
// it. Built on the GPU machine: nvcc -o probe probe.cu -lcuda. It is linked against libcuda, so it also covers that way in.
//
//   probe launch N            median ns of an empty kernel launch over N batches
//   probe alloc BYTES N       median us of cuMemAlloc + cuMemFree
//   probe link BYTES          GB/s of pinned copies, out, in, and both at once
//   probe hold BYTES FIFO...  fills BYTES with a pattern, then obeys lines on stdin: check | touch | quit
//   probe limit               allocates exactly what cuMemGetInfo says is free, then one granule more
//   probe spin MS             a kernel that runs so long
#include <cuda.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#define OK(call)                                                                          \
    do {                                                                                  \
        CUresult r_ = (call);                                                             \
        if (r_ != CUDA_SUCCESS) {                                                         \
            const char *name_ = "?";                                                      \
            cuGetErrorName(r_, &name_);                                                   \
            fprintf(stderr, "probe: %s = %s (line %d)\n", #call, name_, __LINE__);        \
            exit(r_ == CUDA_ERROR_OUT_OF_MEMORY ? 3 : 1);                                 \
        }                                                                                 \
    } while (0)

__global__ void nothing() {}
__global__ void fill(unsigned *p, size_t n, unsigned seed) {
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        p[i] = (unsigned)(i * 2654435761u) ^ (unsigned)(i >> 32) ^ seed;
}
__global__ void check(const unsigned *p, size_t n, unsigned seed, unsigned long long *wrong) {
    unsigned long long bad = 0;
    for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        bad += p[i] != ((unsigned)(i * 2654435761u) ^ (unsigned)(i >> 32) ^ seed);
    if (bad) atomicAdd(wrong, bad);
}
__global__ void spin(long long ns) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    while ((long long)(now - start) < ns);
}

static double now_ns() {
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}
static double median(std::vector<double> v) {
    std::sort(v.begin(), v.end());
    return v[v.size() / 2];
}

int main(int argc, char **argv) {
    std::string what = argc > 1 ? argv[1] : "";
    size_t arg = argc > 2 ? strtoull(argv[2], nullptr, 0) : 0;
    CUdevice dev;
    CUcontext ctx;
    OK(cuInit(0));
    OK(cuDeviceGet(&dev, 0));
    OK(cuDevicePrimaryCtxRetain(&ctx, dev));
    OK(cuCtxSetCurrent(ctx));
    if (what == "launch") {
        CUfunction f;
        nothing<<<1, 1>>>();
        OK(cuCtxSynchronize());
        cudaFunction_t cf;
        if (cudaGetFuncBySymbol(&cf, (const void *)nothing) != cudaSuccess) return 1;
        f = (CUfunction)cf;
        std::vector<double> per;
        for (size_t b = 0; b < arg; b++) {
            double t = now_ns();
            for (int i = 0; i < 500; i++) cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, 0, nullptr, nullptr);
            per.push_back((now_ns() - t) / 500);
            OK(cuCtxSynchronize());
        }
        printf("{\"launch_ns\":%.1f}\n", median(per));
    } else if (what == "alloc") {
        size_t n = argc > 3 ? strtoull(argv[3], nullptr, 0) : 1000;
        std::vector<double> per;
        for (size_t i = 0; i < n + 10; i++) {
            CUdeviceptr p;
            double t = now_ns();
            OK(cuMemAlloc(&p, arg));
            OK(cuMemFree(p));
            if (i >= 10) per.push_back((now_ns() - t) / 1e3);
        }
        printf("{\"alloc_free_us\":%.2f}\n", median(per));
    } else if (what == "link") {
        CUdeviceptr a, b;
        void *ha, *hb;
        CUstream s1, s2;
        OK(cuMemAlloc(&a, arg));
        OK(cuMemAlloc(&b, arg));
        OK(cuMemHostAlloc(&ha, arg, 0));
        OK(cuMemHostAlloc(&hb, arg, 0));
        OK(cuStreamCreate(&s1, CU_STREAM_NON_BLOCKING));
        OK(cuStreamCreate(&s2, CU_STREAM_NON_BLOCKING));
        std::vector<double> out, in, both;
        for (int i = 0; i < 6; i++) {
            double t = now_ns();
            OK(cuMemcpyDtoHAsync(ha, a, arg, s1));
            OK(cuStreamSynchronize(s1));
            double u = now_ns();
            OK(cuMemcpyHtoDAsync(b, hb, arg, s2));
            OK(cuStreamSynchronize(s2));
            double v = now_ns();
            OK(cuMemcpyDtoHAsync(ha, a, arg, s1));
            OK(cuMemcpyHtoDAsync(b, hb, arg, s2));
            OK(cuStreamSynchronize(s1));
            OK(cuStreamSynchronize(s2));
            double w = now_ns();
            if (i) out.push_back(arg / (u - t)), in.push_back(arg / (v - u)), both.push_back(2 * arg / (w - v));
        }
        printf("{\"out_gb_s\":%.2f,\"in_gb_s\":%.2f,\"both_gb_s\":%.2f}\n", median(out), median(in), median(both));
    } else if (what == "hold") {
        std::vector<std::pair<CUdeviceptr, size_t>> parts;
        size_t left = arg, piece = 1ull << 30;
        while (left) {
            size_t n = std::min(left, piece);
            CUdeviceptr p;
            OK(cuMemAlloc(&p, n));
            fill<<<1024, 256>>>((unsigned *)p, n / 4, (unsigned)parts.size());
            parts.push_back({p, n});
            left -= n;
        }
        CUdeviceptr wrong;
        OK(cuMemAlloc(&wrong, 8));
        OK(cuCtxSynchronize());
        printf("ready\n");
        fflush(stdout);
        char line[64];
        while (fgets(line, sizeof line, stdin)) {
            double t = now_ns();
            if (!strncmp(line, "quit", 4)) break;
            if (!strncmp(line, "touch", 5)) {
                nothing<<<1, 1>>>();
                OK(cuCtxSynchronize());
                printf("{\"touch_s\":%.4f}\n", (now_ns() - t) / 1e9);
            } else {
                unsigned long long bad = 0;
                OK(cuMemsetD8(wrong, 0, 8));
                for (size_t i = 0; i < parts.size(); i++)
                    check<<<1024, 256>>>((unsigned *)parts[i].first, parts[i].second / 4, (unsigned)i, (unsigned long long *)wrong);
                OK(cuMemcpyDtoH(&bad, wrong, 8));
                printf("{\"wrong_words\":%llu,\"check_s\":%.4f}\n", bad, (now_ns() - t) / 1e9);
            }
            fflush(stdout);
        }
    } else if (what == "limit") {
        size_t free_bytes, total, granule = 2 << 20, got = 0;
        OK(cuMemGetInfo(&free_bytes, &total));
        size_t take = free_bytes / granule * granule;
        // In pieces, so that the last granule is an allocation of its own.
        std::vector<CUdeviceptr> all;
        while (got + granule < take) {
            size_t n = std::min(take - granule - got, (size_t)1 << 30);
            CUdeviceptr p;
            OK(cuMemAlloc(&p, n));
            got += n;
        }
        CUdeviceptr last, over;
        CUresult l = cuMemAlloc(&last, granule), o = cuMemAlloc(&over, granule);
        printf("{\"total\":%zu,\"free\":%zu,\"last_granule\":%d,\"one_more\":%d}\n", total, free_bytes, (int)l, (int)o);
        return l == CUDA_SUCCESS && o == CUDA_ERROR_OUT_OF_MEMORY ? 0 : 1;
    } else if (what == "spin") {
        spin<<<1, 1>>>((long long)arg * 1000000);
        OK(cuCtxSynchronize());
    } else {
        fprintf(stderr, "probe: launch N | alloc BYTES N | link BYTES | hold BYTES | limit | spin MS\n");
        return 2;
    }
    return 0;
}
