"""The command line of the experiments, and the table of their results."""

import argparse
import collections
import importlib
import os
import sys
import warnings
from pathlib import Path

import jax

import cqm

from . import api, commands, damage, full_disk, kills, malicious, rivals, worlds
from .children import read_sources
from .materials import Materials
from .report import write_report
from .trials import results_file, run_trials

EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        kills.EXPERIMENT,
        damage.EXPERIMENT,
        malicious.EXPERIMENT,
        rivals.EXPERIMENT,
        full_disk.EXPERIMENT,
        api.EXPERIMENT,
        commands.EXPERIMENT,
        worlds.WRONG_EXPERIMENT,
        worlds.UNUSUAL_EXPERIMENT,
    )
}


def main(args=None):
    """Run experiments, or repeat one trial; returns 1 if a trial failed."""
    parser = argparse.ArgumentParser("chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=list(EXPERIMENTS))
    parser.add_argument("--trials", type=int, help="number of trials per experiment")
    parser.add_argument("--sample", action="store_true", help="as many trials as the tests run")
    parser.add_argument("--out", type=Path, default=Path("runs/chaos"), help="directory of the run")
    parser.add_argument("--replay", metavar="NAME:SEED:TRIAL", help="repeat one trial")
    parser.add_argument("--report", action="store_true", help="write the table in the docs")
    options = parser.parse_args(args)
    _load_everything()
    materials = Materials(options.out.absolute())
    jax.config.update("jax_compilation_cache_dir", str(materials.directory / "compiled"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    if options.replay:
        name, seed, number = options.replay.split(":")
        (result,) = EXPERIMENTS[name].run(materials, int(seed), [int(number)])
        print(f"{result.what}\n{result.outcome}\n{result.failure or 'kept its promise'}")
        return 1 if result.failure else 0
    failures = 0
    for name in options.only:
        experiment = EXPERIMENTS[name]
        num = options.trials or (experiment.sample if options.sample else experiment.trials)
        failures += _run(experiment, materials, options.seed, num)
    if options.report:
        titles = {name: EXPERIMENTS[name].title for name in options.only}
        write_report(titles, materials, options.seed)
    return 1 if failures else 0


def _run(experiment, materials, seed, num):
    results = results_file(materials, experiment.name, seed)
    print(f"{experiment.title}: {num} trials, seed {seed}", flush=True)
    outcomes, failures = collections.Counter(), 0
    for i, trial in enumerate(run_trials(experiment, materials, seed, num, results), 1):
        outcomes[trial.outcome] += 1
        if trial.failure:
            failures += 1
            print(f"  FAILED {experiment.name}:{seed}:{trial.number} {trial.what}")
            print(f"         {trial.failure}", flush=True)
        if i % max(1, num // 10) == 0:
            print(f"  {i}/{num}, {failures} failed", flush=True)
    print(f"  {', '.join(f'{k} {v}' for k, v in sorted(outcomes.items()))}; {failures} failed")
    return failures


def _load_everything():
    """Import what children would otherwise import one by one."""
    warnings.simplefilter("ignore")
    for name in cqm.__all__:
        getattr(cqm, name)
    for name in ("cqm.cli", "cqm.experiments.job", "cqm.experiments.report", "dm_control.suite"):
        importlib.import_module(name)
    importlib.import_module("cqm.experiments.methods")
    read_sources()
    if len(os.listdir("/proc/self/task")) > 1:
        sys.exit("chaos: this process has threads, which a fork would lose")
