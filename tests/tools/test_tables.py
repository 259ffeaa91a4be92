"""Tables of README and pages are those of the results files: `python -m tools.tables` writes them."""

import pytest

tables = pytest.importorskip("tools.tables.__main__", reason="prints tables by rich, which is in the extra lab")
pretraining = tables.pretraining

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


def test_steps_that_are_estimated_are_about_those_that_were_measured():
    from sagebwd.cli.estimate import estimate
    from tools.tables.steps import measured_steps

    steps = measured_steps()
    assert len({name for name, *_ in steps}) >= 2
    for _, sizes, theirs_ms, ours_ms in steps:
        found = estimate("H200", **sizes)
        assert found.rest_ms + found.others_ms["fa4"] == pytest.approx(theirs_ms, rel=0.15)
        assert found.gain("fa4") == pytest.approx(theirs_ms / ours_ms, abs=0.03)


def test_runs_of_wrong_kernels_are_counted_by_their_table_alone():
    assert pretraining.of_wrong_kernels().count("\n") == 1 + len(pretraining.FAULTS)
    counted = {commit for test in pretraining.FROM_SCRATCH for commit in pretraining.rows_of(test)[0].commits}
    assert not counted & {"a6a23aa-dirty", "2330368-dirty"}
