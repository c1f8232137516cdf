"""`make bench ARGS=overhead`: runs one measurement, each a module with a `main()`."""

import importlib
import sys

# Folder -> name -> what is measured.
MEASUREMENTS = {
    "benchmarks.system": {
        "overhead": "what the path through all services adds to the model itself, one stream",
        "throughput": "tokens per second of many streams, and where the processor time goes",
        "overload": "four times capacity: how fast others are refused, and whether those let in notice",
        "durability": "what it costs that tokens are logged before they are shown",
        "startup": "seconds from `tessera serve` to ready",
        "compare": "one server's figures over a table of workloads: Tessera, vLLM, llama.cpp",
        "schema_tpot": "time between tokens of eight streams with and without a JSON schema, through all services",
        "drafts": "time between tokens with and without drafts, of answers that repeat themselves and others",
        "path": "processor time of each process for each token and request, on any checkpoint",
        "telemetry": "what timelines, metrics, traces and log lines take of all processor time",
        "gateway_request": "processor time of the gateway alone for each chat request, of several checkouts in turn",
        "large_requests": "for how long, and with how much memory, the largest requests keep a gateway",
        "leaks": "whether a process grows with the number of requests that it has served",
    },
    "benchmarks.kernels": {
        "linear": "linear layers by every instruction set of this machine, beside torch",
        "quantized": "linear layers over codes of 8 and 4 bits, beside the same ones in bfloat16",
        "attention": "attention by every instruction set of this machine",
        "cache_codes": "attention of tokens to keys and values of 8 bits, beside bfloat16",
        "step": "a step of the decoder alone, with and without what makes it fast",
        "bound": "a step of the decoder beside what reading its weights takes at the memory's bandwidth",
        "roofline": "projected milliseconds of a step on Ascend NPUs, from bytes and operations",
        "grammar": "a step of the decoder with and without a JSON schema for its sequences",
        "backends": "a step of the decoder by our layers and by those of transformers",
        "adapters": "a step of the decoder with and without LoRA adapters of its sequences",
        "tower": "encoding one picture: our kernels against torch",
        "pixels": "an image before the tower: decoding, resizing, bytes against float32",
    },
    "benchmarks.scheduling": {
        "scheduler": "microseconds of a decision for each sequence and step",
        "goodput": "answers in time when more is asked than can be done: the whole system in virtual time",
        "scheduler_process": "microseconds of a step in a scheduler process with gRPC and Redis",
    },
    "benchmarks.quality": {
        "quality": "what each quantization costs: divergence of next tokens from float32",
        "codes": "ways of making codes of 4 bits, by the same measure",
        "outliers": "how uneven a model's channels are, which makes it hard to quantize",
        "answers": "right answers of the demo model with each quantization, through all services",
    },
    "benchmarks": {
        "simulator": "the real core and router against simulated decoders: a thousand of them, a million requests",
    },
}


def main() -> int:
    """Runs the measurement that is named, or lists them."""
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    for folder, measurements in MEASUREMENTS.items():
        if name in measurements:
            module = importlib.import_module(f"{folder}.{name}")
            return module.main(sys.argv[2:]) or 0
    for measurements in MEASUREMENTS.values():
        for known, what in measurements.items():
            print(f"  make bench ARGS={known:<17} {what}")
    return 2 if name else 0


if __name__ == "__main__":
    raise SystemExit(main())
