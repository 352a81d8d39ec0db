import math
import os
import pty
import re
import subprocess
import sys
import time

import pytest

from cqm import progress as progress_module
from cqm.progress import duration, progress, say


@pytest.fixture(autouse=True)
def no_terminal(monkeypatch):
    """Variables by which some build servers claim to be a terminal."""
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is told to move."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def move(seconds):
        now[0] += seconds

    return move


@pytest.mark.parametrize("show", [None, False])
def test_nothing_is_printed_without_a_terminal(capsys, show):
    with progress("collecting", 100, unit="states", show=show) as advance:
        for _ in range(10):
            advance(10)
    assert capsys.readouterr() == ("", "")


def test_the_first_line_comes_before_anything_is_done(capsys):
    with progress("collecting hopper", 4000, unit="states", show=True):
        assert capsys.readouterr().err == "collecting hopper: 0/4,000 states\n"
    with progress("steps", 800, unit="updates", done=200, first="compiling", show=True):
        assert capsys.readouterr().err == "steps: compiling, then 600 updates\n"


def test_plain_lines_have_the_rate_and_the_time_left(capsys, clock):
    with progress("collecting hopper", 4000, unit="states", show=True) as advance:
        clock(2.0)
        advance(1000)
        clock(1.0)
        advance(200)
        clock(3.0)
        advance(2800)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "collecting hopper: 0/4,000 states",
        "collecting hopper: 1,000/4,000 states, 500/s, 6 s left",
        "collecting hopper: 1,200/4,000 states, 400/s, 7 s left",
        "collecting hopper: 4,000/4,000 states, 667/s, 0 s left",
    ]


def test_fast_work_has_a_line_for_every_tenth_and_not_more(capsys, clock):
    with progress("fitting", 1000, unit="steps", show=True) as advance:
        for _ in range(1000):
            clock(0.01)
            advance(1)
    _, *lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 10
    assert [re.search(r": ([\d,]+)/1,000 steps", line)[1] for line in lines] == [
        *(f"{done}" for done in range(100, 1000, 100)),
        "1,000",
    ]
    assert lines[4] == "fitting: 500/1,000 steps, 100/s, 5 s left"


def test_slow_work_shows_its_rate_within_seconds_and_then_every_half_minute(capsys, clock):
    with progress("fitting", 100_000, unit="updates", show=True) as advance:
        for _ in range(100):
            clock(1.0)
            advance(10)
    assert capsys.readouterr().err.splitlines() == [
        "fitting: 0/100,000 updates",
        "fitting: 20/100,000 updates, 10/s, 2 h 47 min left",
        "fitting: 320/100,000 updates, 10/s, 2 h 46 min left",
        "fitting: 620/100,000 updates, 10/s, 2 h 46 min left",
        "fitting: 920/100,000 updates, 10/s, 2 h 45 min left",
    ]


def test_work_that_reports_nothing_for_long_is_still_heard_of(capsys, clock, monkeypatch):
    monkeypatch.setattr(progress_module, "SILENCE_SECONDS", 0.05)
    with progress("steps", 100, unit="updates", first="compiling", show=True) as advance:
        clock(90.0)
        time.sleep(0.3)
        advance(50)
        clock(10.0)
        time.sleep(0.3)
    assert capsys.readouterr().err.splitlines() == [
        "steps: compiling, then 100 updates",
        "steps: compiling, then 100 updates (1 min 30 s so far)",
        "steps: 50/100 updates, 33.3/min, 1 min 30 s left",
        "steps: 50/100 updates, 30.0/min, 1 min 40 s left",
    ]


def test_what_was_done_before_does_not_count_for_the_rate(capsys, clock):
    with progress("fitting", 1000, unit="updates", done=800, show=True) as advance:
        clock(2.0)
        advance(100)
    assert capsys.readouterr().err.splitlines() == [
        "fitting: 800/1,000 updates",
        "fitting: 900/1,000 updates, 50/s, 2 s left",
    ]


@pytest.mark.parametrize("show", [True, False])
def test_compiling_does_not_count_for_the_rate(clock, show):
    with progress("fitting", 1000, unit="updates", first="compiling", show=show) as advance:
        clock(60.0)
        assert math.isnan(advance(0))  # compiled; nothing is known yet
        clock(2.0)
        assert advance(100) == 18.0  # seconds left
        advance(0)  # only the first one restarts the clock
        clock(2.0)
        assert advance(100) == 16.0


def test_work_found_finished_prints_nothing(capsys):
    with progress("fitting", 1000, unit="updates", done=1000, first="compiling", show=True):
        pass
    assert capsys.readouterr().err == ""


def test_a_slow_rate_is_by_the_minute(capsys, clock):
    with progress("jobs", 4, unit="jobs", show=True) as advance:
        clock(40.0)
        advance(1)
    assert capsys.readouterr().err.splitlines()[1] == "jobs: 1/4 jobs, 1.5/min, 2 min left"


def test_plain_lines_hold_no_control_characters(capsys, clock):
    with progress("collecting", 3, unit="states", show=True) as advance:
        clock(1.0)
        advance(3)
    assert re.fullmatch(r"([\x20-\x7e]+\n)+", capsys.readouterr().err)


def test_work_that_takes_no_time_is_no_mistake(capsys, clock):
    with progress("collecting", 10, unit="states", show=True) as advance:
        advance(10)
    assert "collecting: 10/10 states, " in capsys.readouterr().err


@pytest.mark.parametrize("show", [None, True])
def test_nothing_to_do_prints_nothing(capsys, show):
    with progress("collecting", 0, unit="states", show=show):
        pass
    assert capsys.readouterr() == ("", "")


def test_an_error_passes_through(capsys):
    def work():
        with progress("collecting", 10, unit="states", show=True) as advance:
            advance(5)
            raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        work()
    assert "5/10 states" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59.4, "59 s"), (59.6, "1 min"), (3599, "1 h"), (7384, "2 h 3 min")],
)
def test_durations_have_two_units_at_most(seconds, text):
    assert duration(seconds) == text


def test_messages_are_printed_where_progress_is_shown(capsys):
    say("Loading reacher")
    say("not on a terminal", None)
    say("not wanted", False)
    assert capsys.readouterr() == ("", "Loading reacher\n")


SCRIPT = """
import time
from cqm.progress import progress
with progress("collecting hopper", 2000, unit="states"{show}) as advance:
    for _ in range(4):
        time.sleep(0.05)
        advance(500)
"""


def printed_on_a_terminal(show):
    leader, follower = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    with subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(show=show)],
        stdin=follower,
        stdout=subprocess.PIPE,
        stderr=follower,
        env=environment,
    ) as process:
        os.close(follower)
        pieces = []
        try:
            while piece := os.read(leader, 4096):
                pieces.append(piece)
        except OSError:  # how Linux says that the other side is closed
            pass
        os.close(leader)
        assert process.stdout.read() == b""
    assert process.returncode == 0
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(pieces).decode())


@pytest.mark.parametrize("show", ["", ", show=True"])
def test_a_terminal_gets_a_bar_with_the_rate_and_the_time_left(show):
    printed = printed_on_a_terminal(show)
    assert "collecting hopper" in printed
    assert "2,000/2,000 states" in printed
    assert re.search(r"\d/s", printed)
    assert re.search(r"left \d:\d\d:\d\d", printed)


def test_a_terminal_stays_empty_where_nothing_is_wanted():
    assert printed_on_a_terminal(", show=False") == ""
