"""What the wheel must not hold; `make package` builds one and runs it."""

from tools import package


def test_modules_of_a_clone_are_seen():
    named = {"sagebwd/lab/runs.py": b"x = 1", "benchmarks/x.py": b"", "sagebwd/attention.py": b"import torch"}
    assert package.of_the_clone(named) == ["benchmarks/x.py", "sagebwd/lab/runs.py"]
    copied = {"sagebwd/pretrain.py": (package.ROOT / "lab/training/pretrain.py").read_bytes()}
    assert package.of_the_clone(copied) == ["sagebwd/pretrain.py"]
    importing = {
        "sagebwd/a.py": b"def f():\n    from lab.training import data",
        "sagebwd/b.py": b"import benchmarks.x as y",
    }
    assert package.of_the_clone(importing) == ["sagebwd/a.py", "sagebwd/b.py"]
    relative = {"sagebwd/c.py": b"from .benchmarks import x\nfrom labels import y"}
    assert package.of_the_clone(relative) == []


def test_the_package_is_none_of_a_clone():
    modules = {str(path): path.read_bytes() for path in package.PACKAGE.rglob("*.py")}
    modules = {str(path).removeprefix(str(package.PACKAGE.parent)): source for path, source in modules.items()}
    assert len(modules) > 100
    assert package.of_the_clone(modules) == []
