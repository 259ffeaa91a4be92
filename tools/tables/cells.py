"""Format cells of a table."""

from collections.abc import Iterable


def between(values: Iterable[float], digits: int = 2) -> str:
    """The least and the largest of some numbers: `1.04 to 1.34`."""
    values = list(values)
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def numbers(values: Iterable[float], digits: int) -> str:
    """Numbers of several tensors or directions: `1.06 / 1.14`."""
    return " / ".join(f"{value:.{digits}f}" for value in values)


def errors(values: Iterable[float]) -> str:
    """Relative errors of several tensors."""
    return numbers(values, 4)


def width(head_dim: int, value_dim: int) -> str:
    """A head_dim, with V's where it is another: `192/128`."""
    return str(head_dim) if head_dim == value_dim else f"{head_dim}/{value_dim}"


def length(tokens: int) -> str:
    """A number of tokens, in units of 1024 where it is a multiple: `8K`."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def mask_and_length(causal: bool, tokens: int) -> str:
    """Heading of a column of calls: `no mask, 8K`."""
    return f"{'causal' if causal else 'no mask'}, {length(tokens)}"
