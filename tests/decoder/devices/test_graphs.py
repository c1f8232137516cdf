"""Which numbers of rows have a graph, and which of them a step takes."""

import pytest
from torch import Tensor

from services.decoder.devices.base.graphs import Graphs, graph_sizes
from services.decoder.steps.step import Step


class Nothing(Graphs):
    def capture(self) -> None: ...

    def run(self, step: Step) -> Tensor:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (4, [1, 2, 4]),
        (20, [1, 2, 4, 8, 16, 20]),
        (256, [1, 2, 4, *range(8, 64, 8), *range(64, 257, 16)]),
    ],
)
def test_sizes_end_with_the_most_rows_of_a_step(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


def test_the_smallest_that_holds_the_rows_is_taken() -> None:
    graphs = Nothing(graph_sizes(1000))
    found = [graphs.size_for(rows) for rows in (1, 3, 5, 8, 65, 255, 256, 257)]
    assert found == [1, 4, 8, 8, 80, 256, 256, None]
