"""FlashAttention for CuPy: CUDA text specialised and compiled at first use, cached, launched."""

import importlib
from typing import TYPE_CHECKING, Any

from cuflash import log
from cuflash.api import flash_attn_func, flash_attn_varlen_func
from cuflash.errors import CacheWarning, CuflashError, ErrorCode, TuningWarning, get_error_string
from cuflash.plan import Plan, last_plan
from cuflash.problem import AttentionProblem, describe_problem

if TYPE_CHECKING:
    from cuflash.debug.compare import Comparison, compare
    from cuflash.tuning.tune import tune

__version__ = "0.1.0"

log.start()

__all__ = [
    "AttentionProblem",
    "CacheWarning",
    "Comparison",
    "CuflashError",
    "ErrorCode",
    "Plan",
    "TuningWarning",
    "__version__",
    "compare",
    "describe_problem",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_error_string",
    "last_plan",
    "tune",
]

# What a program that only calls attention need not load.
_ON_DEMAND = {
    "Comparison": "cuflash.debug.compare",
    "compare": "cuflash.debug.compare",
    "tune": "cuflash.tuning.tune",
}


def __getattr__(name: str) -> Any:
    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)
