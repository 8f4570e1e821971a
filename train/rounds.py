"""``python -m train rounds --config FILE --out DIR``: on-policy training, round after round.

Round 0 trains on the config's traces. Each later round traces the model under the best scorer so far, at budgets drawn
at random: histories are those that the evicting cache saw, labels come from the full cache's run of the same tokens. It
trains on these and on all traces before, and is judged in closed loop; the best of all rounds is kept (Ross et al.,
2011, arXiv:1011.0686, with the full cache as the expert).
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from kvlearn.errors import KvlearnError
from kvlearn.progress import bar
from kvlearn.report.grids import markdown_grid, terminal_grid
from kvlearn.rows import Row, RowStore, write_atomically
from kvlearn.shapes import Budget, GroupReduce
from kvlearn.stats import bootstrap_interval
from kvlearn.tracing import trace
from train.judge import Judge, Judging, table_of
from train.recipe import SCORER, changed, read_config, train_into

ROWS, TABLE, RESULTS = "rows.jsonl", "table.md", "results.jsonl"
LEAST_SHARE, MOST_SHARE = 0.05, 0.6
"""Of a window: between these lie the budgets that rounds trace at."""


@dataclass(frozen=True)
class Rounds:
    """What rounds are made of.

    Args:
        recipe: the config of round 0, with the traces that all rounds train on.
        out: folder of everything.
        judging: how a round's scorer is judged, and the model that is traced.
        data: text that rounds trace, a training split.
        tokens: traced by each round.
        window: tokens per window.
        last: number of the last round.
        block: queries per observed block, as in the config's traces.
        group_reduce: how the query heads of a KV head are reduced, as in the config's traces.
        seed: of training; a round's texts and budgets are drawn with the round's number.
    """

    recipe: Mapping[str, Any]
    out: Path
    judging: Judging
    data: str
    tokens: int
    window: int = 2048
    last: int = 2
    block: int = 32
    group_reduce: GroupReduce = "mean"
    seed: int = 0

    def folder(self, number: int) -> Path:
        """Of a round."""
        return self.out / f"round-{number}"

    def scorer(self, number: int) -> Path:
        """What a round has trained."""
        return self.folder(number) / SCORER

    def traces(self, number: int) -> Path:
        """What a round has traced."""
        return self.folder(number) / "trace"

    @property
    def budgets(self) -> str:
        """Between which a window's budget is drawn."""
        low, high = round(LEAST_SHARE * self.window), round(MOST_SHARE * self.window)
        return f"{max(low, Budget.resolve(high, self.block).least)}-{high}"

    def config(self, number: int) -> dict[str, Any]:
        """The config that a round trains with: the traces of all rounds up to it are mixed."""
        before = [str(path) for path in self.recipe["data"]["train"]]
        return changed(self.recipe, {"data.train": before + [str(self.traces(n)) for n in range(1, number + 1)]})


@dataclass
class Line:
    """One round in the table.

    Attributes:
        number: of the round.
        loss: mean rise over the full cache over documents and budgets, nats/token.
        by_budget: likewise at each budget.
        under: the round whose scorer it traced under; None for round 0.
        difference: mean paired difference to the best round before; None for round 0.
        low: lower end of its 95% interval over documents.
        high: upper end.
        best: whether it is the best so far.
    """

    number: int
    loss: float
    by_budget: list[float] = field(default_factory=list)
    under: int | None = None
    difference: float | None = None
    low: float | None = None
    high: float | None = None
    best: bool = True


def lines(rows: Sequence[Row], rounds: Rounds) -> list[Line]:
    """All rounds from the first on that are judged."""
    measured = {row["policy"] for row in rows}
    found: list[Line] = []
    best: tuple[int, Any] | None = None
    for number in range(rounds.last + 1):
        scorer = str(rounds.scorer(number))
        if scorer not in measured:
            break
        own = table_of(rows, [scorer], list(rounds.judging.budgets))[0]  # [budgets, documents]
        line = Line(number, float(own.mean()), own.mean(-1).tolist())
        if best is not None:
            interval = bootstrap_interval((own - best[1]).mean(0))
            line.under, line.difference, line.low, line.high = best[0], interval.mean, interval.lo, interval.hi
            line.best = line.loss < float(np.mean(best[1]))
        if line.best:
            best = number, own
        found.append(line)
    return found


def best_of(found: Sequence[Line]) -> int:
    """The round to trace under next, and to keep."""
    return [line.number for line in found if line.best][-1]


def run_round(rounds: Rounds, number: int, judge: Judge, store: RowStore) -> None:
    """Trace, train and judge one round, as far as it is not done.

    Raises:
        KvlearnError: a round before it is missing.
    """
    if number:
        before = lines(store.rows, rounds)[:number]
        if len(before) < number:
            raise KvlearnError(f"round {number} needs round {number - 1}; run that first.")
        with bar(f"round {number}: tracing") as progress:
            trace(
                judge.loaded,
                rounds.data,
                rounds.traces(number),
                tokens=rounds.tokens,
                window=rounds.window,
                policy=str(rounds.scorer(best_of(before))),
                budget=rounds.budgets,
                seed=number,
                block=rounds.block,
                group_reduce=rounds.group_reduce,
                progress=lambda done, total: progress("tokens", done, total),
            )
    train_into(rounds.config(number), rounds.folder(number), seed=rounds.seed)
    with bar(f"round {number}: judging") as progress:
        judge.run([str(rounds.scorer(number))], progress)


def run_rounds(rounds: Rounds, only: int | None = None) -> list[Line]:
    """All rounds, or one of them; what is done is not done again. The best scorer is in ``OUT/scorer`` at the end.

    Raises:
        KvlearnError: a round cannot be done.
    """
    found: list[Line] = []
    with RowStore(rounds.out / ROWS) as store:
        judge = Judge(rounds.judging, store)
        if rounds.judging.beside:
            judge.run(rounds.judging.beside)
        for number in range(rounds.last + 1) if only is None else [only]:
            run_round(rounds, number, judge, store)
            found = lines(store.rows, rounds)
            write(found, rounds)
    shutil.copytree(rounds.scorer(best_of(found)), rounds.out / SCORER, dirs_exist_ok=True)
    return found


def commands(rounds: Rounds, found: Sequence[Line]) -> list[str]:
    """What each round did, as commands of their own."""
    made = []
    for line in found:
        if line.under is not None:
            made.append(
                f"kvlearn trace {rounds.judging.model} --data {shlex.quote(rounds.data)} --tokens {rounds.tokens} "
                f"--window {rounds.window} --policy {rounds.scorer(line.under)} --budget {rounds.budgets} "
                f"--seed {line.number} --block {rounds.block} --group-reduce {rounds.group_reduce} "
                f"--out {rounds.traces(line.number)}"
            )
        folder = rounds.folder(line.number)
        made.append(f"python -m train fit --config {folder / 'config.yaml'}")
        made.append(f"python -m train export {folder / 'checkpoints/last.ckpt'} {folder / SCORER}")
    return made


def grid(found: Sequence[Line], rounds: Rounds) -> tuple[list[str], list[list[str]]]:
    """Columns and cells of the table."""
    budgets = rounds.judging.budgets
    columns = ["round", "traced under", *[f"loss at {b}" for b in budgets], "mean", "difference to the best before", ""]
    cells = []
    for line in found:
        change = ""
        if line.difference is not None:
            interval = "" if line.low is None else f" [{line.low:+.4f}, {line.high:+.4f}]"
            change = f"{line.difference:+.4f}{interval}"
        under = "the full cache" if line.under is None else f"round {line.under}"
        kept = "kept" if line.number == best_of(found) else ""
        cells.append([str(line.number), under, *[f"{x:.4f}" for x in line.by_budget], f"{line.loss:.4f}", change, kept])
    return columns, cells


def write(found: Sequence[Line], rounds: Rounds) -> None:
    """Write the table and the results."""
    judging = rounds.judging
    note = (
        f"Rise over the full cache in nats/token, {judging.model}, {judging.docs} documents of {judging.window:,} "
        f"tokens of {judging.data} ({judging.split}), slots shared {judging.allocation}; differences are paired, with "
        f"their 95% bootstrap interval over documents. Rounds trace {rounds.tokens:,} tokens at {rounds.budgets} slots."
    )
    asked, each = shlex.join(["python", "-m", "train", *sys.argv[1:]]), "\n".join(commands(rounds, found))
    table = markdown_grid(*grid(found, rounds))
    text = f"```bash\n{asked}\n```\n\n{table}\n\n{note}\n\nStep by step:\n\n```bash\n{each}\n```\n"
    write_atomically(rounds.out / TABLE, text.encode())
    write_atomically(rounds.out / RESULTS, "".join(json.dumps(vars(line)) + "\n" for line in found).encode())


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    from rich.console import Console

    rounds, only, threads = parse(arguments)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    found = run_rounds(rounds, only)
    Console().print(terminal_grid("rise over the full cache, nats/token", *grid(found, rounds)))
    print(f"the best is round {best_of(found)}: {rounds.out / SCORER}; {rounds.out / TABLE} says how it was made")


def parse(arguments: Sequence[str]) -> tuple[Rounds, int | None, int | None]:
    """Rounds, the only one to do if there is one, and threads."""
    parser = argparse.ArgumentParser(
        prog="python -m train rounds",
        description="Train, trace under what was trained, train on both, and so on; keep what is best in closed loop.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="as for fit: the recipe, and the traces of round 0")
    add("--out", required=True, type=Path, metavar="DIR", help="traces, scorers, rows and the table")
    add("--model", required=True, help="the model that the traces are of")
    add("--data", required=True, help="training text to trace, see `kvlearn corpora`")
    add("--tokens", type=int, default=98304, help="traced by each round")
    add("--window", type=int, default=2048, help="tokens per window, traced and judged")
    add("--rounds", type=int, default=2, help="rounds after round 0")
    add("--round", type=int, help="do only this one; those before it must be done")
    add("--block", type=int, default=32, help="queries per observed block, as in the config's traces")
    add("--group-reduce", choices=("mean", "max"), default="mean", help="as in the config's traces")
    add("--seed", type=int, default=0, help="of training")
    add("--judge-data", default="stdlib", help="texts to judge on, of the validation split; with commas")
    add("--judge-split", default="validation", help="validation, test or all")
    add("--docs", type=int, default=4, help="documents to judge on")
    add("--batch", type=int, default=4, help="documents judged together")
    add("--budgets", default="128,256,512", help="slots to judge at")
    add("--allocation", default="uniform", help="how slots are shared when judging")
    add("--beside", default="", help="policies to judge as well, such as ema,oracle")
    add("--dtype", help="of the model; if not given, that which reads text fastest here")
    add("--device", default="cpu", help="of the model")
    add("--threads", type=int, help="CPU threads; all cores if not given")
    options = parser.parse_args(arguments)
    try:
        budgets = [int(part) for part in options.budgets.split(",")]
    except ValueError:
        raise KvlearnError(f"--budgets is {options.budgets!r}; give numbers of slots with commas.") from None
    if options.rounds < 0 or (options.round is not None and not 0 <= options.round <= options.rounds):
        raise KvlearnError(f"there are rounds 0 to {options.rounds}, so --round cannot be {options.round}.")
    recipe = read_config(options.config)
    if not recipe.get("data", {}).get("train"):
        raise KvlearnError(f"{options.config} names no data.train, the traces of round 0.")
    judging = Judging(
        model=options.model,
        data=options.judge_data,
        split=options.judge_split,
        docs=options.docs,
        budgets=budgets,
        allocation=options.allocation,
        window=options.window,
        batch=options.batch,
        beside=[name for name in options.beside.split(",") if name],
        dtype=options.dtype,
        device=options.device,
        block=options.block,
    )
    sizes = {"tokens": options.tokens, "window": options.window, "last": options.rounds, "block": options.block}
    rounds = Rounds(
        recipe, options.out, judging, options.data, **sizes, group_reduce=options.group_reduce, seed=options.seed
    )
    return rounds, options.round, options.threads
