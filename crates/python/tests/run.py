"""Runs the functions `test_*` of the files given, in order, without pytest. Prints a line for each and the failures.

A function that raises `SkipTest` is skipped. With names after the files, only functions that contain one of them run.
"""

import importlib.util
import sys
import traceback
from pathlib import Path
from time import perf_counter
from unittest import SkipTest

HERE = Path(__file__).parent


def load(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def main(words: list[str]) -> int:
    files = [HERE / word for word in words if word.endswith(".py")]
    names = [word for word in words if not word.endswith(".py")]
    sys.path.insert(0, str(HERE))
    num_run = num_failed = 0
    for file in files:
        try:
            tests = list(vars(load(file)).items())
        except SkipTest as reason:
            print(f"SKIPPED: {file.name} ({reason})")
            continue
        for name, test in tests:
            if not name.startswith("test_") or (names and not any(word in name for word in names)):
                continue
            start = perf_counter()
            try:
                test()
                outcome = "ok"
            except SkipTest as reason:
                outcome = f"SKIPPED ({reason})"
            except BaseException:
                traceback.print_exc()
                outcome = "FAILED"
                num_failed += 1
            num_run += 1
            print(f"{file.stem}::{name} ... {outcome} ({perf_counter() - start:.1f} s)", flush=True)
    print(f"{num_run} tests, {num_failed} failed")
    return 1 if num_failed or not num_run and not names else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
