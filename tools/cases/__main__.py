"""Run cases in this process, with the kvspool that Python finds, and print each row as JSON; `tools/bench` starts this."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path

from cases.case import Bench, LeftOut
from cases.catalogue import CASES


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(prog="cases", description=__doc__)
    parser.add_argument("names", nargs="+", choices=CASES, metavar="NAME")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--short", action="store_true", help="measure next to nothing")
    parser.add_argument("--alone", action="store_true", help="measure without the peers")
    arguments = parser.parse_args()
    with os.fdopen(os.dup(1), "w") as rows:
        os.dup2(2, 1)  # only rows go to the standard output, because servers and Spark print, too
        for name in arguments.names:
            with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
                bench = Bench(Path(folder), arguments.rounds, is_short=arguments.short, is_alone=arguments.alone)
                try:
                    for row in CASES[name].run(bench):
                        print(json.dumps({"case": name, "row": row._asdict()}), file=rows, flush=True)
                except LeftOut as reason:
                    bench.left_out.add(str(reason))
                for missing in bench.left_out:
                    print(json.dumps({"case": name, "left_out": missing}), file=rows, flush=True)


if __name__ == "__main__":
    main()
