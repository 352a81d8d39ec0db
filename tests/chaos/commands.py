"""Nonsense on the command line: a message and exit code 2, no traceback, no hang."""

import os
import signal

import numpy as np

from cqm.cli import main

from .children import in_child
from .trials import Experiment, Result, one_by_one

SECONDS = 5.0  # a command that takes longer hangs
NUMBERS = ["-1", "0", "1.5", "nan", "inf", "1e400", "abc", "", "1" * 30, "0x10", "١٢", "--", "None"]
HUGE = ["1000000000000000", "10000000000000", "9" * 25]
FILES = ["nowhere", "empty", "text", "fifo", "loop", "set", "logs", "model", "run", "fifo-set"]
FILES += [
    "array.npy",
    "pickle.npy",
    "bad.npy",
    "words.csv",
    "ragged.csv",
    "",
    "a" * 300,
    "/dev/null",
]
FILES += ["bad.safetensors", "fifo.npy", "fifo.csv", "model.zip", "/proc/self/mem", "empty.csv"]
WORLDS = ["reacher-easi", "CartPole-v9", "", "cartpole", "../etc", "💥", "nope-nope", "-", "Ant v4"]
REWARDS = ["", "x +", "nope", "1", "mixed_0", "position", "__import__('os').system('true')", "1/0"]
REWARDS += ["(" * 300, "9**9**9**9", "nan", "position * 1e308 * 1e308", "a" * 100_000, "lambda: 1"]
WORDS = [
    "--nope",
    "--",
    "-x",
    "--json=maybe",
    "extra",
    "--seed",
    "--out",
    "--help=1",
    "-h -h",
    "\n",
]

# Commands that work on small materials; each argument after the command is a list of words.
GOOD = {
    "collect": ["cartpole-swingup", "--out=out", "--states=4", "--horizon=2", "--threads=1"],
    "audit": ["set", "--families=4"],
    "fit": ["set", "--out=out-model", "--candidates=direct", "--updates=1", "--width=4"],
    "query": ["model", "--reward=position", "--states=2"],
    "refute": ["residual", "logs", "--refuters=mirror"],
    "worlds check": ["cartpole-swingup", "--states=2"],
    "worlds list": [],
    "logs import": [
        "table.csv",
        "--action=a",
        "--observations=x",
        "--outcomes=y",
        "--out=out-logs",
    ],
    "logs check": ["logs"],
    "logs effects": ["logs"],
    "reproduce": ["--preset=smoke", "--methods=zero", "--domains=nope", "--out=out-run"],
    "report": ["run"],
}
NUMERIC = {
    "collect": ["states", "horizon", "draws", "seed", "discount", "nuisance", "mixing-seed"],
    "audit": ["families", "seed"],
    "fit": ["updates", "validation", "width", "members", "seed"],
    "query": ["states", "confidence", "seed"],
    "refute": ["seed"],
    "worlds check": ["states", "seed"],
    "logs effects": ["confidence", "seed"],
    "reproduce": ["seeds"],
}
NUMERIC["collect"] += ["arms", "warmup", "continuation", "threads", "per-step", "action-names"]
CHOICES = {
    "fit": ["estimator", "candidates", "budget"],
    "refute": ["reward", "refuters"],
    "reproduce": ["preset", "study", "methods", "domains"],
    "logs import": ["action", "observations", "outcomes", "propensity", "episode", "missing"],
    "logs effects": ["by"],
}
PATHS = {"fit": ["calibration", "out"], "collect": ["out"], "query": ["states", "logs"]}
PATHS["logs import"] = ["out"]
POSITIONAL = {"collect": WORLDS, "worlds check": WORLDS, "audit": FILES, "fit": FILES}
POSITIONAL |= {"query": FILES, "refute": FILES, "report": FILES}
POSITIONAL |= {"logs import": FILES, "logs check": FILES, "logs effects": FILES}


def command_line(rng):
    """A command with one or two mistakes."""

    def pick(values):
        return values[rng.integers(len(values))]

    name = pick(list(GOOD))
    words = list(GOOD[name])
    for _ in range(1 + int(rng.random() < 0.3)):
        how = rng.random()
        if how < 0.3 and name in POSITIONAL and words:
            words[0] = pick(POSITIONAL[name])
        elif how < 0.65 and name in NUMERIC:
            flag = pick(NUMERIC[name])
            words.append(f"--{flag}={pick(NUMBERS + HUGE)}")
        elif how < 0.7 and name in CHOICES:
            words.append(f"--{pick(CHOICES[name])}={pick(['', 'nope', '3', 'PAPER', 'logs '])}")
        elif how < 0.8 and name in PATHS:
            words.append(f"--{pick(PATHS[name])}={pick(FILES)}")
        elif how < 0.9 and name == "query":
            words.append(f"--reward={pick(REWARDS)}")
        elif how < 0.95:
            words.insert(int(rng.integers(len(words) + 1)), pick(WORDS))
        elif words:
            del words[rng.integers(len(words))]
    command = name.split()
    if rng.random() < 0.03:
        command = [pick(["colect", "", "worlds nope", "--versio", "query\n"])]
    return [*command, *words]


def furnish(materials, directory):
    """Fill a directory with what command lines name: materials, and files that are not."""
    for name in ("set", "logs", "model", "residual", "run"):
        materials.copy(name, directory / name)
    (directory / "empty").mkdir()
    (directory / "text").write_text("hello\n")
    for name in ("fifo", "fifo.npy", "fifo.csv"):
        os.mkfifo(directory / name)
    (directory / "fifo-set").mkdir()
    os.mkfifo(directory / "fifo-set" / "manifest.json")
    (directory / "loop").symlink_to("loop")
    np.save(directory / "array.npy", np.zeros((2, 9)))
    np.save(directory / "pickle.npy", np.array([{}], object), allow_pickle=True)
    (directory / "bad.npy").write_bytes(b"\x93NUMPY\x01\x00v\x00{'descr': ")
    (directory / "words.csv").write_text("a,b\nc,d\n")
    (directory / "ragged.csv").write_text("1,2,3\n4,5\n")
    (directory / "empty.csv").write_text("")
    table = "".join(f"{i % 7},{'ab'[i % 2]},{i % 5}\n" for i in range(60))
    (directory / "table.csv").write_text(f"x,a,y\n{table}")
    (directory / "bad.safetensors").write_bytes(b"\xff" * 16)
    (directory / "model.zip").write_bytes(b"PK\x03\x04")


def _trial(materials, rng, directory):
    words = command_line(rng)
    furnish(materials, directory)
    what = "cqm " + " ".join(word if len(word) < 60 else f"{word[:57]}..." for word in words)
    for limit in (SECONDS, 4 * SECONDS):  # once more if the machine was busy
        ended = in_child(_run, words, directory, limit=limit, memory_gb=12)
        if not ended.too_slow:
            break
    if ended.too_slow:
        return Result(what, "hung", ended.crash)
    if ended.crash:
        return Result(what, "crashed", ended.crash)
    if ended.raised is not None:
        return Result(what, "traceback", str(ended.raised))
    code = ended.value
    if "Traceback" in ended.output:
        return Result(what, "traceback", ended.output[-300:])
    if code not in (0, 1, 2):
        return Result(what, "other code", f"exit code {code}: {ended.output[-200:]}")
    if code == 2 and not ended.output.strip():
        return Result(what, "silent", "exit code 2 without a message")
    return Result(what, {0: "worked", 1: "reported", 2: "refused"}[code])


def _run(words, directory):
    os.chdir(directory)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main(words)
    except SystemExit as end:  # from the parser
        return end.code if isinstance(end.code, int) else 2


EXPERIMENT = Experiment(
    "commands", "A command is given nonsense arguments", 1_000, 24, one_by_one(_trial)
)
