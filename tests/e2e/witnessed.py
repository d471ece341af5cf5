"""`megasharp` with a witness (`witness.py`): the first argument is where it writes, the rest is the command's."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    import witness

    from megasharp.cli.main import main

    witness.install(Path(sys.argv.pop(1)))
    main()
