"""The commands as a user types them."""

import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import cqm
from cqm.branches import collect as collection
from cqm.cli import main
from cqm.models.checkpoint import Checkpoint


def test_collect_then_audit(tmp_path, capsys):
    out = tmp_path / "branches"
    args = ["collect", "cartpole-swingup", "--states", "300", "--nuisance", "4", "--seed", "7"]
    args += ["--action-names", "left", "none", "right"]
    assert main([*args, "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert "300 families" in printed.out
    assert str(out) in printed.out
    said = printed.err.splitlines()  # progress, plain because this is no terminal
    assert said[:2] == ["Loading cartpole-swingup", "collecting cartpole-swingup: 0/300 states"]
    assert said[-1].startswith("collecting cartpole-swingup: 300/300 states, ")
    assert "\r" not in printed.err
    branches = cqm.Branches.open(out)
    assert (len(branches), branches.action_names) == (300, ("left", "none", "right"))

    assert main(["audit", str(out), "--families", "16"]) == 0
    assert "stored families replay bit for bit" in capsys.readouterr().out
    assert main(["audit", str(out), "--json"]) == 0
    assert all(f["passed"] for f in json.loads(capsys.readouterr().out)["checks"])


def test_collect_says_once_what_was_dropped(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(collection, "MANY_DROPPED", -1.0)  # so that any set is warned about
    monkeypatch.setattr(cqm.Branches, "dropped", {"raised": 7})
    assert main(["collect", "cartpole-swingup", "--states", "20", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("7 raised") == 1
    assert "dropped" not in printed.err


def test_recipe_fields_are_flags(tmp_path):
    out = tmp_path / "branches"
    args = "--states 20 --horizon 4 --discount 0.5 --draws 2 --arms 2 --warmup 1 3 --per-step"
    args += " --continuation 0.5 0.25 0.25"
    assert main(["collect", "cartpole-swingup", *args.split(), "--out", str(out)]) == 0
    recipe = cqm.Branches.open(out).recipe
    assert (recipe.horizon, recipe.discount, recipe.draws, recipe.arms) == (4, 0.5, 2, 2)
    assert (recipe.warmup, recipe.per_step) == ((1, 3), True)
    assert recipe.continuation.law == (0.5, 0.25, 0.25)
    assert main(["collect", "cartpole-swingup", "--continuation", "wait", "--out", str(out)]) == 2


def test_another_configuration_is_refused_with_the_difference(tmp_path, capsys):
    args = ["collect", "cartpole-swingup", "--states", "20", "--out", str(tmp_path / "b")]
    assert main(args) == 0
    assert main([*args, "--seed", "1"]) == 2
    assert "recipe.seed: 0 -> 1" in capsys.readouterr().err
    assert main(args) == 0  # and nothing was harmed


def test_audit_of_a_broken_set_exits_nonzero(tmp_path, capsys):
    out = tmp_path / "b"
    main(["collect", "cartpole-swingup", "--states", "20", "--out", str(out)])
    path = next(out.glob("*.safetensors"))
    content = bytearray(path.read_bytes())
    content[-9] ^= 4
    path.write_bytes(content)
    assert main(["audit", str(out)]) == 1
    assert "FAIL  checksums" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["audit", "nowhere"], "nowhere contains no branches"),
        (["worlds", "check", "no-such"], "unknown world 'no-such'; available: "),
        (["collect", "cartpole-swingup", "--states", "0", "--out", "x"], "states must be"),
    ],
)
def test_mistakes_are_one_line_on_standard_error(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) if "0" in args else contextlib.nullcontext():
        assert main(args) == 2
    printed = capsys.readouterr()
    assert message in printed.err.replace("\n", " ")
    assert "Traceback" not in printed.err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("colect", "collect"),
        ("worlds chek", "worlds check"),
        ("Fit", "fit"),
        ("reprduce", "reprod"),
    ],
)
def test_a_misspelt_command_is_recognised(typed, meant, capsys):
    assert main(typed.split()) == 2
    assert f"unknown command '{typed}'; did you mean ['{meant}" in capsys.readouterr().err


@pytest.mark.parametrize("args", ["", "worlds", "collect x --states 0 --out y", "fit --wdth 3"])
def test_no_message_shows_the_parser_within(args, capsys):
    with pytest.raises(SystemExit):
        main(args.split())
    printed = capsys.readouterr().err
    assert "dummy" not in printed
    assert " ".join(["cqm", *args.split()[:1], "--help"]) in printed


def test_nobody_reading_on_is_no_error():
    process = subprocess.Popen(
        [sys.executable, "-m", "cqm", "worlds", "list"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()  # as `head -1` does, only sooner
    assert process.stderr.read() == ""
    assert process.wait() == 128 + signal.SIGPIPE
    process.stderr.close()


def test_the_shell_completes_commands(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--tyro-print-completion", "bash"])
    assert ended.value.code in (None, 0)
    script = capsys.readouterr().out
    assert all(name in script for name in ("worlds", "collect", "reproduce", "--per-step"))


def test_worlds_check(capsys):
    assert main(["worlds", "check", "reacher-easy"]) == 0
    assert "ok    clone fidelity and shared noise" in capsys.readouterr().out
    assert main(["worlds", "check", "CartPole-v1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "CartPole-v1 (cloning: deepcopy)"


def test_worlds_list(capsys):
    assert main(["worlds", "list", "--json"]) == 0
    rows = {row["world"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == 50
    assert (rows["walker-walk"]["observations"], rows["walker-walk"]["actions"]) == (24, 5)
    assert "one state at a time" in rows["humanoid-run"]["cloning"]


def test_a_model_of_logs_is_asked_with_a_file_of_states(tmp_path, capsys):
    rng = np.random.default_rng(0)
    states, actions = rng.normal(size=(600, 2)), rng.integers(2, size=600)
    logs = cqm.Logs.from_arrays(
        states,
        np.array(["wait", "charge"])[actions],
        actions[:, None, None] + 0.0,
        action_names=["wait", "charge"],
        feature_names=["yield_"],
    )
    logs.save(tmp_path / "logs")
    fit = ["fit", str(tmp_path / "logs"), "--out", str(tmp_path / "model")]
    assert main([*fit, "--estimator", "residual", "--paper"]) == 2
    assert "--paper fits the paper's model to branches" in capsys.readouterr().err
    assert main([*fit, "--estimator", "residual", "--width", "256"]) == 2
    assert "width is for methods that train a network" in capsys.readouterr().err
    assert main([*fit, "--estimator", "residual"]) == 0
    capsys.readouterr()
    np.save(tmp_path / "states.npy", states[:3])
    query = ["query", str(tmp_path / "model"), "--reward=2 * yield_"]
    assert main([*query, "--states", str(tmp_path / "states.npy")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Best first action for 2 * yield_ (linear in the features)"
    assert lines[1].split() == ["state", "best", "ranking", "advantages"]
    assert [line.split()[:5] for line in lines[2:5]] == [
        [str(i), "charge", "charge", ">", "wait"] for i in range(3)
    ]
    assert lines[5].startswith("The model is not calibrated, so its error is unknown")
    assert (
        lines[6] == "The best action is the one with the highest expected reward in a single step."
    )
    assert main(query) == 2
    assert "to query without the world, pass --states FILE" in capsys.readouterr().err
    assert main([*query[:2], "--reward=abs(yield_)", "--states", str(tmp_path / "states.npy")]) == 2
    assert "a reward that is not linear in the features needs a world" in capsys.readouterr().err


PATIENTS = ["--action", "drug", "--observations", "age,ward", "--outcomes", "pain,cost"]


def write_patients(path, num=1200):
    """A table in which the drug relieves pain in the south, and costs 3 everywhere."""
    rng = np.random.default_rng(0)
    lines = ["id,age,ward,drug,pain,cost,day"]
    for i in range(num):
        south, drug = rng.random(2) < 0.5
        pain = 5 - 2 * (drug and south) + 0.1 * rng.normal()
        ward, given = ("south" if south else "north"), ("yes" if drug else "no")
        age, cost = rng.normal(50, 9), 3 * drug + 0.1 * rng.normal()
        lines.append(f"00{i},{age:.3f},{ward},{given},{pain:.3f},{cost:.3f},{i}")
    path.write_text("\n".join(lines) + "\n")


def test_two_commands_from_a_table_to_a_ranking_with_intervals(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_patients(tmp_path / "patients.csv")
    assert main(["logs", "import", "patients.csv", *PATIENTS, "--out", "logs"]) == 0
    (tmp_path / "new.csv").write_text("ward,age\nsouth,50\nnorth,50\n")
    query = ["query", "logs", "--reward=-pain - 0.2 * cost"]
    states = ["--states", "new.csv", "--out", "ranking.csv"]
    assert main([*query, *states]) == 0
    assert "One action is clearly the best in 2 of 2 states." in capsys.readouterr().out
    with open("ranking.csv", newline="") as file:
        south, north = csv.DictReader(file)
    assert (south["best"], north["best"]) == ("yes", "no")
    assert 1.3 < float(south["behind_low.no"]) < 1.4 < float(south["behind_high.no"]) < 1.5
    assert 0.5 < float(north["behind_low.yes"]) < 0.6 < float(north["behind_high.yes"]) < 0.7
    assert main([*query, "--states", "3", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [state["answer"] for state in answer["states"]] == ["clear"] * 3

    assert main(["fit", "logs", "--estimator", "residual", "--out", "model"]) == 0
    saved = ["query", "model", *query[2:], *states, "--overwrite"]
    assert main(saved) == 0
    assert "calibrate it with" in (printed := capsys.readouterr().out)
    assert "--logs LOGS" in printed
    assert main([*saved, "--logs", "logs"]) == 0
    assert "clearly the best in 2 of 2" in capsys.readouterr().out
    assert main([*query, *states, "--overwrite", "--logs", "logs"]) == 2
    assert "logs contains logs already; leave out --logs" in capsys.readouterr().err
    other = ["logs", "import", "patients.csv", "--action", "drug", "--observations", "age"]
    assert main([*other, "--outcomes", "pain,cost", "--out", "others"]) == 0
    assert main([*saved, "--logs", "others"]) == 2
    assert "the observations of others are age; those of model are" in capsys.readouterr().err


def test_a_mistake_in_a_query_is_found_before_a_model_is_learned(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_patients(tmp_path / "patients.csv")
    text = Path("patients.csv").read_text().replace("pain,cost", "pain score,yield", 1)
    Path("patients.csv").write_text(text)
    roles = [*PATIENTS[:-1], "pain score,yield"]
    assert main(["logs", "import", "patients.csv", *roles, "--out", "logs"]) == 0
    assert "write `pain score` with backquotes" in capsys.readouterr().err
    Path("new.csv").write_text("age\n50\n")
    with monkeypatch.context() as without_models:
        without_models.setattr(cqm.ResidualModel, "fit", None)
        for arguments, message in [
            (["--reward=-yield *"], "the formula '-yield *' cannot be parsed at its end"),
            (["--reward=pain score"], "write the feature 'pain score' in backquotes"),
            (["--reward=yeld"], "unknown feature 'yeld'; did you mean ['yield']?"),
            (["--reward=yield", "--states", "old.csv"], "old.csv does not exist"),
            (
                ["--reward=yield", "--states", "new.csv"],
                "missing column 'ward' in new.csv; it has ['age']",
            ),
        ]:
            assert main(["query", "logs", *arguments]) == 2
            assert message in capsys.readouterr().err
    assert main(["query", "logs", "--reward=-`pain score` - 0.2 * yield", "--states", "2"]) == 0
    assert "Best first action for -`pain score` - 0.2 * yield" in capsys.readouterr().out


def test_from_a_table_to_a_ranking(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_patients(tmp_path / "patients.csv")
    assert main(["logs", "import", "patients.csv", *PATIENTS, "--out", "logs"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        "Reading patients.csv",
        "Note: ignored 2 columns: id, day",
        "Note: categories (ward: north, south)",
    ]
    lines = printed.out.splitlines()
    assert lines[0].startswith("Logs(logs, 1,200 trajectories, 2 actions (no, yes), horizon 1")
    assert lines[-2:] == ["no problems found", "saved in logs"]
    assert main(["fit", "logs", "--estimator", "residual", "--out", "model"]) == 0
    (tmp_path / "new.csv").write_text("ward;id;age;phone\nsouth;007;50;1\nnorth;008;50,5;2\n")
    query = ["query", "model", "--reward=-pain - 0.2 * cost", "--states", "new.csv"]
    capsys.readouterr()
    assert main([*query, "--id", "id", "--out", "ranking.csv"]) == 0
    printed = capsys.readouterr()
    assert "Ignored 1 column of new.csv: phone" in printed.err
    assert printed.out.splitlines()[-1] == "saved 2 states in ranking.csv"
    with open("ranking.csv", newline="") as file:
        title, *rows = csv.reader(file)
    assert title == ["state", "id", "best", "ranking", "advantage.no", "advantage.yes"]
    assert [row[:4] for row in rows] == [
        ["0", "007", "yes", "yes > no"],
        ["1", "008", "no", "no > yes"],
    ]
    # Relief of 2 at a cost of 3 is worth 1.4, or 0.7 on either side of the mean.
    np.testing.assert_allclose(
        np.array([row[4:] for row in rows], float)[:, 1], [0.7, -0.3], atol=0.1
    )

    content = (tmp_path / "ranking.csv").read_bytes()
    assert main([*query, "--out", "ranking.csv"]) == 2
    assert "ranking.csv exists already; choose another name, or pass" in capsys.readouterr().err
    assert (tmp_path / "ranking.csv").read_bytes() == content
    assert main([*query, "--out", "ranking.csv", "--overwrite"]) == 0
    assert (tmp_path / "ranking.csv").read_text().startswith("state,best,ranking,adv")
    capsys.readouterr()
    assert main([*query, "--out", "new.csv", "--overwrite"]) == 2
    assert "--out and --states must be different files; got new.csv" in capsys.readouterr().err
    assert main([*query, "--out", "logs"]) == 2
    assert "logs is a directory; choose the name of a file" in capsys.readouterr().err
    assert main([*query, "--id", "id"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:4]] == ["007", "008"]
    assert main([*query, "--id", "age"]) == 2
    assert "'age' is an observation, so it cannot be the id" in capsys.readouterr().err
    assert main([*query[:3], "--id", "id"]) == 2
    (tmp_path / "new.csv").write_text("ward,age\nnorth,1\nwest,2\n")
    assert main(query) == 2
    expected = "'ward' of new.csv has the unknown value 'west' in row 3; known: ['north', 'south']"
    assert expected in capsys.readouterr().err


def test_import_takes_all_roles_and_refuses_to_replace_logs(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_patients(tmp_path / "p.csv", num=300)
    lines = (tmp_path / "p.csv").read_text().splitlines()
    rows = [f"{line},0.5,0.5,{i % 7}" for i, line in enumerate(lines[1:])]
    rows[4] = rows[4].replace(rows[4].split(",")[1], "")
    (tmp_path / "p.csv").write_text("\n".join([lines[0] + ",p,q,code", *rows]))
    command = ["logs", "import", "p.csv", "--action", "drug", "--outcomes", "pain", "cost"]
    command += ["--observations", "age", "ward", "code", "--categorical", "code"]
    command += ["--episode", "id", "--time", "day", "--missing", "mean", "--out", "logs"]
    assert main([*command, "--propensity", "p"]) == 0
    logs = cqm.Logs.load("logs")
    names = ("age", "age=(missing)", "ward=south", *(f"code={i}" for i in range(1, 7)))
    assert logs.observation_names == names
    assert (len(set(logs.groups)), logs.propensities.mean()) == (300, 0.5)
    capsys.readouterr()
    assert main(command) == 2
    assert "logs.json exists already; choose another name, or pass --ov" in capsys.readouterr().err
    assert main([*command, "--overwrite", "--propensity", "no=p,yes=q"]) == 0
    assert cqm.Logs.load("logs").propensities.shape == (300, 2)
    capsys.readouterr()
    for wrong, message in [
        (["--propensity", "no=p,q"], "must be one column, or ACTION=COLUMN for every action; got"),
        (
            ["--missing", "error"],
            "p.csv: 'age' in 1 row (row 6); to leave these rows out, pass --missing drop; to fill "
            "in observations, pass --missing mean",
        ),
        (
            ["--outcomes", "paim"],
            "missing column 'paim' in p.csv; did you mean ['pain']? it has ['id', 'age',",
        ),
    ]:
        assert main([*command, "--overwrite", *wrong]) == 2
        assert message in capsys.readouterr().err


def test_poor_coverage_is_an_exit_code(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    states = rng.normal(size=(2000, 2))
    for name, chance in (("even", 0.5), ("uneven", 1 / (1 + np.exp(-4 * states[:, 0])))):
        actions = (rng.random(2000) < chance).astype(int)
        cqm.Logs.from_arrays(states, actions, actions[:, None, None] + 0.0).save(name)
    assert main(["logs", "check", "even"]) == 0
    assert "no problems found" in capsys.readouterr().out
    assert main(["logs", "check", "uneven"]) == 1
    assert "problem: action " in capsys.readouterr().out
    assert main(["logs", "check", "uneven", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["action_names"] == ["0", "1"]
    assert found["num_decisions"] == 2000
    assert len(found["problems"]) > 0
    assert np.shape(found["regions"]) == (20, 2)
    assert main(["logs", "check", "nowhere"]) == 2
    assert "nowhere contains no logs" in capsys.readouterr().err
    assert main(["logs", "chek", "even"]) == 2
    assert "did you mean ['logs check'" in capsys.readouterr().err


def test_average_effects_of_a_table_in_two_commands(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    lines = ["ward,age,drug,pain"]
    for _ in range(400):
        age, ward = rng.integers(20, 80), rng.choice(["north", "south"])
        drug = rng.choice(["yes", "no"])
        pain = 0.1 * age - 2 * (drug == "yes") + rng.normal()
        lines.append(f"{ward},{age},{drug},{pain:.6f}")
    Path("data.csv").write_text("\n".join(lines))
    roles = ["--action", "drug", "--observations", "ward,age", "--outcomes", "pain"]
    assert main(["logs", "import", "data.csv", *roles, "--out", "logs"]) == 0
    capsys.readouterr()
    assert main(["logs", "effects", "logs", "--by", "ward"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in said[2:5]] == ["all", "ward = north", "ward = south"]
    assert "yes instead of no" in said[2]
    assert main(["logs", "effects", "logs", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert (row["action"], row["baseline"], row["outcome"]) == ("yes", "no", "pain")
    assert row["low"] < -2 < row["high"]
    assert main(["logs", "effects", "logs", "--by", "wrd"]) == 2
    assert "unknown observation 'wrd'; did you mean ['ward'" in capsys.readouterr().err


@pytest.mark.filterwarnings("always:no overlap", "always:poor coverage")
def test_a_lack_of_overlap_is_an_exit_code_and_leaves_nothing_clear(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    wards = rng.choice(["north", "south"], size=300)
    lines = [
        f"{w},{rng.normal():.4f},{'yes' if w == 'north' else 'no'},{rng.normal():.4f}"
        for w in wards
    ]
    Path("data.csv").write_text("\n".join(["ward,age,drug,pain", *lines]))
    roles = ["--action", "drug", "--observations", "ward,age", "--outcomes", "pain"]
    assert main(["logs", "import", "data.csv", *roles, "--out", "logs"]) == 0
    capsys.readouterr()
    assert main(["logs", "effects", "logs", "--by", "ward"]) == 1
    said = capsys.readouterr()
    assert said.out.count("[-inf, inf]   no overlap") == 3
    assert "no overlap: action no never occurs in " in said.err
    assert "decisions with ward = north" in said.err
    assert main(["logs", "effects", "logs", "--json"]) == 1
    [row] = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (row["sign"], row["effect"], row["high"]) == ("no overlap", None, None)
    asked = ["query", "logs", "--reward=-pain", "--states", "3"]
    assert main([*asked, "--out", "ranking.csv"]) == 0
    said = capsys.readouterr()
    assert "no overlap: action " in said.err
    assert "clearly the best in 0 of 3 states" in said.out
    for row in csv.DictReader(Path("ranking.csv").read_text().splitlines()):
        other = {"yes": "no", "no": "yes"}[row["best"]]
        assert row["separable"] == "False"
        assert [float(row[f"behind_{end}.{other}"]) for end in ("low", "high")] == [-np.inf, np.inf]
    assert main([*asked, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert answer["states"][0]["behind"] == [[None, None]]


def test_fit_passes_its_settings_on_and_says_what_it_does(tmp_path, capsys):
    collect = ["collect", "cartpole-swingup", "--horizon", "3", "--states", "60"]
    assert main([*collect, "--out", str(tmp_path / "train")]) == 0
    fit = ["fit", str(tmp_path / "train"), "--out", str(tmp_path / "model")]
    fit += ["--candidates", "constant", "direct", "--budget", "1h"]
    fit += ["--updates", "8", "--validation", "0.25", "--width", "8"]
    capsys.readouterr()
    for wrong in (["--paper"], ["--estimator", "residual"]):
        assert main([*fit, *wrong]) == 2
    printed = capsys.readouterr().err
    flags = "--candidates, --budget, --updates, --validation, --width"
    assert f"fixes all settings but the seed; leave out {flags}" in printed
    assert "--candidates is for branches, but --estimator residual learns from logs" in printed
    assert main(fit) == 0
    numbers = r"[\d.e-]+ ± [\d.e-]+|\d+/s|in \d+ s"
    said = re.sub(numbers, "…", capsys.readouterr().err).splitlines()
    compared = [
        f"Loading {tmp_path / 'train'}",
        "Read 60 branch families",
        "constant: error … …",
        "direct-1: compiling, then 1 updates",
        "direct-1: 1/1 updates, …, 0 s left",
    ]
    assert said[: len(compared)] == compared
    assert "direct: error … …" in said
    model = cqm.load_model(tmp_path / "model")
    assert f"Chosen: {model.method_.replace('stack', 'constant and direct')}; fitting to all " in (
        " ".join(said)
    )
    assert model.candidates == ("constant", "direct")
    assert (model.budget, model.updates, model.validation, model.width) == ("1h", 8, 0.25, 8)
    assert model.num_examples_ == 60
    assert [row.candidate for row in model.comparison_] == ["constant", "direct"]
    assert model.training_["direct-1"]["updates_made"] == 1


@pytest.mark.slow
def test_fit_then_query(tmp_path, capsys):
    collect = ["collect", "cartpole-swingup", "--horizon", "4"]
    collect += ["--action-names", "left", "none", "right"]
    assert main([*collect, "--states", "400", "--out", str(tmp_path / "train")]) == 0
    held_out = ["--states", "300", "--draws", "16", "--seed", "1", "--out", str(tmp_path / "held")]
    assert main([*collect, *held_out]) == 0
    model = tmp_path / "model"
    fit = ["fit", str(tmp_path / "train"), "--out", str(model), "--paper"]
    assert main(fit) == 0
    capsys.readouterr()
    assert main(["query", str(model), "--reward=-cart_position", "--states", "3"]) == 0
    printed = capsys.readouterr().out
    assert "not calibrated, so its error is unknown; calibrate it with cqm fit" in printed
    assert printed.count("left > none > right") == 3  # the cart goes left for the first action

    assert main([*fit, "--calibration", str(tmp_path / "held")]) == 0  # finds it trained
    capsys.readouterr()
    query = ["query", str(model), "--reward=-cart_position", "--states", "3", "--json"]
    assert main(query) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [row["separable"] for row in answer["states"]] == [True] * 3
    assert answer["states"][0]["ranking"] == [0, 1, 2]
    assert answer["states"][0]["advantages"][0] > 0 > answer["states"][0]["advantages"][2]
    for low, high in answer["states"][0]["behind"]:
        assert 0 < low < high  # separable: nothing else may be as good
    assert "excess error" in (model / "README.md").read_text()

    observations = cqm.Branches.open(tmp_path / "held").observations[:2]
    np.save(tmp_path / "states.npy", observations)
    asked = ["query", str(model), "--reward=-cart_position", "--states"]
    assert main([*asked, str(tmp_path / "states.npy")]) == 0
    printed = capsys.readouterr().out
    assert printed.count("left > none > right") == 2
    assert "typical error" in printed
    np.save(tmp_path / "states.npy", observations[:, :3])
    assert main([*asked, str(tmp_path / "states.npy")]) == 2
    assert "must contain observations [states, 5]" in capsys.readouterr().err
    assert main(["query", str(model), "--reward=-no_such_thing"]) == 2
    assert "no_such_thing" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore:on 4096 events")  # the projection is poor
def test_the_best_control_in_the_box_is_found_from_the_shell(tmp_path, capsys):
    branches, model = tmp_path / "branches", tmp_path / "model"
    args = "--states 300 --actions box --arms 3 --continuation box --horizon 4"
    assert main(["collect", "reacher-easy", *args.split(), "--out", str(branches)]) == 0
    assert main(["fit", str(branches), "--candidates", "ridge", "--out", str(model)]) == 0
    ask = ["query", str(model), "--reward=velocity_wrist", "--states", "2", "--over", "box"]
    capsys.readouterr()
    assert main(ask) == 0
    assert capsys.readouterr().out.startswith("Best first control for velocity_wrist")
    assert main([*ask, "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["states"]
    assert first["gain over it"] >= 0
    assert len(second["best control"].split()) == 2
    assert main([*ask, "--out", str(tmp_path / "answers.csv")]) == 2
    assert "--over box prints its answers" in capsys.readouterr().err


def test_a_reward_that_is_not_linear_is_integrated_on_request(tmp_path, capsys):
    collect = ["collect", "cartpole-swingup", "--horizon", "4", "--per-step", "--states", "300"]
    collect += ["--action-names", "left", "none", "right"]
    assert main([*collect, "--out", str(tmp_path / "train")]) == 0
    model = str(tmp_path / "model")
    fit = ["fit", str(tmp_path / "train"), "--out", model, "--candidates", "unrolled"]
    assert main([*fit, "--updates", "400"]) == 0
    capsys.readouterr()
    ask = ["query", model, "--reward=-abs(cart_velocity)", "--states", "20", "--json"]
    assert main([*ask, "--integrate"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["query"] == "-abs(cart_velocity) (integrated over predicted futures)"
    assert answer["trust"].startswith("Predicted futures have no certificate")
    assert {row["best"] for row in answer["states"]} >= {"left", "right"}  # against the motion

    for more in ([], ["--branches", str(tmp_path / "train")]):
        assert main([*ask, *more]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert "projected:" not in answer["query"]
        assert answer["trust"].startswith("Only the average error of this answer is known")
        assert {row["best"] for row in answer["states"]} >= {"left", "right"}
    assert main([*ask[:-1], "--branches", str(tmp_path / "train")]) == 0
    printed = capsys.readouterr().out
    assert "Ways to evaluate this reward:" in printed
    assert "regressed" in printed
    assert main([*ask, "--integrate", "--branches", str(tmp_path / "train")]) == 2
    assert "cannot be combined with --integrate" in capsys.readouterr().err


def test_fit_sets_branches_aside_for_calibration(tmp_path, capsys):
    train = str(tmp_path / "train")
    assert (
        main(["collect", "cartpole-swingup", "--horizon", "3", "--states", "200", "--out", train])
        == 0
    )
    fit = ["fit", train, "--out", str(tmp_path / "model"), "--candidates", "constant"]
    assert main([*fit, "--calibration", "0.2"]) == 0
    assert "on 40 held-out states with 16 draws each" in capsys.readouterr().out
    model = cqm.load_model(tmp_path / "model")
    assert model.num_examples_ == 160
    assert main([*fit, "--calibration", "0.01"]) == 2
    assert "set aside at least 19 of the 200 families" in capsys.readouterr().err


@pytest.mark.filterwarnings("once:the query uses features that")
def test_the_answers_of_a_calibrated_model_are_labelled(tmp_path, capsys):
    world = cqm.load_world("cartpole-swingup", action_names=("left", "none", "right"))
    recipe = {"horizon": 3, "threads": 1}
    model = cqm.EffectModel(candidates="direct", updates=2, width=8)
    model.fit(cqm.collect(world, states=40, **recipe))
    model.calibrate(cqm.collect(world, states=30, draws=16, seed=1, **recipe)).save(tmp_path)
    query = ["query", str(tmp_path), "--reward=-cart_position", "--states", "2"]
    assert main([*query, "--confidence", "0.9"]) == 0
    printed = capsys.readouterr()
    [warning] = [line for line in printed.err.splitlines() if "warning" in line]
    assert warning.startswith("cqm: warning: the query uses features that the model has learned")
    assert "cart_position (" in warning
    title, header, *rows, trust, meaning = printed.out.splitlines()
    assert title == "Best first action for -cart_position (linear in the features)"
    columns = ["state", "best", "ranking", "advantages", "typical error", "answer"]
    assert re.split(r"  +", header) == [*columns, "regret at most"]
    assert [set(re.split(r"  +", row)[2].split(" > ")) for row in rows] == [
        {"left", "none", "right"}
    ] * 2
    assert trust.startswith("The best action is ")
    assert "with 90% confidence over states like the 30 calibration states" in trust
    assert meaning.startswith(
        "The best action is the one that, taken first and followed by uniform"
    )

    assert main([*query, "--out", str(tmp_path / "ranking.csv"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["actions"] == ["left", "none", "right"]
    with open(tmp_path / "ranking.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["state"]) for row in rows] == [0, 1]
    for row, state in zip(rows, answer["states"], strict=True):
        assert row["best"] == state["best"]
        assert float(row["regret_bound"]) == state["regret_bound"]
        assert row["separable"] == str(state["separable"])
        assert row["answer"] == state["answer"]
        order = [answer["actions"][action] for action in state["ranking"]]
        assert row["ranking"] == " > ".join(order)
        assert [float(row[f"advantage.{name}"]) for name in order] == state["advantages"]
        low, high = ([row[f"behind_{end}.{name}"] for name in order] for end in ("low", "high"))
        assert (low[0], high[0]) == ("", "")
        assert [[float(a), float(b)] for a, b in zip(low, high, strict=True) if a] == state[
            "behind"
        ]
    assert answer["meaning"] == meaning
    for state in answer["states"]:
        assert state["best"] == answer["actions"][state["ranking"][0]]


COMMANDS = [
    *("worlds", "worlds list", "worlds check", "collect", "audit"),
    *("logs", "logs import", "logs check", "logs effects"),
    *("fit", "query", "refute", "reproduce", "report"),
]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_is_complete_english_with_an_example(command, capsys):
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    text = capsys.readouterr().out
    assert f"Example: cqm {command}" in text
    assert not re.search(r" {2,}Of ", text)  # says what a thing is, not what it is of


def run_without(modules, *args):
    """Run a command in an environment in which some modules are not installed."""
    code = f"import sys; sys.modules.update(dict.fromkeys({modules})); "
    code += "from cqm.cli import main; sys.exit(main(sys.argv[1:]))"
    return subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("missing", "command", "extra"),
    [
        (["matplotlib"], "reproduce --preset smoke --out x", "cqm[experiments]"),
        (["matplotlib"], "report x", "cqm[experiments]"),
        (["mujoco", "dm_control", "gymnasium"], "collect reacher-easy --out x", "cqm[sim]"),
        (["mujoco", "dm_control", "gymnasium"], "worlds check CartPole-v1", "cqm[sim]"),
        (["ray"], "collect cartpole-swingup --cluster auto --out x", "cqm[cluster]"),
    ],
)
def test_a_missing_extra_is_named_in_one_line(missing, command, extra, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = run_without(missing, *command.split())
    assert done.returncode == 2
    *before, problem = done.stderr.splitlines()
    assert extra in problem
    assert "Traceback" not in done.stderr
    # They say what they load before they import anything large.
    assert before[0].startswith(("Load", "Read"))
    assert not list(tmp_path.glob("x/*.safetensors"))  # before any work is done


def test_stopped_by_hand_it_says_how_to_continue(tmp_path):
    args = ["collect", "walker-walk", "--states", "20000", "--out", str(tmp_path / "b")]
    # Background jobs of a shell start with interrupts ignored; a user's terminal does not.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from cqm.cli import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *args],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "MUJOCO_GL": "disable"},
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "b" / "manifest.json").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    kept = len(list((tmp_path / "b").glob("shard-*.json")))
    said = f"kept {kept} of 5 shards in {tmp_path / 'b'}; rerun the command to resume"
    if kept == 0:
        said = "nothing was kept; rerun the command to start again"
    assert err.splitlines()[-1] == f"cqm: interrupted; {said}"


def test_interrupted_while_it_starts_it_prints_one_line():
    # An import that is interrupted, as by Ctrl-C while the compiler is loaded.
    code = "import sys\n"
    code += "class Interrupted:\n"
    code += "    def find_spec(self, name, path=None, target=None):\n"
    code += "        if name == 'tyro': raise KeyboardInterrupt\n"
    code += "sys.meta_path.insert(0, Interrupted())\n"
    code += "from cqm.__main__ import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 130
    assert done.stderr == "cqm: interrupted while starting; nothing was changed\n"


def test_worlds_are_listed_without_the_simulators():
    hidden = ("mujoco", "dm_control", "gymnasium")
    code = f"import sys; sys.modules.update(dict.fromkeys({hidden})); from cqm.cli import main; "
    code += "sys.exit(main(['worlds', 'list']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "reacher-easy" in done.stdout
    assert "Not installed: mujoco, dm_control, gymnasium" in done.stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("collect cartpole-swingup --out x --states 1000000000000000", "TB on disk"),
        ("collect cartpole-swingup --out x --draws 100000000", "TB of memory"),
        ("collect cartpole-swingup --out x --nuisance 40000", "GB of memory"),
        ("collect cartpole-swingup --out x --horizon 1000000000", "TB of memory"),
        ("collect cartpole-swingup --out file", "is a file; choose another directory"),
        ("audit pipe", "pipe contains no branches"),
        ("fit pipe --out x", "pipe contains no branches"),
        ("query pipe --reward x", "pipe does not exist"),
    ],
)
def test_absurd_sizes_and_wrong_files_are_refused(args, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    (tmp_path / "file").write_text("mine")
    assert main(args.split()) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_stopped_fit_says_what_is_in_its_checkpoint(tmp_path, capsys, monkeypatch):
    out = tmp_path / "model"
    world = cqm.load_world("cartpole-swingup")
    cqm.collect(world, states=30, horizon=2, out=tmp_path / "set")
    write = Checkpoint.write

    def interrupted(checkpoint, path):
        write(checkpoint, path)
        raise KeyboardInterrupt

    args = ["fit", str(tmp_path / "set"), "--out", str(out), "--width", "4", "--updates", "500"]
    args += ["--candidates", "direct", "--validation", "0"]
    monkeypatch.setattr(Checkpoint, "write", interrupted)
    assert main(args) == 130
    said = f"checkpoints are kept in {out} (direct-1: 250 updates); rerun the command to resume"
    assert capsys.readouterr().err.splitlines()[-1] == f"cqm: interrupted; {said}"
    monkeypatch.undo()
    assert main(args) == 0
    assert "direct-1: resuming after 250 of 500 updates" in capsys.readouterr().err
