"""Write the parts of README.md that are computed: its picture, its table and the shown outputs.

    python docs/readme.py

The picture is drawn from a few simulated futures, the table from the scores in `results/paper`, and
each output is what the code above it prints. It takes a few minutes. `tests/test_readme.py` makes
everything again and compares it with what is committed. The outputs in the documentation itself are
made and compared when it is built: see `executed.py`.
"""

import re
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))

from blocks import blocks

import cqm
from cqm.experiments import results
from cqm.experiments.drawing import drawing
from cqm.experiments.methods import METHODS
from cqm.experiments.scores import domain_title, score

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PICTURES = ROOT / "docs" / "_static"
THEMES = {"light": "#1f2328", "dark": "#e6edf3"}  # colours of text on a light and a dark page

ACTIONS = {"push left": "#0c7bc4", "no push": "#8a8f98", "push right": "#d55e00"}
DRAWS, HORIZON, COORDINATE = 8, 24, 40  # the coordinate on which this state's effects are largest


def futures():
    """One coordinate of the futures of one state, and of their effects: `[draws, actions, steps]`.

    A draw is one realisation of the distractors and of the later actions, shared by all actions.
    """
    world = cqm.load_world("cartpole-swingup", nuisance=64, seed=7)
    branches = cqm.collect(world, states=1, draws=DRAWS, horizon=HORIZON, per_step=True, seed=3)
    effects = branches.step_effects()[0].swapaxes(1, 2)  # [draws, actions, steps, coordinates]
    return branches.step_features[0, ..., COORDINATE], effects[..., COORDINATE]


def picture():
    """The futures and the effects side by side, as SVG in the colour of the surrounding text."""
    future, effect = futures()
    scale = float(f"{np.ptp(future) / np.ptp(effect):.1g}")
    steps = np.arange(1, HORIZON + 1)
    with drawing("effects", height=2.7) as (figure, svg):
        figure.set_size_inches(7.2, 2.7)
        left, right = figure.subplots(1, 2)
        # Futures of different actions coincide; lines within lines show all of them.
        for action, (colour, width) in enumerate(
            zip(ACTIONS.values(), (4.5, 2.7, 1.0), strict=True)
        ):
            left.plot(steps, future[:, action].T, color=colour, linewidth=width)
            right.plot(steps, effect[:, action].T, color=colour, linewidth=1.2)
        for name, end in zip(ACTIONS, effect[:, :, -1].mean(axis=0), strict=True):
            _write(right, name, (HORIZON, end), (6, 0), 11, xycoords="data", color=ACTIONS[name])
        shown = (
            f"{future[..., 0].size} futures of one state: {len(ACTIONS)} actions × {DRAWS} draws"
        )
        titles = {
            left: ("What happens next", shown),
            right: (
                "What the action changes",
                f"the same, shared part removed; axis × {scale:.0f}",
            ),
        }
        for axes, (title, subtitle) in titles.items():
            _write(axes, title, (0, 1), (0, 26), 12.5, fontweight="bold")
            _write(axes, subtitle, (0, 1), (0, 10), 10)
            axes.set_xlabel("steps after the action", fontsize=10)
            axes.set_xticks([1, 8, 16, 24])
            axes.tick_params(labelsize=9)
    return svg[0]


def _write(axes, text, place, offset, size, *, xycoords="axes fraction", **style):
    """Write text at an offset in points from a place."""
    axes.annotate(
        text,
        place,
        xytext=offset,
        xycoords=xycoords,
        textcoords="offset points",
        va="center",
        fontsize=size,
        **style,
    )


def table():
    """Accuracy per domain as Markdown: the ceiling, the paper's model, ours and the best rival."""
    run = results.load(ROOT / "results" / "paper")
    rivals = [name for name in run.methods if _is_rival(name)]
    accuracy = {
        (domain, name): score(run, domain, name, "accuracy")
        for domain in run.domains
        for name in ("cqm", "default", *rivals)
    }
    best = {d: max(rivals, key=lambda name: accuracy[d, name].mean) for d in run.domains}
    rows = [
        ("", "Ceiling", "Paper's model", "**This library**", "Best rival"),
        (":---", "---:", "---:", "---:", "---:"),
        *(
            (
                domain_title(domain),
                f"{run.ceiling(domain, 'accuracy_ceiling')[0]:.3f}",
                f"{accuracy[domain, 'cqm'].mean:.3f}",
                f"**{accuracy[domain, 'default'].mean:.3f}**",
                f"{accuracy[domain, rival].mean:.3f}",
            )
            for domain, rival in best.items()
        ),
    ]
    seeds = sorted(accuracy[domain, rival].num for domain, rival in best.items())
    *chances, last = (f"{run.chance(domain):.2f}" for domain in run.domains)
    notes = (
        f"Means over {len(run.seeds)} seeds ({seeds[0]} to {seeds[-1]} for the rivals). A random "
        f"choice scores {', '.join(chances)} and {last}. The best rival is the best of "
        f"{len({name.partition('+')[0] for name in rivals})} methods that predict futures or "
        f"values instead of effects: {_places(best)}. A star marks a domain in which that "
        "method's input is preprocessed like ours."
    )
    lines = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join([*lines, "", textwrap.fill(notes, 120)])


def _is_rival(name):
    """Whether a method was trained, but not on effects; its input may be conditioned."""
    method = METHODS[name.partition("+")[0]]
    return method.role != "limit" and method.predicts != "effects"


def _places(best):
    """Which method is best where, with a star where its input was conditioned."""
    places = {}
    for domain, name in best.items():
        base, plus, _ = name.partition("+")
        star = r"\*" if plus else ""
        places.setdefault(METHODS[base].title, []).append(f"{domain_title(domain)}{star}")
    return "; ".join(f"{title} on {_listed(names)}" for title, names in places.items())


def _listed(words):
    *others, last = words
    return f"{', '.join(others)} and {last}" if others else last


def with_table(text):
    """The text of the README with the table between its two markers made again."""
    return re.sub(
        r"(<!-- results: .*? -->\n).*?(?=<!-- end of results -->)",
        lambda match: f"{match[1]}\n{table()}\n\n",
        text,
        flags=re.S,
    )


def runs(block):
    """Whether a block can run here; commands that install or test everything cannot."""
    return block.language == "python" or block.code.startswith("cqm ")


def output(block, directory):
    """What a block prints when it runs on its own in a directory."""
    code = block.code
    if block.language == "sh":
        here = str(Path(__file__).parent)
        code = f"import sys; sys.path.append({here!r}); import blocks; blocks.shell({code!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=directory, capture_output=True, text=True
    )
    if done.returncode or "Warning" in done.stderr:
        raise RuntimeError(f"{block.code}\n{done.stderr}")
    return done.stdout


def with_outputs(text):
    """The text of the README with every shown output made again."""
    chosen = [block for block in blocks(text) if runs(block)]
    with tempfile.TemporaryDirectory() as directory:
        printed = [(block, output(block, directory)) for block in chosen]
    for block, new in reversed(printed):
        if block.shown is not None:
            start, stop = block.output_span
            text = text[:start] + new + text[stop:]
    return text


def main():
    """Rewrite the pictures and the README."""
    svg = picture()
    for theme, colour in THEMES.items():
        (PICTURES / f"effects-{theme}.svg").write_text(svg.replace("currentColor", colour))
    README.write_text(with_outputs(with_table(README.read_text())))


if __name__ == "__main__":
    main()
