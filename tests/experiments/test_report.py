"""The page of a run, as text and in a browser."""

import json
import math
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser

import pytest
from support.synthetic_run import write_run

from cqm.experiments.report import write_report
from cqm.experiments.report.page import render
from cqm.experiments.report.verdict import cards, verdict
from cqm.experiments.results import COLUMNS, load, write_csv

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
FAILED = {
    "domain": "walker-walk",
    "seed": 8,
    "method": "cocoa",
    "error": 'ValueError: <script>alert(1)</script> & "more"',
}
DOMAINS = ("reacher-easy", "walker-walk")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), domains=DOMAINS, seeds=(7, 8), failed=[FAILED])


@pytest.fixture(scope="module")
def page(run):
    return write_report(run).read_text()


class Elements(HTMLParser):
    """Elements that are opened and not closed, attributes, and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.texts, self.tags = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_the_page_is_well_formed(page):
    elements = Elements(page)
    assert elements.open == []
    ids = [value for name, value in elements.attributes if name == "id"]
    assert len(ids) == len(set(ids))
    links = [value for name, value in elements.attributes if name == "href"]
    assert {link.removeprefix("#") for link in links} <= set(ids)


def test_the_page_needs_nothing_from_outside(page):
    elements = Elements(page)
    assert not re.search(r"https?:|//[a-z]|@import", page)
    assert set(re.findall(r"url\((.)", page)) == {"#"}
    assert not {"link", "img", "iframe", "object", "embed", "video", "audio"} & set(elements.tags)
    assert "src" not in dict(elements.attributes)
    assert "default-src 'none'" in page


def test_the_same_results_give_the_same_page(run, page):
    assert render(load(run)) == page


def test_everything_that_matters_is_there(page):
    text = " ".join(" ".join(Elements(page).texts).split())
    for words in (
        *("Verdict", "Tables", "Figures", "Beyond the paper", "The run"),
        *("Accuracy", "Normalised regret", "Effect NMSE", "Absolute-future NMSE", "Correlation"),
        *("Ceiling", "Noise floor", "How to run it again", "cqm reproduce --preset paper"),
        *("Protocol", "training.learning_rate", "0.0003", "mujoco", "3.17.0", "cores"),
    ):
        assert words in text


def test_what_comes_from_data_is_escaped(tmp_path):
    evil = '<img src=x onerror="alert(1)">&amp;'
    write_run(tmp_path, domains=(evil,), seeds=(7,), methods=("cqm",), beyond=(f"cqm+{evil}", evil))
    run = json.loads((tmp_path / "run.json").read_text())
    run |= {"preset": evil, "commands": [evil], "versions": {evil: evil}, "machine": {"a": [evil]}}
    run["failed"] = [dict.fromkeys(("domain", "seed", "method", "error"), evil)]
    (tmp_path / "run.json").write_text(json.dumps(run))
    page = render(load(tmp_path))
    elements = Elements(page)
    assert "img" not in elements.tags
    assert "onerror" not in dict(elements.attributes)
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;amp;") > 10


def test_failed_jobs_are_listed(page):
    assert "One job failed" in page
    assert "ValueError: &lt;script&gt;alert(1)&lt;/script&gt; &amp; &quot;more&quot;" in page


def test_time_is_split_with_shares(page):
    # 210.5, 61, 330.25, 80 and 31 seconds of 712.75.
    for part, share in (
        ("physics", "29.5%"),
        ("compilation", "8.6%"),
        ("training", "46.3%"),
        ("evaluation", "11.2%"),
        ("rest", "4.3%"),
    ):
        assert f'<i class="{part}"></i>{part} <b>{share}</b>' in page
    assert "Of the last call, which did 0 jobs: 11.9 min of work, in 6.7 min by the clock" in page


def test_a_committed_run_without_times_says_so(tmp_path):
    write_run(
        tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("cqm",), beyond=(), times=False
    )
    page = render(load(tmp_path))
    assert "times of this run were not kept" in page
    assert "Beyond the paper" not in page
    assert "Jobs that failed" not in page


def test_scores_alone_give_a_page(tmp_path):
    write_run(tmp_path, domains=("walker-walk",), seeds=(7,), methods=("cqm",), beyond=())
    for name in COLUMNS:
        if name != "scores.csv":
            (tmp_path / name).unlink()
    page = write_report(tmp_path).read_text()
    assert page.count("<figure") == 1
    assert "0.3134 <span>± 0.0101</span>" in page


# The verdict


def write_scores(directory, scores, **protocol):
    """A run with accuracies and shares of the ceiling, by method on reacher or by domain too."""
    rows = []
    for name, values in scores.items():
        domain, method = name if isinstance(name, tuple) else ("reacher-easy", name)
        for seed, value in enumerate(values, 7):
            row = dict.fromkeys(COLUMNS["scores.csv"])
            row |= {"domain": domain, "seed": seed, "method": method}
            rows.append({**row, "accuracy": value, "ceiling_share": 2 * value - 1})
    write_csv(directory / "scores.csv", rows, COLUMNS["scores.csv"])
    (directory / "run.json").write_text(json.dumps({"preset": "x", "protocol": protocol}))
    return load(directory)


FULL = {"states": 20_000, "test_states": 4_000, "training": {"updates": 4_000}}


def test_the_winner_whoever_it_is(tmp_path):
    scores = {"cqm": [0.6, 0.61, 0.59, 0.6, 0.6], "direct": [0.9, 0.91, 0.89, 0.9, 0.9]}
    sentences = verdict(write_scores(tmp_path, scores, **FULL))
    assert sentences[0] == (
        "Of the paper's methods, the most accurate is Direct value in 1 of 1 domains (Reacher). "
        "In the paper it is CQM-B. Leads over the second that exceed their Student-t intervals: "
        "Direct value in Reacher."
    )
    assert "1 of 2 for accuracy" in sentences[1]
    assert sentences[1].endswith("more than the intervals: CQM-B on Reacher.")
    assert "80% on Reacher" in sentences[2]
    assert len(sentences) == 3


def test_every_clear_lead_has_its_winner(tmp_path):
    high, low, near = [0.9, 0.91, 0.89], [0.6, 0.61, 0.59], [0.9, 0.88, 0.91]
    scores = {("reacher-easy", "cqm"): low, ("reacher-easy", "direct"): high}
    scores |= {("cheetah-run", "cqm"): high, ("cheetah-run", "direct"): low}
    scores |= {("walker-walk", "cqm"): high, ("walker-walk", "direct"): near}
    first = verdict(write_scores(tmp_path, scores, **FULL))[1]
    assert first.endswith("intervals: Direct value in Reacher and CQM-B in Cheetah.")


def test_all_who_share_the_first_place_are_named(tmp_path):
    scores = {method: [1.0, 1.0] for method in ("cqm", "cocoa")}
    scores |= {f"{method}+effect": [0.5, 0.5] for method in ("world", "sf", "direct", "task-td")}
    scores |= {f"{method}+effect": [1.0, 1.0] for method in ("cqm", "cocoa")}
    results = write_scores(tmp_path, scores, **FULL)
    assert [card.leader for card in cards(results)] == ["CQM-B and COCOA"]
    assert verdict(results)[-1].endswith("the most accurate is CQM-B and COCOA in Reacher.")


def test_a_lead_within_its_interval_is_none(tmp_path):
    scores = {"cqm": [0.5, 0.9], "direct": [0.6, 0.7]}
    assert "No lead over the second" in " ".join(verdict(write_scores(tmp_path, scores, **FULL)))


def test_a_smaller_run_says_so_first(tmp_path):
    smaller = {**FULL, "states": 4_000, "training": {"updates": 1_000}}
    first, second, *_ = verdict(write_scores(tmp_path, {"cqm": [0.9]}, **smaller))
    assert "4,000 of 20,000 training states, 1,000 of 4,000 updates and 1 of 5 seeds" in first
    assert "With one seed it cannot be said" in second


def test_cards_show_the_best_and_how_far_it_gets(run):
    reacher, walker = cards(load(run))
    assert (reacher.title, walker.title) == ("Reacher", "Walker")
    assert 0 < reacher.accuracy <= 1
    assert walker.ceiling == pytest.approx(0.48, abs=0.01)
    assert re.fullmatch(r"\d+ of \d+ figures agree", walker.agreement)


def test_the_verdict_names_noise_rank_and_conditioning(run):
    text = " ".join(verdict(load(run)))
    assert "foresee 63.0%" in text
    assert "the rank accounts for 0.017" in text
    assert "With the same conditioned input for every method" in text
    assert "accuracy of the default model against CQM-B's" in text


def test_without_methods_of_the_paper_nothing_is_claimed(tmp_path):
    results = write_scores(tmp_path, {"zero": [0.2] * 5}, **FULL)
    assert verdict(results) == []
    assert cards(results) == []
    assert "<h2>Verdict</h2>" in render(results)


# In a browser

PROBE = """
<script>
addEventListener("load", () => {
  const table = document.querySelector("#tables table");
  const header = table.tHead.rows[0].cells[4];
  const order = () => [...table.tBodies].map((body) => Number(body.rows[0].cells[4].dataset.value));
  const names = () => [...table.tBodies].map((body) => body.rows[0].cells[0].textContent);
  const found = { before: order(), button: header.querySelector("button").tabIndex };
  header.querySelector("button").click();
  found.ascending = order();
  found.sort = [header.getAttribute("aria-sort")];
  header.querySelector("button").click();
  found.descending = order();
  found.sort.push(header.getAttribute("aria-sort"));
  table.tHead.rows[0].cells[0].querySelector("button").click();
  found.names = names();
  found.sort.push(header.getAttribute("aria-sort"));
  found.rows = [...table.tBodies].map((body) => body.rows.length);
  found.figures = [...document.querySelectorAll("figure svg")].map((svg) => {
    const box = svg.getBoundingClientRect();
    return [box.width, box.height, svg.querySelectorAll("path, use, text").length];
  });
  const page = document.documentElement;
  found.width = [innerWidth, page.scrollWidth, document.body.scrollWidth];
  const right = (box) => box.getBoundingClientRect().right;
  found.outside = [...document.querySelectorAll("main > section > *, figure, .scroll, pre, dl, li")]
    .filter((box) => right(box) > innerWidth + 0.5).length;
  found.scrolls = [...document.querySelectorAll(".scroll")]
    .map((box) => [box.scrollWidth > box.clientWidth, getComputedStyle(box).overflowX]);
  const colours = getComputedStyle(document.body);
  found.colours = [colours.color, colours.backgroundColor];
  found.ink = getComputedStyle(document.querySelector("figure svg text")).fill;
  found.requests = performance.getEntriesByType("resource").length;
  parent.postMessage(JSON.stringify(found), "*");
});
</script>
"""
FRAME = """<!doctype html><body><script>
addEventListener("message", (event) => { document.title = event.data; });
</script><iframe src="probe.html" style="width: WIDTHpx; height: 800px; border: 0"></iframe>
"""


@pytest.fixture(scope="module")
def look(page, tmp_path_factory):
    """What a browser finds on the page at a given width, in light or dark."""
    if BROWSER is None:
        pytest.skip("no Chromium is installed")

    def look(width, *, dark):
        directory = tmp_path_factory.mktemp("browser")
        (directory / "probe.html").write_text(page.replace("</body>", PROBE + "</body>"))
        # In a frame, because a browser's window cannot be as narrow as a phone.
        (directory / "frame.html").write_text(FRAME.replace("WIDTH", str(width)))
        command = [
            *(BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--disable-quic", "--no-first-run", f"--user-data-dir={directory / 'profile'}"),
            f"--blink-settings=preferredColorScheme={0 if dark else 1}",
            *("--window-size=1400,900", "--virtual-time-budget=20000", "--dump-dom"),
            (directory / "frame.html").as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        title = re.search(r"<title>(.*?)</title>", done.stdout, re.S)
        assert title, f"the page told nothing: {done.stdout[:500]} {done.stderr[-500:]}"
        return json.loads(unescape(title[1]))

    return look


@pytest.fixture(scope="module")
def phone(look):
    return look(375, dark=False)


@pytest.fixture(scope="module")
def laptop(look):
    return look(1280, dark=True)


def test_headers_sort_tables(phone, run):
    means = [
        math.fsum(load(run).values(domain, "cqm", "accuracy").values()) / 2 for domain in DOMAINS
    ]
    assert phone["before"] == pytest.approx(means)
    assert phone["ascending"] == sorted(phone["before"])
    assert phone["descending"] == sorted(phone["before"], reverse=True)
    assert phone["before"] != phone["ascending"]
    assert phone["names"] == ["Reacher", "Walker"]
    assert phone["sort"] == ["ascending", "descending", "none"]
    assert phone["button"] == 0  # reached by the keyboard
    assert phone["rows"] == [3, 3]  # rows of a domain stay together


@pytest.mark.parametrize("where", ["phone", "laptop"])
def test_figures_are_seen(request, where):
    figures = request.getfixturevalue(where)["figures"]
    assert len(figures) == 12
    for width, height, shapes in figures:
        assert width > 300
        assert height > 100
        assert shapes > 20


@pytest.mark.parametrize(("where", "width"), [("phone", 375), ("laptop", 1280)])
def test_the_page_does_not_scroll_sideways(request, where, width):
    found = request.getfixturevalue(where)
    assert found["width"] == [width] * 3
    assert found["outside"] == 0


def test_wide_tables_scroll_in_their_own_box_on_a_phone(phone):
    assert any(wide for wide, _ in phone["scrolls"])
    assert {overflow for _, overflow in phone["scrolls"]} == {"auto"}


def brightness(colour):
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_light_and_dark_follow_the_reader(phone, laptop):
    for found, dark in ((phone, False), (laptop, True)):
        ink, paper = map(brightness, found["colours"])
        assert (ink > 200 and paper < 50) if dark else (ink < 50 and paper > 200)
        assert found["ink"] == found["colours"][0]


def test_nothing_is_fetched(phone, laptop):
    assert phone["requests"] == laptop["requests"] == 0
