"""`python -m labsupport.distributed.launch`: a script in several processes, from the shell."""

from __future__ import annotations

import argparse
import sys

from labsupport.distributed.launch import LaunchError, launch
from labsupport.interrupt import interrupted_status


def main() -> int:
    """Run it; 0 if all went well, 1 if a process failed, 2 for a call that makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m labsupport.distributed.launch",
        description="Run a script in several processes of this machine, one for each GPU or on the "
        "CPU; show what rank 0 prints, and end all of them when one fails.",
    )
    parser.add_argument("--processes", type=int, default=2, help="how many (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: GPUs if they suffice")
    parser.add_argument(
        "--timeout", type=float, default=20.0, help="seconds to wait in a collective (default: 20)"
    )
    parser.add_argument("--limit", type=float, help="seconds for the whole run (default: no limit)")
    parser.add_argument("script", help="train.py, a module, or either with :function")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="the script's own")
    asked = parser.parse_args()
    try:
        launch(
            asked.script,
            asked.args,
            processes=asked.processes,
            device=asked.device,
            timeout=asked.timeout,
            limit=asked.limit,
        )
    except LaunchError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return interrupted_status()
    return 0


if __name__ == "__main__":
    sys.exit(main())
