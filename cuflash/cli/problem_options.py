"""The options that say which problems a command is about: one set for tune, bench, check, show and dev."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from cuflash.problem import AttentionProblem, describe_problem
from cuflash.tuning.presets import MODELS

Command = TypeVar("Command", bound=Callable[..., Any])

DTYPES = ("fp16", "bf16", "fp32")
# Where neither an option nor a model says it: on a GPU, and on a CPU, where the NumPy road is slow.
DEFAULTS = {"batch": 4, "seqlen_q": 4096, "nheads_q": 16, "head_dim": 128, "dtype": "bf16"}
SMALL = {"batch": 1, "seqlen_q": 1024, "nheads_q": 4, "head_dim": 64, "dtype": "bf16"}


class _List(click.ParamType[tuple[Any, ...]]):
    """Values separated by commas; each gives a problem of its own."""

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self.inner = inner
        self.name = f"{inner.name},..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        """Convert each part."""
        if isinstance(value, tuple):
            return value
        parts = [part for part in str(value).replace(",", " ").split() if part]
        if not parts:
            self.fail("at least one value is needed", param, ctx)
        return tuple(self.inner.convert(part, param, ctx) for part in parts)


class _Window(click.ParamType[tuple[int, int]]):
    name = "left,right"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, int]:
        """Read two distances; -1 is no bound."""
        if isinstance(value, tuple):
            return value
        try:
            left, right = (int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is not LEFT,RIGHT, such as 256,0", param, ctx)
        return left, right


_INTS = _List(click.IntRange(0))
_SIZES = _List(click.IntRange(1))

_OPTIONS = (
    click.option("--batch", type=click.IntRange(0), help="Sequences."),
    click.option("--seqlen", "--seqlen-q", "seqlen_q", type=_INTS, metavar="N,...",
                 help="Queries; several give several problems."),
    click.option("--seqlen-k", type=click.IntRange(0), metavar="N", help="Keys.  [default: as --seqlen]"),
    click.option("--heads", "nheads_q", type=click.IntRange(1), metavar="N", help="Query heads."),
    click.option("--heads-k", "nheads_k", type=click.IntRange(1), metavar="N",
                 help="Key heads.  [default: as --heads]"),
    click.option("--head-dim", type=_SIZES, metavar="N,...", help="Of q and k, 1 to 256."),
    click.option("--head-dim-v", type=click.IntRange(1), metavar="N", help="Of v.  [default: as --head-dim]"),
    click.option("--dtype", type=_List(click.Choice(DTYPES)), metavar="NAME,...", help="fp16, bf16 or fp32."),
    click.option("--causal/--no-causal", default=None, help="The causal mask, bottom-right; neither: without."),
    click.option("--both-masks", is_flag=True, help="Each problem with and without the causal mask."),
    click.option("--window", "window_size", type=_Window(), help="Keys seen left and right of the diagonal; -1 = all."),
    click.option("--softcap", type=float, metavar="X", help="Cap of the scores."),
    click.option("--alibi", is_flag=True, help="With ALiBi slopes."),
    click.option("--bias", type=click.Choice(DTYPES), help="With a bias of this dtype."),
    click.option("--sink", is_flag=True, help="With a sink logit for each head."),
    click.option("--seqlens-k", is_flag=True, help="With a count of valid keys for each sequence."),
    click.option("--packed", is_flag=True, help="Packed sequences of random lengths; --seqlen counts the rows of all."),
    click.option("--precision", type=click.Choice(["ieee", "tf32"]), help="Of fp32 products."),
    click.option("--vector-bytes", type=click.Choice(["2", "4", "8", "16"]), help="Widest load that the arrays allow."),
    click.option("--from-model", type=click.Choice(sorted(MODELS)), help="Heads, head dim and mask of a model."),
    click.option("--from-log", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE",
                 help="Problems recorded with CUFLASH_RECORD=FILE."),
)  # fmt: skip
_NAMES = (
    "batch", "seqlen_q", "seqlen_k", "nheads_q", "nheads_k", "head_dim", "head_dim_v", "dtype", "causal", "both_masks",
    "window_size", "softcap", "alibi", "bias", "sink", "seqlens_k", "packed", "precision", "vector_bytes",
    "from_model", "from_log",
)  # fmt: skip


def problem_options(command: Command) -> Command:
    """Give a command the options; it gets them as one dict, ``problem_options``."""

    @functools.wraps(command)
    def gathering(*args: Any, **kwargs: Any) -> Any:
        asked = {name: kwargs.pop(name) for name in _NAMES}
        return command(*args, problem_options=asked, **kwargs)

    wrapped: Any = gathering
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped


def problems(asked: dict[str, Any], defaults: dict[str, Any] = DEFAULTS) -> list[AttentionProblem]:
    """Give the problems that the options ask for.

    Raises
    ------
    CuflashError
        For a problem that no call could ask for.
    """
    given = {
        name: value for name, value in asked.items() if value is not None and value is not False
    }
    log = given.pop("from_log", None)
    if log is not None:
        if given:
            raise click.UsageError(f"--from-log says it all: leave out {_flag(next(iter(given)))}")
        from cuflash.tuning import problem_log

        return problem_log.read(log)
    model = given.pop("from_model", None)
    both = given.pop("both_masks", False)
    if "vector_bytes" in given:
        given["vector_bytes"] = int(given["vector_bytes"])
    if asked["causal"] is False:  # said, not left out: a model's mask goes
        given["causal"] = False
    fields = {**defaults, **(MODELS[model] if model else {}), **given}
    masks = (False, True) if both else (fields.pop("causal", False),)
    fields.pop("causal", None)
    several = ("dtype", "head_dim", "seqlen_q")
    lists = [value if isinstance(value := fields.pop(n), tuple) else (value,) for n in several]
    return [
        describe_problem(**fields, **dict(zip(several, values, strict=True)), causal=causal)
        for *values, causal in itertools.product(*lists, masks)
    ]


def command_line(problem: AttentionProblem) -> str:
    """Give the options that ask for a problem, for commands that a person is to run."""
    plain = describe_problem(dtype=problem.dtype, head_dim=problem.head_dim).options
    options = problem.options
    parts = [f"--dtype {problem.dtype}"]
    if problem.causal:
        options["window_size"] = plain["window_size"]
        parts.append("--causal")
    always = ("batch", "seqlen_q", "nheads_q", "head_dim")
    for name, value in options.items():
        if name in ("dtype", "softmax_scale"):
            continue
        derived = {
            "seqlen_k": problem.seqlen_q, "nheads_k": problem.nheads_q, "head_dim_v": problem.head_dim,
        }.get(name, plain[name])  # fmt: skip
        if name not in always and value == derived:
            continue
        if value is True:
            parts.append(_flag(name))
        else:
            text = ",".join(map(str, value)) if isinstance(value, tuple) else f"{value}"
            parts.append(f"{_flag(name)} {text}")
    return " ".join(parts)


def _flag(name: str) -> str:
    names = {
        "nheads_q": "heads",
        "nheads_k": "heads_k",
        "seqlen_q": "seqlen",
        "window_size": "window",
    }
    return "--" + names.get(name, name).replace("_", "-")
