"""A linear layer's weight as codes of 8 or 4 bits: what they mean, and the selections of them that stay codes."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shared.weights.layouts.layout import LEAST_GROUP

Numbers: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.int64]]"

# Values that `dequantize` holds in float32 at once.
_BLOCK = 1 << 22


class NotAsCodes(ValueError):
    """A selection that codes and scales cannot express. Says why."""


@dataclass(frozen=True)
class QuantizedWeight:
    """Codes [out, inputs] and what makes numbers of them. Column c has the scale of group c // `group`; the number is

    (code - 2 ** (bits - 1)) * scale    without the fields below
    (code - zero) * scale               with `zeros`
    code * scale + minimum              with `minima`
    codebook[code] * scale              with `codebook`

    each operation rounded to float32. At most one of those three fields is given. Where there are factors, such a scale
    is scale * factor, and such a minimum is minimum * its factor, rounded to float32. With `order`, column c belongs to
    input order[c]: who multiplies takes the activations x[:, order], or puts the columns back. With `width` there are
    more columns than inputs: some fill groups up, have the code of zero, and belong to an input that another column of
    their group belongs to as well.
    """

    codes: Tensor  # uint8 [out, inputs]; of 4 bits [out, inputs / 2], the even column in the lower half of a byte
    scales: Tensor  # float32, float16 or bfloat16 [out, groups]
    bits: int  # 8 or 4
    group: int  # columns of one scale, the last group may have fewer; 0: the whole row
    zeros: Tensor | None = None  # uint8 [out, groups], to 2 ** bits; GPTQ has one beyond the codes
    minima: Tensor | None = None  # [out, groups], of the scales' type
    codebook: tuple[int, ...] | None = None  # 2 ** bits numbers
    order: Tensor | None = None  # int64 [columns], a permutation unless there is a width
    width: int = 0  # inputs; 0: as many as columns
    activations: int = 16  # bits in which the checkpoint, or `--quantization`, wants to multiply
    factors: Tensor | None = None  # int8 [out, groups]
    minimum_factors: Tensor | None = None  # int8 [out, groups]
    span: tuple[int, int] = (0, 255)  # the least and the largest code that there may be, of 8 bits
    # Of activations of 8 bits the step and the zero that the checkpoint has for all tokens.
    fixed: tuple[float, int] | None = None

    def __post_init__(self) -> None:
        out, columns = self.codes.shape[0], self.columns
        groups = -(-columns // self.group) if self.group else 1
        given = [part for part in self._each(lambda values: values).values() if part is not None]
        if self.bits not in (4, 8) or self.codes.dtype != torch.uint8:
            raise ValueError(f"codes of {self.bits} bits in {self.codes.dtype}")
        if any(part.shape != (out, groups) for part in given):
            shapes = ", ".join(str(list(part.shape)) for part in given)
            raise ValueError(
                f"{out} outputs and {groups} groups of inputs, but scales are {shapes}"
            )
        if sum(part is not None for part in (self.zeros, self.minima, self.codebook)) > 1:
            raise ValueError("more than one of zeros, minima and codebook")

    @property
    def columns(self) -> int:
        """Codes of an output."""
        return self.codes.shape[1] * (8 // self.bits)

    @property
    def inputs(self) -> int:
        """What it is multiplied with."""
        return self.width or self.columns

    @property
    def is_finite(self) -> bool:
        """Whether all scales and minima are numbers, and none is infinite."""
        given = (values for values in (self.scales, self.minima) if values is not None)
        return all(bool(values.isfinite().all()) for values in given)

    def unpacked(self) -> Tensor:
        """uint8 [out, inputs], one code a byte."""
        if self.bits == 8:
            return self.codes
        return torch.stack((self.codes & 15, self.codes >> 4), -1).flatten(1)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """[out, inputs], columns by their input: the reference that says what the codes mean."""
        found = torch.empty((len(self.codes), self.inputs), dtype=dtype)
        step = max(1, _BLOCK // max(1, self.columns))
        for first in range(0, len(found), step):
            rows = slice(first, first + step)
            values = self._rows(rows)
            if self.width and self.order is not None:
                whole = values.new_zeros((len(values), self.width))
                values = whole.index_add_(1, self.order, values)
            elif self.order is not None:
                values = values[:, torch.argsort(self.order)]
            found[rows] = values
        return found

    def _rows(self, rows: slice) -> Tensor:
        """float32 [rows, columns]."""
        codes, size = self.outputs_between(rows).unpacked(), self.group or self.columns
        short = -self.columns % max(1, size)  # columns that the last group has less than others
        grouped = F.pad(codes, (0, short)).view(len(codes), -1, max(1, size))
        scales = _product(self.scales, self.factors, rows)[..., None]
        if self.codebook is not None:
            known = torch.tensor(self.codebook, dtype=torch.float32)
            found = known[grouped.long()].mul_(scales)
        elif self.minima is not None:
            minima = _product(self.minima, self.minimum_factors, rows)[..., None]
            found = grouped.float().mul_(scales).add_(minima)
        elif self.zeros is not None:
            found = grouped.float().sub_(self.zeros[rows].float()[..., None]).mul_(scales)
        else:
            found = grouped.float().sub_(2 ** (self.bits - 1)).mul_(scales)
        return found.flatten(1)[:, : self.columns]

    def outputs_between(self, rows: slice) -> "QuantizedWeight":
        """Some outputs that follow each other; no memory is copied."""
        return replace(self, codes=self.codes[rows], **self._each(lambda values: values[rows]))

    def in_groups(self, group: int) -> "QuantizedWeight":
        """In groups of so many columns, a part of what they are."""
        times = (self.group or self.columns) // group
        count = -(-self.columns // group)  # the last of the wider ones may be a short one
        repeated = self._each(lambda values: values.repeat_interleave(times, 1)[:, :count])
        return replace(self, group=group, **repeated)

    def without_factors(self) -> "QuantizedWeight":
        """The same numbers, with scales and minima in float32 where there are factors."""
        if self.factors is None and self.minimum_factors is None:
            return self
        every, minima = slice(None), self.minima
        return replace(
            self,
            scales=_product(self.scales, self.factors, every),
            minima=None if minima is None else _product(minima, self.minimum_factors, every),
            factors=None,
            minimum_factors=None,
        )

    def _each(self, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        """The fields that are [out, groups], changed in one way."""
        names = "scales", "zeros", "minima", "factors", "minimum_factors"
        fields = {name: getattr(self, name) for name in names}
        return {name: None if values is None else change(values) for name, values in fields.items()}

    def outputs(self, sources: Numbers) -> "QuantizedWeight":
        """Output number i is number sources[i] of these; -1: an output of zeros."""
        at, missing = torch.from_numpy(sources.clip(0)), torch.from_numpy(sources < 0)

        def rows(values: Tensor, blank: int = 0) -> Tensor:
            if not len(values):  # there is none but those of zeros
                return values.new_full((len(at), values.shape[1]), blank)
            return values[at].masked_fill(missing[:, None], blank)

        blank = self._blank()
        codes = rows(self.codes, blank if self.bits == 8 else blank * 17)
        return replace(self, codes=codes, **self._each(rows))

    def scaled(self, factors: Tensor) -> "QuantizedWeight":
        """Each output times its factor [out]; scales and minima are in float32 then."""
        factors, plain = factors.float()[:, None], self.without_factors()
        minima = None if plain.minima is None else plain.minima.float() * factors
        return replace(plain, scales=plain.scales.float() * factors, minima=minima)

    def select_inputs(self, sources: Numbers) -> "QuantizedWeight":
        """Input number i is number sources[i] of these; -1: an input of zeros. Groups stay whole: where those that are
        left do not lie one behind the other, the columns are put in an `order` in which they do.

        Raises NotAsCodes where a part of a group is asked for, and for zeros in a group that has no code for zero.
        """
        columns = sources
        if self.order is not None:
            if self.width:
                raise NotAsCodes("its inputs were cut before")
            inverse = np.empty(self.inputs, np.int64)
            inverse[self.order.numpy()] = np.arange(self.inputs)
            columns = np.where(sources < 0, -1, inverse[sources.clip(0)])
        if not self.group:
            if self._zero_codes(self.zeros) is not None or (columns >= 0).all():
                return self._arranged(columns, np.zeros(1, np.int64), 0, None)
            # One group for all that is there, others for the zeros.
            there = np.flatnonzero(columns >= 0)
            order = np.concatenate((there, np.flatnonzero(columns < 0)))
            count = -(-len(columns) // max(1, len(there)))
            one = np.where(np.arange(count) == 0, 0, -1)
            return self._arranged(columns[order], one, max(1, len(there)), order)
        kept = columns[columns >= 0]
        if not self._has_whole_groups(kept):
            if self.order is None and (finer := self._finer(kept)) is not None:
                return finer.select_inputs(sources)
            if self.order is not None and len(kept) == len(columns):
                return self._filled_up(columns)
            raise NotAsCodes(
                f"its inputs are cut inside a group of {self.group} that share a scale; with another"
                " --tensor-parallel-size groups may stay whole"
            )
        groups = self._groups_in_place(columns)
        if groups is not None:
            return self._arranged(columns, groups, self.group, None)
        # Whole groups first, as they were; the last of them may be a short one; zeros behind.
        order = np.argsort(np.where(columns < 0, self.inputs, columns), kind="stable")
        groups = self._groups_in_place(columns[order])
        assert groups is not None
        return self._arranged(columns[order], groups, self.group, order)

    def _has_whole_groups(self, columns: Numbers) -> bool:
        sizes = np.bincount(columns // self.group, minlength=self.scales.shape[1])
        whole = np.full(len(sizes), self.group)
        whole[-1] = self.columns - self.group * (len(sizes) - 1)
        return bool(((sizes == 0) | (sizes == whole)).all()) and len(np.unique(columns)) == len(
            columns
        )

    def _finer(self, columns: Numbers) -> "QuantizedWeight | None":
        """The same in groups of a half, a quarter and so on, of which the columns are whole ones; None if there is
        none."""
        group = self.group
        while group % (2 * LEAST_GROUP) == 0:
            group //= 2
            finer = self.in_groups(group)
            if finer._has_whole_groups(columns):
                return finer
        return None

    def _filled_up(self, columns: Numbers) -> "QuantizedWeight":
        """Some columns, of each group that has any as many as of the others: those that are missing are zeros. Column
        columns[i] belongs to input i."""
        zero = self._zero_codes(self.zeros)
        if zero is None or self.width:
            raise NotAsCodes("a group that is to be filled up has no code for zero")
        groups, at, sizes = np.unique(
            columns // self.group, return_inverse=True, return_counts=True
        )
        size = -(-int(sizes.max()) // LEAST_GROUP) * LEAST_GROUP
        inputs = np.argsort(at, kind="stable")  # by their groups
        place = np.arange(len(inputs)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        first = inputs[np.cumsum(sizes) - sizes]
        order = np.repeat(first, size).reshape(len(groups), size)
        order[at[inputs], place] = inputs
        missing = np.ones_like(order, bool)
        missing[at[inputs], place] = False
        chosen = torch.from_numpy(groups)
        codes = self.unpacked()[:, torch.from_numpy(columns[order.ravel()])]
        if zero.shape[1] > 1:
            zero = zero[:, chosen].repeat_interleave(size, 1)
        codes = torch.where(torch.from_numpy(missing.ravel()), zero.to(torch.uint8), codes)
        if self.bits == 4:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return replace(
            self,
            codes=codes.contiguous(),
            group=size,
            order=torch.from_numpy(order.ravel()),
            width=len(columns),
            **self._each(lambda values: values[:, chosen]),
        )

    def _groups_in_place(self, columns: Numbers) -> "Numbers | None":
        """Whose scale each run of `group` columns has, -1 for zeros alone; None where a run has columns of several
        groups."""
        padding = np.full(-len(columns) % self.group, -1, np.int64)
        runs = np.concatenate((columns, padding)).reshape(-1, self.group)
        groups = np.where(runs < 0, -1, runs // self.group)
        found: Numbers = groups.max(1)
        return found if ((groups < 0) | (groups == found[:, None])).all() else None

    def _arranged(
        self, columns: Numbers, groups: Numbers, group: int, order: "Numbers | None"
    ) -> "QuantizedWeight":
        """The columns, and the scales of these groups; -1: zeros."""
        at, missing = torch.from_numpy(groups.clip(0)), torch.from_numpy(groups < 0)

        given = self._each(lambda values: values[:, at].masked_fill(missing, 0))
        zeros = given["zeros"]
        codes = self.unpacked()[:, torch.from_numpy(columns.clip(0))]
        blank = np.flatnonzero(columns < 0)
        if len(blank):
            of = torch.from_numpy(blank // (group or len(columns)))
            zero = self._zero_codes(zeros)
            if zero is not None and zeros is None:
                zero = zero[:, :1].expand(1, len(groups))
            if zero is None and not missing[of].all():
                raise NotAsCodes("a group that is to be filled up has no code for zero")
            if zero is None:
                zero = torch.tensor(self._blank(), dtype=torch.uint8).expand(1, len(groups))
            codes[:, torch.from_numpy(blank)] = zero[:, of].expand(len(codes), -1)
        if self.bits == 4:
            if codes.shape[1] % 2:
                raise NotAsCodes("codes of 4 bits are kept for an even number of inputs")
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        turned = None if order is None else torch.from_numpy(order)
        return replace(self, codes=codes.contiguous(), group=group, order=turned, width=0, **given)

    def _blank(self) -> int:
        """A code whose number is not negative: zero times it is no -0."""
        if self.codebook is not None:
            return self.codebook.index(max(self.codebook))
        return 0 if self.zeros is not None or self.minima is not None else 2 ** (self.bits - 1)

    def _zero_codes(self, zeros: Tensor | None) -> Tensor | None:
        """uint8 [out or 1, groups]: the code of zero in each group with these `zeros`; None where one has none."""
        if zeros is not None:
            return None if (zeros > 2**self.bits - 1).any() else zeros
        if self.minima is not None or (self.codebook is not None and 0 not in self.codebook):
            return None
        zero = 2 ** (self.bits - 1) if self.codebook is None else self.codebook.index(0)
        return torch.tensor(zero, dtype=torch.uint8).expand(1, self.scales.shape[1])


def _product(values: Tensor, factors: Tensor | None, rows: slice) -> Tensor:
    """float32 [rows, groups]."""
    found = values[rows].float()
    return found if factors is None else found * factors[rows]
