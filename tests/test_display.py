"""Tables for terminals and notebooks."""

from html.parser import HTMLParser

from cqm.display import html_facts, html_table, text_facts, text_table

ROWS = [{"best": "a < b", "gap": 1.5}, {"best": "<script>alert(1)</script>", "gap": 20}]


class Page(HTMLParser):
    """Tags that are opened and closed, and the text between them."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.closed, self.texts = [], [], []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        self.closed.append(tag)

    def handle_data(self, data):
        self.texts.append(data)


def test_columns_of_a_text_table_are_aligned():
    lines = text_table([*ROWS[:1], {"best": "c", "gap": 20}]).splitlines()
    assert lines == ["best   gap", "a < b  1.5", "c      20"]
    assert text_table([]) == ""


def test_facts_are_aligned_under_their_title():
    assert text_facts("T", {"a": 1, "long": "x"}) == "T\n  a     1\n  long  x"


def test_html_is_escaped_and_closed():
    page = Page(html_table(ROWS, title="A & B", notes=["x <b>y</b>"]))
    assert "script" not in page.tags
    assert page.texts == [
        *("A & B", "best", "gap", "a < b", "1.5", "<script>alert(1)</script>", "20"),
        "x <b>y</b>",
    ]
    assert sorted(page.tags) == sorted(page.closed)
    page = Page(html_facts("<i>", {"<u>": "<s>"}))
    assert page.texts == ["<i>", "<u>", "<s>"]
    assert sorted(page.tags) == sorted(page.closed)
