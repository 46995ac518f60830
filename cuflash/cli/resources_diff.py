"""What two kernels take, side by side: `cuflash compile --diff`."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from cuflash.cli import listing
from cuflash.cli.tables import Column, Row, Table, emit, plain
from cuflash.errors import CompileError, MissingDependencyError

if TYPE_CHECKING:
    from cuflash.gpu.cache import Kernel

# Opcodes by what they keep busy; the first that fits counts. Names: CUDA Binary Utilities, "Instruction Set Reference".
_CLASSES = (
    ("tensor core", r"[A-Z]?G?MMA|UTC\w*MMA"),
    ("asynchronous copy", r"LDGSTS|UBLK\w*|UTMA\w*"),
    ("global memory", r"LDG|STG|LD|ST|RED\w*|ATOM\w*"),
    ("shared memory", r"LDS\w*|STS\w*|ATOMS"),
    ("local memory (spills)", r"LDL|STL"),
    ("constant memory", r"LDC\w*|ULDC\w*"),
    ("exp, log, 1/x", r"MUFU"),
    ("conversion", r"[FIH]2\w+|U?F2FP|I2FP"),
    ("float32", r"F(?!LO)\w+"),
    ("half", r"H[A-Z]+2\w*"),
    ("shuffle and vote", r"SHFL|VOTE\w*|REDUX|MATCH"),
    ("barrier and wait", r"BAR|DEPBAR|LDGDEPBAR|SYNCS|MEMBAR|FENCE|WARPSYNC\w*|ARRIVES|WARPGROUP"),
    ("branch", r"BRA|BRX|JMP|JMX|EXIT|CALL|RET|BSSY|BSYNC|BREAK|BPT|KILL"),
    ("integer and logic",
     r"U?(I\w+|LOP3?|LEA|SHF|SHL|SHR|PRMT|SEL|MOV\w*|PLOP3|POPC|FLO|BMSK|SGXT|VI\w+)|P2R|R2P|R2UR|CS2R|S2R|S2UR"),
)  # fmt: skip
_PATTERNS = tuple((name, re.compile(pattern)) for name, pattern in _CLASSES)
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", re.MULTILINE)


def show(configs: tuple[str, str], a: Kernel, b: Kernel, *, as_json: bool) -> None:
    """Print the table of two kernels."""
    labels = [config or "as chosen" for config in configs]
    columns = (
        Column("resource"),
        Column("a", labels[0], right=True),
        Column("b", labels[1], right=True),
        Column("delta", text=signed, right=True),
    )
    rows = [difference("spec", a.spec.name, b.spec.name), *resource_rows(a, b), *sass_rows(a, b)]
    emit(
        [Table("diff", f"{a.meta['arch']}: {' and '.join(labels)}", columns, rows)], as_json=as_json
    )


def resource_rows(a: Kernel, b: Kernel) -> list[Row]:
    """Give registers, spills, shared memory by buffer and occupancy."""
    numbers = [resources(kernel) for kernel in (a, b)]
    return [
        difference(name, *(found.get(name) for found in numbers))
        for name in dict.fromkeys([*numbers[0], *numbers[1]])
    ]


def resources(kernel: Kernel) -> dict[str, Any]:
    """Give what a kernel takes, by name; what is not known of a hand-made one is None."""
    from cuflash.gpu.device import Device
    from cuflash.gpu.occupancy import occupancy

    meta, spec = kernel.meta, kernel.spec
    shared = meta["shared_bytes"] + meta["static_shared_bytes"]
    found = {
        "registers": meta["registers"],
        "spill stores, bytes": meta["spill_stores"],
        "spill loads, bytes": meta["spill_loads"],
        "stack, bytes": meta["stack_bytes"],
        "threads": spec.threads,
        **{f"shared memory: {name}": size for name, size in spec.shared_buffers().items()},
        "shared memory: fixed": meta["static_shared_bytes"],
        "shared memory": shared,
    }
    if meta["registers"] is not None:
        fit = occupancy(
            Device.from_arch(spec.arch),
            registers=meta["registers"],
            shared_bytes=shared,
            threads=spec.threads,
        )
        found |= {
            "blocks of an SM": fit.blocks,
            "warps of an SM": fit.warps,
            "occupancy, %": round(100 * fit.fraction),
            "limited by": fit.limiter,
        }
    return {**found, "machine code, bytes": len(kernel.cubin), "compile, ms": meta["compile_ms"]}


def sass_rows(a: Kernel, b: Kernel) -> list[Row]:
    """Count instructions by class; nothing where there is no disassembler, or it cannot read them."""
    try:
        counts = [instruction_classes(listing.sass(kernel)) for kernel in (a, b)]
    except (MissingDependencyError, CompileError):
        return []
    names = [name for name, _ in _CLASSES] + ["other"]
    total = difference("instructions", *(sum(found.values()) for found in counts))
    return [total] + [
        difference(f"instructions: {name}", *(found[name] for found in counts))
        for name in names
        if any(found[name] for found in counts)
    ]


def instruction_classes(sass: str) -> Counter[str]:
    """Count the instructions of a disassembly by class, as they stand: a loop's count once."""
    opcodes = Counter(_INSTRUCTION.findall(sass))
    del opcodes["NOP"]
    found: Counter[str] = Counter()
    for opcode, count in opcodes.items():
        found[_class_of(opcode)] += count
    return found


def _class_of(opcode: str) -> str:
    return next((name for name, pattern in _PATTERNS if pattern.fullmatch(opcode)), "other")


def difference(resource: str, a: Any, b: Any) -> Row:
    """Give one resource as a row; words and what is not known have no difference."""
    numbers = all(isinstance(x, (int, float)) for x in (a, b))
    return {"resource": resource, "a": a, "b": b, "delta": b - a if numbers else None}


def signed(value: Any) -> str:
    """Give a difference with its sign."""
    text = plain(value)
    return f"+{text}" if value > 0 else text
