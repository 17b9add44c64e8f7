"""Writes the texts derived from the consistency modes, for `tools/generate_stubs.py`.

These are the `Literal` of mode names for type checkers, the `Mode` enum of shard.proto, and the table of
modes in docs/strategies.md.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHOICES = ROOT / "psfleet" / "core" / "base" / "settings" / "kinds.py"
NUMBERS = ROOT / "protos" / "psfleet" / "v1" / "shard.proto"
GUIDE = ROOT / "docs" / "strategies.md"
_NAMES = re.compile(r"(?<=^Mode = Literal\[).*(?=\])", re.MULTILINE)
_ENUM = re.compile(r"(?<=^enum Mode {\n).*?(?=^})", re.MULTILINE | re.DOTALL)
_TABLE = re.compile(
    r"(?<=^<!-- Generated from psfleet/core/engine/consistency.py. -->\n).*?\n(?=\n)", re.M | re.S
)
_HEAD = """| mode | a push | a pull is answered | guaranteed | drawback | settings |
|---|---|---|---|---|---|
"""


def texts() -> dict[Path, str]:
    """Return the new content of each file that has such a text."""
    sys.path.insert(0, str(ROOT))
    from psfleet.core.engine.consistency import MODES

    listed = ", ".join(f'"{name}"' for name in MODES)
    return {
        CHOICES: _NAMES.sub(listed, CHOICES.read_text()),
        NUMBERS: _ENUM.sub(lambda _: _enum(), NUMBERS.read_text()),
        GUIDE: _TABLE.sub(lambda _: _table(), GUIDE.read_text()),
    }


def _enum() -> str:
    from psfleet.core.engine.consistency import MODES

    lines = ["  // Not allowed.\n  MODE_UNSPECIFIED = 0;\n"]
    for name, mode in MODES.items():
        meaning = (type(mode).__doc__ or "").partition("\n")[0]
        lines.append(f"  // {meaning}\n  MODE_{name.upper().replace('-', '_')} = {mode.number};\n")
    return "".join(lines)


def _table() -> str:
    from psfleet.core.engine.consistency import MODES
    from psfleet.core.runtime.strategy.strategy_parts import ConsistencySettings, settings_of_mode

    rows = []
    for name, mode in MODES.items():
        settings = (
            setting
            for setting in ConsistencySettings.settings()
            if setting.name in settings_of_mode(name)
        )
        defaults = ", ".join(f"`{setting.name}` = {setting.default:,}" for setting in settings)
        guide = mode.guide
        cells = [f"`{name}`", guide.push, guide.pull, guide.promise, guide.price, defaults]
        rows.append(f"| {' | '.join(cells)} |\n")
    return _HEAD + "".join(rows)
