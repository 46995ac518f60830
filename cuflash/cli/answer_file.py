"""Arrays that another program saved: an .npz of q, k, v and its answer."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from cuflash import arrays
from cuflash.errors import InvalidArgumentError

NEEDED = ("q", "k", "v", "out")
OPTIONAL = ("lse", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k", "alibi_slopes", "bias", "sink")
FLOATS = (*NEEDED, "lse", "alibi_slopes", "bias", "sink")


def read(path: Path, dtype: str | None = None) -> tuple[dict[str, Any], list[str]]:
    """Read the arguments of `cuflash.compare`, and the names of what else is there.

    NumPy's files have no bfloat16: two-byte arrays without a type are taken for it, and with
    ``dtype`` "bf16" those of two-byte integers too.

    Raises
    ------
    InvalidArgumentError
        For a file that is none of NumPy's, or lacks an array.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it holds one array, without a name")
            found = {name: file[name] for name in file.files}
    # A file can be broken in each of these ways; a pickled array is a ValueError.
    except (OSError, ValueError, EOFError, TypeError, KeyError, zipfile.BadZipFile) as error:
        raise InvalidArgumentError(
            f"{path} cannot be read ({error}): an .npz is needed, as"
            ' numpy.savez("answer.npz", q=q, k=k, v=v, out=out) writes it'
        ) from error
    missing = [name for name in NEEDED if name not in found]
    if missing:
        raise InvalidArgumentError(
            f"{path} has no {', '.join(missing)}: {', '.join(NEEDED)} are needed, and"
            f" {', '.join(OPTIONAL)} may be there; it has {', '.join(found) or 'nothing'}"
        )
    other = [name for name in found if name not in (*NEEDED, *OPTIONAL)]
    known = {name: _typed(name, x, dtype) for name, x in found.items() if name not in other}
    return known, other


def _typed(name: str, x: np.ndarray[Any, Any], dtype: str | None) -> np.ndarray[Any, Any]:
    """See bits as the bfloat16 that they are."""
    bits = x.dtype.kind == "V" or (dtype == "bf16" and x.dtype.kind in "iu")
    if name in FLOATS and x.dtype.itemsize == 2 and bits:
        return x.view(arrays.dtype_of("bf16"))
    return x
