// Runs CUDA C++ kernels on a CPU: what they may use of CUDA, for g++ -std=c++17.
//
// Idea: each thread of a block is a fiber, a stack of its own on the one OS thread, that gives way
// at barriers, warp collectives and `__nanosleep`; blocks run one after another. Which fiber goes
// next follows `order`: warp by warp, each as far as it gets, so that a missing barrier shows.
// Shared memory starts as 0xA5 in every block. Mistakes end the launch with a message.
// Subnormal float32 are 0, as operands and as results, for CuPy compiles with -ftz=true; but not
// where a kernel has doubles (`flushed` is false), which a GPU never flushes and a CPU only with the others.
//
// Not as on a GPU: no contraction to fma, no rounding of `__expf` and the like, no inline PTX,
// no `__CUDA_ARCH__`, tensor cores that sum exactly. Names as in the CUDA C++ Programming Guide.
// Longer than most files: one header, most of it a list of functions that CUDA has.
#pragma once

#include <csignal>
#include <cstddef>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <math.h>
#include <sys/mman.h>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#ifndef __aarch64__
#include <xmmintrin.h>
#endif

#define EMULATED 1
#define __global__ inline  // a program has the kernel that it launches, not the others of the file
#define __device__
#define __host__
#define __constant__ __attribute__((unused))
#define __grid_constant__
#define __forceinline__ inline  // as the compiler likes: copies of it take long to compile
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
// emulator.py has the linker gather variables of functions, to be filled before each block
#define __shared__ static __attribute__((used))
#define DYNAMIC_SHARED(name) char* name = emulator::dynamic_shared()

// `long long` as on the GPU, where <cstdint> has `long`
typedef long long emulated_int64;
typedef unsigned long long emulated_uint64;
#define int64_t emulated_int64
#define uint64_t emulated_uint64
// NVRTC lacks these
#undef INFINITY
#undef NAN

#define VECTOR(type, name, width)                                                          \
    struct __align__(sizeof(type) * width > 16 ? 16 : sizeof(type) * width) name##width
#define VECTORS(type, name)                                                                \
    VECTOR(type, name, 2) { type x, y; };                                                  \
    struct name##3 { type x, y, z; };                                                      \
    VECTOR(type, name, 4) { type x, y, z, w; };                                            \
    inline name##2 make_##name##2(type x, type y) { return {x, y}; }                       \
    inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }            \
    inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
VECTORS(signed char, char)
VECTORS(unsigned char, uchar)
VECTORS(short, short)
VECTORS(unsigned short, ushort)
VECTORS(int, int)
VECTORS(unsigned, uint)
VECTORS(float, float)
VECTORS(long long, longlong)
VECTORS(unsigned long long, ulonglong)
VECTORS(double, double)
#undef VECTORS
#undef VECTOR

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;
static const int warpSize = 32;

extern "C" char __start_shared[] __attribute__((visibility("hidden")));
extern "C" char __stop_shared[] __attribute__((visibility("hidden")));

namespace emulator {

constexpr int THREADS = 1024, PAGE = 4096, STACK = 64 * 1024, GARBAGE = 0xA5;
constexpr long long POLLS = 8'000'000;  // without a barrier or an exit: some seconds
constexpr size_t SHARED = 227 * 1024;   // per block, compute capability 9.0

enum Order { FORWARD, BACKWARD, RANDOM };
enum State { READY, RESTING, AT_WARP, AT_BLOCK, DONE };

struct Site {
    const char* file;
    int line;
    static Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return {file, line};
    }
};
#define SITE emulator::Site site = emulator::Site::here()

struct Thread {
    State state;
    bool fresh;
    uint3 index;
    const char* operation;  // what it waits at, where, and for a collective with whom
    Site site;
    unsigned mask;
    void (*combine)();
    void* part;
    ucontext_t start;
    void* jump[5];
};

struct Warp {
    unsigned live, waiting;  // lanes that have not exited; that wait for others in a collective
};

static Thread threads[THREADS], *current;
static Warp warps[THREADS / 32];
static void* scheduler[5];
static int count, live, arrived, agreed, last_arrived, last_agreed, resting;
static bool released, failed, running, flushed;
static long long polls;
static Order order;
static unsigned long long seed;
static void (*body)();
static void** arguments;
static char *stacks, *memory, *end, *message;  // at `end` of `memory` a page without access begins
static char handler_stack[64 * 1024];
static long long now;
static size_t message_bytes, memory_bytes;

struct Piece {  // of a thread's copies that it waits for itself
    void* to;
    const void* from;
    size_t bytes;
    bool in;
    int group;
};
static Piece pieces[THREADS][64];
static int piecing[THREADS], grouping[THREADS];  // pieces that nobody waited for; the group that is open

inline unsigned draw(unsigned below) {  // xorshift64*
    seed ^= seed >> 12, seed ^= seed << 25, seed ^= seed >> 27;
    return unsigned((seed * 0x2545F4914F6CDD1Dull) >> 33) % below;
}

// ---- switching -----------------------------------------------------------------------------

// The compiler's own jumps, half as long as libc's. noipa: it may not conclude that memory is
// unchanged by a call, and all registers are kept.
__attribute__((noipa)) static void pause() {
    if (!__builtin_setjmp(current->jump)) __builtin_longjmp(scheduler, 1);
}

__attribute__((noipa)) static void resume(Thread& thread) {
    current = &thread;
    threadIdx = thread.index;
    if (__builtin_setjmp(scheduler)) return;
    if (!thread.fresh) __builtin_longjmp(thread.jump, 1);
    thread.fresh = false;
    setcontext(&thread.start);
}

static void note(const char* format, va_list values) {
    if (!failed) vsnprintf(message, message_bytes, format, values);
    failed = true;
}

static void report(const char* format, ...) {
    va_list values;
    va_start(values, format);
    note(format, values);
    va_end(values);
}

// Ends the launch, from within a thread.
[[noreturn]] static void fail(Site site, const char* format, ...) {
    char text[512];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    report("%s at %s:%d, thread (%u, %u, %u) of block (%u, %u, %u)", text, site.file, site.line,
           threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    __builtin_longjmp(scheduler, 1);
}

// Lets others run first.
inline void rest(const char* operation, Site site) {
    if (++polls > POLLS) fail(site, "%s: polls for what never comes", operation);
    current->state = RESTING;
    resting++;
    pause();
}

// ---- barriers and collectives ----------------------------------------------------------------

static void release() {
    Thread* first = nullptr;
    for (int i = 0; i < count; i++) {
        Thread& thread = threads[i];
        if (thread.state != AT_BLOCK) continue;
        if (!first) first = &thread;
        if (thread.operation != first->operation || thread.site.line != first->site.line)
            return report("barriers differ: %s at %s:%d and %s at %s:%d, block (%u, %u, %u)",
                          first->operation, first->site.file, first->site.line, thread.operation,
                          thread.site.file, thread.site.line, blockIdx.x, blockIdx.y, blockIdx.z);
    }
    for (int i = 0; i < count; i++)
        if (threads[i].state == AT_BLOCK) threads[i].state = READY;
    last_arrived = arrived, last_agreed = agreed;
    arrived = agreed = 0, polls = 0;
    released = true;
}

static void barrier(const char* operation, bool predicate, Site site) {
    current->state = AT_BLOCK, current->operation = operation, current->site = site;
    arrived++, agreed += predicate;
    if (arrived == live) release();
    pause();
}

// Once all lanes of `mask` wait, and for the same: what each brought goes to `combine`.
template <class Part>
__attribute__((noinline)) void combine_all(Warp& warp, int first, unsigned mask,
                                           void (*combine)(Part* const*, unsigned)) {
    Part* parts[32] = {};
    for (int lane = 0; lane < 32; lane++) {
        if (!(mask >> lane & 1)) continue;
        Thread& other = threads[first + lane];
        if (other.mask != mask || other.combine != current->combine ||
            other.operation != current->operation)
            return;
        parts[lane] = static_cast<Part*>(other.part);
    }
    warp.waiting &= ~mask;
    combine(parts, mask);
    polls = 0;
    for (int lane = 0; lane < 32; lane++)
        if (mask >> lane & 1) threads[first + lane].state = READY;
}

// Waits for the lanes of `mask`; the last to come runs `combine` on what each brought.
template <class Part>
void collective(const char* operation, Site site, unsigned mask, Part& part,
                void (*combine)(Part* const*, unsigned)) {
    int own = int(current - threads), first = own & ~31;
    if (!(mask >> (own - first) & 1))
        fail(site, "%s: mask %#x does not name the calling lane %d", operation, mask, own - first);
    current->state = AT_WARP, current->operation = operation, current->site = site;
    current->mask = mask, current->part = &part;
    current->combine = reinterpret_cast<void (*)()>(combine);
    Warp& warp = warps[own / 32];
    if (unsigned gone = mask & ~warp.live) {
        int lane = __builtin_ctz(gone);
        fail(site, "%s: mask %#x names lane %d, which has %s", operation, mask, lane,
             first + lane < count ? "exited" : "no thread");
    }
    warp.waiting |= 1u << (own - first);
    if ((warp.waiting & mask) == mask) combine_all(warp, first, mask, combine);
    pause();
}

static void leave() {
    int own = int(current - threads), first = own & ~31;
    for (int i = first; i < first + 32 && i < count; i++)
        if (threads[i].state == AT_WARP && threads[i].mask >> (own - first) & 1)
            fail(threads[i].site, "lane %d exited while lane %d waits for it in %s with mask %#x",
                 own - first, i - first, threads[i].operation, threads[i].mask);
    warps[own / 32].live &= ~(1u << (own - first));
    current->state = DONE;
    live--, polls = 0;
    if (live && arrived == live) release();
    pause();
}

static void fiber() {
    for (;;) {
        body();
        leave();
    }
}

static void deadlock() {
    char text[600];
    int used = 0, groups = 0;
    for (int i = 0; i < count; i++) {
        Thread& thread = threads[i];
        int same = 0, before = 0;
        for (int j = 0; j < count; j++)
            if (threads[j].state == thread.state && threads[j].operation == thread.operation &&
                threads[j].site.line == thread.site.line && threads[j].mask == thread.mask)
                same++, before += j < i;
        if (thread.state == DONE || before || ++groups > 4) continue;
        used += snprintf(text + used, sizeof text - used, "%s%d at %.20s (%.32s:%d",
                         used ? ", " : "", same, thread.operation, thread.site.file,
                         thread.site.line);
        if (thread.state == AT_WARP)
            used += snprintf(text + used, sizeof text - used, ", mask %#x", thread.mask);
        used += snprintf(text + used, sizeof text - used, ")");
    }
    report("deadlock in block (%u, %u, %u): threads wait: %s; %d exited", blockIdx.x, blockIdx.y,
           blockIdx.z, text, count - live);
}

// ---- blocks ------------------------------------------------------------------------------------

// Runs the ready lanes of a warp until none is, or a barrier sets others free.
static bool advance(int warp) {
    int first = warp * 32, lanes = count - first < 32 ? count - first : 32;
    bool ran = false, again = true;
    int turn[32];
    for (int i = 0; i < lanes; i++) turn[i] = order == BACKWARD ? lanes - 1 - i : i;
    while (again) {
        again = false;
        if (order == RANDOM) {
            for (int i = lanes - 1; i > 0; i--) std::swap(turn[i], turn[draw(i + 1)]);
            if (ran && draw(4) == 0) return true;  // another warp's turn
        }
        for (int i = 0; i < lanes; i++) {
            Thread& thread = threads[first + turn[i]];
            if (thread.state != READY) continue;
            resume(thread);
            if (failed || released) return true;
            again = ran = true;
        }
    }
    return ran;
}

static void run_block() {
    memset(__start_shared, GARBAGE, __stop_shared - __start_shared);
    memset(memory, GARBAGE, memory_bytes);
    live = count, arrived = agreed = 0, resting = 0, polls = 0;
    int last = (count - 1) / 32, turn[THREADS / 32];
    for (int i = 0; i <= last; i++) turn[i] = order == BACKWARD ? last - i : i, warps[i] = {};
    for (int i = 0; i < count; i++) {
        threads[i].state = READY, threads[i].mask = 0, piecing[i] = grouping[i] = 0;
        warps[i / 32].live |= 1u << i % 32;
    }
    while (live) {
        bool ran = false;
        released = false;
        if (order == RANDOM)
            for (int i = last; i > 0; i--) std::swap(turn[i], turn[draw(i + 1)]);
        for (int i = 0; i <= last && !released; i++) {
            ran |= advance(turn[i]);
            if (failed) return;
        }
        if (!ran && !resting) return deadlock();
        for (int i = 0; resting && i < count; i++)
            if (threads[i].state == RESTING) threads[i].state = READY, resting--;
    }
}

static void on_signal(int number, siginfo_t* about, void*) {
    if (!running) {
        signal(number, SIG_DFL);  // another's mistake: happens again, and counts
        return;
    }
    report("illegal address %p in thread (%u, %u, %u) of block (%u, %u, %u)", about->si_addr,
           threadIdx.x, threadIdx.y, threadIdx.z, blockIdx.x, blockIdx.y, blockIdx.z);
    __builtin_longjmp(scheduler, 1);
}

// Memory that ends at a page without access.
static char* guarded(size_t bytes) {
    bytes = (bytes + PAGE - 1) / PAGE * PAGE;
    void* found = mmap(nullptr, bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                       -1, 0);
    if (found == MAP_FAILED) abort();
    char* end = static_cast<char*>(found) + bytes;
    mprotect(end, PAGE, PROT_NONE);
    return end;
}

// Stacks for all threads of a block, a page without access before each. One library makes them for
// all: each such page counts as a mapping, of which a process has 65,530.
inline char* make_stacks() {
    char* made = guarded(THREADS * size_t(STACK + PAGE)) - THREADS * size_t(STACK + PAGE);
    for (int i = 0; i < THREADS; i++) mprotect(made + i * size_t(STACK + PAGE), PAGE, PROT_NONE);
    return made;
}

static void run_grid() {
    size_t blocks = size_t(gridDim.x) * gridDim.y * gridDim.z;
    unsigned* turn = static_cast<unsigned*>(malloc(blocks * sizeof(unsigned)));
    for (size_t i = 0; i < blocks; i++) turn[i] = order == BACKWARD ? blocks - 1 - i : i;
    if (order == RANDOM)
        for (size_t i = blocks - 1; i > 0; i--) std::swap(turn[i], turn[draw(i + 1)]);
    for (size_t i = 0; i < blocks && !failed; i++) {
        unsigned row = turn[i] / gridDim.x;
        blockIdx = {turn[i] % gridDim.x, row % gridDim.y, row / gridDim.y};
        run_block();
    }
    free(turn);
}

// What says whether subnormal numbers are flushed to zero, and the bits of it that do.
#ifdef __aarch64__
constexpr size_t FLUSH = 1 << 24;
static size_t control() {
    size_t word;
    asm volatile("mrs %0, fpcr" : "=r"(word));
    return word;
}
static void set_control(size_t word) { asm volatile("msr fpcr, %0" ::"r"(word)); }
#else
constexpr size_t FLUSH = 0x8040;  // of results, of operands
static size_t control() { return _mm_getcsr(); }
static void set_control(size_t word) { _mm_setcsr(unsigned(word)); }
#endif

static void run(const unsigned* grid, const unsigned* block, size_t shared_bytes) {
    if (!end) end = guarded(SHARED);
    size_t given = control();
    if (flushed) set_control(given | FLUSH);  // contexts that are made from here on have it
    gridDim = {grid[0], grid[1], grid[2]}, blockDim = {block[0], block[1], block[2]};
    count = int(blockDim.x * blockDim.y * blockDim.z);
    memory_bytes = (shared_bytes + 15) / 16 * 16;
    memory = end - memory_bytes;
    for (int i = 0; i < count; i++) {
        Thread& thread = threads[i];
        char* stack = stacks + i * size_t(STACK + PAGE);
        getcontext(&thread.start);
        thread.start.uc_stack.ss_sp = stack + PAGE;
        thread.start.uc_stack.ss_size = STACK;
        makecontext(&thread.start, fiber, 0);
        thread.fresh = true;
        thread.index = {i % blockDim.x, i / blockDim.x % blockDim.y,
                        i / blockDim.x / blockDim.y};
    }
    struct sigaction act = {}, segv, bus;
    act.sa_sigaction = on_signal;
    act.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    stack_t alternative = {}, before;
    alternative.ss_sp = handler_stack, alternative.ss_size = sizeof handler_stack;
    sigaltstack(&alternative, &before);
    sigaction(SIGSEGV, &act, &segv), sigaction(SIGBUS, &act, &bus);
    running = true;
    run_grid();
    running = false;
    set_control(given);
    sigaction(SIGSEGV, &segv, nullptr), sigaction(SIGBUS, &bus, nullptr);
    sigaltstack(&before, nullptr);
    // zeros again: what nobody has set is the same at every launch, whatever ran before
    madvise(stacks, count * size_t(STACK + PAGE), MADV_DONTNEED);
}

inline char* dynamic_shared() { return memory; }

// ---- the entry ---------------------------------------------------------------------------------

// As `struct` of Python packs it; 's': a struct of named fields, which is a kernel's only parameter.
template <class P>
constexpr char kind() {
    if (std::is_pointer_v<P>) return 'P';
    if (std::is_integral_v<P> && std::is_signed_v<P>) return sizeof(P) == 8 ? 'q' : sizeof(P) == 4 ? 'i' : '?';
    return std::is_same_v<P, float> ? 'f' : std::is_same_v<P, double> ? 'd' : std::is_class_v<P> ? 's' : '?';
}

// What emulator.py has read of a kernel's source is what the compiler has: a field's kind and place.
#define FIELD(type, name, place, letter)                                                           \
    static_assert(offsetof(type, name) == place && emulator::kind<decltype(type::name)>() == letter, \
                  "the field " #name " of " #type);

template <auto kernel>
struct Entry;

template <class... P, void (*kernel)(P...)>
struct Entry<kernel> {
    static constexpr char signature[] = {kind<P>()..., 0};
    static_assert(((kind<P>() != '?') && ...), "a kernel's parameters are pointers, numbers or a struct");

    template <size_t... i>
    static void call(std::index_sequence<i...>) {
        kernel(*static_cast<P*>(arguments[i])...);
    }

    static int launch(void** passed, const unsigned* grid, const unsigned* block,
                      size_t shared_bytes, int order_, unsigned long long seed_, char* message_,
                      size_t message_bytes_) {
        arguments = passed, order = Order(order_), seed = seed_ * 2 + 1;
        message = message_, message_bytes = message_bytes_, failed = false;
        body = [] { call(std::index_sequence_for<P...>()); };
        run(grid, block, shared_bytes);
        return failed;
    }
};

}  // namespace emulator

// What g++ calls on undefined behavior: compiled with -fsanitize, linked without its library.
extern "C" {
#define UNDEFINED(name, text, ...)                                                          \
    void __ubsan_handle_##name##_abort(void* about, ##__VA_ARGS__) {                        \
        emulator::fail(*static_cast<emulator::Site*>(about), text);                         \
    }
UNDEFINED(out_of_bounds, "index out of bounds", void*)
UNDEFINED(shift_out_of_bounds, "shift by too much", void*, void*)
UNDEFINED(divrem_overflow, "division by zero", void*, void*)
UNDEFINED(add_overflow, "signed overflow", void*, void*)
UNDEFINED(sub_overflow, "signed overflow", void*, void*)
UNDEFINED(mul_overflow, "signed overflow", void*, void*)
UNDEFINED(negate_overflow, "signed overflow", void*)
UNDEFINED(type_mismatch_v1, "misaligned address", void*)
#undef UNDEFINED
}

// ---- barriers and warps -------------------------------------------------------------------------

inline void __syncthreads(SITE) { emulator::barrier("__syncthreads", false, site); }
inline int __syncthreads_or(int predicate, SITE) {
    emulator::barrier("__syncthreads_or", predicate, site);
    return emulator::last_agreed > 0;
}
inline int __syncthreads_and(int predicate, SITE) {
    emulator::barrier("__syncthreads_and", predicate, site);
    return emulator::last_agreed == emulator::last_arrived;
}
inline int __syncthreads_count(int predicate, SITE) {
    emulator::barrier("__syncthreads_count", predicate, site);
    return emulator::last_agreed;
}

namespace emulator {

constexpr unsigned FULL = 0xffffffffu;

inline int lane() { return int(current - threads) & 31; }

struct Nothing {};

template <class T>
struct Exchange {
    T value, result;
    int source;
};

// Value of lane `source`, or garbage if it takes no part.
template <class T>
T shuffle(const char* operation, Site site, unsigned mask, T value, int source) {
    Exchange<T> part = {value, value, source};
    collective<Exchange<T>>(operation, site, mask, part, [](Exchange<T>* const* lanes, unsigned) {
        for (int i = 0; i < 32; i++) {
            if (!lanes[i]) continue;
            if (Exchange<T>* from = lanes[lanes[i]->source])
                lanes[i]->result = from->value;
            else
                memset(&lanes[i]->result, GARBAGE, sizeof(T));
        }
    });
    return part.result;
}

inline int last_of_segment(int width) { return lane() | (width - 1); }
inline int first_of_segment(int width) { return lane() & ~(width - 1); }

// f of the values of all lanes, in the order of the lanes.
template <class T, class F>
T reduce(const char* operation, Site site, unsigned mask, T value, F) {
    Exchange<T> part = {value, value, 0};
    collective<Exchange<T>>(operation, site, mask, part, [](Exchange<T>* const* lanes, unsigned) {
        T total = T();
        bool any = false;
        for (int i = 0; i < 32; i++)
            if (lanes[i]) total = any ? F()(total, lanes[i]->value) : lanes[i]->value, any = true;
        for (int i = 0; i < 32; i++)
            if (lanes[i]) lanes[i]->result = total;
    });
    return part.result;
}

struct Add { template <class T> T operator()(T a, T b) { return T(unsigned(a) + unsigned(b)); } };
struct Min { template <class T> T operator()(T a, T b) { return a < b ? a : b; } };
struct Max { template <class T> T operator()(T a, T b) { return a > b ? a : b; } };
struct And { template <class T> T operator()(T a, T b) { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) { return a ^ b; } };

inline unsigned ballot(const char* operation, Site site, unsigned mask, int predicate) {
    return reduce(operation, site, mask, unsigned(predicate != 0) << lane(), Or());
}

}  // namespace emulator

inline void __syncwarp(unsigned mask = emulator::FULL, SITE) {
    emulator::Nothing part;
    emulator::collective<emulator::Nothing>("__syncwarp", site, mask, part,
                                            [](emulator::Nothing* const*, unsigned) {});
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SITE) {
    return emulator::ballot("__ballot_sync", site, mask, predicate);
}
inline int __any_sync(unsigned mask, int predicate, SITE) {
    return emulator::ballot("__any_sync", site, mask, predicate) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SITE) {
    return emulator::ballot("__all_sync", site, mask, predicate) == mask;
}

#define FOR_TYPE(T)                                                                                \
    inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, SITE) {               \
        source = emulator::first_of_segment(width) | (source & (width - 1));                       \
        return emulator::shuffle("__shfl_sync", site, mask, value, source);                        \
    }                                                                                              \
    inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SITE) {        \
        int source = emulator::lane() - int(delta);                                                \
        if (source < emulator::first_of_segment(width)) source = emulator::lane();                 \
        return emulator::shuffle("__shfl_up_sync", site, mask, value, source);                     \
    }                                                                                              \
    inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SITE) {      \
        int source = emulator::lane() + int(delta);                                                \
        if (source > emulator::last_of_segment(width)) source = emulator::lane();                  \
        return emulator::shuffle("__shfl_down_sync", site, mask, value, source);                   \
    }                                                                                              \
    inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SITE) {            \
        int source = emulator::lane() ^ (lanes & 31);                                              \
        if (source > emulator::last_of_segment(width)) source = emulator::lane();                  \
        return emulator::shuffle("__shfl_xor_sync", site, mask, value, source);                    \
    }                                                                                              \
    inline unsigned __match_any_sync(unsigned mask, T value, SITE) {                               \
        using Part = std::pair<T, unsigned>;                                                       \
        Part part = {value, 0};                                                                    \
        emulator::collective<Part>("__match_any_sync", site, mask, part,                           \
                                   [](Part* const* lanes, unsigned) {                              \
            for (int i = 0; i < 32; i++)                                                           \
                for (int j = 0; lanes[i] && j < 32; j++)                                           \
                    if (lanes[j] && !memcmp(&lanes[i]->first, &lanes[j]->first, sizeof(T)))        \
                        lanes[i]->second |= 1u << j;                                               \
        });                                                                                        \
        return part.second;                                                                        \
    }
FOR_TYPE(int)
FOR_TYPE(unsigned)
FOR_TYPE(long)
FOR_TYPE(unsigned long)
FOR_TYPE(long long)
FOR_TYPE(unsigned long long)
FOR_TYPE(float)
FOR_TYPE(double)
#undef FOR_TYPE

#define REDUCE(name, T, F)                                                    \
    inline T __reduce_##name##_sync(unsigned mask, T value, SITE) {           \
        return emulator::reduce("__reduce_" #name "_sync", site, mask, value, emulator::F()); \
    }
REDUCE(add, int, Add)
REDUCE(add, unsigned, Add)
REDUCE(min, int, Min)
REDUCE(min, unsigned, Min)
REDUCE(max, int, Max)
REDUCE(max, unsigned, Max)
REDUCE(and, unsigned, And)
REDUCE(or, unsigned, Or)
REDUCE(xor, unsigned, Xor)
#undef REDUCE

// ---- matrix instructions ------------------------------------------------------------------------

namespace emulator {

struct Fragments {
    unsigned a[4], b[2];
    void* c;
    const void* decode;
};

// C += A B by the fragments of m16n8: a register holds E consecutive k, K = 8 E; four lanes a row.
template <class T, class S, int E, class DecodeA, class DecodeB>
__attribute__((optimize("O3"), no_sanitize("undefined")))
void multiply(Fragments* const* lanes, unsigned) {
    T a[16][8 * E], b[8][8 * E];
    for (int lane = 0; lane < 32; lane++)
        for (int upper = 0; upper < 2; upper++)
            for (int e = 0; e < E; e++) {
                int row = lane / 4, k = upper * 4 * E + lane % 4 * E + e, shift = e * (32 / E);
                a[row][k] = DecodeA()(lanes[lane]->a[2 * upper] >> shift);
                a[row + 8][k] = DecodeA()(lanes[lane]->a[2 * upper + 1] >> shift);
                b[row][k] = DecodeB()(lanes[lane]->b[upper] >> shift);
            }
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            S& c = static_cast<S*>(lanes[row % 8 * 4 + column / 2]->c)[row / 8 * 2 + column % 2];
            T total = T(c);
            for (int k = 0; k < 8 * E; k++) total += a[row][k] * b[column][k];
            c = S(total);
        }
}

struct Unsigned8 { unsigned operator()(unsigned bits) { return bits & 255; } };
struct Signed8 { unsigned operator()(unsigned bits) { return unsigned(int((signed char)bits)); } };
struct Bfloat16 {
    double operator()(unsigned bits) {
        float value;
        bits <<= 16;
        memcpy(&value, &bits, 4);
        return value;
    }
};

// C += A B for bits: 128 of them are a row of A and a column of B.
__attribute__((optimize("O3"), no_sanitize("undefined")))
inline void multiply_bits(Fragments* const* lanes, unsigned) {
    for (int lane = 0; lane < 32; lane++)
        for (int k = 0; k < 4; k++)
            for (int part = 0; part < 4; part++) {
                unsigned a = lanes[lane / 4 * 4 + k]->a[part / 2];
                unsigned b = lanes[(lane % 4 * 2 + part % 2) * 4 + k]->b[0];
                static_cast<int*>(lanes[lane]->c)[part] += __builtin_popcount(a & b);
            }
}

// C += A B for halves, m16n8k16. Float32, one product after the other: k, k + 1, k + 8, k + 9 of each
// lane's in turn.
template <class Decode>
__attribute__((optimize("O3"), no_sanitize("undefined")))
void multiply_halves(Fragments* const* lanes, unsigned) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4, k = lane % 4 * 4 + i, half = i / 2, shift = i % 2 * 16;
            const Decode& decode = *static_cast<const Decode*>(lanes[lane]->decode);
            a[row][k] = decode((unsigned short)(lanes[lane]->a[2 * half] >> shift));
            a[row + 8][k] = decode((unsigned short)(lanes[lane]->a[2 * half + 1] >> shift));
            b[k][row] = decode((unsigned short)(lanes[lane]->b[half] >> shift));
        }
    for (int row = 0; row < 16; row++) {
        float total[8];
        float* c[4];
        for (int t = 0; t < 4; t++) {
            c[t] = static_cast<float*>(lanes[row % 8 * 4 + t]->c) + row / 8 * 2;
            total[2 * t] = c[t][0], total[2 * t + 1] = c[t][1];
        }
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) total[column] += a[row][k] * b[k][column];
        for (int t = 0; t < 4; t++) c[t][0] = total[2 * t], c[t][1] = total[2 * t + 1];
    }
}

// mma.sync.aligned.m16n8k128.row.col.s32.b1.b1.s32.and.popc
inline void mma_m16n8k128_b1(int (&c)[4], unsigned a0, unsigned a1, unsigned b, SITE) {
    Fragments part = {{a0, a1}, {b}, c};
    collective("mma b1", site, FULL, part, multiply_bits);
}

// mma.sync.aligned.m16n8k16.row.col.f32 of what `decode` makes float32 of: f16 or bf16.
template <class Decode>
void mma_m16n8k16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                  unsigned b1, const Decode& decode, SITE) {
    Fragments part = {{a0, a1, a2, a3}, {b0, b1}, c, &decode};
    collective("mma", site, FULL, part, multiply_halves<Decode>);
}

// mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32; sums wrap around.
inline void mma_m16n8k32_u8s8(int (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                              unsigned b0, unsigned b1, SITE) {
    Fragments part = {{a0, a1, a2, a3}, {b0, b1}, c};
    collective("mma u8 s8", site, FULL, part, multiply<unsigned, int, 4, Unsigned8, Signed8>);
}

// mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32; sums in double, rounded once.
inline void mma_m16n8k16_bf16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                              unsigned b0, unsigned b1, SITE) {
    Fragments part = {{a0, a1, a2, a3}, {b0, b1}, c};
    collective("mma bf16", site, FULL, part, multiply<double, float, 2, Bfloat16, Bfloat16>);
}

}  // namespace emulator

// ---- bits, conversions, arithmetic --------------------------------------------------------------

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline unsigned __brev(unsigned x) {
    unsigned y = 0;
    for (int i = 0; i < 32; i++) y |= (x >> i & 1) << (31 - i);
    return y;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)high << 32 | low) << (shift & 31) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((unsigned long long)high << 32 | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector, SITE) {
    if (selector & 0x8888) emulator::fail(site, "__byte_perm: selector %#x, digits to 7", selector);
    unsigned long long bytes = (unsigned long long)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++)
        result |= unsigned(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
    return result;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
    for (int i = 0; i < 32; i += 8) c += (a >> i & 255) * (b >> i & 255);
    return c;
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8)
        c = int(unsigned(c) + unsigned((signed char)(a >> i) * (signed char)(b >> i)));
    return c;
}

namespace emulator {

template <class To, class From>
To bits(From value) {
    static_assert(sizeof(To) == sizeof(From));
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}

// Already rounded; saturates. NaN: 0 from float to 32 bits, else the least integer.
template <class I, class F>
I integer(F value) {
    constexpr F limit = sizeof(I) == 4 ? F(2147483648.0) : F(9223372036854775808.0);
    constexpr I least = I(1ull << (sizeof(I) * 8 - 1));
    if (value != value) return sizeof(I) == 4 && sizeof(F) == 4 ? 0 : least;
    return value >= limit ? I(~least) : value < -limit ? least : I(value);
}

}  // namespace emulator

inline unsigned __float_as_uint(float x) { return emulator::bits<unsigned>(x); }
inline int __float_as_int(float x) { return emulator::bits<int>(x); }
inline float __uint_as_float(unsigned x) { return emulator::bits<float>(x); }
inline float __int_as_float(int x) { return emulator::bits<float>(x); }
inline long long __double_as_longlong(double x) { return emulator::bits<long long>(x); }
inline double __longlong_as_double(long long x) { return emulator::bits<double>(x); }
inline int __float2int_rn(float x) { return emulator::integer<int>(rintf(x)); }
inline int __float2int_rd(float x) { return emulator::integer<int>(floorf(x)); }
inline int __float2int_ru(float x) { return emulator::integer<int>(ceilf(x)); }
inline int __float2int_rz(float x) { return emulator::integer<int>(truncf(x)); }
inline int __double2int_rn(double x) { return emulator::integer<int>(rint(x)); }
inline long long __float2ll_rn(float x) { return emulator::integer<long long>(rintf(x)); }
inline long long __double2ll_rn(double x) { return emulator::integer<long long>(rint(x)); }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline float __ll2float_rn(long long x) { return float(x); }
inline double __ll2double_rn(long long x) { return double(x); }
inline float __double2float_rn(double x) { return float(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return float(1.0 / sqrt(double(x))); }
// glibc declares functions of these names
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f

#define SMALLER(A, B, T)                                   \
    inline T min(A a, B b) { return (T)a < (T)b ? a : b; } \
    inline T max(A a, B b) { return (T)a < (T)b ? b : a; }
SMALLER(int, int, int)
SMALLER(unsigned, unsigned, unsigned)
SMALLER(int, unsigned, unsigned)
SMALLER(unsigned, int, unsigned)
SMALLER(long long, long long, long long)
SMALLER(unsigned long long, unsigned long long, unsigned long long)
#undef SMALLER
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

// ---- memory -------------------------------------------------------------------------------------

namespace emulator {

// The address, unless it is one of shared memory, which these loads cannot read.
template <class T>
const T* in_global(const T* address, Site site) {
    auto at = reinterpret_cast<const char*>(address);
    if ((at >= __start_shared && at < __stop_shared) || (at >= memory && at < end))
        fail(site, "a load from global memory of an address in shared memory");
    return address;
}

}  // namespace emulator

template <class T> T __ldg(const T* address, SITE) { return *emulator::in_global(address, site); }
template <class T> T __ldca(const T* address, SITE) { return *emulator::in_global(address, site); }
template <class T> T __ldcg(const T* address, SITE) { return *emulator::in_global(address, site); }
template <class T> T __ldcs(const T* address, SITE) { return *emulator::in_global(address, site); }
template <class T> T __ldcv(const T* address, SITE) { return *emulator::in_global(address, site); }
template <class T> void __stcg(T* address, std::common_type_t<T> value) { *address = value; }
template <class T> void __stcs(T* address, std::common_type_t<T> value) { *address = value; }
template <class T> void __stwt(T* address, std::common_type_t<T> value) { *address = value; }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

namespace emulator {

// In random order others may come first; in any order now and then, for those who spin.
template <class T, class F>
T atomic(const char* operation, Site site, T* address, F change) {
    if ((order == RANDOM && draw(2)) || ++polls % 1024 == 0) rest(operation, site);
    T before = *address;
    *address = change(before);
    return before;
}

}  // namespace emulator

// The types of the CUDA C++ Programming Guide: no long long for Add, Exch and CAS.
#define ATOMIC(name, T, expression)                                                    \
    inline T atomic##name(T* address, T value, SITE) {                                 \
        return emulator::atomic("atomic" #name, site, address,                         \
                                [value](T old) { return (T)(expression); });             \
    }
ATOMIC(Add, int, unsigned(old) + unsigned(value))
ATOMIC(Add, unsigned, old + value)
ATOMIC(Add, unsigned long long, old + value)
ATOMIC(Add, float, old + value)
ATOMIC(Add, double, old + value)
ATOMIC(Sub, int, unsigned(old) - unsigned(value))
ATOMIC(Sub, unsigned, old - value)
ATOMIC(Exch, int, value)
ATOMIC(Exch, unsigned, value)
ATOMIC(Exch, unsigned long long, value)
ATOMIC(Exch, float, value)
#define ATOMIC_ORDERED(T)                  \
    ATOMIC(Max, T, old < value ? value : old) \
    ATOMIC(Min, T, value < old ? value : old) \
    ATOMIC(And, T, old & value)            \
    ATOMIC(Or, T, old | value)             \
    ATOMIC(Xor, T, old ^ value)
ATOMIC_ORDERED(int)
ATOMIC_ORDERED(unsigned)
ATOMIC_ORDERED(long long)
ATOMIC_ORDERED(unsigned long long)
#undef ATOMIC_ORDERED
#undef ATOMIC
#define ATOMIC_CAS(T)                                                        \
    inline T atomicCAS(T* address, T expected, T value, SITE) {              \
        return emulator::atomic("atomicCAS", site, address, [=](T old) {     \
            return old == expected ? value : old;                            \
        });                                                                  \
    }
ATOMIC_CAS(int)
ATOMIC_CAS(unsigned)
ATOMIC_CAS(unsigned long long)
#undef ATOMIC_CAS

inline void __nanosleep(unsigned, SITE) { emulator::rest("__nanosleep", site); }
inline long long clock64() { return emulator::now++; }
namespace emulator {
inline unsigned long long globaltimer() {  // %globaltimer, for stamps (benchmarks/stamps.py)
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000ull + now.tv_nsec;
}
}  // namespace emulator
[[noreturn]] inline void __trap(SITE) { emulator::fail(site, "__trap"); }
// ---- copies that a barrier in shared memory waits for (common.cuh) -----------------------------

namespace emulator {

struct Copy {
    void* to;
    const void* from;
    size_t bytes;
    void* barrier;
};
static Copy copies[256];
static int copying;

}  // namespace emulator

// The bytes come when they are waited for; until then garbage is there.
inline void emulated_copy(void* to, const void* from, size_t bytes, void* barrier, SITE) {
    if (emulator::copying == 256) emulator::fail(site, "copy: 256 that nobody waits for");
    if ((reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from) | bytes) % 16)
        emulator::fail(site, "copy: %p to %p, %zu bytes: not aligned", from, to, bytes);
    memset(to, emulator::GARBAGE, bytes);
    emulator::copies[emulator::copying++] = {to, from, bytes, barrier};
}

// barrier: how many phases are over.
inline void emulated_wait(unsigned long long* barrier, unsigned parity, SITE) {
    if ((*barrier & 1) != parity) return;
    int found = 0, kept = 0;
    for (int i = 0; i < emulator::copying; i++) {
        emulator::Copy& copy = emulator::copies[i];
        if (copy.barrier == barrier) memcpy(copy.to, copy.from, copy.bytes), found++;
        else emulator::copies[kept++] = copy;
    }
    emulator::copying = kept;
    if (!found) emulator::fail(site, "wait: for a phase that nothing was copied in");
    ++*barrier;
}

// ---- copies that a thread waits for itself (common.cuh) ----------------------------------------

// As `emulated_copy`; zeros unless `in`.
inline void emulated_copy_async(void* to, const void* from, size_t bytes, bool in, SITE) {
    int thread = int(emulator::current - emulator::threads);
    if (emulator::piecing[thread] == 64) emulator::fail(site, "piece: 64 that nobody waits for");
    if ((reinterpret_cast<size_t>(to) | reinterpret_cast<size_t>(from)) % bytes)
        emulator::fail(site, "piece: %p to %p, %zu bytes: not aligned", from, to, bytes);
    if (in) emulator::in_global(static_cast<const char*>(from), site);
    memset(to, emulator::GARBAGE, bytes);
    emulator::pieces[thread][emulator::piecing[thread]++] = {to, from, bytes, in, emulator::grouping[thread]};
}

inline void emulated_async_commit() { emulator::grouping[emulator::current - emulator::threads]++; }

// For pieces of all groups before the last `but`; -1 also for those of no group.
inline void emulated_async_wait(int but = -1) {
    int thread = int(emulator::current - emulator::threads), last = emulator::grouping[thread] - but, left = 0;
    for (int i = 0; i < emulator::piecing[thread]; i++) {
        emulator::Piece& piece = emulator::pieces[thread][i];
        if (piece.group >= last) emulator::pieces[thread][left++] = piece;
        else if (piece.in) memcpy(piece.to, piece.from, piece.bytes);
        else memset(piece.to, 0, piece.bytes);
    }
    emulator::piecing[thread] = left;
}

#undef SITE
