"""Models and checkpoints that others trained, read and traced."""

import json
import lzma
import shutil
from pathlib import Path

import pytest
import torch

from sagebwd.analysis import checkpoints, models
from sagebwd.analysis.checkpoints import Checkpoint, looseness, markdown
from tests.analysis.test_capture import build, tokens


def test_models_and_tokenisers_by_folder(tmp_path):
    run = tmp_path / "run"
    build("qwen3").save_pretrained(run / "model")
    ids = tokens(1, 20)
    with torch.no_grad():
        assert torch.equal(models.load_model(run / "model")(ids).logits, build("qwen3")(ids).logits)
    assert models.load_model(run / "model", dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(ValueError, match="no tokeniser there"):
        models.encode(run / "model", "text")
    (run / "config.yaml").write_text(json.dumps({"data": {"tokenizer": "bytes"}}))  # JSON is YAML
    assert models.encode(run / "model", "ab").tolist() == [[97, 98, 256]]
    with pytest.raises(ValueError, match="text: it is empty"):
        models.encode(run / "model", "")
    with pytest.raises(ValueError, match=r"no config\.json there"):
        models.load_model(run)


def test_windows_are_spread_over_the_text():
    ids = torch.arange(100)[None]
    assert [window.tolist()[0] for window in models.windows(ids, 3, 2)] == [[0, 1, 2], [97, 98, 99]]
    (one,) = models.windows(ids, 7)
    assert one.tolist() == [list(range(7))]
    assert len(models.windows(ids, 25, 4)) == 4
    for tokens_wanted, count, message in (
        (26, 4, "4 windows of 26 need 104; the text has 100"), (101, 1, "tokens=101: the text has 100"),
        (0, 1, "tokens=0"), (5, 0, "windows=0 must be at least 1"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            models.windows(ids, tokens_wanted, count)


def test_a_text_of_a_model(tmp_path):
    run = tmp_path / "run"
    build().save_pretrained(run / "model")
    (run / "config.yaml").write_text(json.dumps({"data": {"tokenizer": "bytes"}}))
    (tmp_path / "text.txt").write_text("abc" * 200)
    with lzma.open(tmp_path / "text.txt.xz", "wt") as file:
        file.write("abc" * 200)
    model = models.load_model(run / "model")
    plain = models.text_windows(model, run / "model", tmp_path / "text.txt", count=2)
    assert [window.shape for window in plain] == [(1, 128), (1, 128)]  # its positions
    packed = models.text_windows(model, run / "model", tmp_path / "text.txt.xz", count=2)
    assert all(torch.equal(one, other) for one, other in zip(plain, packed, strict=True))
    (sample,) = models.text_windows(model, run / "model", None, tokens=12)
    assert sample.shape == (1, 12)
    assert len(models.SAMPLE_TEXT.read_text(encoding="utf-8")) > 4000


def test_a_gguf_file_needs_its_package_and_itself(tmp_path, monkeypatch):
    path = tmp_path / "x.gguf"
    for use in (models.load_model, lambda path: models.encode(path, "text")):
        with pytest.raises(ValueError, match="there is no such file"):
            use(path)
    path.touch()
    monkeypatch.setattr(models, "find_spec", lambda name: None)
    for use in (models.load_model, lambda path: models.encode(path, "text")):
        with pytest.raises(ValueError, match="needs the package gguf: pip install gguf"):
            use(path)


def write_gguf(path, model):
    """A Llama as llama.cpp keeps it: rows of the query and key projections in pairs of the rotary embedding."""
    gguf = pytest.importorskip("gguf")
    config, weights = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    letters = [chr(33 + index) for index in range(config.vocab_size - 2)]
    writer.add_token_list([*letters, "<|endoftext|>", "!!"])
    writer.add_token_merges(["! !"])
    writer.add_eos_token_id(config.vocab_size - 2)
    names = {
        "embed_tokens": "token_embd", "norm": "output_norm", "q_proj": "attn_q", "k_proj": "attn_k",
        "v_proj": "attn_v", "o_proj": "attn_output", "gate_proj": "ffn_gate", "up_proj": "ffn_up",
        "down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "lm_head": "output",
    }  # fmt: skip
    for name, weight in weights.items():
        parts = name.split(".")
        prefix = f"blk.{parts[2]}." if parts[1] == "layers" else ""
        if parts[-2] in ("q_proj", "k_proj"):
            weight = weight.view(-1, 2, config.head_dim // 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)
        writer.add_tensor(f"{prefix}{names[parts[-2]]}.weight", weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_the_model_that_was_written(tmp_path):
    model = build()
    write_gguf(tmp_path / "x.gguf", model)
    read = models.load_model(tmp_path / "x.gguf")
    ids = tokens(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(read(ids).logits, model(ids).logits)
    assert models.encode(tmp_path / "x.gguf", "!!$").tolist() == [[63, 3]]
    read.save_pretrained(tmp_path / "saved")
    with torch.no_grad():
        assert torch.equal(models.load_model(tmp_path / "saved")(ids).logits, read(ids).logits)


RESULTS = Path(__file__).parents[2] / "docs" / "results"
DEMO = f"demo:240={RESULTS / 'trace_demo.json'}"


def cells(table, first):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith(first)]


def test_tables_are_the_files_figures():
    errors, ratios, magnitudes, bound, attribution = markdown([Checkpoint.read(DEMO)]).split("\n\n")
    content = json.loads((RESULTS / "trace_demo.json").read_text(encoding="utf-8"))
    paper, token = (next(row for row in content["layers"] if row["recipe"] == name) for name in ("paper", "token"))
    line = cells(errors, "| demo | 240 | 0 | `paper`")[0]
    assert line[4:12] == [f"{error:.4f}" for error in paper["relative_l2"].values()]
    assert line[12].split()[0] == "dQ"
    assert line[12].split()[-1] == "dP"
    means, spread = cells(ratios, "| demo | 240 | 0 | `token` / `paper`")[0][4].split(" ", 1)
    heads = {(row["recipe"], row["head"]): row["relative_l2"]["ds"] for row in content["rows"] if row["layer"] == 0}
    each = [heads["token", head] / heads["paper", head] for head in (0, 1)]
    assert means == f"{sum(each) / 2:.2f}"
    assert spread == f"({min(each):.2f} to {max(each):.2f})"
    line = cells(magnitudes, "| demo | 240 | 0 |")[0]
    assert line[7] == f"{token['ds_bound'] / token['rms']['ds']:.1f}"
    assert bound == "Bound over RMS(dS), 6 heads: 19.4 to 40.0, median 32.0; it holds on 6."
    assert len(cells(attribution, "| demo | 240 | 2 |")) == 10


def test_a_head_over_the_bound_is_counted():
    one = Checkpoint.read(DEMO)
    one.rows[0]["ds_bound"] = one.rows[0]["rms"]["ds"] / 2
    assert min(looseness(one)) == 0.5
    assert "it holds on 5." in markdown([one])


def test_the_command_prints_and_draws(tmp_path, capsys):
    picture = tmp_path / "folder" / "plot.png"
    later = tmp_path / "later.json"
    shutil.copy(RESULTS / "trace_demo.json", later)
    checkpoints.main([DEMO, f"demo:480={later}", "--plot", str(picture)])
    printed = capsys.readouterr().out
    assert "| demo | 480 | 2 |" in printed
    assert picture.stat().st_size > 5000


def test_recipes_can_be_chosen(capsys):
    checkpoints.main([DEMO, "--recipe", "token"])
    printed = capsys.readouterr().out
    assert "`token`" in printed
    assert "`paper`" not in printed
    with pytest.raises(SystemExit):
        checkpoints.main([DEMO, "--recipe", "fine"])
    assert "--recipe 'fine' is not in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("demo=file", "expected MODEL:STEP=FILE"),
        ("demo:late=file", "expected MODEL:STEP=FILE"),
        ("demo:1=/no/such", "/no/such: there is no such file"),
        (f"demo:1={__file__}", "not a file of sagebwd trace --output"),
    ],
)
def test_bad_arguments_are_one_line(text, message, capsys):
    with pytest.raises(SystemExit):
        checkpoints.main([text])
    assert message in capsys.readouterr().err.splitlines()[-1]
