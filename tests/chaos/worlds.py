"""Wrong worlds and sets, which the checks must catch, and unusual ones, which they must pass."""

import warnings

from support.wrong_worlds import UNUSUAL, WRONG_SETS, WRONG_WORLDS, collect_set, set_world

import cqm

from .children import in_child
from .trials import Experiment, Result

SEEDS = 20  # of the checks, for each unusual case


def _wrong_world(make_world, directory, seed):
    return cqm.check_world(make_world(), seed=seed)


def _wrong_set(tamper, directory, seed):
    collect_set(directory / "set", seed=seed)
    tamper(directory / "set")
    return cqm.audit(directory / "set", set_world(), seed=seed)


def _unusual_world(case, directory, seed):
    return cqm.check_world(case.make_world(), seed=seed)


def _unusual_set(case, directory, seed):
    world, settings = case.make_world(), {"states": 300, "horizon": 6, **case.settings}
    if case.policy is not None:
        settings["continuation"] = case.policy
    branches = cqm.collect(world, seed=seed, show_progress=False, **settings)
    return cqm.audit(branches, world, policy=case.policy, seed=seed)


WRONG = [(world.__name__, _wrong_world, world) for world in WRONG_WORLDS]
WRONG += [(name, _wrong_set, tamper) for name, tamper in WRONG_SETS.items()]
VALID = [(name, _unusual_world, case) for name, case in UNUSUAL.items()]
VALID += [(name, _unusual_set, case) for name, case in UNUSUAL.items()]


def _checks(cases, passes):
    """Run the cases in turn, each time with another seed."""

    def run(materials, seed, numbers):
        for number in numbers:
            name, check, case = cases[number % len(cases)]
            with materials.scratch() as directory:
                own = 1_000 * seed + number // len(cases)
                ended = in_child(_passed, check, case, directory, own, limit=600)
            what = f"{name} ({check.__name__[1:].replace('_', ' ')}), seed {own}"
            if ended.crash or (ended.raised and (passes or not ended.raised.explained)):
                yield Result(what, "error", str(ended.raised or ended.crash))
                continue
            passed, text = ended.value or (False, "refused")
            outcome = "passed" if passed else "caught"
            yield Result(what, outcome, "" if passed == passes else text[-400:] or "not caught")

    return run


def _passed(check, case, directory, seed):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = check(case, directory, seed)
    return bool(report), str(report)


WRONG_EXPERIMENT = Experiment(
    "wrong",
    "A world or a set is subtly wrong, and checked",
    5 * len(WRONG),
    len(WRONG),
    _checks(WRONG, passes=False),
)
UNUSUAL_EXPERIMENT = Experiment(
    "unusual",
    "A world or a set is unusual but valid, and checked",
    SEEDS * len(VALID),
    len(VALID) // 2,
    _checks(VALID, passes=True),
)
