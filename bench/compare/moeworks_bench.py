"""Moeworks as a program that is asked, line by line, to time an MoE layer or a part of one."""

import json
import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parent.parent.parent
PROGRAM = os.environ.get("MOEWORKS", ROOT / "target/release/moeworks")


class Moeworks:
    """`moeworks bench moe`, which keeps its weights from one question to the next."""

    def __init__(self, threads, device="cpu"):
        command = [PROGRAM, "bench", "moe", "--threads", str(threads), "--device", device]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def times(self, shape, dtype, tokens, **rest):
        """Seconds of each run. `shape` is (D, F, E, K, activation); `rest` may say `both` and `part`."""
        d, f, e, k, activation = shape
        case = {"d": d, "f": f, "e": e, "k": k, "activation": activation, "dtype": dtype, "tokens": tokens, **rest}
        self.process.stdin.write(json.dumps(case) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())["seconds"]

    def close(self):
        self.process.stdin.close()
        self.process.wait()
