"""Tables of README and pages are those of the results files: `python -m tools.tables` writes them."""

import pytest

tables = pytest.importorskip("tools.tables.__main__", reason="prints tables by rich, which is in the extra lab")

PAGE = tables.ROOT / "docs" / "results" / "speed.md"


def text_of(page):
    return page.read_text(encoding="utf-8")


TABLED = [page for page in tables.pages() if "<!-- table:" in text_of(page)]


@pytest.mark.parametrize("page", TABLED, ids=lambda path: path.name)
def test_tables_are_those_of_the_results_files(page):
    assert tables.written(text_of(page)) == text_of(page)


def test_a_changed_number_and_an_unknown_table_are_seen():
    changed = text_of(PAGE).replace("1.06", "1.07", 1)
    assert changed != text_of(PAGE) == tables.written(changed)
    with pytest.raises(KeyError):
        tables.written("<!-- table: of-nothing -->\n<!-- end -->")


def test_every_table_is_on_a_page():
    named = {name for page in TABLED for _, name, _ in tables.BLOCK.findall(text_of(page))}
    assert named == set(tables.TABLES)


def test_the_command_writes_the_pages_that_are_named(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(text_of(PAGE).replace("1.06", "1.07", 1), encoding="utf-8")
    assert tables.main([str(page)]) == 0
    assert text_of(page) == text_of(PAGE)
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert tables.main([str(page)]) == 0
    assert not capsys.readouterr().out
