"""Modules named ``flash_attn`` and a distribution flash-attn that `importlib.metadata` finds, until undone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution, DistributionFinder
from pathlib import Path
from types import ModuleType, TracebackType

NAME = "flash_attn"
DISTRIBUTION = "flash-attn"
VERSION = "2.8.4+sagebwd"
"""Whose signatures the functions have, and by a local label whose they are."""

_METADATA = f"""Metadata-Version: 2.1
Name: {DISTRIBUTION}
Version: {VERSION}
Summary: sagebwd's attention by flash-attn's signatures; not the package flash-attn
"""


class _Distribution(Distribution):
    def read_text(self, filename: str) -> str | None:
        return {"METADATA": _METADATA, "top_level.txt": f"{NAME}\n"}.get(filename)

    def locate_file(self, path: str) -> Path:
        return Path(__file__).parent / path


class _Finder(DistributionFinder):
    """Finds the distribution; the modules are in sys.modules and need no finder."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterator[Distribution]:
        wanted = None if context is None else context.name
        if wanted is None or wanted.lower().replace("_", "-") == DISTRIBUTION:
            yield _Distribution()


class Installation:
    """The modules while they are installed; leaving a ``with`` block, or `uninstall`, takes them away.

    Args: contents, by the name of a module below ``flash_attn`` ("" for itself) what it holds by name.

    Raises ValueError where a module of this name is imported already.
    """

    def __init__(self, contents: Mapping[str, Mapping[str, object]]) -> None:
        there = sys.modules.get(NAME)
        if there is not None:
            raise ValueError(
                f"install: {NAME} is imported already, from {getattr(there, '__file__', None) or there!r}; accepted: "
                "before anything imports it, and once until uninstall()"
            )
        self._modules = {f"{NAME}.{name}".rstrip("."): _module(name, x) for name, x in contents.items()}
        root = self._modules[NAME]
        for name, module in self._modules.items():
            if module is not root:
                setattr(root, name.rpartition(".")[2], module)
        self._finder = _Finder()
        sys.modules |= self._modules
        sys.meta_path.insert(0, self._finder)

    def uninstall(self) -> None:
        """Take the modules and the distribution away; nothing happens a second time."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.uninstall()


def _module(name: str, contents: Mapping[str, object]) -> ModuleType:
    full = f"{NAME}.{name}".rstrip(".")
    module = ModuleType(full, f"sagebwd's attention under the name {full}; not the package flash-attn.")
    module.__spec__ = ModuleSpec(full, None, origin=__file__, is_package=not name)
    module.__file__, module.__package__, module.__version__ = __file__, NAME, VERSION
    if not name:
        module.__path__ = []  # so that what is not here is no module, rather than an error of another kind
    vars(module).update(contents)
    return module
