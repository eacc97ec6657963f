"""Where the course's data lies: inside the installed package, or beside it in a checkout."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent
DATA = next((d for d in (_HERE / "data", _HERE.parent / "data") if d.is_dir()), _HERE / "data")
