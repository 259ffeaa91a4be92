"""The digest of the code that results are of."""

from tools.tree import digest


def test_what_is_in_a_file_and_its_name_count(tmp_path):
    (tmp_path / "src").mkdir()
    file = tmp_path / "src" / "a.py"
    file.write_text("x = 1")
    first = digest("src", root=tmp_path)
    assert digest("src", root=tmp_path) == first
    (tmp_path / "src" / "notes.md").write_text("of no weight")
    assert digest("src", root=tmp_path) == first
    file.write_text("x = 2")
    second = digest("src", root=tmp_path)
    file.rename(tmp_path / "src" / "b.py")
    assert len({first, second, digest("src", root=tmp_path)}) == 3


def test_of_the_repository():
    assert digest("src") != digest("src", "tools/matrix") != digest("tools/matrix")
