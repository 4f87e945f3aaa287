// A driver-API program without kernels that knows nothing of ebb; it finds the driver by dlopen, as most programs do.
//
//   g++ -O2 -std=c++17 -I<cuda.h> -o calls calls.cpp -ldl
//
//   calls start           initialises, makes a context, allocates and fills 2 MiB; says how long each took
//   calls async BYTES N   median ns of cuMemAllocAsync and of cuMemFreeAsync, from a warm pool
//   calls hold BYTES      takes BYTES, fills them, prints a line, and ends when stdin does
#include <cuda.h>
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

static void *driver() {
    static void *handle = dlopen("libcuda.so.1", RTLD_NOW);
    if (!handle) {
        fprintf(stderr, "calls: %s\n", dlerror());
        exit(4);
    }
    return handle;
}

// The newest form of a call, as the CUDA runtime asks for it.
template <typename F>
static F find(const char *name) {
    using Get = CUresult (*)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
    static Get get = (Get)dlsym(driver(), "cuGetProcAddress_v2");
    void *found = nullptr;
    CUdriverProcAddressQueryResult status;
    if (!get || get(name, &found, 12000, 0, &status) != CUDA_SUCCESS || !found) {
        fprintf(stderr, "calls: the driver has no %s\n", name);
        exit(4);
    }
    return (F)found;
}

#define OK(call)                                                          \
    do {                                                                  \
        CUresult r_ = (call);                                             \
        if (r_ != CUDA_SUCCESS) {                                         \
            fprintf(stderr, "calls: %s = %d (line %d)\n", #call, r_, __LINE__); \
            exit(r_ == CUDA_ERROR_OUT_OF_MEMORY ? 3 : 1);                 \
        }                                                                 \
    } while (0)

static double now_ms() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

int main(int argc, char **argv) {
    std::string what = argc > 1 ? argv[1] : "";
    size_t arg = argc > 2 ? strtoull(argv[2], nullptr, 0) : 0;
    double began = now_ms();
    CUdevice dev;
    CUcontext ctx;
    OK(find<CUresult (*)(unsigned)>("cuInit")(0));
    double inited = now_ms();
    OK(find<CUresult (*)(CUdevice *, int)>("cuDeviceGet")(&dev, 0));
    OK(find<CUresult (*)(CUcontext *, CUdevice)>("cuDevicePrimaryCtxRetain")(&ctx, dev));
    OK(find<CUresult (*)(CUcontext)>("cuCtxSetCurrent")(ctx));
    double made = now_ms();
    auto alloc = find<CUresult (*)(CUdeviceptr *, size_t)>("cuMemAlloc");
    auto memset = find<CUresult (*)(CUdeviceptr, unsigned char, size_t)>("cuMemsetD8");
    auto sync = find<CUresult (*)()>("cuCtxSynchronize");
    if (what == "start") {
        CUdeviceptr p;
        OK(alloc(&p, 2 << 20));
        OK(memset(p, 7, 2 << 20));
        OK(sync());
        printf("{\"init_ms\":%.2f,\"context_ms\":%.2f,\"first_ms\":%.2f}\n", inited - began, made - inited, now_ms() - made);
    } else if (what == "async") {
        auto get = find<CUresult (*)(CUdeviceptr *, size_t, CUstream)>("cuMemAllocAsync");
        auto give = find<CUresult (*)(CUdeviceptr, CUstream)>("cuMemFreeAsync");
        auto stream_sync = find<CUresult (*)(CUstream)>("cuStreamSynchronize");
        CUstream stream;
        OK(find<CUresult (*)(CUstream *, unsigned)>("cuStreamCreate")(&stream, CU_STREAM_NON_BLOCKING));
        // Warm: what is freed stays in the pool, also over a synchronisation.
        CUmemoryPool pool;
        cuuint64_t keep = ~0ull;
        OK(find<CUresult (*)(CUmemoryPool *, CUdevice)>("cuDeviceGetDefaultMemPool")(&pool, dev));
        OK(find<CUresult (*)(CUmemoryPool, CUmemPool_attribute, void *)>("cuMemPoolSetAttribute")(
            pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &keep));
        size_t n = argc > 3 ? strtoull(argv[3], nullptr, 0) : 1000;
        std::vector<double> got, given;
        CUdeviceptr p[20];
        for (size_t batch = 0; batch < n / 20 + 5; batch++) {
            double t = now_ms();
            for (auto &one : p) OK(get(&one, arg, stream));
            double u = now_ms();
            for (auto one : p) OK(give(one, stream));
            double v = now_ms();
            if (batch >= 5) got.push_back((u - t) * 1e6 / 20), given.push_back((v - u) * 1e6 / 20);
            OK(stream_sync(stream));
        }
        std::sort(got.begin(), got.end());
        std::sort(given.begin(), given.end());
        printf("{\"alloc_ns\":%.1f,\"free_ns\":%.1f}\n", got[got.size() / 2], given[given.size() / 2]);
    } else if (what == "hold") {
        std::vector<CUdeviceptr> all;
        for (size_t left = arg; left;) {
            size_t n = std::min(left, (size_t)1 << 30);
            CUdeviceptr p;
            OK(alloc(&p, n));
            OK(memset(p, (unsigned char)all.size(), n));
            all.push_back(p);
            left -= n;
        }
        OK(sync());
        printf("ready\n");
        fflush(stdout);
        while (getchar() != EOF) {
        }
    } else {
        fprintf(stderr, "calls: start | async BYTES N | hold BYTES\n");
        return 2;
    }
    return 0;
}
