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


def test_masks_that_are_passed_and_read_are_columns_apart():
    from tools.tables.masks import speeds_table

    call = {"mask": "causal-frames", "tokens": 32760, "heads": 12, "kv_heads": 12, "head_dim": 128, "shown": 0.524}
    times = {
        "mixed": ({"flex": 1.8, "sdpa": 3.0, "fa4": 1.2}, {"flex": 1.9, "fa4": 1.3, "packed mixed": 0.9}),
        "read mixed": ({"flex": 2.1}, {}),  # one that FlexAttention does not run beside
        "flex": ({"fa4": 0.7}, {"fa4": 0.6}),
    }
    rows = [
        call | {"attention": name, "direction": way, "over": over}
        for name, both in times.items()
        for way, over in zip(("fwd", "fwd+bwd"), both)
    ]
    head, _, row = speeds_table(rows).strip().splitlines()
    assert head.count("passed as it is: over") == head.count("read once: over") == 2
    assert row == "| causal-frames | 32760, 12 heads of 128 | 52.4% | 1.80 / 1.90 | 1.20 / 1.30 | - | - |"


def test_steps_of_models_are_compared_with_the_best_of_the_others():
    from tools.tables.steps import models_table

    case = {"model": "llama-8b", "tokens": 8192, "layers": 4, "whole_layers": 32, "best": "flash_attention_4"}
    times = {"sdpa": 800.0, "flash_attention_4": 500.0, "sagebwd": 400.0, "sagebwd+fuse": 250.0}
    rows = [
        case | {
            "attention": name, "compiled": True, "ms": ms, "gate": "ok", "over_best": 500.0 / ms, "peak_bytes": ms,
            "attention_share": 0.25,
        }
        for name, ms in times.items()
    ]  # fmt: skip
    absent = {"gate": "does not run: ImportError", "ms": None, "over_best": None, "best": None, "peak_bytes": None}
    rows.append(rows[2] | absent | {"compiled": False})
    _, _, compiled, eager = models_table(rows).strip().splitlines()
    what = "`llama-8b`, 4 of 32 layers | 8K"
    assert compiled == f"| {what} | compiled | 800 | - | 500 | - | 400 | 250 | 1.25 / 2.00 | 0.80 | 25% |"
    assert eager == f"| {what} | eager | - | - | - | - | - | - | - / - | - | - |"


def test_steps_that_are_estimated_are_about_those_that_were_measured():
    from sagebwd.cli.estimate import estimate
    from tools.tables.steps import measured_steps

    steps = measured_steps()
    assert len({name for name, *_ in steps}) >= 2
    for _, sizes, theirs_ms, ours_ms in steps:
        found = estimate("H200", **sizes)
        assert found.rest_ms + found.others_ms["fa4"] == pytest.approx(theirs_ms, rel=0.15)
        assert found.gain("fa4") == pytest.approx(theirs_ms / ours_ms, abs=0.03)


def test_the_command_writes_the_pages_that_are_named(tmp_path, capsys):
    page = tmp_path / "page.md"
    page.write_text(text_of(PAGE).replace("1.06", "1.07", 1), encoding="utf-8")
    assert tables.main([str(page)]) == 0
    assert text_of(page) == text_of(PAGE)
    assert capsys.readouterr().out == f"wrote {page}\n"
    assert tables.main([str(page)]) == 0
    assert not capsys.readouterr().out


def test_a_star_needs_one_look_a_margin_before_and_holm():
    for tests in (pretraining.FROM_SCRATCH, pretraining.TRAINED_ON):
        p = pretraining.corrected(tests)
        for test in tests:
            pairs = {len(row.gaps) for row in pretraining.rows_of(test)}
            assert pairs == {test.looks[-1]}, "a look that the table does not count"
            alone = pretraining.p_at(test, test.looks[-1])
            assert alone is None or p[test] >= min(1, alone * len(test.looks))
            shown = test.beforehand and len(test.looks) == 1 and p.get(test, 1) < 0.05
            assert pretraining.starred(test) == ("*" in pretraining.verdict(test).replace("**", "")) == shown


def test_runs_of_wrong_kernels_are_counted_by_their_table_alone():
    assert pretraining.of_wrong_kernels().count("\n") == 1 + len(pretraining.FAULTS)
    counted = {commit for test in pretraining.FROM_SCRATCH for commit in pretraining.rows_of(test)[0].commits}
    assert not counted & {"a6a23aa-dirty", "2330368-dirty"}
