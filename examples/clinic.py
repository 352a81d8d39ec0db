"""Logs: what treatments do, from records in which the sickest patients got the strongest one.

A clinic recorded each patient's age, severity and ward, one of three treatments, and the pain and
cost that followed. It was not an experiment: the more severe the pain, the likelier the drug. A
plain comparison of the treatments therefore blames the drug for pain that was there before. The
records contain what the doctors saw, so the effects can still be estimated: on average, with
intervals, and for each patient. Whether pain or cost matters more is decided last.

The table is generated, so the truth is known: every patient's pain under every treatment. The model
sees only the table.

    python examples/clinic.py
"""

from pathlib import Path

import numpy as np
import tyro
from matplotlib.figure import Figure

import cqm

TREATMENTS = ("rest", "physio", "drug")
WISHES = {"least pain": "-pain", "pain and cost": "-pain - 0.02 * cost"}
PATIENTS = {"age": [30, 60, 85], "severity": [5.0, 5.0, 5.0], "ward": ["north", "west", "south"]}
AGES = ("under 55", "55 and over")
GREY, BLUE, ORANGE = "#7f7f7f", "#0072b2", "#d55e00"


def effects_on_pain(age):
    """The truth: pain compared with rest, `[patients, treatments]`; the drug helps the young."""
    age = np.asarray(age, float)
    return np.column_stack([0 * age, -0.8 + 0 * age, -2.4 + 0.035 * (age - 20)])


def records(num, rng):
    """The table of one clinic, and every patient's expected reward for each wish."""
    age, severity = rng.integers(20, 90, num), rng.normal(5, 1.5, num)
    ward = rng.choice(["north", "south", "west"], num)
    score = np.column_stack([0 * severity, 0.4 * (severity - 5), 0.8 * (severity - 5)])
    chosen = (score + rng.gumbel(size=score.shape)).argmax(axis=1)  # severe cases: the drug
    relief, cost = effects_on_pain(age), np.array([5.0, 60.0, 25.0])
    pain = 1 + 0.8 * severity + 0.5 * (ward == "west") + relief[range(num), chosen]
    table = {
        "age": age,
        "severity": severity.round(1),
        "ward": ward,
        "treatment": np.array(TREATMENTS)[chosen],
        "pain": (pain + rng.normal(size=num)).round(1),
        "cost": (cost[chosen] + rng.normal(0, 5, num)).round(),
    }
    return table, {"least pain": -relief, "pain and cost": -relief - 0.02 * cost}


def draw(path, rows, logs, model):
    """Above: average effects against the truth. Below: the drug's effect by age."""
    figure = Figure(figsize=(6.4, 6.4), layout="constrained")
    top, lower = figure.subplots(2, 1)
    for y, (_, naive, estimate, low, high, truth) in enumerate(reversed(rows)):
        seen = y == 0
        top.plot([low, high], [y, y], color=BLUE, lw=3, label="cqm, 95% interval" if seen else "")
        top.plot(estimate, y, "o", color=BLUE, ms=8)
        top.plot(truth, y, "|", color="black", ms=18, mew=2, label="truth" if seen else "")
        top.plot(naive, y, "X", color=ORANGE, ms=10, label="plain comparison" if seen else "")
    top.set_yticks(range(len(rows)), [row[0] for row in reversed(rows)])
    top.axvline(0, color=GREY, lw=1)
    top.set(
        ylim=(-0.6, len(rows) - 0.4), xlabel="← less pain than with rest (points) | more pain →"
    )
    top.set_title("Compared plainly, the drug seems useless")
    top.legend(loc="upper left", frameon=False)
    age, place = logs.observations[:, 0], logs.feature_names.index("pain")
    for treatment, colour in (("physio", ORANGE), ("drug", BLUE)):
        effect = model.effect(logs.observations, action=treatment, baseline="rest")
        lower.plot(age, effect[:, place], ".", color=colour, alpha=0.3, ms=4)
        lower.plot([], [], "o", color=colour, label=treatment)
        truth = effects_on_pain([20, 90])[:, TREATMENTS.index(treatment)]
        lower.plot([20, 90], truth, color="black", lw=2)
    lower.plot([], [], color="black", lw=2, label="truth")
    lower.axhline(0, color=GREY, lw=1)
    lower.set(xlabel="age (years)", ylabel="effect on pain (points)")
    lower.set_title("The drug helps the young most")
    lower.legend(loc="lower right", frameon=False, title="each dot is a patient")
    figure.savefig(path, dpi=200)


def main(small: bool = False, figure: Path = Path("clinic.png")) -> dict:
    """Estimate effects from a confounded table, then rank the treatments for each patient.

    Args:
        small: A short table, to try it out.
        figure: File to write the figure to.
    """
    table, values = records(1500 if small else 6000, np.random.default_rng(0))
    columns = {"observations": ["age", "severity", "ward"], "outcomes": ["pain", "cost"]}
    logs = cqm.Logs.from_frame(table, action="treatment", **columns)
    print(logs.coverage(), "\n")  # can these records tell?
    model = cqm.ResidualModel().fit(logs)
    old = np.where(table["age"] >= 55, AGES[1], AGES[0])
    average = model.average_effect(logs, by=old)

    rows, relief = [], effects_on_pain(table["age"])
    place = logs.feature_names.index("pain")
    for treatment in ("physio", "drug"):
        for group in ("all", *AGES):
            chosen = (old == group) | (group == "all")
            pain = {t: table["pain"][chosen & (table["treatment"] == t)].mean() for t in TREATMENTS}
            low, high = (end[place] for end in average.interval(treatment, "rest", group))
            estimate = average.contrast(treatment, "rest", group)[0][place]
            truth = relief[chosen, TREATMENTS.index(treatment)].mean()
            naive = pain[treatment] - pain["rest"]
            rows.append((f"{treatment}, {group}", naive, estimate, low, high, truth))
    print("Effect on pain, compared with rest")
    print("treatment, age        plain comparison    cqm  95% interval     truth")
    for name, naive, estimate, low, high, truth in rows:
        print(f"{name:20} {naive:+17.2f} {estimate:+6.2f}  [{low:+.2f}, {high:+.2f}] {truth:+7.2f}")

    facts = {"covered": all(low <= truth <= high for *_, low, high, truth in rows)}
    for wish, reward in WISHES.items():
        query = cqm.Query.formula(reward, logs)
        print(f"\nBest treatments for {wish} ({reward}):")
        for age, order in zip(PATIENTS["age"], model.rank(PATIENTS, query), strict=True):
            print(f"  aged {age}: {' > '.join(logs.action_names[a] for a in order)}")
        best = model.act(logs.observations, query)
        best = [TREATMENTS.index(logs.action_names[a]) for a in best]
        regret = values[wish].max(axis=1) - values[wish][range(len(logs)), best]
        facts[wish] = float((regret == 0).mean())
        print(f"  the truly best one for {facts[wish]:.1%} of all patients; mean loss", end=" ")
        print(f"{regret.mean():.3f} points of pain")
    draw(figure, rows, logs, model)
    return facts


if __name__ == "__main__":
    tyro.cli(main)
