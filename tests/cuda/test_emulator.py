"""The emulator runs correct kernels as a GPU would, and rejects wrong ones.

This file is longer than most: it is a list of small kernels, one for each thing that may go wrong.
"""

import time

import numpy as np
import pytest
import torch

from kvindex_cuda.runtime import launch as launching
from kvindex_cuda.runtime.constants import constants
from tests.cuda.emulator import ORDERS, available, compile_text, emulated
from tests.support.helpers import mostly_slow

pytestmark = pytest.mark.skipif(not available(), reason="needs g++ to compile the emulator")


def run(text, grid, block, *arguments, shared_bytes=0, name="kernel", defines=(), **settings):
    """Pass arguments as `kvindex_cuda.runtime.launch.launch` does."""
    passed = [part.data_ptr() if isinstance(part, torch.Tensor) else part for part in arguments]
    passed = [0 if part is None else part for part in passed]
    defines = (*constants("text.cu").items(), *defines)
    compile_text(text, name, defines, **settings)(grid, block, passed, shared_bytes)


@pytest.fixture(params=ORDERS)
def order(request):
    return request.param


SUMS = """
__device__ __forceinline__ float warp_sum(float value) {
    #pragma unroll
    for (int step = 16; step; step /= 2) value += __shfl_xor_sync(0xffffffff, value, step);
    return value;
}
extern "C" __global__ void __launch_bounds__(THREADS)
kernel(const float* __restrict__ rows, float* sums, long long columns, float scale) {
    __shared__ float partial[THREADS / 32];
    const float* row = rows + blockIdx.x * columns;
    float value = 0;
    for (long long i = threadIdx.x; i < columns; i += blockDim.x) value += __ldg(row + i);
    value = warp_sum(value);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = value;
    __syncthreads();
    if (threadIdx.x < 32) {
        value = warp_sum(threadIdx.x < THREADS / 32 ? partial[threadIdx.x] : 0.f);
        if (threadIdx.x == 0) sums[blockIdx.x] = scale * value;
    }
}
"""


def test_block_reduction(order):
    rows, sums = torch.randint(-9, 9, (7, 1000)).float(), torch.full((7,), torch.nan)
    run(SUMS, (7,), (256,), rows, sums, 1000, 0.5, defines=(("THREADS", 256),), order=order)
    assert torch.equal(sums, rows.sum(1) / 2)


SHUFFLES = """
extern "C" __global__ void kernel(long long* out) {
    int lane = threadIdx.x;
    long long value = 100000000000ll + lane;
    out[lane] = __shfl_up_sync(0xffffffff, value, 3, 8);
    out[32 + lane] = __shfl_down_sync(0xffffffff, value, 3, 8);
    out[64 + lane] = __shfl_sync(0xffffffff, value, 9, 8);
    out[96 + lane] = (long long)__shfl_xor_sync(0xffffffff, double(value), 5);
    if (lane < 16) out[128 + lane] = __reduce_max_sync(0xffff, lane * 7 % 16);
    else out[128 + lane] = __reduce_add_sync(0xffff0000, -lane);
}
"""


@pytest.mark.slow
def test_shuffles_within_segments(order):
    out = torch.zeros(5, 32, dtype=torch.long)
    run(SHUFFLES, (1,), (32,), out, order=order)
    lane = torch.arange(32)
    sources = (
        torch.where(lane % 8 >= 3, lane - 3, lane),
        torch.where(lane % 8 < 5, lane + 3, lane),
        lane // 8 * 8 + 1,
        lane ^ 5,
    )
    assert torch.equal(out[:4], 10**11 + torch.stack(sources))
    assert out[4].tolist() == [15] * 16 + [-sum(range(16, 32))] * 16


INTEGER_MMA = """
extern "C" __global__ void kernel(const unsigned char* a, const signed char* b, int* out) {
    int lane = threadIdx.x % 32, row = lane / 4, k = 4 * (lane % 4);
    int c[4] = {1, 1, 1, 1};
    const unsigned* a_row = (const unsigned*)(a + row * 32 + k);
    const unsigned* b_row = (const unsigned*)(b + row * 32 + k);
    emulator::mma_m16n8k32_u8s8(c, a_row[0], a_row[64], a_row[4], a_row[68], b_row[0], b_row[4]);
    for (int i = 0; i < 4; i++) out[(row + i / 2 * 8) * 8 + 2 * (lane % 4) + i % 2] = c[i];
}
"""

BFLOAT_MMA = """
extern "C" __global__ void kernel(const unsigned short* a, const unsigned short* b, float* out) {
    int lane = threadIdx.x % 32, row = lane / 4, k = 2 * (lane % 4);
    float c[4] = {1, 1, 1, 1};
    const unsigned* a_row = (const unsigned*)(a + row * 16 + k);
    const unsigned* b_row = (const unsigned*)(b + row * 16 + k);
    emulator::mma_m16n8k16_bf16(c, a_row[0], a_row[64], a_row[4], a_row[68], b_row[0], b_row[4]);
    for (int i = 0; i < 4; i++) out[(row + i / 2 * 8) * 8 + 2 * (lane % 4) + i % 2] = c[i];
}
"""


@pytest.mark.slow
def test_integer_matrix_product(order):
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 256, (16, 32)), rng.integers(-128, 128, (8, 32))  # b: n, k
    out = torch.zeros(16, 8, dtype=torch.int32)
    operands = torch.from_numpy(a).to(torch.uint8), torch.from_numpy(b).to(torch.int8)
    run(INTEGER_MMA, (1,), (32,), *operands, out, order=order)
    assert np.array_equal(out.numpy(), a @ b.T + 1)


@pytest.mark.slow
def test_bfloat16_matrix_product(order):
    rng = np.random.default_rng(0)
    a, b = rng.integers(-255, 256, (16, 16)), rng.integers(-255, 256, (8, 16))
    out = torch.zeros(16, 8)
    operands = (torch.from_numpy(part).to(torch.bfloat16) for part in (a, b))
    run(BFLOAT_MMA, (1,), (32,), *operands, out, order=order)
    assert np.array_equal(out.numpy(), a @ b.T + 1)


VOTES = """
extern "C" __global__ void kernel(const int* values, unsigned* out) {
    int i = threadIdx.x, lane = i % 32;
    if (lane >= 20) return;
    unsigned mask = 0xfffff;
    out[i] = __ballot_sync(mask, values[i] > 1);
    out[64 + i] = __match_any_sync(mask, values[i]);
    out[128 + i] = 2 * __any_sync(mask, values[i] == 3) + __all_sync(mask, values[i] < 3);
    out[192 + i] = __syncthreads_count(values[i] == 0) * 4 + __syncthreads_or(values[i] == 3) * 2 +
                   __syncthreads_and(values[i] < 3);
}
"""


@pytest.mark.slow
def test_votes(order):
    values = torch.randint(0, 3, (2, 32), dtype=torch.int32)
    values[1, 4] = 3
    out = torch.zeros(4, 2, 32, dtype=torch.int32)
    run(VOTES, (1,), (64,), values, out, order=order)
    part = values[:, :20]
    weights = 2 ** torch.arange(20)
    assert torch.equal(out[0, :, :20].long(), ((part > 1) * weights).sum(1, True).expand(2, 20))
    same = part[:, :, None] == part[:, None]
    assert torch.equal(out[1, :, :20].long(), (same * weights).sum(2))
    assert out[2, :, :20].tolist() == [[1] * 20, [2] * 20]
    assert (out[3, :, :20] == 4 * (part == 0).sum() + 2).all()


BITS = """
extern "C" __global__ void kernel(long long* out) {
    out[0] = __popc(0xf0f0u) * 100 + __clz(1) + __ffs(8);
    out[1] = __brev(3u);
    out[2] = __funnelshift_l(0x80000000u, 1u, 1);
    out[3] = __funnelshift_r(0x80000000u, 1u, 31);
    out[4] = __byte_perm(0x33221100u, 0x77665544u, 0x7410);
    out[5] = __dp4a(0x01ff02fe, 0x01010101, 5);
    out[6] = __dp4a(0x01ff02feu, 0x01010101u, 5u);
    out[7] = __float2int_rn(2.5f) * 1000 + __float2int_rn(-3.5f);
    out[8] = __float2int_rn(1e20f);
    out[9] = __float_as_uint(-1.0f);
    uint4 four = make_uint4(1, 2, 3, 4);
    out[10] = (four.x + four.w) * 100 + min(3, 4) + max(5ll, 6ll) + (int)rsqrtf(0.25f);
    int64_t wide = 1; uint64_t more = uint64_t(wide) << 40;
    out[11] = more;
}
"""


@pytest.mark.slow
def test_bits_and_conversions():
    out = torch.zeros(12, dtype=torch.long)
    run(BITS, (1,), (1,), out)
    expected = [800 + 31 + 4, 3 << 30, 3, 3, 0x77441100, 1 - 1 + 2 - 2 + 5, 1 + 255 + 2 + 254 + 5]
    expected += [2000 - 4, 2**31 - 1, 0xBF800000, 511, 1 << 40]
    assert out.tolist() == expected


SMALL = """
extern "C" __global__ void kernel(const float* x, float* out) {
    out[0] = x[0] * 0.5f, out[1] = x[1] * 16777216.0f, out[2] = x[1];
}
"""


@pytest.mark.parametrize("doubles", [False, True])
def test_subnormal_numbers_are_zero_in_a_kernel_without_doubles(doubles):
    smallest = torch.finfo(torch.float32).tiny
    x, out = torch.tensor([smallest, smallest / 4]), torch.ones(3)
    run(SMALL + "typedef double wide;" * doubles, (1,), (1,), x, out)
    kept = [smallest / 2, smallest * 2**22] if doubles else [0, 0]
    assert out.tolist() == [*kept, smallest / 4]
    assert (x[1] * 2).item() == smallest / 2


LAST_BLOCK = """
extern "C" __global__ void kernel(const int* values, int* counts, unsigned* done,
                                  int* total, long long n) {
    __shared__ bool last;
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(counts + values[i], 1);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(done, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    for (int j = threadIdx.x; j < 10; j += blockDim.x) atomicMax(total, counts[j]);
}
"""


@pytest.mark.slow
def test_atomics_and_the_last_block(order):
    values = torch.randint(0, 10, (1000,), dtype=torch.int32)
    counts, done, most = (torch.zeros(n, dtype=torch.int32) for n in (10, 1, 1))
    run(LAST_BLOCK, (8,), (128,), values, counts, done, most, 1000, order=order)
    assert torch.equal(counts.long(), values.bincount(minlength=10))
    assert (done, most) == (8, counts.max())


REVERSE = """
extern "C" __global__ void kernel(const int* in, int* out) {
    DYNAMIC_SHARED(memory);
    int* staged = (int*)memory;
    int x = blockIdx.x * blockDim.x + threadIdx.x, y = blockIdx.y * blockDim.y + threadIdx.y;
    int width = gridDim.x * blockDim.x, here = threadIdx.y * blockDim.x + threadIdx.x;
    staged[here] = in[y * width + x];
    BARRIER;
    out[y * width + x] = staged[blockDim.x * blockDim.y - 1 - here];
}
"""


def reversed_tiles(barrier, shared_bytes=256, **settings):
    """64 threads copy a tile of 8 x 8, and read what the opposite thread wrote."""
    tiles = torch.arange(3 * 8 * 2 * 8, dtype=torch.int32).view(3, 8, 2, 8)
    out = torch.zeros_like(tiles)
    text = REVERSE.replace("BARRIER", barrier)
    run(text, (2, 3), (8, 8), tiles, out, shared_bytes=shared_bytes, **settings)
    return torch.equal(out, tiles.flip(1, 3)), out


def test_dynamic_shared_memory_in_a_grid_of_two_dimensions(order):
    assert reversed_tiles("__syncthreads()", order=order)[0]


def test_a_missing_barrier_shows(order):
    right, out = reversed_tiles("", order=order)
    assert not right
    assert (out == int.from_bytes(b"\xa5" * 4, "little", signed=True)).any()


def test_a_barrier_of_the_warp_where_the_block_needs_one_shows(order):
    assert not reversed_tiles("__syncwarp()", order=order)[0]


WRITE_AFTER_READ = """
extern "C" __global__ void kernel(int* out) {
    __shared__ int value;
    for (int i = 0; i < 3; i++) {
        if (threadIdx.x == WRITER) value = i;
        __syncthreads();
        out[threadIdx.x] = out[threadIdx.x] * 10 + value;
        BARRIER;
    }
}
"""


@pytest.mark.parametrize("writer", mostly_slow([0, 127], 0))
def test_a_barrier_missing_between_reading_and_the_next_write_shows(writer):
    def outcomes(barrier):
        for order in ORDERS:
            out = torch.zeros(128, dtype=torch.int32)
            text = WRITE_AFTER_READ.replace("BARRIER", barrier)
            run(text, (1,), (128,), out, defines=(("WRITER", writer),), order=order)
            yield (out == 12).all()

    assert all(outcomes("__syncthreads()"))
    assert not all(outcomes(""))


def test_shared_memory_is_garbage_in_every_block():
    text = """
    template <int n> __device__ int* own() { __shared__ int kept[n]; return kept; }
    extern "C" __global__ void kernel(int* out) {
        DYNAMIC_SHARED(memory);
        out[2 * blockIdx.x] = *own<4>();
        out[2 * blockIdx.x + 1] = *(int*)memory;
        *own<4>() = *(int*)memory = 7;
    }
    """
    out = torch.zeros(6, dtype=torch.int32)
    run(text, (3,), (1,), out, shared_bytes=16)
    assert out.tolist() == [int.from_bytes(b"\xa5" * 4, "little", signed=True)] * 6


MISTAKES = {
    "deadlock.*62 at __syncthreads .text.cu:13.* 1 at __shfl_sync .text.cu:12, mask 0x3": """
        if (i == 32) __shfl_sync(3u, i, 0);
        else if (i != 33) __syncthreads();
        else __match_any_sync(6u, i);""",
    "barriers differ: __syncthreads .*__syncthreads_or": """
        if (i < 32) __syncthreads();
        else __syncthreads_or(1);""",
    "barriers differ: __syncthreads at text.cu:12 and __syncthreads at text.cu:13": """
        if (i < 32) __syncthreads();
        else __syncthreads();""",
    "mask 0xffffffff names lane 3, which has exited|lane 3 exited while lane": """
        if (i != 3) __ballot_sync(0xffffffff, 1);""",
    "mask 0xffffffff names lane 2, which has no thread": """
        if (i >= 64) __syncwarp();""",
    "mask 0x1 does not name the calling lane 1": """
        if (i < 2) __any_sync(1u, 1);""",
    "deadlock.*32 at __shfl_xor_sync.*32 at __shfl_up_sync": """
        if (i % 2) __shfl_up_sync(0xffffffff, i, 1);
        else __shfl_xor_sync(0xffffffff, i, 1);""",
    "index out of bounds at text.cu:12, thread .6[0-3], 0, 0. of block .0, 0, 0.": """
        __shared__ int few[60]; few[i] = 1;""",
    "misaligned address at text.cu:12": """
        *(int2*)(out + 1) = make_int2(1, 2);""",
    "shift by too much": "out[0] = 1 << i;",
    "illegal address 0x[0-9a-f]+ in thread": "DYNAMIC_SHARED(memory); memory[5 * i] = 1;",
    "illegal address .nil. in thread": "((int* volatile*)out)[0][0] = 1;",
    "illegal address .* in thread": "((volatile char*)out)[1ll << 50] = 1;",
    "atomicAdd: polls|__nanosleep: polls": "while (atomicAdd(out, 0) == 0) __nanosleep(100);",
}


USUAL = ("barriers differ: __syncthreads .*or", "index out", "misaligned", "illegal address .nil.")


@pytest.mark.parametrize(
    "message", mostly_slow(MISTAKES, *(one for one in MISTAKES if one.startswith(USUAL)))
)
def test_mistakes_end_the_launch_with_a_message(message, order):
    text = "\n" * 9 + 'extern "C" __global__ void kernel(int* out) {\nint i = threadIdx.x;'
    body = MISTAKES[message].lstrip("\n")
    launch = compile_text(f"{text}\n{body}\n}}", "kernel", order=order)
    threads = 66 if "no thread" in message else 64
    out = torch.zeros(100, dtype=torch.int32)
    for _ in range(2):  # and leaves nothing behind
        with pytest.raises(RuntimeError, match=message):
            launch((1,), (threads,), [out.data_ptr()], 256)


PIECES = """
#include "common/common.cuh"
extern "C" __global__ void kernel(const uint4* from, uint4* out, i64 in) {
    __shared__ uint4 values[32];
    copy_async<16>(shared_place(values + threadIdx.x), from + threadIdx.x, threadIdx.x < in);
    if (WAIT) async_wait();
    __syncwarp();
    out[threadIdx.x] = values[threadIdx.x ^ 1];
}
"""


@pytest.mark.parametrize("wait", mostly_slow([0, 1], 0))
def test_copies_of_a_thread_are_there_once_it_waited(wait, order):
    given = torch.arange(128, dtype=torch.int32).view(32, 4)
    out = torch.zeros_like(given)
    run(PIECES, (2,), (32,), given, out, 20, order=order, defines=(("WAIT", wait),))
    want = given.masked_fill(torch.arange(32)[:, None] >= 20, 0) if wait else given * 0 - 0x5A5A5A5B
    assert torch.equal(out, want[torch.arange(32) ^ 1])
    with pytest.raises(RuntimeError, match=r"piece: .* not aligned"):
        run(PIECES, (1,), (32,), given.view(-1)[1:], out, 20, defines=(("WAIT", wait),))


@pytest.mark.parametrize(("but", "come"), mostly_slow([(0, 2), (1, 1), (2, 0)], (1, 1)))
def test_a_thread_waits_for_all_but_the_last_groups_of_copies(but, come, order):
    text = """
    #include "common/common.cuh"
    extern "C" __global__ void kernel(const uint4* from, uint4* out) {
        __shared__ uint4 values[2][32];
        for (int i = 0; i < 2; i++) {
            copy_async<16>(shared_place(values[i] + threadIdx.x), from + threadIdx.x);
            async_commit();
        }
        async_wait_but<BUT>();
        for (int i = 0; i < 2; i++) out[i * 32 + threadIdx.x] = values[i][threadIdx.x];
        async_wait();
    }
    """
    given = torch.arange(128, dtype=torch.int32).view(32, 4)
    out = torch.zeros((2, 32, 4), dtype=torch.int32)
    run(text, (1,), (32,), given, out, order=order, defines=(("BUT", but),))
    want = [given if i < come else given * 0 - 0x5A5A5A5B for i in range(2)]
    assert torch.equal(out, torch.stack(want))


def test_a_barrier_does_not_wait_for_threads_that_returned(order):
    text = """
    extern "C" __global__ void kernel(int* out) {
        __shared__ int written[40];
        if (threadIdx.x >= 40) return;
        written[threadIdx.x] = threadIdx.x;
        __syncthreads();
        out[threadIdx.x] = written[39 - threadIdx.x];
    }
    """
    out = torch.zeros(40, dtype=torch.int32)
    run(text, (1,), (128,), out, order=order)
    assert out.tolist() == list(range(39, -1, -1))


@pytest.mark.slow
def test_spinning_on_another_thread_of_the_block(order):
    text = """
    extern "C" __global__ void kernel(int* out) {
        if (threadIdx.x == TEACHER) atomicExch(out, 1);
        while (atomicAdd(out, 0) == 0) __nanosleep(100);
        out[1 + threadIdx.x] = 1;
    }
    """
    for teacher in (0, 99):
        out = torch.zeros(101, dtype=torch.int32)
        run(text, (1,), (100,), out, order=order, defines=(("TEACHER", teacher),))
        assert out.all()


def test_arguments_are_checked():
    rows, sums = torch.ones(1, 32), torch.zeros(1)
    with pytest.raises(TypeError, match="got 3 arguments, allowed are 4"):
        run(SUMS, (1,), (32,), rows, sums, 32, defines=(("THREADS", 32),))
    for wrong in ((rows, sums, 32.0, 1.0), (rows, sums, 32, 1), (rows, 32, 32, 1.0)):
        with pytest.raises(TypeError, match="allowed is"):
            run(SUMS, (1,), (32,), *wrong, defines=(("THREADS", 32),))
    with pytest.raises(RuntimeError, match=r"got dimensions .1025, 1, 1."):
        run(SUMS, (1,), (1025,), rows, sums, 32, 1.0, defines=(("THREADS", 32),))


def test_the_compiler_speaks():
    with pytest.raises(RuntimeError, match=r"text.cu:1:.*error"):
        compile_text('extern "C" __global__ void kernel(int* out) { out[0] = nothing; }', "kernel")


def test_launch_takes_cpu_tensors_while_emulated(tmp_path, monkeypatch):
    (tmp_path / "common").mkdir()
    (tmp_path / "common/common.cuh").write_text("#define SCALE 3\n")
    body = "out[blockIdx.x] = SCALE * factor + BIAS;"
    head = 'extern "C" __global__ void kernel(float* out, const float* nothing, float factor)'
    (tmp_path / "some.cu").write_text(f'#include "common/common.cuh"\n{head} {{ {body} }}')
    monkeypatch.setattr(launching, "SOURCES", tmp_path)
    out = torch.zeros(2)
    given = dict(factor=2.0, out=out, nothing=None)
    with emulated(order="backward"):
        launching.launch("some.cu", "kernel", (2,), (1,), arguments=given, BIAS=1)
    assert out.tolist() == [7, 7]
    with pytest.raises(ValueError, match="allowed is a CUDA device"):
        launching.launch("some.cu", "kernel", (2,), (1,), arguments=given, BIAS=1)


@pytest.mark.slow
def test_it_is_fast_enough():
    text = """
    extern "C" __global__ void kernel(int* out) {
        __shared__ int values[256];
        int sum = 0;
        for (int i = 0; i < 50; i++) {
            values[threadIdx.x] = i;
            __syncthreads();
            sum += values[(threadIdx.x + i) % 256];
            __syncwarp();
        }
        out[blockIdx.x * 256 + threadIdx.x] = sum;
    }
    """
    out = torch.zeros(64 * 256, dtype=torch.int32)
    launch = compile_text(text, "kernel")
    start = time.process_time()
    launch((64,), (256,), [out.data_ptr()], 0)
    assert time.process_time() - start < 2
