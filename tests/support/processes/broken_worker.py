"""A confined process that keeps none of the rules: it answers a job as the job says, whatever that breaks."""

import json
import marshal
import os
import time

from shared.confinement.messages import LENGTHS

READY = {"missing": [], "processor_s": 0}


def main() -> None:
    """Answers until its input ends."""
    send(json.dumps(READY).encode())
    while len(head := os.read(0, LENGTHS.size)) == LENGTHS.size:
        job = marshal.loads(os.read(0, LENGTHS.unpack(head)[0]))
        if job["do"] == "say":
            send(job["head"])
        elif job["do"] == "announce":
            os.write(0, LENGTHS.pack(*job["lengths"]))
        elif job["do"] == "drip":
            os.write(0, LENGTHS.pack(1 << 16, 0))
            for _ in range(1 << 16):
                os.write(0, b" ")
                time.sleep(0.1)
        elif job["do"] == "hang up":
            os.dup2(os.open(os.devnull, os.O_RDWR), 0)
            time.sleep(600)


def send(head: bytes) -> None:
    """A message without a text."""
    os.write(0, LENGTHS.pack(len(head), 0) + head)


if __name__ == "__main__":
    main()
