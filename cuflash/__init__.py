"""FlashAttention for CuPy: CUDA text specialised and compiled at first use, cached, launched."""

from cuflash import log
from cuflash.api import flash_attn_func, flash_attn_varlen_func
from cuflash.errors import CacheWarning, CuflashError, ErrorCode, get_error_string
from cuflash.plan import Plan, last_plan

__version__ = "0.1.0"

log.start()

__all__ = [
    "CacheWarning",
    "CuflashError",
    "ErrorCode",
    "Plan",
    "__version__",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "get_error_string",
    "last_plan",
]
