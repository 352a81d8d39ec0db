"""Every example runs at small size, agrees with its own check, and is in the gallery."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
GALLERY = (ROOT / "docs" / "gallery.md").read_text()


def run(name, tmp_path, capsys):
    """The facts that the example returns and the text that it prints, at small size."""
    path = ROOT / "examples" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    figure = tmp_path / f"{name}.png"
    facts = module.main(small=True, figure=figure)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert figure.stat().st_size > 20_000  # an empty figure of this size has about 5,000 bytes
    return facts, capsys.readouterr().out


def test_orders_agree_with_brute_force_for_all_prices(tmp_path, capsys):
    facts, text = run("inventory", tmp_path, capsys)
    assert facts["right"] > 0.9
    assert facts["certain"] > 0.2
    assert facts["certain_right"] == 1
    assert "followed by order 20 at every step" in " ".join(text.split())


def test_effects_of_treatments_agree_with_the_truth(tmp_path, capsys):
    facts, text = run("clinic", tmp_path, capsys)
    assert facts["covered"]
    assert min(facts["least pain"], facts["pain and cost"]) > 0.9
    assert "aged 85: physio > drug > rest" in text  # least pain
    assert "aged 85: rest > drug > physio" in text  # pain and cost


def test_wishes_come_true_in_the_environment(tmp_path, capsys):
    facts, text = run("gymnasium_wishes", tmp_path, capsys)
    up, down = facts["model"]
    assert up > max(0, facts["random actions"][0])
    assert down < -0.5 * up
    if text.startswith("Acrobot"):
        assert up > 15  # joules; random actions add about 2
        assert min(facts["swing up"], facts["come to rest"]) > 0.8


def test_the_arm_reaches_goals_that_were_given_afterwards(tmp_path, capsys):
    facts, _ = run("robot_arm", tmp_path, capsys)
    assert facts["right"] > 0.9
    assert facts["wrong"] < 0.01
    assert facts["distance"] < 5  # centimetres, for the worst goal


def test_tariffs_agree_with_brute_force(tmp_path, capsys):
    facts, text = run("battery", tmp_path, capsys)
    assert facts["same"] > 0.7
    assert facts["certain_right"] > 0.95
    assert facts["loss"] < 0.15  # euros, in the worst hour of the worst tariff
    strips = dict(re.findall(r"^([a-z -]+?) +([c.d]{24})", text, re.M))
    assert strips["flat"][12:15] == strips["market price"][12:15] == "ccc"  # surplus is stored,
    assert "c" not in strips["feed-in bonus"][12:15]  # unless selling it pays more


def test_signals_agree_with_brute_force(tmp_path, capsys):
    facts, _ = run("junction", tmp_path, capsys)
    for right, wrong in (facts["all cars alike"], facts["east-west counts three times"]):
        assert right > 0.85
        assert wrong == 0
    assert facts["gain"] > 2  # identical arrivals are worth at least twice as many simulations


def test_measures_agree_with_simulation_and_dynamic_programming(tmp_path, capsys):
    facts, _ = run("grid_measures", tmp_path, capsys)
    assert facts["simulation"] < 0.03  # visits
    assert facts["values"] < 1e-12
    assert facts["learned"] < 0.1  # squared error as a share of the effects' size
    assert facts["wrong"] == 0


def test_an_example_is_a_command(tmp_path):
    """Flags and help work from the shell; the run itself is tested above."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "inventory.py", "--help"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert "--small" in done.stdout
    assert "--figure" in done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_examples_are_short_and_in_the_gallery(script):
    text = script.read_text()
    assert len(text.splitlines()) <= 150
    assert f"    python examples/{script.name}\n" in text
    assert f"(gallery-{script.stem})=" in GALLERY
    assert f"{{literalinclude}} ../examples/{script.name}" in GALLERY
    assert f"{{literalinclude}} gallery/{script.stem}.txt" in GALLERY
    assert f"{{figure}} gallery/{script.stem}.png" in GALLERY
    folder = ROOT / "docs" / "gallery"
    assert (folder / f"{script.stem}.txt").stat().st_size > 100
    assert (folder / f"{script.stem}.png").stat().st_size > 20_000
