"""`beamq compare` and `beamq sensitivity`: one call into the library, tables and reports."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from beamq.adapter.options import AdapterOptions
from beamq.commands.options import Checkpoint, Source, command, place
from beamq.errors import UsageError, counted
from beamq.eval.compare.options import CompareOptions, SensitivityOptions
from beamq.io.files import user_path
from beamq.options import Flag, option

if TYPE_CHECKING:
    from beamq.eval.compare.records import Comparison
    from beamq.eval.compare.sensitivity import Choice, Sensitivity
    from beamq.report.console import Block, Screen


REPORT = Flag(
    "Write a report as HTML, Markdown and JSON to this folder.",
    metavar="DIR",
    type=Path,
    after="seed",
)


@dataclass(frozen=True, kw_only=True)
class CompareFiles:
    """What `beamq compare` writes."""

    report: Path | None = option(None, REPORT)
    write_card: bool = option(
        False, "Write each checkpoint's figures into its README.md.", after="seed"
    )


@command()
def compare(
    screen: Screen,
    source: Source,
    checkpoints: Annotated[list[str], place("CHECKPOINT...", "Folders made from SOURCE.")],
    options: CompareOptions,
    adapter: AdapterOptions,
    files: CompareFiles,
    verbose: bool,
) -> int:
    """Compare models: what quantization cost and what it saved.

    All models run on the same text, one layer of each at a time. Under torchrun, experts are split
    over the processes. The exit code is 1 if a checkpoint exceeds its recipe's bounds.
    """
    from beamq.eval.compare.compare import compare as run
    from beamq.report.files import check_report_folder, write_cards, write_report

    if files.report is not None:
        check_report_folder(files.report, "report")
    page: Path | None = None

    def write(found: Comparison) -> None:
        nonlocal page
        page = None if files.report is None else write_report(found, files.report)
        if files.write_card:
            write_cards(found, checkpoints)

    with screen.progress("comparing") as advance:
        found = run(
            source,
            checkpoints,
            **vars(options),
            **vars(adapter),
            on_start=lambda: screen.say(
                f"Running {source} and {counted(len(checkpoints), 'checkpoint')} on the same text."
            ),
            progress=advance,
            on_result=write,
        )
    screen.show(
        # The keys of report.json (docs/report-schema.md) come after these two.
        lambda: {"command": "compare", "report": _text(page), **found.to_dict()},
        lambda: compare_blocks(found, page, verbose=verbose),
    )
    return 0 if found.safe else 1


@dataclass(frozen=True, kw_only=True)
class SensitivityChoice:
    """Which parts `beamq sensitivity` chooses, and what it writes."""

    exclude_worst: int | None = option(
        None, "Keep in high precision the N parts that lose most.", metavar="N", type=int,
        at_least=1, after="seed",
    )  # fmt: skip
    max_kl: float | None = option(
        None, "Keep the fewest parts that bring the KL down to X nats.", metavar="X", type=float,
        at_least=0, after="seed",
    )  # fmt: skip
    target_bits: float | None = option(
        None, "Keep as many parts as fit B bits a weight.", metavar="B", type=float,
        at_least=0, after="seed",
    )  # fmt: skip
    write_recipe: Path | None = option(
        None, "Write the chosen parts as a recipe.", metavar="FILE", type=Path, after="seed"
    )
    report: Path | None = option(None, REPORT)

    def check(self) -> None:
        """Raise `UsageError` for flags that contradict each other or paths that are in the way."""
        from beamq.report.files import check_new_file, check_report_folder

        limits = (self.exclude_worst, self.max_kl, self.target_bits)
        given = sum(limit is not None for limit in limits)
        if given > 1:
            raise UsageError("give one of --exclude-worst, --max-kl and --target-bits")
        if self.write_recipe is not None:
            if not given:
                raise UsageError(
                    "--write-recipe needs --exclude-worst, --max-kl or --target-bits to choose by"
                )
            if self.write_recipe.suffix not in (".yaml", ".yml"):
                raise UsageError(
                    f"--write-recipe {self.write_recipe}: a recipe's name ends in .yaml"
                )
            check_new_file(self.write_recipe, "--write-recipe")
        if self.report is not None:
            check_report_folder(self.report, "sensitivity")


@command()
def sensitivity(
    screen: Screen,
    source: Source,
    checkpoint: Checkpoint,
    options: SensitivityOptions,
    adapter: AdapterOptions,
    wanted: SensitivityChoice,
    verbose: bool,
) -> None:
    """Measure what each quantized part costs on its own.

    CHECKPOINT is a quantized Beam made from SOURCE. Each part (a layer's experts, dense MLP or
    attention) replaces the source's part on its own, all in one pass over a few rows of text. The
    result shows which parts to keep in high precision.
    """
    from beamq.eval.compare.sensitivity import choose, recipe_yaml, sparing_recipe
    from beamq.eval.compare.sensitivity import sensitivity as run
    from beamq.io.shard_writer import write_file
    from beamq.report.files import write_sensitivity

    wanted.check()
    with screen.progress("measuring") as advance:
        found = run(
            source,
            checkpoint,
            **vars(options),
            **vars(adapter),
            on_start=lambda: screen.say(
                f"Running {source} with one quantized part of {checkpoint} at a time."
            ),
            progress=advance,
        )
    choice = choose(
        found,
        exclude_worst=wanted.exclude_worst,
        max_kl=wanted.max_kl,
        target_bits=wanted.target_bits,
    )
    recipe = wanted.write_recipe if choice is not None else None
    if recipe is not None and choice is not None:
        text = recipe_yaml(sparing_recipe(found, choice))
        write_file(user_path(recipe), text.encode(), resumable=False)
    page = None if wanted.report is None else write_sensitivity(found, choice, wanted.report)
    screen.show(
        lambda: {
            "command": "sensitivity",
            "report": _text(page),
            "recipe_file": _text(recipe),
            "choice": None if choice is None else choice.to_dict(),
            **found.to_dict(),
        },
        lambda: sensitivity_blocks(found, choice, recipe, page, verbose=verbose),
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


ABREAST = 2  # candidates that fit 80 columns side by side
LAYERS, LINEARS = 5, 5
ALL_LINEARS = 20
NAME_WIDTH, CELL_WIDTH = 17, 28  # of a folder's name, and of a linear's


def compare_blocks(comparison: Comparison, report: Path | None, *, verbose: bool) -> list[Block]:
    """Verdicts first, then the figures that they depend on; `verbose` shows all."""
    from beamq.eval.compare.records import CAVEAT
    from beamq.report import tables

    blocks: list[Block] = []
    for candidate in comparison.candidates:
        blocks += [f"{candidate.model.name}: {candidate.verdict.headline}"]
        blocks += [candidate.verdict.text]
        blocks += [f"Note: {note}." for note in candidate.notes]
        blocks.append("")
    blocks += [*_tables(comparison, verbose=verbose), tables.text_line(comparison)]
    blocks += [f"Note: {note}." for note in comparison.data["notes"]]
    blocks.append(CAVEAT)
    if report is not None:
        blocks += ["", f"Report: {report}"]
    return blocks


def _tables(comparison: Comparison, *, verbose: bool) -> Iterator[Block]:
    from beamq.report import tables

    candidates, shown = comparison.candidates, []
    names = [each.name for each in (comparison.source, *(each.model for each in candidates))]
    labels = dict(zip(names, tables.labels(names, NAME_WIDTH), strict=True))
    for start in range(0, len(candidates), ABREAST):
        shown.append(tables.summary(comparison.source, candidates[start : start + ABREAST]))
    for candidate in candidates:
        shown.append(tables.damage(candidate, None if verbose else LAYERS))
        shown.append(tables.linears(candidate, ALL_LINEARS if verbose else LINEARS))
        shown.append(tables.adapter(candidate))
    shown += [tables.sizes(comparison), tables.newly_fitting(comparison)]
    if verbose:
        shown.append(tables.per_gpu(comparison))
    for table in shown:
        if table.rows:
            yield table.clipped(labels, CELL_WIDTH)
            yield ""


SHOWN_PARTS = 12


def sensitivity_blocks(
    found: Sensitivity,
    choice: Choice | None,
    recipe: Path | None,
    report: Path | None,
    *,
    verbose: bool,
) -> list[Block]:
    """The tables of a measurement, the choice, and the files that were written."""
    from beamq.report.console import Command
    from beamq.report.files import choice_line, curve_table, headline, parts_table, text_line

    blocks: list[Block] = [headline(found), text_line(found)]
    blocks += [f"Note: {note}." for note in found.data["notes"]]
    blocks += ["", parts_table(found, None if verbose else SHOWN_PARTS)]
    hidden = len(found.parts) - SHOWN_PARTS
    if hidden > 0 and not verbose:
        blocks.append(f"and {hidden} more; -v shows all")
    blocks += ["", curve_table(found), ""]
    if choice is not None:
        blocks.append(choice_line(choice))
    if recipe is not None:
        blocks += [f"Recipe: {recipe}", Command(f"beamq quantize SOURCE OUTPUT --recipe {recipe}")]
    if report is not None:
        blocks.append(f"Report: {report}")
    return blocks
