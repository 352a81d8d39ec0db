"""Verdicts: decisions with their certificates, as tables and in words."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cqm.certificates import DOUBT, Limits
from cqm.display import counted, data_frame, html_table, text_table

SHOWN_STATES = 10  # rows of a printed verdict
NOTE_WIDTH = 90  # characters per line of the sentences below its table


@dataclass(frozen=True)
class Verdict:
    """A decision for each state, and how far to trust it; prints as a table."""

    advantages: np.ndarray  # [n, actions]
    action: np.ndarray  # [n], the best action according to the model
    gap: np.ndarray  # [n], advantage over the second-best action
    radius: np.ndarray  # [n], bound on the errors of all contrasts of a state at once
    typical_error: np.ndarray  # [n], median size of the error in the gap, in states like this
    regret_bound: np.ndarray  # [n], bound on the regret of the chosen action
    combined_bound: float  # 2Wδ + 2·m_H·ε_r; NaN for a reward that is not projected
    paper_bound: float  # 2Wδ + 4·m_H·ε_r; likewise
    separable: np.ndarray  # [n], whether the chosen action is certified to be the best
    unlike: np.ndarray  # [n], whether the state is unlike any calibration state
    shifted: bool  # whether the states, taken together, are unlike the calibration states
    confidence: float  # probability that the bounds hold
    calibration_states: int
    limits: Mapping[str | None, Limits]  # of the query's errors, by group; None for all states
    action_names: tuple[str, ...]
    query: str  # the reward, in words
    meaning: str  # what "best" means, in one sentence
    projected: bool = False  # whether the reward is only approximately linear in the features
    num_queries: int = 1  # number of rewards for which the bounds hold at once
    settled: ClassVar[str] = "certain"  # said of a state in which one action is the best

    @property
    def best(self) -> tuple[str, ...]:
        """The name of the best action in each state."""
        return tuple(self.action_names[action] for action in self.action)

    @property
    def behind(self) -> np.ndarray:
        """Interval for how far each action is behind the chosen one, `[n, actions, 2]`."""
        lead = self.advantages.max(axis=1, keepdims=True) - self.advantages
        radius = self.radius[:, None]
        return np.stack([lead - radius, lead + radius], axis=-1)

    @property
    def answers(self) -> tuple[str, ...]:
        """In words, what is known about the best action in each state."""
        words = np.where(self.separable, self.settled, "cannot tell")
        return tuple(np.where(self.unlike, "unlike calibration", words).tolist())

    @property
    def trust(self) -> str:
        """What the confidence means, in a few sentences."""
        where = f"over states like the {self.calibration_states} calibration states"
        if self.limits.keys() != {None}:
            where += ", in each group separately"
        if self.num_queries > 1:
            where += f", for {self.num_queries} rewards at once"
        bounds = f"The bounds on the regret hold with {self._percent} confidence {where}"
        assumed = (
            "Assumed: the reward is nowhere further from linear than in the sampled steps. "
            if self.projected
            else ""
        )
        return f"{assumed}{self._about_certain()} {bounds}, not for each state separately."

    def _about_certain(self) -> str:
        """What it means that a state is certain, in one or two sentences."""
        tested = [limits for limits in self.limits.values() if limits.tested]
        others = {group: limits for group, limits in self.limits.items() if not limits.tested}
        sentences = []
        if tested or not others:
            lead = ""
            if len(self.limits) == 1 and not self.projected and tested[0].typical > 0:
                times = tested[0].typical_errors
                lead = f" (a lead of at least {times:.2g} times the typical error)"
            sentences.append(
                f"Of the states that are marked certain{lead}, at most "
                f"{100 * (1 - self.confidence):.3g}% have a different best action (tested with "
                f"{100 * (1 - DOUBT):g}% confidence)."
            )
        if others:
            needed = max(limits.needed for limits in others.values())
            few = any(limits.states < limits.needed for limits in others.values())
            more = f" ({needed} calibration states would limit the share of wrong answers)"
            noun = "groups" if len(others) > 1 else "group"
            start = f"In {noun} {', '.join(map(str, others))}, a" if tested else "A"
            sentences.append(
                f"{start} state is certain if its bound on the regret is zero{more if few else ''}."
            )
        return " ".join(sentences)

    def summary(self) -> str:
        """In how many states the best action is certain, in one or two sentences."""
        certain, num, unlike = int(self.separable.sum()), len(self.separable), self.unlike.sum()
        elsewhere = self.regret_bound[~self.separable & ~self.unlike]
        regret = f"the regret of the chosen action is at most {elsewhere.max(initial=0):.3g}"
        if certain == num:
            text = f"The best action is certain in {counted(num, 'state')}."
        elif certain == 0:
            known = f"; {regret}" if len(elsewhere) else ""
            text = f"The best action is not certain in any state{known}."
        else:
            known = f"; elsewhere, {regret}" if len(elsewhere) else ""
            text = f"The best action is certain in {certain} of {num} states{known}."
        if unlike:
            where = f"{counted(int(unlike), 'state')} unlike the calibration states"
            text += f" In {where}, the model's error is unknown."
        return text

    def rows(self, most: int | None = None) -> list[dict[str, object]]:
        """The decisions as rows of a table; only the first `most` states if given."""
        order = np.argsort(-self.advantages[:most], axis=1, kind="stable")
        answers = self.answers
        return [
            {
                "state": i,
                "best": self.action_names[first],
                "second best": self.action_names[second],
                "lead": f"{self.gap[i]:.3g}",
                "typical error": f"{self.typical_error[i]:.3g}",
                "answer": answers[i],
                "regret at most": "unknown" if self.unlike[i] else f"{self.regret_bound[i]:.3g}",
            }
            for i, (first, second, *_) in enumerate(order)
        ]

    def to_pandas(self) -> Any:
        """A `pandas.DataFrame` with one row per state; `low` and `high` limit the lead."""
        return data_frame(
            {
                "best": self.best,
                "lead": self.gap,
                "low": self.gap - self.radius,
                "high": self.gap + self.radius,
                "typical_error": self.typical_error,
                "certain": self.separable,
                "unlike_calibration": self.unlike,
                "regret_bound": self.regret_bound,
            }
        )

    def __repr__(self) -> str:
        table = text_table(self.rows(SHOWN_STATES))
        notes = (textwrap.fill(note, NOTE_WIDTH) for note in self._notes())
        return "\n".join([self._title(), *([table] if table else []), *notes])

    def __str__(self) -> str:
        return repr(self)

    def _repr_html_(self) -> str:
        return html_table(self.rows(SHOWN_STATES), title=self._title(), notes=self._notes())

    @property
    def _percent(self) -> str:
        return f"{100 * self.confidence:g}%"

    def _title(self) -> str:
        return f"Best first action for {self.query}"

    def _notes(self) -> list[str]:
        more = len(self.action) - SHOWN_STATES
        rest = [f"… and {counted(more, 'more state')}"] if more > 0 else []
        return [*rest, self.summary(), self.trust, self.meaning]


def meaning_of_best(discount: float, horizon: int, continuation: str) -> str:
    """What "best" means, in one sentence."""
    if horizon == 1:
        return "The best action is the one with the highest expected reward in a single step."
    return (
        f"The best action is the one that, taken first and followed by {continuation}, gives the "
        f"highest expected sum of rewards over {horizon} steps (discount {discount:g})."
    )
