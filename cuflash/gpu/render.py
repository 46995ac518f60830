"""A spec to CUDA text: the only string substitution in the project."""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from string import Template

from cuflash import settings
from cuflash.errors import CompileError
from cuflash.gpu.spec import KernelSpec

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)
_PRELUDE = "prelude.cuh.in"
# For editors only; a rendered kernel has the prelude instead.
_EDITOR_DEFAULTS = "editor_defaults.cuh"


@dataclass(frozen=True, slots=True)
class Source:
    """CUDA text ready to compile.

    ``includes`` maps the name in each reachable ``#include "..."`` of ours to its text, so that the
    compiler needs no folder of ours and no path can be wrong.
    """

    name: str
    text: str
    includes: dict[str, str]


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
    # #line makes messages and profilers point at the file that a person edits.
    text = f'#define CUFLASH_SPEC 1\n#line 1 "kernels_cu/{_PRELUDE}"\n{prelude}\n#line 1 "kernels_cu/{name}"\n{kernel}'
    return Source(name, text, _includes(root, kernel))


def kernel_root() -> Path:
    """Folder of the kernels: CUFLASH_KERNEL_DIR, the installed package's, or the checkout's."""
    return settings.kernel_dir() or _packaged_root()


@functools.cache
def _packaged_root() -> Path:
    package = Path(str(resources.files("cuflash")))
    installed = package / "kernels_cu"
    return installed if installed.is_dir() else package.parent / "kernels_cu"


def _substitute(template: str, constants: dict[str, str]) -> str:
    prelude = Template(template)
    wanted, given = set(prelude.get_identifiers()), set(constants)
    if wanted != given:
        raise CompileError(
            f"{_PRELUDE} and the spec name different constants: only in the prelude"
            f" {sorted(wanted - given)}, only in the spec {sorted(given - wanted)}; make them agree"
        )
    return prelude.substitute(constants)


def _includes(root: Path, text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    waiting = [text]
    while waiting:
        for name in _INCLUDE.findall(waiting.pop()):
            if name not in found and name != _EDITOR_DEFAULTS:
                found[name] = _read(root, name)
                waiting.append(found[name])
    return found


def _read(root: Path, name: str) -> str:
    path = root / name
    try:
        stat = path.stat()
        return _cached_text(str(path), stat.st_mtime_ns, stat.st_size)
    except OSError as error:
        raise CompileError(
            f"kernel file {name} cannot be read in {root} ({error.strerror or error}): reinstall cuflash,"
            " or correct CUFLASH_KERNEL_DIR",
            source_path=str(path),
        ) from error


@functools.lru_cache(maxsize=256)
def _cached_text(path: str, mtime_ns: int, size: int) -> str:
    """Text of a file, read again only when it changed."""
    return Path(path).read_text(encoding="utf-8")
