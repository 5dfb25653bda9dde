"""What is plotted: a panel's curves, axes and words, and which runs have nothing for it."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence

from slipstream_tf.telemetry.report.runs import Run

Point = tuple[float | None, float | None]


@dataclasses.dataclass(frozen=True)
class Curve:
    """One run's numbers in one panel.

    Attributes:
        run: its name.
        part: which of a run's curves it is; empty where a run has one.
        points: (x, y); of bars, x is the index of the category.
    """

    run: str
    part: str
    points: tuple[tuple[float, float], ...]


@dataclasses.dataclass(frozen=True)
class Panel:
    """One plot.

    Attributes:
        group: heading under which it stands.
        name: stem of its files' names.
        title: in a few words.
        caption: one sentence that says what is on the axes, with units.
        x_label, y_label: of the axes.
        curves: what is drawn, in the order of the runs.
        missing: names of the runs whose records do not have it.
        notes: sentences about single runs.
        categories: of bars, one below the other; empty: lines are drawn.
        x_is_log, y_is_log: whether the axis is logarithmic.
        best: y that a run should come close to, drawn as a line; or None.
    """

    group: str
    name: str
    title: str
    caption: str
    x_label: str
    y_label: str
    curves: tuple[Curve, ...] = ()
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    x_is_log: bool = False
    y_is_log: bool = False
    best: float | None = None

    @property
    def parts(self) -> list[str]:
        """The parts that curves have, each once; empty where there is one curve a run."""
        return list(dict.fromkeys(curve.part for curve in self.curves if curve.part))

    def filled(
        self,
        runs: Iterable[Run],
        points_of: Callable[[Run], Mapping[str, Sequence[Point]]],
        note_of: Callable[[Run], str] = lambda run: "",
    ) -> "Panel":
        """Returns the panel with what runs have for it.

        Args:
            runs: in order.
            points_of: the points of a run by part; those with a None are left out.
            note_of: a sentence about a run, which stands for its curves where it has none.
        """
        curves, missing, notes = [], [], []
        for run in runs:
            found = []
            for part, points in points_of(run).items():
                known = tuple((x, y) for x, y in points if x is not None and y is not None)
                if known:
                    found.append(Curve(run.name, part, known))
            note = note_of(run)
            if note:
                notes.append(note)
            elif not found:
                missing.append(run.name)
            curves += found
        return dataclasses.replace(
            self, curves=tuple(curves), missing=tuple(missing), notes=tuple(notes)
        )
