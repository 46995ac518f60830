"""The real kernels in a folder of a test's own, to be edited."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from cuflash.gpu.render import kernel_root


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "kernels of mine"
    shutil.copytree(kernel_root(), folder)
    monkeypatch.setenv("CUFLASH_KERNEL_DIR", str(folder))
    return folder


def edit(folder: Path, end: str, name: str = "forward_mma.cu") -> int:
    """Save a file with one more line, in the place of the last edit's; give the line's number."""
    file = folder / name
    lines = [line for line in file.read_text().splitlines() if not line.endswith("// edit")]
    file.write_text("\n".join([*lines, f"{end} // edit", ""]))
    return len(lines) + 1
