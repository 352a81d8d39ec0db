"""The answers of `cqm query`: rankings for a terminal, as JSON and as a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cqm import storage

if TYPE_CHECKING:
    from cqm.models.projections import LogVerdict
    from cqm.verdicts import Verdict


def answers_by_state(
    advantages: np.ndarray, names: Sequence[str], verdict: Verdict | LogVerdict | None
) -> list[dict[str, Any]]:
    """Ranking and advantages for each state, with bounds if there is a verdict."""
    from cqm.decisions import rank

    answers = []
    for i, (order, values) in enumerate(zip(rank(advantages), advantages, strict=True)):
        answer = {"state": i, "best": names[order[0]], "ranking": order.tolist()}
        answer["advantages"] = values[order].tolist()
        answers.append(answer)
    if verdict is None:
        return answers
    columns = (verdict.behind, verdict.separable, verdict.answers, verdict.regret_bound)
    for answer, behind, separable, words, regret in zip(answers, *columns, strict=True):
        answer["behind"] = behind[answer["ranking"][1:]].tolist()
        answer["separable"] = bool(separable)
        answer["answer"] = words
        answer["regret_bound"] = float(regret)
    for answer, typical in zip(answers, getattr(verdict, "typical_error", ()), strict=False):
        answer["typical_error"] = float(typical)
    return answers


def answer_row(answer: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """One row of the table of rankings; the values of a cell are in the order of the ranking."""
    row = {
        "state": answer.get("id", answer["state"]),
        "best": answer["best"],
        "ranking": " > ".join(names[action] for action in answer["ranking"]),
        "advantages": " ".join(f"{value:+.3g}" for value in answer["advantages"]),
    }
    if "typical_error" in answer:  # a certificate; without, intervals say what is clear
        row["typical error"] = f"{answer['typical_error']:.3g}"
    elif "behind" in answer:
        row["behind the best"] = " ".join(f"[{a:.3g}, {b:.3g}]" for a, b in answer["behind"])
    if "behind" in answer:
        unknown = answer["answer"] == "unlike calibration"
        row["answer"] = answer["answer"]
        row["regret at most"] = "unknown" if unknown else f"{answer['regret_bound']:.3g}"
    return row


def write_ranking(
    path: Path, answers: Sequence[dict[str, Any]], names: Sequence[str], id_title: str | None
) -> None:
    """Write one row per state to a CSV file.

    `advantage.NAME` is the advantage of an action. With a calibrated model or with logs,
    `behind_low.NAME` and `behind_high.NAME` limit how far it is behind the best action, for which
    they are empty.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    bounded = bool(answers) and "behind" in answers[0]
    title = ["state", *([] if id_title is None else [id_title]), "best", "ranking"]
    title += [f"advantage.{name}" for name in names]
    if bounded:
        title += ["answer", "separable", "regret_bound"]
        title += [f"behind_{end}.{name}" for name in names for end in ("low", "high")]
    writer.writerow(title)
    for answer in answers:
        order = answer["ranking"]
        row = [answer["state"], *([] if id_title is None else [answer["id"]]), answer["best"]]
        row.append(" > ".join(names[action] for action in order))
        advantages = dict(zip(order, answer["advantages"], strict=True))
        row += [advantages[action] for action in range(len(names))]
        if bounded:
            behind = {order[0]: ["", ""], **dict(zip(order[1:], answer["behind"], strict=True))}
            row += [answer["answer"], answer["separable"], answer["regret_bound"]]
            row += [limit for action in range(len(names)) for limit in behind[action]]
        writer.writerow(row)
    storage.write_pieces(path, [text.getvalue().encode()])
