"""The tables of a sweep: winners, candidates, heat maps, and what was not tried."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cuflash.cli import tables
from cuflash.cli.tables import Column, Row, Table, emit
from cuflash.cli.units import in_bytes, in_milliseconds

if TYPE_CHECKING:
    from cuflash.tuning.space import Plan
    from cuflash.tuning.sweep import Result


def in_ratio(value: float) -> str:
    """Give a ratio as one compares it."""
    return f"{value:.3f}"


TILE = (
    Column("kernel"),
    Column("block_m", right=True),
    Column("block_n", right=True),
    Column("num_warps", "warps", right=True),
    Column("num_stages", "stages", right=True),
    Column("blocks_per_sm", "blocks/SM asked", right=True),
    Column("q_in_registers", "q in registers"),
)
RECORDS = (
    Column("problem"),
    Column("rank", right=True),
    *TILE,
    Column("resident", "blocks/SM", right=True),
    Column("registers", right=True),
    Column("spill_bytes", "spills", in_bytes, right=True),
    Column("shared_bytes", "shared memory", in_bytes, right=True),
    Column("compile_ms", "compile ms", in_milliseconds, right=True),
    Column("ms", right=True),
    Column("spread", "spread %", right=True),
    Column("tflops", "TFLOP/s", right=True),
    Column("ratio", "of default", in_ratio, right=True),
    Column("noise", "noise", in_ratio, right=True),
    Column("verdict"),
    Column("error"),
)
# What a person compares, narrow enough for a terminal.
SHORT = (
    Column("rank", "", right=True),
    Column("tile"),
    Column("registers", "regs", right=True),
    Column("spill_bytes", "spills", right=True),
    Column("shared_bytes", "shared", in_bytes, right=True),
    Column("resident", "blocks/SM", right=True),
    Column("ms", right=True),
    Column("spread", "± %", right=True),
    Column("tflops", "TFLOP/s", right=True),
    Column("ratio", "of default", in_ratio, right=True),
    Column("verdict"),
    Column("error"),
)
WINNERS = (
    Column("problem"),
    Column("gpu"),
    Column("config"),
    Column("ms", right=True),
    Column("default_ms", "default ms", right=True),
    Column("ratio", "of default", in_ratio, right=True),
    Column("verdict"),
    Column("tried", right=True),
    Column("failed", right=True),
    Column("complete"),
)
PRUNED = (
    Column("problem"),
    Column("kind"),
    Column("count", right=True),
    Column("example"),
    Column("reason"),
)


def report(results: list[Result], top: int, form: str | None) -> None:
    """Print winners, records and what was pruned; a terminal gets heat maps, and the best records only."""
    as_table = form == "table" or (form is None and tables.is_terminal())
    winners = Table("winners", "Winners", WINNERS, [winner_row(r) for r in results])
    pruned = pruned_table([row for result in results for row in pruned_rows(result.plan)])
    if as_table:
        shown = [winners]
        for result in results:
            best = Table(
                "records", "The fastest, and why others are out", SHORT, shortened(result, top)
            )
            shown += [heat_table(result), best]
        emit([*shown, pruned], form=form)
        return
    records = [row for result in results for row in record_rows(result)]
    emit(
        [winners, Table("records", "Candidates, the fastest first", RECORDS, records), pruned], form=form
    )  # fmt: skip


def shortened(result: Result, top: int) -> list[Row]:
    """Give the fastest, the default, and one of each kind of failure."""
    rows = record_rows(result)
    seen: set[str] = set()
    kept = []
    for row in rows:
        ran = row["status"] == "ok"
        first_of_kind = not ran and row["status"] not in seen
        if (
            (ran and row["rank"] <= top)
            or row["config"] == result.plan.default.name
            or first_of_kind
        ):
            kept.append(row)
        seen.add(row["status"])
    return kept


def tile_in_words(row: Row) -> str:
    """Give a tile as one reads it."""
    kernel = "" if row["kernel"] == "forward_mma" else f"{row['kernel']} "
    return (
        f"{kernel}{row['block_m']}x{row['block_n']} {row['num_warps']} warps {row['num_stages']} stages"
        f" {row['blocks_per_sm']} a SM{' q in registers' if row['q_in_registers'] else ''}"
    )


def winner_row(result: Result) -> Row:
    """Give the row of a sweep's outcome."""
    winner, default = result.winner, result.default
    row: Row = {
        "problem": result.plan.problem.in_words, "gpu": result.plan.device.name, "tried": len(result.records),
        "failed": sum(not r.ok for r in result.records), "complete": result.complete,
        "default_ms": default and default.final_ms,
    }  # fmt: skip
    if winner is not None:
        kept = winner.config == result.plan.default.name
        row |= {"config": winner.config, "ms": winner.final_ms, "ratio": winner.ratio}
        row["verdict"] = "default kept" if kept else "faster"
    return row | ({} if winner else {"verdict": "FAIL"})


def record_rows(result: Result) -> list[Row]:
    """Give a row for each candidate."""
    from cuflash.gpu.choose import parse_config

    rows = []
    for rank, record in enumerate(result.records, 1):
        ms = record.final_ms or record.ms
        row = record.as_dict() | parse_config(record.config)
        row |= {
            "problem": result.plan.problem.in_words,
            "rank": rank,
            "ms": ms,
            "resident": record.blocks_per_sm,
        }
        if ms and record.ms and record.p20 and record.p80:
            row["spread"] = 100 * (record.p80 - record.p20) / record.ms
            if not result.plan.problem.packed:
                row["tflops"] = result.plan.problem.flops / ms / 1e9
        row["tile"] = tile_in_words(row)
        rows.append(row)
    return rows


def pruned_rows(plan: Plan) -> list[Row]:
    """Give a row for each kind of reason, with an example."""
    from cuflash.tuning.space import config_name

    examples = {pruned.kind: pruned for pruned in reversed(plan.pruned)}
    return [
        {"problem": plan.problem.in_words, "kind": kind, "count": count,
         "example": config_name(examples[kind].config), "reason": examples[kind].reason}
        for kind, count in plan.pruned_by_kind.most_common()
    ]  # fmt: skip


def pruned_table(rows: list[Row]) -> Table:
    """Give the table of what was not tried."""
    return Table("pruned", "Not tried", PRUNED, rows)


def heat_table(result: Result) -> Table:
    """Give block_m against block_n: the best milliseconds of each cell."""
    from cuflash.tuning.heatmap import heat_map

    found = heat_map(result.records)
    columns = [Column("block_m", "block_m \\ block_n", right=True)]
    columns += [Column(str(n), right=True) for n in found.block_n]
    rows: list[Row] = []
    for m in found.block_m:
        row: Row = {"block_m": m}
        for n in found.block_n:
            time = found.best.get((m, n))
            row[str(n)] = found.failed.get((m, n)) if time is None else f"{time:.4g}"
        rows.append(row)
    return Table(
        "heat_map", f"Best ms of each block: {result.plan.problem.in_words}", columns, rows
    )
