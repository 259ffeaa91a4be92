"""docs/reference from the docstrings, by pdoc: `python -m tools.reference [FOLDER]` (make docs) writes every page.

A page is a part of the package, and an index names them all. pdoc finds the members and reads the docstrings. Git
ignores the pages; tests write them anew.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from pdoc import doc, docstrings

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
INTEGRATIONS = "sagebwd.integrations."
# A page: its title, and its parts: a module, and which of its public names; None for all that the module defines.
PAGES: dict[str, tuple[str, list[tuple[str, tuple[str, ...] | None]]]] = {
    "attention": (
        "Attention",
        [("sagebwd", ("sage_attention", "sage_attention_varlen", "read_mask", "read_block_mask"))],
    ),
    "block_masks": ("Masks by name", [("sagebwd.block_masks", None)]),
    "norm_rope": (
        "QK-norm and rotary embedding before attention",
        [("sagebwd", ("qk_norm_rope_attention", "qk_norm_rope"))],
    ),
    "recipes": ("Recipes", [("sagebwd", ("Recipe", "RECIPES"))]),
    "asking": (
        "What ran, and switches", [("sagebwd", ("explain", "explain_varlen", "summary", "switches", "__version__"))],
    ),
    "sdpa": (
        "Calls of scaled_dot_product_attention", [("sagebwd", ("replace_sdpa", "install_sdpa", "uninstall_sdpa"))],
    ),
    "transformers": (
        "Transformers",
        [
            (INTEGRATIONS + "transformers", ("register", "attention", "add_qk_norm")),
            (INTEGRATIONS + "transformers_sharing", ("share_sequences", "keep_sequences")),
        ],
    ),
    "torch_registry": ("torch's registry of flash-attention kernels", [(INTEGRATIONS + "torch_registry", None)]),
    "diffusers": ("Diffusers", [(INTEGRATIONS + "diffusers", None)]),
    "sageattention": ("SageAttention's signatures", [(INTEGRATIONS + "sageattention", None)]),
    "flash_attn": (
        "flash-attn's signatures",
        [
            (
                INTEGRATIONS + "flash_attn",
                (
                    "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func",
                    "flash_attn_with_kvcache", "install",
                ),
            ),
        ],
    ),
    "flash_attn_varlen": (
        "flash-attn's signatures, packed, and its padding",
        [
            (
                INTEGRATIONS + "flash_attn",
                ("flash_attn_varlen_func", "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func"),
            ),
            (INTEGRATIONS + "flash_attn_padding", None),
        ],
    ),
    "flex_attention": ("FlexAttention's signature", [(INTEGRATIONS + "flex_attention", None)]),
    "context_parallel": ("One sequence over several processes", [(INTEGRATIONS + "context_parallel", None)]),
    "training": (
        "In training: checkpointing, error measures, the monitor",
        [
            ("sagebwd.checkpointing", ("keep_attention",)),
            ("sagebwd.reference.metrics", ("relative_l2", "cosine")),
            ("sagebwd.diagnostics.monitor", ("AttentionMonitor",)),
            ("sagebwd.diagnostics.monitor_settings", ("Monitor",)),
        ],
    ),
}  # fmt: skip
VARIABLES = {
    "RECIPES": "The recipes that have a name: a dictionary of names to `Recipe`.",
    "__version__": "The version, a text.",
}


class _AsWritten:
    """An annotation whose text is the source's."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def members(name: str, names: tuple[str, ...] | None) -> list[doc.Doc]:
    """What a part of a page has, in its order."""
    module = doc.Module.from_name(name)
    if names is not None:
        return [module.members[x] for x in names]
    return [
        x
        for x in module.members.values()
        if isinstance(x, (doc.Function, doc.Class)) and x.taken_from[0] == name and not x.name.startswith("_")
    ]


def heading(member: doc.Doc) -> str:
    """Its name and signature, a parameter a line where they do not fit one."""
    if isinstance(member, doc.Variable):
        return member.name
    # a dataclass's fields are told by its docstring
    if isinstance(member, doc.Class):
        return f"class {member.name}"
    signature = inspect.signature(member.obj)
    texts = [
        parameter.replace(annotation=_AsWritten(parameter.annotation))
        if isinstance(parameter.annotation, str)
        else parameter
        for parameter in signature.parameters.values()
    ]
    # without what is returned, which the docstring has
    line = str(inspect.Signature(texts))
    if len(member.name + line) <= 100:
        return member.name + line
    kinds = [parameter.kind for parameter in texts]
    lines = [f"    {text}," for text in texts]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        lines.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "    *,")
    return "\n".join([member.name + "(", *lines, ")"])


def described(member: doc.Doc) -> str:
    """Its docstring as Markdown."""
    if isinstance(member, doc.Variable):
        return VARIABLES[member.name]
    text = docstrings.convert(inspect.cleandoc(member.docstring), "google", None)
    text = re.sub(r"^#+ (\w+):$", r"**\1**", text, flags=re.MULTILINE)
    text = re.sub(r"^ - \*\*(.*?):\*\* +", r"- `\1`: ", text, flags=re.MULTILINE)
    text = re.sub(r"^> ?", "", text, flags=re.MULTILINE).replace("``", "`")
    lines = (line.rstrip() for line in text.splitlines())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).replace("**\n- ", "**\n\n- ").strip()


def lines_of(page: str) -> Iterator[str]:
    """A page's text in parts."""
    title, parts = PAGES[page]
    yield f"# {title}"
    for number, (module, names) in enumerate(parts):
        yield f"Of the module `{module}`" + (
            "." if number else ", from its docstrings (`make docs`). [All pages](README.md)"
        )
        for member in members(module, names):
            yield f"## {member.name}".replace("__", r"\_\_")  # not bold
            yield f"```py\n{heading(member)}\n```"
            yield described(member)
            for method in getattr(member, "own_members", []):
                if isinstance(method, doc.Function) and not method.name.startswith("_") and method.docstring:
                    yield f"**{method.name}**"
                    yield f"```py\n{heading(method)}\n```"
                    yield described(method)


def index() -> Iterator[str]:
    """The text of the folder's README in parts."""
    yield "# Reference"
    yield "Every public name, from the docstrings. `make docs` writes these pages."
    rows = ["| name | what it is | page |", "| --- | --- | --- |"]
    escaped = r"\|"
    for page, (title, parts) in PAGES.items():
        for module, names in parts:
            for member in members(module, names):
                first = described(member).split("\n\n")[0].replace("\n", " ").split(". ")[0].rstrip(".")
                link = f"{page}.md#{member.name.lower()}"
                rows.append(f"| [`{module}.{member.name}`]({link}) | {first.replace('|', escaped)} | {title} |")
    yield "\n".join(rows)


def write(folder: Path = FOLDER) -> list[Path]:
    """Write every page into a folder; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"README": index(), **{page: lines_of(page) for page in PAGES}}
    for name, parts in texts.items():
        (folder / f"{name}.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [folder / f"{name}.md" for name in texts]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=FOLDER, help="of the pages")
    for path in write(parser.parse_args().folder):
        print(path)
