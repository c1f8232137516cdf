"""Random weights as codes, in every form that `QuantizedWeight` has."""

from dataclasses import dataclass

import torch

from shared.weights.quantized_weight import QuantizedWeight

_NIBBLES = (-127, -104, -83, -65, -49, -35, -22, -10, 0, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True)
class Form:
    """How codes become numbers."""

    bits: int = 8
    group: int = 0
    zeros: bool = False
    minima: bool = False
    codebook: bool = False
    order: bool = False
    scales: torch.dtype = torch.float32
    used_bits: int = 8  # of codes of 8 bits: as many as blocks of GGUF files have
    run: int = 0  # groups that share a scale, and have a factor each

    def __str__(self) -> str:
        parts = [f"int{self.bits}", f"g{self.group}", str(self.scales).removeprefix("torch.")]
        names = ("zeros", "minima", "codebook", "order")
        parts += [f"{self.used_bits} used"] * (self.used_bits < 8) + [f"runs of {self.run}"] * (
            self.run > 0
        )
        return "-".join([*parts, *(name for name in names if getattr(self, name))])

    def make(self, out: int, inputs: int, seed: int = 0) -> QuantizedWeight:
        """[out, inputs] of numbers about as large as a linear layer's."""
        generator = torch.Generator().manual_seed(seed)
        groups = -(-inputs // self.group) if self.group else 1
        most = 2**self.bits

        def drawn(*shape: int, below: int) -> torch.Tensor:
            return torch.randint(below, shape, generator=generator).to(torch.uint8)

        def numbers() -> torch.Tensor:
            runs = -(-groups // self.run) if self.run else groups
            found = torch.rand((out, runs), generator=generator).add(0.5).div(8 * most)
            return found.repeat_interleave(self.run or 1, 1)[:, :groups]

        def factors() -> torch.Tensor | None:
            return drawn(out, groups, below=64).to(torch.int8) - 32 if self.run else None

        used = 2**self.used_bits
        least = 0 if self.minima else 128 - used // 2
        return QuantizedWeight(
            codes=drawn(out, inputs * self.bits // 8, below=used) + least,
            scales=numbers().to(self.scales),
            bits=self.bits,
            group=self.group,
            zeros=drawn(out, groups, below=most // 2) + most // 4 if self.zeros else None,
            minima=(-numbers() * most / 2).to(self.scales) if self.minima else None,
            codebook=_NIBBLES if self.codebook else None,
            order=torch.randperm(inputs, generator=generator) if self.order else None,
            factors=factors(),
            minimum_factors=factors() if self.minima else None,
            span=(least, least + used - 1),
        )


# What checkpoints have: compressed-tensors, AWQ and GPTQ, GGUF, NF4.
FORMS = [
    Form(),
    Form(group=32),
    Form(group=128, scales=torch.float16),
    Form(group=32, zeros=True),
    Form(zeros=True, scales=torch.bfloat16),
    Form(bits=4, group=32, zeros=True, scales=torch.float16),
    Form(bits=4, group=128),
    Form(bits=4, group=32, minima=True, scales=torch.float16),
    Form(minima=True),
    Form(group=16),
    Form(group=32, minima=True, scales=torch.float16),
    Form(bits=4, group=16, minima=True),
    Form(bits=4, group=64, codebook=True),
    Form(bits=4, group=32, order=True, scales=torch.float16),
    Form(group=32, scales=torch.float16, used_bits=5),
    Form(group=32, minima=True, scales=torch.float16, used_bits=5, run=8),
    Form(group=16, scales=torch.float16, used_bits=6, run=16),
    Form(bits=4, group=32, minima=True, scales=torch.float16, run=8),
    Form(bits=4, group=32, codebook=True, scales=torch.float16, run=8),
]
