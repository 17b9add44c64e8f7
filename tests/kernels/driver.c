/* A CUDA driver whose device memory is memory of the host: what psfleet's tables ask a driver for.
   It does everything at once, and refuses what a driver refuses: other sizes than whole granules, memory that is
   mapped twice or nowhere, and copies over memory that is not accessible, which ends the process. It cannot run the
   code of kernels: launches are passed to a function of the test (tests/kernels/fake_driver.py), if it has set one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

typedef uint64_t ptr;
typedef int result;
enum { OK = 0, INVALID = 1, NO_MEMORY = 2, NOT_FOUND = 500 };
enum { GRANULE = 2 << 20, RANGES = 4096 };

static size_t total = 1ull << 30, taken; /* bytes of the device */
static __thread void *current;
static struct { ptr start; size_t size; int access; } mapped[RANGES];
static int ranges;

result cuInit(unsigned flags) { return OK; }
result cuDriverGetVersion(int *version) { *version = 13000; return OK; }
result cuDeviceGetCount(int *count) { *count = 1; return OK; }
result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal ? INVALID : OK; }
result cuDeviceGetName(char *name, int size, int device) { strncpy(name, "Host memory", size); return OK; }
result cuDeviceGetUuid(char *uuid, int device) { memset(uuid, 7, 16); return OK; }
result cuDeviceTotalMem(size_t *bytes, int device) { *bytes = total; return OK; }
result cuDeviceGetAttribute(int *value, int which, int device) {
    *value = which == 75 ? 9 : which == 76 ? 0 : 1; /* compute capability 9.0 */
    return OK;
}
result cuDevicePrimaryCtxRetain(void **context, int device) {
    *context = &total;
    return getenv("DRIVER_REFUSES") ? atoi(getenv("DRIVER_REFUSES")) : OK;
}
result cuDevicePrimaryCtxRelease(int device) { return OK; }
result cuCtxGetCurrent(void **context) { *context = current; return OK; }
result cuCtxSetCurrent(void *context) { current = context; return OK; }
result cuCtxPushCurrent(void *context) { current = context; return OK; }
result cuCtxPopCurrent(void **context) { *context = current; current = 0; return OK; }
result cuCtxGetDevice(int *device) { *device = 0; return current ? OK : 201; }
result cuCtxSynchronize(void) { return current ? OK : 201; }
result cuGetErrorName(int error, const char **name) { *name = "CUDA_ERROR"; return OK; }
result cuGetErrorString(int error, const char **text) { *text = "an error of the driver in host memory"; return OK; }

result cuMemGetInfo(size_t *free, size_t *all) { *free = total - taken; *all = total; return OK; }
result cuMemAlloc(ptr *place, size_t size) {
    if (!size) return INVALID;
    if (taken + size > total) return NO_MEMORY;
    size_t *memory = malloc(size + 256);
    *memory = size, taken += size, *place = (ptr)memory + 256;
    memset((void *)*place, 0xAB, size); /* a device's memory is not cleared */
    return OK;
}
result cuMemFree(ptr place) {
    size_t *memory = (size_t *)(place - 256);
    taken -= *memory;
    free(memory);
    return OK;
}
result cuMemHostAlloc(void **memory, size_t size, unsigned flags) { *memory = malloc(size); return OK; }
result cuMemFreeHost(void *memory) { free(memory); return OK; }

result cuMemcpyHtoD(ptr to, const void *from, size_t size) { memmove((void *)to, from, size); return OK; }
result cuMemcpyDtoH(void *to, ptr from, size_t size) { memmove(to, (void *)from, size); return OK; }
result cuMemcpyDtoD(ptr to, ptr from, size_t size) { memmove((void *)to, (void *)from, size); return OK; }
result cuMemsetD8(ptr to, unsigned char value, size_t count) { memset((void *)to, value, count); return OK; }
#define ON_STREAM(stream) if (!(stream)) return INVALID
result cuMemcpyHtoDAsync(ptr to, const void *from, size_t size, void *s) { ON_STREAM(s); return cuMemcpyHtoD(to, from, size); }
result cuMemcpyDtoHAsync(void *to, ptr from, size_t size, void *s) { ON_STREAM(s); return cuMemcpyDtoH(to, from, size); }
result cuMemcpyDtoDAsync(ptr to, ptr from, size_t size, void *s) { ON_STREAM(s); return cuMemcpyDtoD(to, from, size); }
result cuMemsetD8Async(ptr to, unsigned char v, size_t n, void *s) { ON_STREAM(s); return cuMemsetD8(to, v, n); }

result cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(8); return flags ? INVALID : OK; }
result cuStreamDestroy(void *stream) { free(stream); return OK; }
result cuStreamSynchronize(void *stream) { return OK; }
result cuStreamWaitEvent(void *stream, void *event, unsigned flags) { ON_STREAM(stream); return event ? OK : INVALID; }
result cuEventCreate(void **event, unsigned flags) { *event = calloc(1, sizeof(struct timespec)); return OK; }
result cuEventDestroy(void *event) { free(event); return OK; }
result cuEventRecord(void *event, void *stream) { clock_gettime(CLOCK_MONOTONIC, event); return OK; }
result cuEventQuery(void *event) { return OK; }
result cuEventSynchronize(void *event) { return event ? OK : INVALID; }
result cuEventElapsedTime(float *ms, struct timespec *first, struct timespec *last) {
    *ms = (last->tv_sec - first->tv_sec) * 1e3f + (last->tv_nsec - first->tv_nsec) / 1e6f;
    return OK;
}

/* -- kernels: one is only its name, since the driver cannot run its code -- */

typedef result (*runner)(const char *kernel, unsigned threads, void **parameters);
static runner run;
void driver_runs(runner function) { run = function; }

result cuLibraryLoadData(void **library, const void *code, const void *o, const void *v, unsigned n,
                         const void *p, const void *q, unsigned m) {
    *library = malloc(1);
    return memcmp(code, "\177ELF", 4) ? 200 : OK;
}
result cuLibraryUnload(void *library) { free(library); return OK; }
result cuLibraryGetKernel(void **kernel, void *library, const char *name) { *kernel = strdup(name); return OK; }
result cuKernelGetFunction(void **function, void *kernel) { *function = kernel; return OK; }
result cuKernelGetAttribute(int *value, int which, void *kernel, int device) { *value = 32; return OK; }
result cuLaunchKernel(void *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned v, unsigned w,
                      unsigned shared, void *stream, void **parameters, void **extra) {
    ON_STREAM(stream);
    if (!current) return 201;
    if (!x || y != 1 || z != 1 || !threads || threads > 1024 || v != 1 || w != 1 || shared || extra) return INVALID;
    return run ? run(kernel, x * threads, parameters) : OK;
}
struct configuration { unsigned grid[3], block[3], shared; void *stream; };
result cuLaunchKernelEx(const struct configuration *c, void *kernel, void **parameters, void **extra) {
    return cuLaunchKernel(kernel, c->grid[0], c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared,
                          c->stream, parameters, extra);
}

/* -- virtual memory: addresses are reserved without access, and become accessible granule by granule -- */

struct place { int type, id; };
struct kind { int type, handles; struct place location; };
struct access { struct place location; int flags; };
static int is_device(const struct kind *kind) { return kind->type == 1 && kind->location.type == 1 && !kind->location.id; }

result cuMemGetAllocationGranularity(size_t *size, const struct kind *kind, int option) {
    *size = GRANULE;
    return is_device(kind) && option < 2 ? OK : INVALID;
}
result cuMemAddressReserve(ptr *place, size_t size, size_t alignment, ptr wanted, uint64_t flags) {
    if (!size || size % GRANULE || flags) return INVALID;
    void *memory = mmap(0, size + GRANULE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return NO_MEMORY;
    *place = ((ptr)memory + GRANULE - 1) / GRANULE * GRANULE;
    return OK;
}
result cuMemAddressFree(ptr place, size_t size) {
    for (int i = 0; i < ranges; i++)
        if (mapped[i].size && mapped[i].start >= place && mapped[i].start < place + size) return INVALID;
    munmap((void *)place, size);
    return OK;
}
result cuMemCreate(uint64_t *handle, size_t size, const struct kind *kind, uint64_t flags) {
    if (!size || size % GRANULE || flags || !is_device(kind)) return INVALID;
    if (taken + size > total) return NO_MEMORY;
    taken += size, *handle = size; /* what it stands for is its size */
    return OK;
}
result cuMemRelease(uint64_t handle) { return handle ? OK : INVALID; }
result cuMemMap(ptr place, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    if (place % GRANULE || handle != size || offset || flags || ranges == RANGES) return INVALID;
    for (int i = 0; i < ranges; i++)
        if (place < mapped[i].start + mapped[i].size && mapped[i].start < place + size) return INVALID;
    mapped[ranges].start = place, mapped[ranges].size = size, ranges++;
    return OK;
}
result cuMemSetAccess(ptr place, size_t size, const struct access *access, size_t count) {
    if (getenv("DRIVER_REFUSES_ACCESS")) return NO_MEMORY;
    if (count != 1 || access->location.type != 1 || access->location.id || access->flags != 3) return INVALID;
    for (int i = 0; i < ranges; i++)
        if (mapped[i].start == place && mapped[i].size == size) {
            if (mprotect((void *)place, size, PROT_READ | PROT_WRITE)) return INVALID;
            memset((void *)place, 0xAB, size);
            return OK;
        }
    return INVALID;
}
result cuMemUnmap(ptr place, size_t size) {
    for (int i = 0; i < ranges; i++)
        if (mapped[i].start == place && mapped[i].size == size) {
            madvise((void *)place, size, MADV_DONTNEED);
            mprotect((void *)place, size, PROT_NONE);
            mapped[i].size = 0, mapped[i].start = 0, taken -= size;
            return OK;
        }
    return INVALID;
}

result cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    static void *self;
    if (!self) {
        Dl_info here;
        dladdr((void *)cuGetProcAddress_v2, &here);
        self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    }
    *function = dlsym(self, name);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}
