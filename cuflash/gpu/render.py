"""A spec to CUDA text: the only string substitution in the project."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

from cuflash import settings
from cuflash.errors import CompileError
from cuflash.gpu.spec import KernelSpec

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"([^"]+)"', re.MULTILINE)
_PRELUDE = "prelude.cuh.in"
# For editors only; a rendered kernel has the prelude instead.
_EDITOR_DEFAULTS = "editor_defaults.cuh"


@dataclass(frozen=True, slots=True)
class Source:
    """CUDA text ready to compile.

    ``includes`` maps the name in each reachable ``#include "..."`` of ours to its text, so that the
    compiler needs no folder of ours and no path can be wrong. ``path`` is the file that a person
    edits; it is told in errors and decides nothing.
    """

    name: str
    text: str
    includes: dict[str, str]
    path: str | None = field(default=None, compare=False)


def render(spec: KernelSpec) -> Source:
    """Render the kernel of a spec.

    Raises
    ------
    CompileError
        If a file is missing, or the prelude and the spec do not name the same constants.
    """
    root = kernel_root()
    name = f"{spec.kernel}.cu"
    kernel = _read(root, name)
    prelude = _substitute(_read(root, _PRELUDE), spec.constants())
    text = f"#define CUFLASH_SPEC 1\n{_numbered(_PRELUDE, prelude)}\n{_numbered(name, kernel)}"
    return Source(name, text, _includes(root, kernel), str(root / name))


def kernel_digest(kernel: str) -> str:
    """Digest of a kernel's text before anything is substituted: equal for all its specs.

    Empty for a kernel that is not there.
    """
    root = kernel_root()
    try:
        text = _read(root, f"{kernel}.cu")
        parts = {_PRELUDE: _read(root, _PRELUDE), kernel: text, **_includes(root, text)}
    except CompileError:
        return ""
    content = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def kernel_root() -> Path:
    """Folder of the kernels: CUFLASH_KERNEL_DIR, the installed package's, or the checkout's."""
    return settings.kernel_dir() or _packaged_root()


@functools.cache
def _packaged_root() -> Path:
    # Not importlib.resources, whose first use imports zipfile: 3 ms of the first call's 5.
    package = Path(__file__).parents[1]
    installed = package / "kernels_cu"
    return installed if installed.is_dir() else package.parent / "kernels_cu"


def _numbered(name: str, text: str) -> str:
    """Make compiler messages and profilers point at the file that a person edits."""
    return f'#line 1 "kernels_cu/{name}"\n{text}'


def _substitute(template: str, constants: dict[str, str]) -> str:
    prelude = Template(template)
    wanted, given = set(prelude.get_identifiers()), set(constants)
    if wanted != given:
        raise CompileError(
            f"{_PRELUDE} and the spec name different constants: only in the prelude"
            f" {sorted(wanted - given)}, only in the spec {sorted(given - wanted)}; make them agree"
        )
    try:
        return prelude.substitute(constants)
    except ValueError as error:
        raise CompileError(f"{_PRELUDE}: {error}; write ${{NAME}}, or $$ for a dollar") from error


def _includes(root: Path, text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    waiting = [text]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            if name not in found and name != _EDITOR_DEFAULTS:
                header = _read(root, name)
                found[name] = _numbered(name, header)
                waiting.append(header)
    return found


def _read(root: Path, name: str) -> str:
    """Text of a file, read anew each time: no edit is missed, and a dozen reads cost 1 ms."""
    path = root / name
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise CompileError(
            f"kernel file {name} cannot be read in {root} ({reason}): reinstall cuflash, or correct"
            " CUFLASH_KERNEL_DIR",
            source_path=str(path),
        ) from error
