"""What `sagebwd trace` wrote is read again."""

import dataclasses
import json
import lzma

import pytest

from lab.studies import traces
from sagebwd.diagnostics import layers
from sagebwd.diagnostics import trace as study
from tests.diagnostics.test_trace import random_call


@pytest.mark.parametrize("name", ["rows.json", "rows.json.xz"])
def test_a_file_is_read_again_and_printed(tmp_path, capsys, name):
    call = random_call(tokens=64)
    call.do[:, 1] *= 1e-4
    rows = study.measure([dataclasses.replace(call, layer=1)], ["paper", "token"], attribute=True)
    text = json.dumps({"rows": list(map(dataclasses.asdict, rows))}).encode()
    (tmp_path / name).write_bytes(lzma.compress(text) if name.endswith("xz") else text)
    assert traces.read(tmp_path / name) == rows
    traces.main([str(tmp_path / name)])
    out = capsys.readouterr().out
    assert f"{layers.overall(rows)['paper']['dq'][0]:.4f}" in out
    assert "idle heads" in out
    assert "1 head 1" in out
    with pytest.raises(SystemExit, match=r"python -m lab\.studies"):
        traces.main([])
