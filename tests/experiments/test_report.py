"""The report of a run: its files, what is printed, and its page as text and in a browser."""

import json
import math
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from unittest.mock import Mock

import pytest
from support.synthetic_run import write_run

from cqm.experiments import figures, report, tables
from cqm.experiments.rendering import Cell
from cqm.experiments.report.overview import overview
from cqm.experiments.report.page import render, three_figures
from cqm.experiments.results import COLUMNS, load

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
FORMATS = ("md", "csv", "tex")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"), domains=DOMAINS, seeds=(7, 8), failed=[FAILED])


@pytest.fixture(scope="module")
def printed(run):
    return report.write(run)


@pytest.fixture(scope="module")
def page(run, printed):
    return (run / "report.html").read_text()


def rendered(directory):
    """The page alone, without files."""
    results = load(directory)
    return render(results, tables.make_tables(results), pictures_of(results))


def pictures_of(results):
    opening = overview(results)
    return [*([opening] if opening else []), *figures.make_figures(results)]


def first_screen(page):
    """The page before its first table or section of tables."""
    return page[page.index('<div class="first">') : page.index('id="findings"')]


def test_everything_is_loaded_and_built_once(tmp_path, monkeypatch):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("cqm",), beyond=())
    spied = {
        (module, name): Mock(wraps=getattr(module, name))
        for module, name in (
            *((report, "load"), (report, "make_tables"), (report, "make_figures")),
            *((tables, "paper_table"), (figures, "score_figure")),
        )
    }
    for (module, name), spy in spied.items():
        monkeypatch.setattr(module, name, spy)
    report.write(tmp_path)
    assert [spy.call_count for spy in spied.values()] == [1, 1, 1, 5, 1]


def test_a_report_is_tables_figures_and_a_page(run, page):
    results = load(run)
    names = {f"{t.name}.{kind}" for t in tables.make_tables(results) for kind in FORMATS}
    assert {path.name for path in (run / "tables").iterdir()} == names
    pictures = pictures_of(results)
    assert pictures[0].name == "overview"
    assert {path.name: path.read_text() for path in (run / "figures").iterdir()} == {
        f"{picture.name}.svg": picture.document for picture in pictures
    }
    for table in tables.make_tables(results):
        assert f'id="table-{table.name}"' in page
    for picture in pictures:
        assert f'<figure id="{picture.name}">' in page


def test_tables_and_figures_are_in_their_sections(page):
    sections = dict(re.findall(r'<section id="(\w+)">(.*?)</section>', page, re.S))
    assert list(sections) == ["verdict", "tables", "figures", "beyond", "logs", "run"]
    found = {name: re.findall(r'id="table-([\w-]+)"', text) for name, text in sections.items()}
    assert found["tables"][:2] == ["accuracy", "regret"]
    assert found["beyond"][0] == "default"
    assert found["logs"] == ["ordinary", "choosing"]
    assert sections["logs"].count("<figure") == 2
    assert sections["figures"].count("<figure") == 10


def test_what_is_printed_fits_a_terminal(tmp_path):
    write_run(tmp_path)
    lines = report.write(tmp_path).splitlines()
    assert len(lines) == 1 + 2 * 4 + 1 + 1 + 2 + 4 * 3 * 4 + 2
    assert max(map(len, lines[:-1])) <= 90
    assert lines[0].split() == [
        *("accuracy", "Ceiling", "Random", "CQM-B", "World", "SF"),
        *("Direct", "value", "Task-TD", "COCOA"),
    ]
    assert lines[2].split() == ["paper", "1.000", "0.252", "0.424", "0.990", "0.841", "0.644"]
    assert lines[-2:] == ["", f"report: {tmp_path / 'report.html'}"]


def test_without_methods_of_the_paper_the_summary_says_so(tmp_path):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("zero",), beyond=())
    assert report.write(tmp_path).startswith("none of the paper's methods has finished\n")


def test_logs_alone_give_a_report(run, tmp_path):
    shutil.copy(run / "logs.csv", tmp_path)
    text = report.write(tmp_path)
    page = (tmp_path / "report.html").read_text()
    assert text.startswith("excess error by number of trajectories\n")
    assert 'id="table-ordinary"' in page
    assert 'id="table-accuracy"' not in page
    assert '<figure id="overview">' in page
    assert "seed" not in first_screen(page)
    assert "Effects learned from ordinary trajectories and from branches on Reacher" in page


def test_a_directory_without_a_run_is_explained(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"run\.json is missing; pass the directory"):
        report.write(tmp_path)
    assert list(tmp_path.iterdir()) == []


class Elements(HTMLParser):
    """Elements that are opened and not closed, attributes, and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.attributes, self.texts, self.tags = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "br", "input"):
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
    assert rendered(run) == page


def test_the_first_screen_is_a_picture_and_words_before_any_table(page):
    order = ["<h1>", "<h2>Verdict", '<figure id="overview">', "What was run.", "Who wins."]
    order += ["How close to the best achievable.", "Against the paper.", "From logs."]
    order += ['href="#findings"', 'href="#table-disagreements"', 'id="findings"', "<table"]
    places = [page.index(part) for part in order]
    assert places == sorted(places)
    words = " ".join(Elements(first_screen(page)[: -len("<h3 ")]).texts)
    assert len(words.split()) < 300


def test_the_picture_has_the_contenders_the_ceiling_and_chance(run):
    svg = overview(load(run)).svg
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", svg)
    assert texts.count("Default model") == texts.count("CQM-B") == 2
    assert {"Reacher", "Walker", "our default model", "the paper's model", "best rival"} < set(
        texts
    )
    assert {"ceiling", "chance"} < set(texts)
    results = load(run)
    for domain in DOMAINS:
        assert f"ceiling {results.ceiling(domain, 'accuracy_ceiling')[0]:.3f}" in texts
        best = max(
            math.fsum(results.values(domain, method, "accuracy").values()) / 2
            for method in results.methods
            if method.partition("+")[0] not in ("cqm", "default", "oracle", "zero", "random")
        )
        assert f"{best:.3f}" in texts
    ends = {text: float(x) for x, text in re.findall(r'<text[^>]* x="([\d.]+)"[^>]*>([^<]*)<', svg)}
    numbers = [x for text, x in ends.items() if re.fullmatch(r"\d\.\d{3}", text)]
    assert ends["1.00"] + 25 < min(numbers) == max(numbers) < 310  # a column beside the bars


PARTS = {
    "smoke": {"methods": ("cqm", "direct", "random"), "beyond": ()},
    "default alone": {"methods": (), "beyond": ("default",)},
    "a rival alone": {"methods": ("sf",), "beyond": ()},
    "an unknown method": {"methods": ("random",), "beyond": ("mine",)},
    "a variant": {"methods": (), "beyond": ("cqm+effect",)},
    "a domain of one's own": {"methods": ("cqm",), "beyond": (), "domains": ("my/world $x$",)},
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("complete", [True, False])
def test_parts_of_a_run_have_a_first_screen(tmp_path, part, complete):
    settings = {"domains": ("reacher-easy",), "seeds": (7,), **PARTS[part]}
    write_run(tmp_path, **settings)
    if not complete:
        for name in COLUMNS:
            if name != "scores.csv":
                (tmp_path / name).unlink(missing_ok=True)
    page = rendered(tmp_path)
    assert Elements(page).open == []
    screen = page[page.index('<div class="first">') : page.index('id="run"')]
    assert screen.index('<figure id="overview">') < screen.index("What was run.")
    methods = sum(method != "random" for method in (*settings["methods"], *settings["beyond"]))
    assert f"{methods} learned method{'s' if methods > 1 else ''} on " in screen
    assert ("ceiling 0.9" in overview(load(tmp_path)).svg) == complete
    assert "nan" not in re.sub(r"<[^>]*>", "", screen)
    if not set(settings["methods"]) - {"random"}:
        assert "None of the paper&#x27;s methods has finished." in screen


def test_a_run_of_limits_alone_has_words_and_no_picture(tmp_path):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("zero",), beyond=())
    page = rendered(tmp_path)
    assert '<figure id="overview">' not in page
    assert "0 learned methods on Reacher" in page


def test_the_first_screen_says_what_is_missing(tmp_path):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("cqm",), failed=[FAILED])
    page = rendered(tmp_path)
    left = sum(num for num in map(int, re.findall(r"\((\d+) jobs?\)", page)))
    assert left > 50
    assert f"Not finished: {left} jobs of this preset left. 1 job failed" in page


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("0.9553 ± 0.0290", "0.955 ± 0.029"),
        ("0.9998 ± 0.0003", "1.00 ± 0.0003"),
        ("−0.0126 ± 0.0255", "−0.0126 ± 0.0255"),
        ("+1.0207 ± 0.0137", "+1.02 ± 0.01"),
        ("0.0037 ± 0.0003", "0.0037 ± 0.0003"),
        ("0.00000045 ± 0.00000001", "4.5e-7 ± 0.1e-7"),
        ("32.2254", "32.2"),
        ("194.1", "194"),
        ("1234", "1234"),
        ("+0.0000", "0"),
        ("± 0.0041", "± 0.0041"),
        ("± 0.0000", "± 0"),
        ("0.92–0.93", "0.92–0.93"),
        ("1.05e-09", "1.05e-09"),
        ("undefined", "undefined"),
        ("nuisance 64, by state", "nuisance 64, by state"),
    ],
)
def test_the_page_shows_three_figures(text, short):
    assert three_figures(Cell(text)) == short


def test_means_are_rounded_once():
    assert three_figures(Cell("0.8475 ± 0.0100", 0.84746)) == "0.847 ± 0.010"
    assert three_figures(Cell("−0.8475", -0.84746)) == "−0.847"


def test_tables_on_the_page_have_fewer_digits_than_the_files(run, page):
    cells = re.findall(r"<td[^>]*>(.*?)</td>", page)
    numbers = re.findall(r"\d+\.\d+", " ".join(re.sub(r"<[^>]*>", "", cell) for cell in cells))
    digits = [len(number.replace(".", "").lstrip("0")) for number in numbers]
    assert len(numbers) > 200
    assert max(digits) == 3
    for kind in ("md", "tex"):
        assert re.search(r"\d\.\d{4}", (run / "tables" / f"accuracy.{kind}").read_text())
    assert re.search(r"\d\.\d{9}", (run / "tables" / "accuracy.csv").read_text())


def test_every_second_row_of_intervals_is_folded(page):
    boxes = re.findall(r'<input type="checkbox" id="fold-([\w-]+)" class="fold"><label', page)
    assert boxes == ["accuracy", "regret", "effect-nmse", "absolute-nmse", "correlation"]
    assert page.count('<tr class="folded">') == page.count(">Student-t</td>") > 5
    assert "checked" not in re.search(r"<script>.*</script>", page, re.S)[0]


def test_without_intervals_nothing_is_folded(tmp_path):
    write_run(tmp_path, domains=("reacher-easy",), seeds=(7,))
    assert 'class="fold"' not in rendered(tmp_path)


def test_everything_that_matters_is_there(page):
    text = " ".join(" ".join(Elements(page).texts).split())
    for words in (
        *("Verdict", "Tables", "Figures", "Beyond the paper", "The run"),
        *("Accuracy", "Normalised regret", "Effect NMSE", "Absolute-future NMSE", "Correlation"),
        *("Ceiling", "Noise floor", "How to rerun it", "cqm reproduce --preset paper"),
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
    page = rendered(tmp_path)
    elements = Elements(page)
    assert "img" not in elements.tags
    assert "onerror" not in dict(elements.attributes)
    assert "<img" not in page
    assert page.count("&lt;img src=x onerror=&quot;alert(1)&quot;&gt;&amp;amp;") > 10


def test_failed_jobs_are_listed(page):
    assert "1 job failed, as listed at the end." in page
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
    assert "The last call did 0 jobs in 11.9 min of core time, 6.7 min by the clock" in page


def test_a_committed_run_without_times_says_so(tmp_path):
    write_run(
        tmp_path, domains=("reacher-easy",), seeds=(7,), methods=("cqm",), beyond=(), times=False
    )
    page = rendered(tmp_path)
    assert "timings of this run were not kept" in page
    assert "Beyond the paper" not in page
    assert "Failed jobs" not in page


def test_scores_alone_give_a_page(tmp_path):
    write_run(tmp_path, domains=("walker-walk",), seeds=(7,), methods=("cqm",), beyond=())
    for name in COLUMNS:
        if name != "scores.csv":
            (tmp_path / name).unlink(missing_ok=True)
    page = rendered(tmp_path)
    assert page.count("<figure") == 2
    assert "0.313 <span>± 0.010</span>" in page


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
  const box = (selector) => document.querySelector(selector).getBoundingClientRect();
  const [picture, words, first] = [".first figure", ".first > div", "table"].map(box);
  found.screen = { picture, words, table: first };
  const fold = document.querySelector(".fold");
  const hidden = () => [...document.querySelectorAll(".folded")]
    .filter((row) => getComputedStyle(row).display === "none").length;
  found.folded = [hidden()];
  fold.checked = true;  // without an event, so no script can help
  found.folded.push(hidden());
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
    assert len(figures) == 13
    for width, height, shapes in figures:
        assert width > 300
        assert height > 100
        assert shapes > 20


@pytest.mark.parametrize(("where", "width"), [("phone", 375), ("laptop", 1280)])
def test_the_page_does_not_scroll_sideways(request, where, width):
    found = request.getfixturevalue(where)
    assert found["width"] == [width] * 3
    assert found["outside"] == 0


def test_the_picture_is_beside_the_words_on_a_laptop_and_above_them_on_a_phone(phone, laptop):
    wide, narrow = laptop["screen"], phone["screen"]
    assert wide["picture"]["right"] < wide["words"]["left"]
    assert wide["picture"]["top"] == wide["words"]["top"]
    assert max(wide["picture"]["bottom"], wide["words"]["bottom"]) < 900  # one screen
    assert narrow["picture"]["bottom"] < min(narrow["words"]["top"], 700)
    assert narrow["words"]["bottom"] < narrow["table"]["top"]


def test_intervals_unfold_without_a_script(phone):
    before, after = phone["folded"]
    assert (before, before - after) == (10, 2)


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
