"""The audit's page: each claim has a verdict, a place that decides it, and a test that computes it again."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nbformat
import pytest
from docutils import nodes
from nbformat.v4 import new_code_cell, new_notebook, new_output
from wherebook import claims

ROOT = Path(__file__).resolve().parents[2]
NUMBERS = range(1, 59)
KINDS = {
    "right": "right",
    "right-if": "right, if",
    "wrong": "wrong",
    "outdated": "outdated",
    "undecided": "undecided",
}
TESTED = re.compile(r"^def test_claim_((?:\d+_(?:and_)?)+)", re.MULTILINE)
PAGE = "chapters/13_audit.html"
# What decides a claim may be shut until the question before it is answered; then the line that says so is seen.
# Of answers that follow on each other one line is seen while they are shut: it stands in the first of them.
VISIBLE = """element => {
    let one = element.closest('[data-answers]') ?? element;
    const shut = `[data-answers="${one.dataset.answers}"]`;
    for (let above = one; !one.getBoundingClientRect().height && above; above = above.previousElementSibling) {
        if (above.matches(shut)) one = above;
        else if (!(one = above.querySelector(shut))) return 0;
    }
    return one.getBoundingClientRect().height;
}"""


@pytest.fixture
def audit(visit: Any) -> Any:
    return visit(PAGE)


def rows(page: Any) -> list[list[str]]:
    """Number, kind, verdict and link of each row that is seen."""
    return page.locator("table.claims tbody tr:visible").evaluate_all(
        """rows => rows.map(row => [row.cells[0].innerText, row.className.replace(/row-\\w+/, '').trim(),
            row.cells[2].querySelector('p').innerText, row.cells[2].querySelector('a')?.href || ''])"""
    )


def assert_every_claim_has_a_verdict_of_its_kind(audit: Any) -> None:
    found = rows(audit)
    assert [int(number) for number, *_ in found] == [*NUMBERS]
    for number, kind, verdict, _ in found:
        assert verdict.startswith(KINDS[kind]), number
        assert (kind == "right-if") == verdict.startswith("right, if"), number


def assert_each_row_quotes_its_sentence(audit: Any) -> None:
    cells = audit.locator("table.claims tbody tr").evaluate_all(
        """rows => rows.map(row => [...row.cells[1].children].map(part => [part.tagName, part.innerText]))"""
    )
    assert len(cells) == len(NUMBERS)
    for number, parts in zip(NUMBERS, cells, strict=True):
        (quote, quoted), (_, article), *rest = parts
        assert quote == "BLOCKQUOTE" and quoted.strip(), number
        assert article, number
        assert [text.partition(":")[0] for _, text in rest] in (["Says"], ["Says", "Omits"]), number


def assert_every_verdict_links_to_what_is_seen(audit: Any, watch: Any) -> None:
    page = watch().page
    for number, *_, link in sorted(rows(audit), key=lambda row: row[-1]):  # each page is loaded once
        page.goto(link)
        target = page.locator(f"#claim-{number}")
        assert link.endswith(f"#claim-{number}")
        assert target.count() == 1, number
        assert target.evaluate(VISIBLE) > 0, number


def assert_the_counts_above_are_those_of_the_rows(audit: Any) -> None:
    kinds = [kind for _, kind, *_ in rows(audit)]
    said = audit.locator("article p", has_text=re.compile(r"^Of \d+ claims")).inner_text()
    assert [int(number) for number in re.findall(r"\d+", said)] == [len(kinds), *map(kinds.count, KINDS)]


def assert_the_picture_has_a_mark_for_each_row(audit: Any) -> None:
    marks = audit.locator("figure.claims > p").evaluate_all(
        """lines => lines.flatMap(line => [...line.querySelectorAll('a')].map(mark => [Number(mark.innerText),
            line.firstElementChild.innerText, mark.className, mark.hash.slice(1)]))"""
    )
    in_table = audit.locator("table.claims tbody tr").evaluate_all(
        """rows => rows.map(row => [Number(row.cells[0].innerText), row.querySelector('.article').innerText,
            row.className.replace(/row-\\w+/, '').trim(), row.id])"""
    )
    assert sorted(marks) == in_table


def test_the_table_of_claims_is_whole_and_its_links_and_picture_are_those_of_its_rows(audit: Any, watch: Any) -> None:
    assert_every_claim_has_a_verdict_of_its_kind(audit)
    assert_each_row_quotes_its_sentence(audit)
    assert_the_counts_above_are_those_of_the_rows(audit)
    assert_the_picture_has_a_mark_for_each_row(audit)
    assert_every_verdict_links_to_what_is_seen(audit, watch)


def test_the_first_rows_are_seen_as_the_page_opens_and_the_others_in_their_frame(audit: Any) -> None:
    frame = audit.locator("div.claims")
    assert 0 < frame.evaluate("frame => frame.clientHeight") < frame.evaluate("frame => frame.scrollHeight")
    frame.scroll_into_view_if_needed()
    frame.focus()
    audit.keyboard.press("End")
    audit.wait_for_function("document.querySelector('div.claims').scrollTop > 0")


def test_a_mark_leads_to_its_row_whatever_is_left_out(audit: Any) -> None:
    for number, sought in ((7, ""), (33, "nothing has these words")):
        audit.get_by_role("radio", name="undecided").check()
        audit.get_by_label("with the words").fill(sought)
        audit.locator(f"figure.claims a[href='#claim-row-{number}']").click()
        audit.locator(f"#claim-row-{number}").wait_for(state="visible")
        assert audit.evaluate("location.hash") == f"#claim-row-{number}"
        assert audit.locator(f"#claim-row-{number}").evaluate("row => row.getBoundingClientRect().top < innerHeight")


def test_words_and_verdicts_choose_rows_by_keyboard_alone_and_paper_has_all(audit: Any) -> None:
    audit.get_by_label("with the words").fill("Checkpoint LAYER")
    assert [int(number) for number, *_ in rows(audit)] == [41, 42]
    assert audit.locator("figure.claims a:not(.book-unsought)").all_inner_texts() == ["41", "42"]
    audit.get_by_label("with the words").fill("")
    assert len(rows(audit)) == len(NUMBERS)
    whole = rows(audit)
    audit.get_by_role("radio", name="all").focus()
    for kind in KINDS:
        audit.keyboard.press("ArrowDown")
        assert rows(audit) == [row for row in whole if row[1] == kind]
    audit.keyboard.press("ArrowDown")
    assert rows(audit) == whole
    audit.get_by_role("radio", name="wrong", exact=True).check()
    audit.emulate_media(media="print")
    assert len(rows(audit)) == len(NUMBERS)
    assert not audit.locator("fieldset.claims").is_visible()


def test_the_table_fits_a_phone(visit: Any) -> None:
    page = visit(PAGE, width=375, has_touch=True)
    table = page.locator("table.claims")
    assert table.evaluate("table => table.offsetWidth <= table.parentElement.clientWidth")


def test_every_claim_is_computed_again_by_a_test_of_its_name_or_asserted_beside_its_verdict() -> None:
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tested = {int(number) for numbers in TESTED.findall(tests) for number in re.findall(r"\d+", numbers)}
    asserted = set[int]()
    for chapter in (ROOT / "chapters").glob("*.md"):
        for cell in re.findall(r"^```\{code-cell\}\n(.*?)^```", chapter.read_text(), re.MULTILINE | re.DOTALL):
            if "assert " in cell:
                asserted |= {int(number) for number in re.findall(r'"claim-(\d+)":', cell)}
    assert tested | asserted == {*NUMBERS}


@pytest.mark.parametrize("returned", [{}, {"claim-4": "true"}])
def test_a_claim_without_a_verdict_or_a_place_is_a_warning(
    returned: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = new_output("execute_result", {"text/plain": repr(returned)}, execution_count=1)
    cell = new_code_cell(metadata={"tags": ["remove-cell"]}, outputs=[output])
    nbformat.write(new_notebook(cells=[cell]), tmp_path / "chapter.ipynb")
    env = SimpleNamespace(
        found_docs={"chapter"},
        mystnb_config=SimpleNamespace(output_folder=str(tmp_path), execution_cache_path=str(tmp_path / "cache")),
        domaindata={"std": {"anonlabels": {}}},
    )
    quoted = nodes.block_quote("", nodes.paragraph("", "The loss is divided."))
    statement = nodes.list_item("", quoted, nodes.paragraph("", "Says: so."))
    place = claims.Stated("", nodes.paragraph("", "An article"), nodes.enumerated_list("", statement, start=4))
    warned: list[str] = []
    monkeypatch.setattr(claims.logger, "warning", lambda text, *details, **_: warned.append(text % details))
    claims.table(SimpleNamespace(env=env), "audit", place)
    assert [text.split(":")[0] for text in warned] == ["claim 4", "claim 4"]
    assert "verdict" in warned[0]
    assert "(claim-4)=" in warned[1]


@pytest.mark.parametrize("parts", [["Says: so."], ["A quotation", "Omits: more."], ["A quotation", "So it is."]])
def test_a_claim_without_its_quotation_or_what_it_says_is_a_warning(
    parts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = [
        nodes.block_quote("", nodes.paragraph("", text)) if text == "A quotation" else nodes.paragraph("", text)
        for text in parts
    ]
    warned: list[str] = []
    monkeypatch.setattr(claims.logger, "warning", lambda text, *details, **_: warned.append(text % details))
    claims.claim(4, "An article", nodes.list_item("", *made))
    assert warned == ["claim 4: expected a quotation, then Says: and perhaps Omits:"]


def test_every_verdict_can_be_another_one() -> None:
    """Beside each assert stands an expression with more than one outcome, so that the table is not typed."""
    for path in sorted((ROOT / "chapters").glob("*.md")):
        for number, said in re.findall(r'\{"claim-(\d+)":(.*?)\}\n', path.read_text(), re.DOTALL):
            assert " if " in said, number
            assert re.search(r"\belse\b", said), number
            assert len(set(re.findall(r'"(right, if|right|wrong|outdated|undecided)\b', said))) > 1, number
