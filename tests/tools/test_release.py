"""What a release is refused for, its notes, and the workflow that publishes it; `make release` builds one."""

import re

import pytest

from sagebwd.version import __version__
from tools import package, release

CHANGELOG = "# Changelog\n\n## [0.2.0] - 2027-01-02\n\n- Two.\n\n## [0.1.0] - unreleased\n\n- One.\n"


def test_notes_are_the_versions_part():
    assert release.notes(CHANGELOG, "0.2.0") == ("2027-01-02", "- Two.\n")
    assert release.notes(CHANGELOG, "0.1.0") == ("unreleased", "- One.\n")
    with pytest.raises(ValueError, match=r"no heading '## \[0\.3\.0\] - DATE'"):
        release.notes(CHANGELOG, "0.3.0")


def test_the_changelog_has_this_version():
    _, text = release.notes((package.ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), __version__)
    assert text


@pytest.mark.parametrize(
    ("tag", "date", "told"),
    [("v0.2.1", "2027-01-02", "tag v0.2.1 is not v0.2.0"), ("v0.2.0", "unreleased", "give it its date")],
)
def test_a_tag_that_does_not_fit_is_refused(tag, date, told):
    release.check_tag("v0.2.0", "0.2.0", "2027-01-02")
    with pytest.raises(ValueError, match=re.escape(told)):
        release.check_tag(tag, "0.2.0", date)


def test_the_workflow_publishes_a_tag_without_a_password():
    yaml = pytest.importorskip("yaml")
    flow = yaml.safe_load((package.ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8"))
    assert flow[True] == {"push": {"tags": ["v*"]}}, "YAML reads `on` as true"
    publish = flow["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}
    assert all("password" not in step.get("with", {}) for step in publish["steps"])
    assert any("make release TAG=" in step.get("run", "") for step in flow["jobs"]["build"]["steps"])
