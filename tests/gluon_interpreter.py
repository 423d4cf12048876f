# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""Runs a module of Gluon kernels for sm_90 on a CPU: its own code, with torch in place of triton.

Partitions of warps are threads, mbarriers have their phases, arrivals and bytes, and a kernel whose threads all wait
raises an error. Either copies to shared memory or products happen as late as the kernel allows (`State.late`), when
they are waited for, and the other of both at once: a tile that is read or overwritten too early gives wrong results.
Copies from shared memory are always late. Layouts, registers, fences, and the barriers that Triton inserts within a
partition, are not checked.
"""

import importlib.util
import sys
import threading
import time
import types
from pathlib import Path
from unittest import mock

import torch
import triton


class Tensor(torch.Tensor):
    """In registers."""

    type = types.SimpleNamespace(layout=None)


def tensor(x):
    return torch.as_tensor(x).as_subclass(Tensor)


class Integer(int):
    def to(self, dtype):
        return self


class Pointer:
    def __init__(self, data, offset=0):
        self.data, self.offset = data, offset

    def __add__(self, offset):
        return Pointer(self.data, self.offset + offset)


class Shared:
    """A tile in shared memory."""

    def __init__(self, data):
        self.data, self.shape, self.dtype = data, list(data.shape), data.dtype

    def index(self, i):
        return Shared(self.data[i])

    def reshape(self, shape):
        return Shared(self.data.view(*shape))

    def permute(self, order):
        return Shared(self.data.permute(order))

    def load(self, layout):
        return tensor(self.data.clone())

    def store(self, value):
        assert value.dtype == self.dtype and list(value.shape) == self.shape
        self.data.copy_(value)


class Descriptor:
    def __init__(self, base, shape, strides, block_shape, layout):
        assert list(base.shape) == shape and list(base.stride()) == strides and strides[-1] == 1
        assert all(stride * base.element_size() % 16 == 0 for stride in strides[:-1])
        self.base, self.block_shape, self.layout, self.dtype = base, block_shape, layout, base.dtype
        self.shape = shape
        self.block_type = types.SimpleNamespace(nbytes=torch.Size(block_shape).numel() * base.element_size())

    def region(self, coordinates):
        """The part of a block that lies inside the tensor: as slices of the tensor and of the block."""
        starts = [int(one) for one in coordinates]
        assert starts[-1] * self.base.element_size() % 16 == 0
        spans = [
            (max(start, 0), min(start + size, length))
            for start, size, length in zip(starts, self.block_shape, self.base.shape, strict=True)
        ]
        outer = tuple(slice(a, max(a, b)) for a, b in spans)
        inner = tuple(slice(a - start, max(a, b) - start) for (a, b), start in zip(spans, starts, strict=True))
        return outer, inner


class State:
    """Of the program that runs."""

    late = "copies"  # or "products"
    program, grid = (0, 0, 0), (1, 1, 1)
    changed = threading.Condition()
    running = 0
    waits: dict = {}  # barrier and parity that a thread waits for
    failed = False
    thread = threading.local()  # pending products and stores
    barriers: list = []


class Barriers(list):
    def index(self, i):
        return self[i]


class MBarrier:
    def __init__(self):
        self.count = self.pending = self.bytes = self.phase = 0
        self.copies = []
        State.barriers.append(self)

    def complete(self):
        if self.pending == 0 and self.bytes == 0:
            self.pending, self.phase = self.count, self.phase + 1
            State.changed.notify_all()


def barrier_init(barrier, count):
    barrier.count = barrier.pending = count


def barrier_arrive(barrier, count=1, expected=0, pred=True):
    if not pred:
        return
    with State.changed:
        barrier.pending -= count
        barrier.bytes += expected
        assert barrier.pending >= 0, "more arrivals than the barrier counts"
        barrier.complete()
    time.sleep(1e-4)  # let the other partitions go as far as they may


def barrier_expect(barrier, size):
    barrier_arrive(barrier, 1, size)


def is_deadlock():
    return len(State.waits) == State.running and all(
        barrier.phase & 1 == parity and not barrier.copies for barrier, parity in State.waits.values()
    )


def barrier_wait(barrier, parity):
    with State.changed:
        while barrier.phase & 1 == parity:
            if barrier.copies:
                barrier.copies.pop(0)()
                continue
            State.waits[threading.get_ident()] = barrier, parity
            State.failed |= is_deadlock()
            if State.failed:
                State.changed.notify_all()
                raise RuntimeError("deadlock, or another partition failed")
            State.changed.wait()
            del State.waits[threading.get_ident()]


def copy_to_shared(descriptor, coordinates, barrier, result):
    outer, inner = descriptor.region(coordinates)
    result.data.fill_(torch.nan)

    def land():
        result.data.zero_()
        result.data[inner] = descriptor.base[outer]
        barrier.bytes -= descriptor.block_type.nbytes
        assert barrier.bytes >= 0, "more bytes than the barrier expects"
        barrier.complete()

    assert result.shape == list(descriptor.block_shape)
    with State.changed:
        if State.late == "copies":
            barrier.copies.append(land)
            State.changed.notify_all()
        else:
            land()


def copy_by_threads(result, pointer, mask):
    """cp.async: elements that are masked out are zeros."""
    result.data.fill_(torch.nan)
    State.thread.copies.append((result, load(pointer, mask)))


def arrive_after_copies(barrier, increment_count):
    """All 32 threads of a warp."""
    assert not increment_count
    copies, State.thread.copies = State.thread.copies, []

    def land():
        for result, values in copies:
            result.data.copy_(values)
        barrier.pending -= 32
        assert barrier.pending >= 0, "more arrivals than the barrier counts"
        barrier.complete()

    with State.changed:
        if State.late == "copies":
            barrier.copies.append(land)
            State.changed.notify_all()
        else:
            land()


def copy_to_global(descriptor, coordinates, shared):
    outer, inner = descriptor.region(coordinates)

    def land():
        descriptor.base[outer] = shared.data[inner]

    State.thread.stores.append(land)


def store_wait(pending):
    while len(State.thread.stores) > pending:
        State.thread.stores.pop(0)()


class Product:
    def __init__(self, a, b, acc, use_acc):
        self.operands, self.value = (a, b, acc, use_acc), None

    def run(self):
        a, b, acc, use_acc = self.operands
        acc = acc.value if isinstance(acc, Product) else acc
        a = a.data if isinstance(a, Shared) else a
        assert a.dtype == b.data.dtype
        self.value = tensor(a.float() @ b.data.float() + (acc if use_acc else 0))


def mma(a, b, acc, use_acc=True, is_async=False):
    product = Product(a, b, acc, use_acc)
    State.thread.products.append(product)
    if State.late != "products":
        product.run()
    return product if is_async else mma_wait(0, (product,))


def mma_wait(pending=0, deps=()):
    while len(State.thread.products) > pending:
        product = State.thread.products.pop(0)
        if product.value is None:
            product.run()
    assert all(one not in State.thread.products for one in deps), "a product is used before it is waited for"
    values = tuple(one.value if isinstance(one, Product) else one for one in deps)
    return values[0] if len(values) == 1 else values


def warp_specialize(partitions, num_warps, num_registers):
    errors = []

    def run(function, args):
        State.thread.products, State.thread.stores, State.thread.copies = [], [], []
        try:
            function(*args)
            assert not (State.thread.products or State.thread.stores or State.thread.copies), "not waited for"
        except BaseException as error:  # handed to the caller
            errors.append(error)
        with State.changed:
            State.waits.pop(threading.get_ident(), None)
            State.running -= 1
            State.failed |= bool(errors) or (State.running > 0 and is_deadlock())
            State.changed.notify_all()

    State.running, State.waits, State.failed = len(partitions), {}, False
    threads = [threading.Thread(target=run, args=one) for one in partitions]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    if errors:
        raise errors[0]
    assert all(barrier.bytes == 0 for barrier in State.barriers), "copies that nobody waits for"


class Kernel:
    def __init__(self, function):
        self.function = function

    def __call__(self, *args, **options):
        return self.function(*args, **options)

    def __getitem__(self, grid):
        def launch(*args, num_warps=4, **constants):
            args = [Pointer(one.view(-1)) if isinstance(one, torch.Tensor) else one for one in args]
            State.grid = (*grid, 1, 1)[:3]
            for z in range(State.grid[2]):
                for y in range(State.grid[1]):
                    for x in range(State.grid[0]):
                        State.program, State.barriers = (x, y, z), []
                        State.thread.stores = []
                        self.function(*args, **constants)

        return launch


def jit(function=None, **options):
    return Kernel if function is None else Kernel(function)


def of_both(on_tensors, on_numbers):
    def function(a, b):
        if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
            return on_tensors(tensor(a), tensor(b))
        return on_numbers(a, b)

    return function


def where(condition, a, b):
    if not isinstance(condition, torch.Tensor):
        return a if condition else b
    return tensor(torch.where(condition, a, b))


def load(pointer, mask=None, other=0):
    if not isinstance(pointer.offset, torch.Tensor):
        return pointer.data[pointer.offset].item()
    inside = torch.ones_like(pointer.offset, dtype=torch.bool) if mask is None else mask
    return tensor(torch.where(inside, pointer.data[torch.where(inside, pointer.offset, 0)], other))


def store(pointer, value, mask=None):
    inside = torch.ones_like(pointer.offset, dtype=torch.bool) if mask is None else mask
    pointer.data[pointer.offset[inside].long()] = value[inside].to(pointer.data.dtype)


def allocate(dtype, shape, layout):
    if dtype == torch.int64:
        return Barriers(MBarrier() for _ in range(shape[0]))
    return Shared(torch.full(shape, torch.nan, dtype=dtype))


def round_pairs(asm, constraints, args, dtype, is_pure, pack):
    assert asm.startswith("cvt.rn.") and asm.endswith("x2.f32 $0, $2, $1;") and pack == 2
    return args[0].to(dtype)


def nothing(*args, **options):
    return None


language = types.SimpleNamespace(
    constexpr=int, int32=torch.int32, int64=torch.int64, float32=torch.float32, bfloat16=torch.bfloat16,
    float16=torch.float16,
    NVMMASharedLayout=types.SimpleNamespace(get_default_for=nothing), NVMMADistributedLayout=nothing,
    SliceLayout=nothing, DotOperandLayout=nothing, BlockedLayout=nothing, SwizzledSharedLayout=nothing,
    program_id=lambda axis: Integer(State.program[axis]), num_programs=lambda axis: Integer(State.grid[axis]),
    arange=lambda start, end, layout: tensor(torch.arange(start, end, dtype=torch.int32)),
    full=lambda shape, value, dtype, layout: tensor(torch.full(shape, value, dtype=dtype)),
    zeros=lambda shape, dtype, layout: tensor(torch.zeros(shape, dtype=dtype)),
    convert_layout=lambda x, layout: x, expand_dims=lambda x, axis: x.unsqueeze(axis), static_range=range,
    inline_asm_elementwise=round_pairs, cdiv=triton.cdiv,
    minimum=of_both(torch.minimum, min), maximum=of_both(torch.maximum, max), where=where,
    max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis), exp2=torch.exp2, log2=torch.log2,
    rsqrt=torch.rsqrt, load=load, store=store, allocate_shared_memory=allocate, warp_specialize=warp_specialize,
)  # fmt: skip
hopper = types.SimpleNamespace(
    mbarrier=types.SimpleNamespace(
        MBarrierLayout=nothing, init=barrier_init, arrive=barrier_arrive, expect=barrier_expect, wait=barrier_wait
    ),
    tma=types.SimpleNamespace(
        async_copy_global_to_shared=copy_to_shared, async_copy_shared_to_global=copy_to_global, store_wait=store_wait
    ),
    warpgroup_mma=mma, warpgroup_mma_wait=mma_wait, fence_async_shared=nothing,
)  # fmt: skip


ampere = types.SimpleNamespace(
    async_copy=types.SimpleNamespace(async_copy_global_to_shared=copy_by_threads, mbarrier_arrive=arrive_after_copies)
)


def interpreted(path: Path) -> types.ModuleType:
    """The module of kernels at `path`, whose launches are interpreted."""
    gluon = types.SimpleNamespace(jit=jit, language=language)
    modules = {
        "triton.experimental": types.SimpleNamespace(gluon=gluon),
        "triton.experimental.gluon": gluon,
        "triton.experimental.gluon.language.nvidia.ampere": ampere,
        "triton.experimental.gluon.language.nvidia.hopper": hopper,
        "triton.experimental.gluon.nvidia.hopper": types.SimpleNamespace(TensorDescriptor=Descriptor),
    }
    spec = importlib.util.spec_from_file_location(f"interpreted_{Path(path).stem}", path)
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, modules):
        sys.modules.pop("benchmarks.hopper.descriptors", None)  # it is imported again, with these modules
        spec.loader.exec_module(module)
    return module
