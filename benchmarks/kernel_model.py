# Copyright 2026 The diff_transformer authors. Licensed under the MIT License.
"""A static cost model of the compiled Triton kernels; no GPU.

    python -m benchmarks.kernel_model --out benchmarks/results/kernel_model_<date>
    python -m benchmarks.kernel_model --kernels dkdv --architectures 90 --head-dims 128 --blocks 64/128/8/2 ...

Each kernel is compiled ahead of time (causal, bfloat16). The model looks at its main loop, the unmasked one, and
counts the cycles that one pair of a row block and a key block costs on each unit of a streaming multiprocessor: the
tensor cores, the vector units (the slowest of instruction issue, FP32, integer and special functions) and shared
memory. It assumes that nothing overlaps (*serial*) and that everything does (*overlapped*): a kernel runs in between.
The fraction of peak at the mean of both times (*middle*) ranks blocks. It compares the *useful* multiply-adds with the
cycles. Useful is what the fused computation needs, in units of rows * keys * d per differential head
(benchmarks.attention). `executed / useful` above 1 means padding, or warps that all compute the same.

Registers that are spilled cost what their loads and stores cost.

How far to trust it: the figures rank blocks and kernels, and they promise no speed. Memory latency, cache misses, bank
conflicts, clocks, prologues, masked blocks, waves of programs and the small kernels (prepare, combine) are not
modelled, nor are the bytes that TMA writes. The constants below are published ones, except for those marked as
assumed; on sm_100, where the cost of waiting for tensor memory is unknown, the model is weakest.
"""

import math
import re
import sys
from collections import Counter
from itertools import product
from typing import NamedTuple
from unittest import mock

import networkx
import torch
import triton

from benchmarks.kernel_compiler import Compiled, compiled_for, inputs
from benchmarks.report import argument_parser, command, first_line, show, table, versions, write
from diff_transformer import flash_diff, flash_diff_attention, flash_diff_backward, flash_diff_forward
from diff_transformer.flash_diff_blocks import HEAD_DIMS, SHARED_MEMORY, Blocks, blocks, key_kernels


class Architecture(NamedTuple):
    """What a streaming multiprocessor (SM) does in a clock cycle.

    Tensor cores: NVIDIA's white papers of A100, GA102 (GeForce cards of it accumulate in float32 at half this rate),
    H100 and B200 (2.25 PFLOP/s). mma.sync reaches 62 % of the peak on Hopper (arXiv:2402.13499); that sm_100 is as
    fast as sm_80 with it is assumed. FP32 and the warps: the CUDA programming guide, "Arithmetic Instructions" and
    "Compute Capabilities".
    """

    tensor: int  # multiply-adds in bfloat16
    mma_sync: int  # the same with mma.sync
    fp32: int  # multiply-adds in float32
    warps: int  # that may be resident


ARCHITECTURES = {
    80: Architecture(1024, 1024, 64, 64),
    86: Architecture(512, 512, 128, 48),
    90: Architecture(2048, 1270, 128, 64),
    100: Architecture(4096, 1024, 128, 64),
}
# For all architectures: the CUDA programming guide, and for shared memory and exponentials also FlashAttention-4's
# analysis (https://www.together.ai/blog/flashattention-4)
REGISTERS = 65536
TENSOR_MEMORY = 512  # columns
SHARED = 128  # bytes of shared memory per cycle
ISSUE, INTEGER, SPECIAL = 128, 64, 16  # operations per cycle
# Cycles per pair of blocks that nothing hides, by whether another program shares the SM. Assumed
LATENCY = {False: 250, True: 100}


class Kernel(NamedTuple):
    function: triton.JITFunction
    units: int  # useful multiply-adds of a program per pair of blocks, in rows * keys * d
    constants: dict = {}


KERNELS = {
    "forward": Kernel(flash_diff_forward.forward_kernel, 3, constants={"MAP": 1}),
    "dq": Kernel(flash_diff_backward.dq_kernel, 6),
    "dkdv": Kernel(flash_diff_backward.dkdv_kernel, 8, constants={"DK": True, "DV": True}),
    "dk": Kernel(flash_diff_backward.dkdv_kernel, 6, constants={"DK": True, "DV": False}),
    "dv": Kernel(flash_diff_backward.dkdv_kernel, 4, constants={"DK": False, "DV": True}),
}


# ------------------------------------------------------------------------------------------------- loops of the SASS


class Instruction(NamedTuple):
    address: int
    predicate: str
    opcode: str  # with its modifiers: "LDSM.16.M88.4"
    operands: str

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]


def parse(sass: str) -> list[Instruction]:
    """The instructions that `cuobjdump -sass` prints for a cubin with one kernel."""
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*?)\s*;"
    return [Instruction(int(address, 16), *rest) for address, *rest in re.findall(pattern, sass)]


def control_flow(code: list[Instruction]) -> tuple[list[list[Instruction]], list[set[int]]]:
    """The basic blocks and the successors of each."""
    targets = {}
    for one in code:
        if one.name == "BRA":
            targets[one.address] = int(re.search(r"0x([0-9a-f]+)$", one.operands)[1], 16)
    leaders, block_of, basic = set(targets.values()), {}, []
    for i, one in enumerate(code):
        if i == 0 or one.address in leaders or code[i - 1].name in ("BRA", "EXIT", "RET"):
            basic.append([])
        basic[-1].append(one)
        block_of[one.address] = len(basic) - 1
    successors: list[set[int]] = []
    for i, block in enumerate(basic):
        last = block[-1]
        conditional = last.predicate or (last.name == "BRA" and "," in last.operands)
        falls = last.name not in ("BRA", "EXIT", "RET") or conditional
        jumps = {block_of[targets[last.address]]} if last.address in targets else set()
        successors.append(jumps | ({i + 1} if falls and i + 1 < len(basic) else set()))
    return basic, successors


def natural_loops(successors: list[set[int]]) -> dict[int, set[int]]:
    """The blocks of each loop by its header: the target of an edge whose source cannot be reached without it."""
    graph = networkx.DiGraph((block, other) for block, following in enumerate(successors) for other in following)
    graph.add_node(0)
    loops: dict[int, set[int]] = {}
    for header in graph:
        without = graph.subgraph(graph.nodes - {header})
        reached = {0, *networkx.descendants(without, 0)} if header != 0 else set()
        for source in set(graph.predecessors(header)) - reached:
            body = {source, *networkx.ancestors(without, source)} if source != header else set()
            loops.setdefault(header, {header}).update(body)
    return loops


TENSOR_INSTRUCTIONS = ("HMMA", "HGMMA", "UTCHMMA")


def tensor_loops(sass: str) -> list[list[list[Instruction]]]:
    """The innermost loops with tensor-core instructions, as lists of basic blocks. Loops inside them, which wait for a
    barrier, are left out."""
    basic, successors = control_flow(parse(sass))
    loops = natural_loops(successors)
    uses = {i for i, block in enumerate(basic) if any(one.name in TENSOR_INSTRUCTIONS for one in block)}
    found = []
    for body in loops.values():
        inner = [other for other in loops.values() if other < body]
        if body & uses and not any(other & uses for other in inner):
            found.append([basic[i] for i in sorted(body.difference(*inner))])
    return found


# --------------------------------------------------------------------------------------------- products of the TTGIR


class Dot(NamedTuple):
    """A tl.dot of (rows, inner) x (inner, columns), as laid out over the warps."""

    rows: int
    columns: int
    inner: int
    executed: int  # multiply-adds of all warps
    a_in_shared: bool  # for sm_100; otherwise the SASS tells


def dots(ttgir: str) -> list[Dot]:
    """The products in one iteration of the kernel's innermost loop; a loop with masks does the same as one without."""
    layouts = {}
    for name, layout in re.findall(r"^(#\w+) = #ttg\.nvidia_mma<\{(.*)\}>", ttgir, re.M):
        numbers = re.search(r"warpsPerCTA = \[(\d+), (\d+)\], instrShape = \[(\d+), (\d+)", layout).groups()
        warps_m, warps_n, m, n = map(int, numbers)
        layouts[name] = (warps_m * m, warps_n * n)
    loops: list[list[Dot]] = []
    stack: list[tuple[int, list[Dot]]] = []  # the loops around a line
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if "scf.for" in line:
            stack.append((indent, []))
        elif stack and indent == stack[-1][0] and line.lstrip().startswith("}"):
            if found := stack.pop()[1]:
                loops.append(found)
                stack.clear()  # what is around it is not innermost
        elif stack and re.search(r"tt\.dot |ttng\.(warp_group_dot|tc_gen5_mma) ", line):
            types = line[line.index(" : ") :]
            (rows, inner), (_, columns) = [map(int, one) for one in re.findall(r"<(\d+)x(\d+)x\w+, ", types)[:2]]
            if "tc_gen5_mma" in line:
                tile = (64, 1)
            else:
                layout = re.search(r"-> tensor<\w+, (#\w+)>", types)[1]
                if layout not in layouts:
                    raise ValueError(f"{line.split('=')[0].strip()} is not computed on tensor cores: {line.strip()}")
                tile = layouts[layout]
            covered = (-(-size // part) * part for size, part in zip((rows, columns), tile, strict=True))
            executed = math.prod(covered) * inner
            a_in_shared = "#tmem" not in types.split(">,")[0]
            stack[-1][1].append(Dot(rows, columns, inner, executed, a_in_shared))
    if not (loops := [one for one in loops if one]):
        raise ValueError("the kernel has no loop with a tl.dot in it")
    return max(loops, key=len)


# ------------------------------------------------------------------------------------------------------------- cycles


class Cost(NamedTuple):
    """Cycles of an SM per pair of blocks, and the multiply-adds executed."""

    tensor: float
    vector: float
    shared: float  # loads and stores
    operands: float  # what the tensor cores read of shared memory
    executed: float
    instructions: str  # of the tensor cores

    @property
    def overlapped(self) -> float:
        return max(self.tensor, self.vector, self.shared + self.operands)

    def serial(self, latency: float) -> float:
        return self.tensor + self.vector + self.shared + latency


# What costs more than its issue. IMAD runs in the FP32 units, at the rate of integers
_PIPES = {
    "integer": "IADD3 VIADD VIADDMNMX VIMNMX IMNMX ISETP LOP3 SHF LEA SEL PRMT SGXT BMSK PLOP3 P2R R2P MOV IABS "
    "FSEL FSETP FMNMX FMNMX3 F2FP",
    "multiply": "IMAD",
    "fp32": "FFMA FADD FMUL FFMA2 FADD2 FMUL2",  # the last three: two operations
    "special": "MUFU F2F F2I I2F I2FP",
    "shared": "LDS STS LDSM STSM LDGSTS LDG LDL STL SHFL",
    "tensor memory": "LDTM STTM",
}
PIPES = {name: pipe for pipe, names in _PIPES.items() for name in names.split()}


def transactions(opcode: str) -> int:
    """Cycles of a warp's access: 32 lanes of 4, 8 or 16 bytes, or 1, 2 or 4 matrices of 128 bytes."""
    matrices = re.search(r"LDSM|STSM", opcode) and re.search(r"\.(\d)$", opcode)
    if matrices:
        return int(matrices[1])
    width = re.search(r"\.(64|128)\b", opcode)
    return int(width[1]) // 32 if width else 1


def cost(loop: list[list[Instruction]], products: list[Dot], architecture: int, warps: int) -> Cost:
    """Counts a loop of the SASS, and divides by the number of pairs of blocks in one iteration of it."""
    has = ARCHITECTURES[architecture]
    rates = {"integer": INTEGER, "multiply": INTEGER, "fp32": has.fp32, "special": SPECIAL}
    vector, names = Counter(), Counter()
    tensor = shared = operands = executed = 0.0
    for block in loop:
        # One elected warp issues the tensor instructions of sm_100; the others branch around them
        active = 1 if any(one.name == "UTCHMMA" for one in block) else warps
        for one in block:
            vector["issue"] += active * 32 / ISSUE
            pipe = PIPES.get(one.name)
            if pipe == "shared":
                shared += active * transactions(one.opcode)
            elif pipe == "tensor memory":  # a register per lane and cycle, assumed
                vector[pipe] += active * 32 / ISSUE * int(re.search(r"\.x(\d+)", one.opcode)[1])
            elif pipe:
                vector[pipe] += active * 32 / rates[pipe] * (2 if one.name.endswith("2") else 1)
            elif one.name == "HMMA":
                work = math.prod(map(int, re.match(r"HMMA\.(16)(8)(\d+)", one.opcode).groups()))
                executed += warps * work
                tensor += warps * work / has.mma_sync
                names["mma.sync"] += 1
            elif one.name == "HGMMA":  # of four warps
                n = int(re.match(r"HGMMA\.64x(\d+)x16", one.opcode)[1])
                read = (64 * one.operands.split(",")[1].strip().startswith("gdesc") + n) * 16 * 2 / SHARED
                executed += warps / 4 * 64 * n * 16
                tensor += warps / 4 * max(64 * n * 16 / has.tensor, read)
                operands += warps / 4 * read
                names[f"wgmma m64n{n}"] += 1
            elif one.name == "UTCHMMA":  # its shape is in a register
                names["tcgen05"] += 1
    expected = sum(one.executed for one in products)
    if count := names.pop("tcgen05", 0):
        if executed:
            raise ValueError("a loop mixes tcgen05 with other tensor instructions")
        per_pair = 0
        for one in products:
            m, n = min(one.rows, 128), min(one.columns, 256)
            instructions = -(-one.rows // m) * -(-one.columns // n) * one.inner // 16
            read = (m * one.a_in_shared + n) * 16 * 2 / SHARED
            tensor += instructions * max(128 * n * 16 / has.tensor, read)  # 64 rows take as long as 128
            operands += instructions * read
            per_pair += instructions
            names[f"tcgen05 m{m}n{n}"] += instructions
        tensor, operands, executed = (x * count / per_pair for x in (tensor, operands, expected))
    pairs = executed / expected
    if pairs != round(pairs) or pairs < 1:
        raise ValueError(f"a loop of the SASS executes {executed:.0f} multiply-adds, the TTGIR's {expected}")
    amounts = (tensor, max(vector.values()), shared, operands, executed)
    return Cost(*(amount / pairs for amount in amounts), " + ".join(sorted(names)))


def tensor_partitions(ttgir: str) -> int:
    """How many groups of warps compute products: the partitions of a warp-specialised kernel that do, otherwise 1."""
    _, *partitions = re.split(r"^ *(?:\} )?(?:default|partition\d+\(.*) \{$", ttgir, flags=re.M)
    return sum("warp_group_dot " in one for one in partitions) or 1


def main_loop(compiled: Compiled, architecture: int, warps: int) -> Cost:
    """What the cheapest loop costs: the one without masks, where there are two. The partitions of a warp-specialised
    kernel, of `warps` each, have one such loop each, and run at the same time: their costs add up."""
    products = dots(compiled.ttgir)
    costs = [cost(loop, products, architecture, warps) for loop in tensor_loops(compiled.sass)]
    costs.sort(key=lambda one: (one.serial(0), one.overlapped))
    *amounts, instructions = zip(*costs[: tensor_partitions(compiled.ttgir)], strict=True)
    return Cost(*map(sum, amounts), " + ".join(sorted({*" + ".join(instructions).split(" + ")})))


def occupancy(compiled: Compiled, architecture: int, warps: int) -> int:
    """How many programs fit on an SM; 0: none."""
    total = SHARED_MEMORY[architecture] + 1024
    limits = [ARCHITECTURES[architecture].warps // warps, total // (compiled.shared + 1024)]
    limits.append(REGISTERS // (-(-compiled.registers // 8) * 8 * 32 * warps))
    if compiled.tensor_memory:
        limits.append(TENSOR_MEMORY // compiled.tensor_memory)
    return min(limits)


# ------------------------------------------------------------------------------------------------------------- report


def compile_kernel(name: str, architecture: int, d: int, used: Blocks) -> Compiled:
    kernel, tensors = KERNELS[name], inputs(d, groups=1)
    with (
        compiled_for(architecture, kernel.function) as compiled,
        mock.patch.object(flash_diff, "blocks", lambda *_: used),
        mock.patch.object(flash_diff, "key_kernels", lambda *_: [name]),
    ):
        out = flash_diff_attention(**tensors, causal=True)
        torch.autograd.grad(out, tensors["q"], torch.zeros_like(out))
    return next(one for one in compiled if kernel.constants.items() <= one.constants.items())


def model(name: str, architecture: int, d: int, used: Blocks) -> dict:
    """A row of the result: what the compilers report, cycles per pair of blocks and fractions of peak."""
    kernel = KERNELS[name]
    row = {"architecture": architecture, "d": d, "kernel": name, "blocks": "/".join(map(str, used)), "status": "ok"}
    columns = "executed_over_useful instructions registers spilled_bytes shared_bytes occupancy tensor vector shared"
    row |= dict.fromkeys((*columns.split(), "operands", *FRACTIONS))
    try:
        compiled = compile_kernel(name, architecture, d, used)
    except (triton.TritonError, RuntimeError) as error:
        return row | {"status": f"does not compile: {first_line(error)}"}
    programs = occupancy(compiled, architecture, used.num_warps)
    row |= {"registers": compiled.registers, "spilled_bytes": compiled.spilled, "shared_bytes": compiled.shared}
    row |= {"occupancy": programs}
    if programs == 0:
        return row | {"status": "does not fit on a multiprocessor"}
    try:
        cycles = main_loop(compiled, architecture, used.num_warps)
    except ValueError as error:
        return row | {"status": f"not modelled: {error}"}
    useful = kernel.units * used.BLOCK_M * used.BLOCK_N * d
    row["executed_over_useful"] = round(cycles.executed / useful, 3)
    row["instructions"] = cycles.instructions
    row |= {name: round(getattr(cycles, name)) for name in ("tensor", "vector", "shared", "operands")}
    return row | fractions(cycles, useful / ARCHITECTURES[architecture].tensor, LATENCY[programs > 1])


FRACTIONS = ("serial", "overlapped", "middle")


def fractions(cycles: Cost, ideal: float, latency: float) -> dict[str, float]:
    """Fractions of peak if nothing overlaps, if everything does, and at the mean of both times."""
    slow, fast = cycles.serial(latency), cycles.overlapped
    times = (slow, fast, (slow + fast) / 2)
    return {name: round(ideal / time, 3) for name, time in zip(FRACTIONS, times, strict=True)}


def as_markdown(rows: list[dict], command: str) -> str:
    lines = ["# Modelled cost of the compiled kernels", "", f"`{command}`, triton {rows[0]['triton']}; no GPU.", ""]
    lines += ["Fractions of the peak of the tensor cores if nothing overlaps (serial), at the mean of both times"]
    lines += ["(middle), and if everything does (overlapped). They rank kernels and promise no speed.", ""]
    titles = ["d", "kernel", "rows/keys/warps/stages", "executed / useful", "instructions", "registers", "spilled, B"]
    titles += ["shared, B", "programs per SM", *FRACTIONS]
    columns = ["d", "kernel", "blocks", "executed_over_useful", "instructions", "registers", "spilled_bytes"]
    columns += ["shared_bytes", "occupancy", *FRACTIONS]
    for architecture in dict.fromkeys(row["architecture"] for row in rows):
        body = []
        for row in (row for row in rows if row["architecture"] == architecture):
            failed = {} if row["status"] == "ok" else {"executed_over_useful": row["status"]}
            body.append([(row | failed)[column] for column in columns])
        lines += [f"## sm_{architecture}", "", *table(titles, body), ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Returns 1 if a kernel of the tables is not modelled."""
    parser = argument_parser(__doc__)
    add = parser.add_argument
    add("--architectures", type=int, nargs="+", default=list(ARCHITECTURES), choices=ARCHITECTURES)
    add("--head-dims", type=int, nargs="+", default=HEAD_DIMS, choices=range(1, 129), metavar="D", help="d, up to 128")
    add("--kernels", nargs="+", default=list(KERNELS), choices=KERNELS)
    add("--blocks", nargs="+", default=[], help="rows/keys/warps/stages to try, in place of the tables' own")
    options = parser.parse_args(arguments)
    cells = []
    for architecture, d, name in product(options.architectures, options.head_dims, options.kernels):
        where = divmod(architecture, 10), torch.bfloat16, d
        if options.blocks:
            tried = [Blocks(*map(int, one.split("/"))) for one in options.blocks]
        else:
            tried = [blocks(name, *where)] if name in ("forward", "dq", *key_kernels(*where)) else []
        cells += [(name, architecture, d, used) for used in tried]
    print(f"Budget  {math.ceil(len(cells) * 3 / 60)} minutes on one core for {len(cells)} kernels", flush=True)
    rows: list[dict] = []
    for cell in cells:
        rows.append(show(model(*cell)) | versions("triton"))
        write(options.out, rows, as_markdown(rows, command("kernel_model", arguments)))
    return int(any(row["status"] != "ok" for row in rows) and not options.blocks)


if __name__ == "__main__":
    sys.exit(main())
