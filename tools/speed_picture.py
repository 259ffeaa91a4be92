"""The picture of README and docs/results/speed.md: `python -m tools.speed_picture [FILE]` draws what a call gains.

A pair of bars a head_dim, under a causal mask and without, as wide as a phone. Colours follow the reader's light or
dark scheme. A test holds the committed picture to what this draws.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.tables.cells import width
from tools.tables.speed import CARDS, training_speeds

PICTURE = Path(__file__).parents[1] / "docs" / "figures" / "speed.svg"
CARD, TOKENS = "H200", 8192
HEAD_DIMS = (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)
"""Those of kernels of their own, of keys and values; the page's table has the others."""
MASKS = {True: ("causal", "causal mask"), False: ("none", "no mask")}
WIDTH, TOP, BAR, GROUP, LEFT, UNIT = 360, 96, 13, 40, 66, 186
STYLE = (
    "text{font:13px Helvetica,Arial,sans-serif;fill:#1f2328}.title{font-weight:bold}.soft{fill:#57606a}"
    ".causal{fill:#2f81f7}.none{fill:#e08a1e}.one{stroke:#57606a;stroke-dasharray:4 3}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.soft{fill:#9198a1}.one{stroke:#9198a1}}"
)


def drawn() -> str:
    """The picture as SVG."""
    found = training_speeds(*CARDS[CARD])
    height = TOP + GROUP * len(HEAD_DIMS) + 24
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'role="img">',
        f"<title>Speed of mixed over the fastest BF16 attention, {TOKENS // 1024}K tokens, {CARD}</title>",
        f"<style>{STYLE}</style>",
        '<text class="title" x="8" y="18">mixed, times as fast as the fastest of</text>',
        '<text class="title" x="8" y="36">FlashAttention-3, -4 and cuDNN in BF16</text>',
        f'<text class="soft" x="8" y="56">forward + backward, {TOKENS // 1024}K tokens, one {CARD}</text>',
    ]
    for number, (name, words) in enumerate(MASKS.values()):
        parts.append(f'<rect class="{name}" x="{LEFT + 120 * number}" y="68" width="12" height="12"/>')
        parts.append(f'<text class="soft" x="{LEFT + 120 * number + 18}" y="79">{words}</text>')
    for group, widths in enumerate(HEAD_DIMS):
        top = TOP + GROUP * group
        parts.append(f'<text x="{LEFT - 8}" y="{top + 18}" text-anchor="end">{width(*widths)}</text>')
        for number, (causal, (name, _)) in enumerate(MASKS.items()):
            speed, y = found[*widths, causal, TOKENS], top + number * (BAR + 1)
            parts.append(f'<rect class="{name}" x="{LEFT}" y="{y}" width="{speed * UNIT:.1f}" height="{BAR}"/>')
            parts.append(f'<text x="{LEFT + speed * UNIT + 5:.1f}" y="{y + 11}">{speed:.2f}</text>')
    bottom = TOP + GROUP * len(HEAD_DIMS)
    parts += [
        f'<path class="one" fill="none" d="M{LEFT + UNIT} {TOP - 6}V{bottom}"/>',
        f'<text class="soft" x="{LEFT + UNIT}" y="{bottom + 16}" text-anchor="middle">as fast</text>',
        f'<text class="soft" x="8" y="{bottom + 16}">head_dim</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)


def main() -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, default=PICTURE, help="the SVG; the committed one unless given")
    parser.parse_args().file.write_text(drawn(), encoding="utf-8")


if __name__ == "__main__":
    main()
