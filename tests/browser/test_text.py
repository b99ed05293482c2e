"""Formulas and code of answers in Chromium."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import PHONE, Visit
from tests.support import RunningServer

pytestmark = pytest.mark.browser

Start = Callable[..., Visit]

FORMULA_AT = """async (texts) => {
    const { formulaAt } = await import("/web/chat/formulas.js");
    return texts.map((text) => formulaAt(text));
}"""
SHOWN = """async (texts) => {
    const { Markdown } = await import("/web/chat/markdown.js");
    const answer = new Markdown();
    document.querySelector("main").replaceChildren(answer.element);
    texts.forEach((text, index) => answer.show(text, { complete: index === texts.length - 1 }));
}"""
STREAMED = SHOWN.replace("index === texts.length - 1", "false")
LOADED = "() => performance.getEntriesByType('resource').map((each) => new URL(each.name).pathname)"


def loaded(page: Page) -> set[str]:
    """Folders of static/vendor/ from which the page has loaded something."""
    return {path.split("/")[3] for path in page.evaluate(LOADED) if path.startswith("/web/vendor/")}


def show(tab: Visit, *texts: str, script: str = SHOWN) -> Any:
    """The element that showed these texts, one after the other."""
    tab.page.evaluate(script, list(texts))
    return tab.page.locator("main .markdown")


@pytest.fixture
def tab(visit: Start, scripted: RunningServer) -> Visit:
    tab = visit(scripted)
    tab.open()
    expect(tab.page.get_by_label("Message")).to_be_visible()
    return tab


@pytest.mark.parametrize(
    ("text", "tex", "display"),
    [
        (r"$f(x)=a*x*b$ and", "f(x)=a*x*b", False),
        (r"$\{1,2\}$", r"\{1,2\}", False),
        (r"$a\$b$", r"a\$b", False),
        (r"$n$th", "n", False),
        (r"\(\{1,2\}\), a \)", r"\{1,2\}", False),
        (r"\[ a \\[2pt] b \\] c \] d", r" a \\[2pt] b \\] c ", True),
        ("$$\na \\\\ b\n$$", "\na \\\\ b\n", True),
        (r"$$a \text{ if $b$}$$", r"a \text{ if $b$}", True),
        ("\\begin{align*}a &= b \\\\ c\\end{align*}.", r"\begin{align*}a &= b \\ c\end{align*}", True),
    ],
)
def test_a_formula_is_found(tab: Visit, text: str, tex: str, display: bool) -> None:
    [found] = tab.page.evaluate(FORMULA_AT, [text])
    assert (found["tex"], found["display"], found["closed"]) == (tex, display, True)
    assert text.startswith(found["raw"])


def test_what_only_looks_like_a_formula_is_none(tab: Visit) -> None:
    texts = ["$5 and $10", "$5/$10", "$ a$", "$a $", "$5", "$", "$$ in bash", "$$$$", r"\(\)", r"\$a$", "$a\nb$ c"]
    assert tab.page.evaluate(FORMULA_AT, texts) == [None] * len(texts)
    assert tab.page.evaluate(FORMULA_AT, [r"\[ a" + "\n\n" + r"b \]", "$a\n\nb$"]) == [None, None]


@pytest.mark.parametrize("text", [r"\[ a*b*c \\", r"\( a", "$$\na*b*c", "$a*b*c", r"\begin{align} a"])
def test_a_formula_that_is_not_closed_is_shown_as_it_is(tab: Visit, text: str) -> None:
    answer = show(tab, f"So *it* is {text}", script=STREAMED)
    expect(answer.locator("em")).to_have_text("it")
    expect(answer).to_have_text(f"So it is {text}")
    expect(answer.locator("math")).to_have_count(0)
    assert "temml" not in loaded(tab.page)


def test_signs_that_begin_no_formula_are_markdown_once_more_text_follows(tab: Visit) -> None:
    answer = show(tab, r"\[1] is **bold**", "\\[1] is **bold**\n\nThe end", script=STREAMED)
    expect(answer.locator(".block").first).to_have_text("[1] is bold")
    expect(answer.locator("strong")).to_have_text("bold")
    answer = show(tab, "Set $HOME to **one**")
    expect(answer.locator("strong")).to_have_text("one")
    answer = show(tab, "So \\[ a*b*c")
    expect(answer).to_have_text("So \\[ a*b*c")


def test_formulas_are_typeset_and_keep_what_markdown_would_take(tab: Visit) -> None:
    text = r"""\[ x = \frac{-b \pm \sqrt{b^2-4ac}}{2a} \] and $f(x)=a*x*b$,
$$\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}$$ \(\{1,2\}\)

*Let \(a^*\) and $b_1*c*$ be*, at $5 and $10.

Below:
\[
a
- b
= c
\]

| $x_1$ | `$y$` |
|---|---|
| $\frac{1}{2}$ | 2 |

- $$
  \begin{aligned} a &= b \\ c &= d \end{aligned}
  $$
"""
    answer = show(tab, *(text[:end] for end in range(1, len(text), 7)), text)
    formulas = answer.locator("math")
    expect(formulas).to_have_count(10)
    expect(formulas.nth(0).locator("mfrac msqrt")).to_have_count(1)
    expect(formulas.nth(1)).to_have_text("f(x)=a\u2217x\u2217b")
    expect(formulas.nth(2).locator("mtr")).to_have_count(2)
    expect(formulas.nth(3)).to_have_text("{1,2}")
    expect(answer.locator("em")).to_have_text("Let a\u2217 and b1\u2217c\u2217 be")
    expect(answer.locator("p").nth(1)).to_contain_text("at $5 and $10.")
    expect(formulas.nth(6)).to_have_text("a\u2212b=c")
    expect(answer.locator("code")).to_have_text("$y$")
    expect(formulas.nth(9).locator("mtr")).to_have_count(2)
    expect(answer.locator("li > p, hr, h1, h2")).to_have_count(1)
    assert answer.locator(".formula.display").count() == 4
    tab.check_accessible()


def test_a_formula_stays_as_it_is_if_the_server_is_gone_when_it_is_needed(tab: Visit) -> None:
    tab.page.route("**/temml/*", lambda route: route.abort())
    with tab.page.expect_event("requestfailed"):
        answer = show(tab, "$x^2$ and *more*")
    expect(answer).to_have_text("$x^2$ and more")


def test_formulas_have_fonts_of_the_system(tab: Visit) -> None:
    """Temml's stylesheet names a font file, which is not vendored. The policy would refuse it, with an error."""
    answer = show(tab, r"$f'(x) + g'' = \mathscr{A}$")
    expect(answer.locator("math").first).to_be_visible()
    assert tab.page.evaluate("[...document.fonts].length") == 0
    assert tab.page.evaluate("document.adoptedStyleSheets.length") == 1
    families = "all => all.map((each) => getComputedStyle(each).fontFamily)"
    assert set(answer.locator("math, math *").evaluate_all(families)) == {'"STIX Two Math", "Cambria Math", math'}


def test_code_keeps_its_dollars(tab: Visit) -> None:
    text = "`$a*b$` and `\\(c\\)`\n\n```sh\necho $HOME $PATH\n```\n\n    $$\n    x\n    $$\n"
    answer = show(tab, text)
    expect(answer.locator("code").first).to_have_text("$a*b$")
    expect(answer.locator("code").nth(1)).to_have_text(r"\(c\)")
    expect(answer.locator("pre").first).to_have_text("echo $HOME $PATH\n")
    expect(answer.locator("pre").last).to_have_text("$$\nx\n$$")
    expect(answer.locator(".formula")).to_have_count(0)
    assert "temml" not in loaded(tab.page)


def test_a_formula_that_is_not_valid_is_shown_as_it_is(tab: Visit) -> None:
    wrong = r"$\frac{a*b*c$ and \(\nothing{*x*}\) and $" + "{" * 3000 + "}" * 3000 + "$"
    answer = show(tab, wrong + " and $x^2$")
    expect(answer.locator("math")).to_have_count(1)
    expect(answer.locator("p")).to_contain_text(wrong)


def test_a_formula_can_run_nothing_load_nothing_and_look_like_no_part_of_the_page(tab: Visit) -> None:
    attacks = [
        r"\href{javascript:window.hacked=1}{a}",
        r"\url{https://example.com/}",
        r"\includegraphics{https://example.com/picture.png}",
        r"\class{composer}{b}",
        r"\id{main}{c}",
        r"\style{position:fixed}{d}",
        r"\data{view=chat}{e}",
        r"\text{<img src=x onerror=window.hacked=1>}",
        r"\color{red;position:fixed}{f}",
        r"\rule{9999em}{9999em}",
    ]
    answer = show(tab, "\n\n".join(f"${attack}$" for attack in attacks) + "\n\n$g$")
    expect(answer.locator("math").last).to_have_text("g")
    bad = "a, img, script, [href], [src], [id], [onerror], .composer, [style*=fixed], [data-view]"
    assert answer.locator(bad).count() == 0
    assert tab.page.evaluate("window.hacked") is None
    sizes = answer.locator("mspace").evaluate_all("all => all.map(each => each.getBoundingClientRect().height)")
    assert all(size < 200 for size in sizes)


def test_code_has_colours_once_it_is_complete(tab: Visit) -> None:
    code = 'def f(a: int) -> str:\n    return f"<b>&amp;{a}</b>"  # it\'s\n'
    answer = show(tab, f"```python\n{code}", script=STREAMED)
    assert "highlightjs" not in loaded(tab.page)
    answer = show(tab, f"```python\n{code}", f"```python\n{code}```\n\nAnd\n\n```nothing\nx = 1\n```\n")
    expect(answer.locator("pre").first.locator(".hljs-keyword").first).to_have_text("def")
    assert answer.locator("pre code").first.text_content() == code
    expect(answer.locator("pre").last.locator("span")).to_have_count(0)
    for scheme in ("light", "dark"):
        tab.page.emulate_media(color_scheme=scheme)
        tab.check_accessible()


def test_nothing_for_formulas_and_colours_is_loaded_before_it_is_used(tab: Visit) -> None:
    answer = show(tab, "Plain **text**, `code`, $5, and\n\n```\na block\n```\n")
    expect(answer.locator("strong")).to_have_text("text")
    assert loaded(tab.page) == {"marked", "dompurify"}
    answer = show(tab, "$x$")
    expect(answer.locator("math")).to_have_count(1)
    assert loaded(tab.page) == {"marked", "dompurify", "temml"}
    answer = show(tab, "```js\nlet a = 1;\n```\n")
    expect(answer.locator(".hljs-keyword")).to_have_text("let")
    assert loaded(tab.page) == {"marked", "dompurify", "temml", "highlightjs"}


HOSTILE = {
    "tags": "<svg onload=hacked()><script>hacked()</script><img src=x onerror=hacked()><iframe src=//example.com>" * 20,
    "MathML": '<math><mtext><style><img src=x onerror="hacked()"></style></mtext></math>',
    "addresses": "[a](javascript:hacked()) [b](JaVaScRiPt&colon;hacked()) [c](data:text/html,x) <javascript:hacked()>",
    "names of addresses": "[a][x]\n\n[x]: javascript:hacked()",
    "formulas": r"$\href{javascript:hacked()}{x}$ $\includegraphics{//example.com/x}$ $\rule{9000em}{9000em}$",
    "a formula that nests": "$" + r"\frac{" * 3000 + "x$",
    "control characters": "a\0b\x1b[2J\x1b]0;title\x07c\x9b1A\x7fd",
    "marks of direction": "\u202ea\u2066b\u2069 `\u202ecode\u202c`\n\n```\n\u202ecode\n```\n\nafter",
    "a long word": "w" * 50_000,
    "a long line of code": "```\n" + "c" * 50_000 + "\n```",
    "a wide table": "|" + "a|" * 2000 + "\n|" + "-|" * 2000 + "\n|" + "b|" * 2000,
    "a long table": "|a|b|\n|-|-|\n" + "|c|d|\n" * 5000,
    "lists": "".join(" " * (2 * i) + "- a\n" for i in range(100)),
    "quotes": "> " * 300 + "a",
    "emphasis": "a**b_" * 4000,
    "brackets": "![" * 8000,
    "short blocks": "---\n# a\n" * 2000,
}
ACTIVE = "svg, script, style, img, iframe, object, embed, form, input, link, video"
INSIDE = """(answer) => {
    const all = [...answer.querySelectorAll("*")];
    return [
        [...answer.querySelectorAll("a")].map((each) => each.protocol),
        all.flatMap((each) => each.getAttributeNames()).filter((name) => name.startsWith("on")),
        answer.scrollWidth - answer.clientWidth,
    ];
}"""


@pytest.mark.parametrize("name", HOSTILE)
def test_what_a_hostile_model_writes_is_text_within_its_place(tab: Visit, name: str) -> None:
    """Whole, and while it is written."""
    text = HOSTILE[name]
    answer = show(tab, text[: len(text) // 3], text[: 2 * len(text) // 3], text)
    protocols, handlers, beyond = answer.evaluate(INSIDE)
    assert answer.locator(ACTIVE).count() == 0
    assert set(protocols) <= {"http:", "https:", ":"}
    assert handlers == []
    if name not in ("lists", "quotes"):  # they are indented as deep as they nest
        assert beyond <= 0
    assert answer.text_content()
    assert tab.page.evaluate("window.hacked") is None


TABLE = """
| Name | Town | Amount | Remark |
|:-----|:----:|-------:|--------|
| Wolfeschlegelsteinhausenbergerdorff | Llanfairpwllgwyngyll | 1,234,567.89 | `a_function_with_a_long_name` |
"""
LINES = """all => all.map((each) => {
    const range = document.createRange();
    range.selectNodeContents(each);
    return new Set(Array.from(range.getClientRects(), (rect) => Math.round(rect.bottom / 8))).size;
})"""


def test_a_wide_table_scrolls_on_a_phone_and_keeps_its_words_and_its_alignment(
    visit: Start, scripted: RunningServer
) -> None:
    tab = visit(scripted, PHONE)
    tab.open()
    expect(tab.page.get_by_label("Message")).to_be_visible()
    answer = show(tab, TABLE)
    cells = answer.locator("td")
    assert cells.evaluate_all(LINES) == [1, 1, 1, 1]
    found = "all => all.map((each) => getComputedStyle(each).textAlign)"
    names = {"-webkit-left": "left", "-webkit-center": "center", "-webkit-right": "right", "start": "left"}
    for row in ("th", "td"):
        aligned = answer.locator(row).evaluate_all(found)
        assert [names.get(each, each) for each in aligned] == ["left", "center", "right", "left"]
    frame = answer.get_by_role("region", name="Table")
    assert frame.evaluate("each => each.scrollWidth > each.clientWidth")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= PHONE[0]


def test_a_list_begins_with_its_number(tab: Visit) -> None:
    assert show(tab, "3. three\n4. four").locator("ol").get_attribute("start") == "3"


SLOW = """async ([ms, ...texts]) => {
    const { Markdown } = await import("/web/chat/markdown.js");
    const answer = new Markdown();
    let now = 0;
    performance.now = () => (now += ms);
    const counts = texts.map((text, index) => {
        answer.show(text, { complete: index === texts.length - 1 });
        return [answer.element.querySelectorAll("strong").length, answer.element.querySelectorAll(".plain").length];
    });
    return [counts, answer.element.textContent];
}"""


def test_a_text_that_takes_long_to_draw_is_shown_as_it_is(tab: Visit) -> None:
    """ms: that each look at the clock takes, so each drawing."""
    texts = ["**a**", "**a** **b**", "**a** **b** c"]
    assert tab.page.evaluate(SLOW, [900, *texts]) == [[[1, 0], [2, 0], [2, 0]], "a b c\n"]
    assert tab.page.evaluate(SLOW, [1100, *texts]) == [[[1, 0], [0, 1], [0, 1]], texts[-1]]
    counts, found = tab.page.evaluate(SLOW, [1, "**a**" + " b" * 100_000])
    assert (counts, len(found)) == ([[0, 1]], 200_005)
