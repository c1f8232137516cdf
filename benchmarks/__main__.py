"""`make bench ARGS=overhead`: runs one measurement, each a module of this folder with a `main()`."""

import importlib
import sys

MEASUREMENTS = {
    "overhead": "what the path through all rooms adds to the model itself, one stream",
    "throughput": "tokens per second of many streams, and where the processor time goes",
    "overload": "four times capacity: how fast others are refused, and whether those let in notice",
    "durability": "what it costs that tokens are logged before they are shown",
    "startup": "seconds from `tessera serve` to ready",
    "linear": "linear layers by every instruction set of this machine, beside torch",
    "step": "a step of the decoder alone, with and without what makes it fast",
    "scheduler": "microseconds of a decision for each sequence and step",
    "scheduler_process": "microseconds of a step in a scheduler process with gRPC and Redis",
    "tower": "encoding one picture: our kernels against torch",
    "pixels": "an image before the tower: decoding, resizing, bytes against float32",
    "compare": "one server's figures over a table of workloads: Tessera, vLLM, llama.cpp",
    "path": "processor time of each process for each token and request, on any checkpoint",
    "gateway_request": "processor time of the gateway alone for each chat request, of several checkouts in turn",
    "leaks": "whether a process grows with the number of requests that it has served",
    "simulator": "the real core and router against simulated decoders: a thousand of them, a million requests",
}


def main() -> int:
    """Runs the measurement that is named, or lists them."""
    if len(sys.argv) < 2 or sys.argv[1] not in MEASUREMENTS:
        for name, what in MEASUREMENTS.items():
            print(f"  make bench ARGS={name:<11} {what}")
        return 0 if len(sys.argv) < 2 else 2
    module = importlib.import_module(f"benchmarks.{sys.argv[1]}")
    return module.main(sys.argv[2:]) or 0


if __name__ == "__main__":
    raise SystemExit(main())
