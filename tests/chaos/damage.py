"""Damage: one file of a material is changed, and the material is read again."""

import dataclasses
import functools
import json
import shutil
import struct

import numpy as np

import cqm
from cqm.experiments import results, studies
from cqm.experiments.report.summary import summary
from cqm.experiments.tables import make_tables

from . import materials as made
from .children import in_child
from .trials import Experiment, Result, one_by_one

# What is damaged, and how often out of 20 trials. `others` lend files of their own.
SHARES = {"model": 3, "residual": 1, "hindsight": 1, "zipped": 1, "logs": 3, "checkpoint": 2}
SHARES |= {"run": 4, "published": 1, "logs-run": 1, "set": 3}
OTHERS = {
    "published": "run",
    "model": "other-model",
    "logs": "other-logs",
    "residual": "model",
    "set": "held-out",
}


# Answers: everything a user could learn from a material, as text that is equal bit for bit.


class ReportedError(ValueError):
    """The report says which jobs are missing from its tables."""


def _of_model(materials, path):
    model = cqm.load_model(path / "model.zip" if (path / "model.zip").exists() else path)
    settings = {name: repr(value) for name, value in model.get_params().items()}
    facts = {k: v for k, v in vars(model).items() if k not in ("predictor_", "calibration_")}
    calibration = model.calibration_ and model.calibration_.to_arrays()
    return [settings, facts, model.predictor_.arrays(), calibration, model.summary()]


def _of_scorer(materials, path):
    scorer = cqm.Scorer.load(path)
    states = np.random.default_rng(0).normal(size=(3, len(scorer.observation_names)))
    return [scorer.observation_names, scorer.effect(states)]


def _of_logs(materials, path):
    return vars(cqm.Logs.load(path))


def _of_set(materials, path):
    branches = cqm.Branches.open(path)
    facts = [dict(branches.world), branches.recipe, branches.dropped, branches.action_names]
    facts += [branches.candidate_actions, branches.feature_names, branches.observation_names]
    arrays = {name: branches.array(name) for name in branches.array_names()}
    return [facts, arrays, branches.observations, branches.outcomes]


def _of_checkpoint(materials, path):
    model = made.fit_pendulum(materials, path)
    return [model.predictor_.arrays(), model.losses_, model.training_]


def _of_report(materials, path):
    for record in studies.write_records(path):
        if not record.is_done:  # which `cqm report` says, also on the page
            raise ReportedError(record.problem or f"{record.path} is missing")
    return _results(path)


def _of_rerun(materials, path):
    (made.run_study_of_logs if (path / "logs-study.json").exists() else made.reproduce)(path)
    return _results(path)


def _results(path):
    """All rows, and what the report says of them, apart from the times that the run took."""
    found = results.load(path)
    for status in ("missing", "damaged"):
        if jobs := found.with_status(status):
            raise ReportedError(f"{status}: {jobs}")
    rows = {k: v for k, v in dataclasses.asdict(found).items() if k != "times"}
    return [rows, summary(found, make_tables(found))]


def _of_published(materials, path):
    return _results(path)


READERS = {
    "model": [_of_model, _of_scorer],
    "residual": [_of_model],
    "hindsight": [_of_model],
    "zipped": [_of_model],
    "logs": [_of_logs],
    "checkpoint": [_of_checkpoint],
    "set": [_of_set],
    "run": [_of_report, _of_rerun],
    "logs-run": [_of_report],
    "published": [_of_published],
}


def _text(value):
    """A value as text; equal texts mean equal bits."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}{value.tobytes().hex()}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k}: {_text(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value)


def answer(reader, materials, path):
    # Paths are part of some texts; they do not matter.
    return _text(reader(materials, path)).replace(str(path), "PATH")


@functools.cache
def undamaged(materials, name, reader):
    with materials.scratch() as directory:
        _copy(materials, name, directory)
        ended = in_child(answer, reader, materials, directory, limit=600)
        if ended.raised or ended.crash:
            raise RuntimeError(f"{name}: {ended.raised or ended.crash}")
        return ended.value


def _copy(materials, name, directory):
    if name == "published":  # a run as it is published, without the jobs
        materials.copy("run", directory)
        shutil.rmtree(directory / "jobs")
        shutil.rmtree(directory / "branches")
    else:
        materials.copy(name, directory)


def _trial(materials, rng, directory):
    name = rng.permutation([n for n, share in SHARES.items() for _ in range(share)])[0]
    reader = READERS[name][rng.integers(len(READERS[name]))]
    wanted = undamaged(materials, name, reader)
    _copy(materials, name, directory)
    files = sorted(p for p in directory.rglob("*") if p.is_file() and "branches" not in p.parts)
    if rng.random() < 0.75:  # mostly files that are read back
        files = [file for file in files if file.suffix not in (".md", ".jsonl")]
    path = files[rng.integers(len(files))]
    before = path.read_bytes()
    other = materials.path(OTHERS.get(name, name))
    others = [p for p in sorted(other.rglob("*")) if p.is_file()]
    kind = damage(path, rng, others)
    while path.exists() and path.read_bytes() == before:
        kind = damage(path, rng, others)
    what = f"{name}, {path.relative_to(directory)}: {kind}, read by {reader.__name__[1:]}"
    ended = in_child(answer, reader, materials, directory, limit=120, memory_gb=16)
    if ended.crash:
        return Result(what, "crashed", ended.crash)
    if ended.raised is None:
        if ended.value == wanted:
            return Result(what, "harmless")
        return Result(what, "silent", f"changed: {_first_difference(wanted, ended.value)}")
    reported = ended.raised.kind == "ReportedError"
    if not ended.raised.explained and not reported:
        return Result(what, "unexplained", str(ended.raised))
    names = (path.name, path.parent.name if reported else directory.name)
    if not any(name in ended.raised.message for name in names):
        return Result(what, "unnamed", f"the message does not name the file: {ended.raised}")
    return Result(what, "named")


def _first_difference(old, new):
    first = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), 0)
    start = max(0, first - 40)
    return f"{old[start : first + 40]!r} -> {new[start : first + 40]!r}"


def damage(path, rng, others):
    """Damage a file in a random way; returns a description."""
    kinds = [_flip, _flip, _cut, _grow, _zero, _scramble, _remove, _empty, _replace, _twice]
    special = {".json": _edit_json, ".safetensors": _edit_header, ".csv": _edit_csv}
    if path.suffix in special:
        kinds += 6 * [special[path.suffix]]
    return kinds[rng.integers(len(kinds))](path, rng, others)


def _flip(path, rng, others):
    content = bytearray(path.read_bytes())
    bit = int(rng.integers(8 * len(content)))
    content[bit // 8] ^= 1 << bit % 8
    path.write_bytes(content)
    return f"bit {bit} flipped"


def _cut(path, rng, others):
    size = int(rng.integers(path.stat().st_size))
    path.write_bytes(path.read_bytes()[:size])
    return f"cut to {size} bytes"


def _grow(path, rng, others):
    extra = rng.bytes(int(rng.integers(1, 100)))
    path.write_bytes(path.read_bytes() + extra)
    return f"{len(extra)} bytes appended"


def _zero(path, rng, others):
    content = bytearray(path.read_bytes())
    start = int(rng.integers(len(content)))
    size = len(content[start : start + 64])
    content[start : start + size] = bytes(size)
    path.write_bytes(content)
    return f"{size} bytes from {start} zeroed"


def _scramble(path, rng, others):
    content = bytearray(path.read_bytes())
    start = int(rng.integers(len(content)))
    size = len(content[start : start + 16])
    content[start : start + size] = rng.bytes(size)
    path.write_bytes(content)
    return f"{size} bytes from {start} overwritten"


def _remove(path, rng, others):
    path.unlink()
    return "removed"


def _empty(path, rng, others):
    path.write_bytes(b"")
    return "emptied"


def _twice(path, rng, others):
    path.write_bytes(2 * path.read_bytes())
    return "written twice"


def _replace(path, rng, others):
    alike = [other for other in others if other.suffix == path.suffix]
    if not alike:
        return _flip(path, rng, others)
    chosen = alike[rng.integers(len(alike))]
    path.write_bytes(chosen.read_bytes())
    return f"replaced by {'/'.join(chosen.parts[-3:])}"


def _edit_json(path, rng, others):
    """Valid JSON in which one entry is changed, removed, renamed or moved."""
    content = json.loads(path.read_text())
    found = list(places(content))
    if not found or rng.random() < 0.05:
        path.write_text("{}")
        return "replaced by {}"
    container, key = found[rng.integers(len(found))]
    value, how = container[key], int(rng.integers(4))
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, dict):
        container[f"{key}x"] = container.pop(key)
    elif how == 2 and isinstance(container, list):
        container[key], container[0] = container[0], container[key]
    else:
        container[key] = _other_value(value, rng)
    path.write_text(json.dumps(content, indent=2) + "\n")
    return f"{key!r} edited ({('removed', 'renamed', 'moved', 'changed')[how]}, was {value!r:.40})"


def places(value):
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def _other_value(value, rng):
    others = [None, True, 0, -1, 1.5, 10**30, "", "other", [], {}, [1], {"a": 1}]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float) and rng.random() < 0.7:
        return value + 1 if rng.random() < 0.5 else value * 0.75
    if isinstance(value, str) and rng.random() < 0.7:
        return value + "x" if rng.random() < 0.5 else value[::-1]
    return others[rng.integers(len(others))]


def _edit_header(path, rng, others):
    """A valid safetensors file whose header is edited like JSON, or whose arrays trade places."""
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    names = [name for name in header if name != "__metadata__"]
    how = int(rng.integers(3))
    if how == 0 and header.get("__metadata__"):
        keys = list(header["__metadata__"])
        key = keys[rng.integers(len(keys))]
        text = header["__metadata__"][key]
        header["__metadata__"][key] = text + "1" if rng.random() < 0.5 else text[::-1]
        kind = f"metadata {key!r} changed"
    elif how == 1 and len(names) > 1:
        one, two = rng.choice(names, 2, replace=False)
        header[one], header[two] = header[two], header[one]
        kind = f"{one!r} and {two!r} exchanged"
    else:
        name = names[rng.integers(len(names))]
        header[f"{name}x"] = header.pop(name)
        kind = f"{name!r} renamed"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])
    return kind


def _edit_csv(path, rng, others):
    """A CSV file with a digit changed, or a line removed, repeated or moved."""
    lines = path.read_text().splitlines(keepends=True)
    if len(lines) < 2:
        return _grow(path, rng, others)
    row, how = int(rng.integers(1, len(lines))), int(rng.integers(4))
    digits = [i for i, letter in enumerate(lines[row]) if letter.isdigit()]
    if how == 0:
        del lines[row]
    elif how == 1:
        lines.append(lines[row])
    elif how == 2:
        lines[1], lines[row] = lines[row], lines[1]
    elif digits:
        place = digits[rng.integers(len(digits))]
        digit = str((int(lines[row][place]) + 1 + rng.integers(9)) % 10)
        lines[row] = lines[row][:place] + digit + lines[row][place + 1 :]
    path.write_text("".join(lines))
    return f"line {row} {('removed', 'repeated', 'moved', 'changed')[how]}"


EXPERIMENT = Experiment(
    "damage", "A saved file is damaged, and read", 1_000, 24, one_by_one(_trial)
)
