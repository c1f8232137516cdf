"""What graphs read, and how they are found to be right."""

from functools import partial

from tests.ascend.breaks.fault import DECODER, Break

_TOKENS = ("decoder/test_graphs.py::test_tokens_are_those_without_graphs",)
# Where the cache has nothing of what the same steps wrote without graphs.
_EMPTIED = (
    "decoder/test_graphs.py::test_rows_that_fill_a_graph_up_touch_nothing_that_others_read",
)
# Whose steps are launched before those that came before are collected.
_AHEAD = (
    "decoder/test_steady_step.py::test_a_step_takes_one_copy_each_way_and_one_wait[on-kinds0]",
)
_REFUSED = (
    "decoder/test_graphs.py::test_where_graphs_fail_steps_run_without",
    "decoder/test_graphs.py::test_a_graph_of_a_single_row_that_keeps_its_lengths_is_refused",
)
_graphs = partial(Break, file=f"{DECODER}/devices/npu/graphs.py")
_trials = partial(Break, file=f"{DECODER}/loading/graph_trials.py")
_loading = partial(Break, file=f"{DECODER}/loading/graphs.py")
_UPDATE = """        captured.graph.update([{"actual_seq_lengths_kv": step.meta.kv_lens}])\n"""

BREAKS = [
    _graphs(
        reason="a graph has the ids of its capture",
        old="        given.ids.copy_(step.ids)\n",
        new="",
        tests=_TOKENS,
    ),
    _graphs(
        reason="a graph has the positions of its capture",
        old="        given.positions.copy_(step.positions)\n",
        new="",
        tests=_TOKENS,
    ),
    _graphs(
        reason="a graph writes where its capture did",
        old="        given.meta.slots.copy_(step.meta.slots)\n",
        new="",
        tests=_EMPTIED,
    ),
    _graphs(
        reason="a graph reads the blocks of its capture",
        old="        given.meta.block_table[:, : table.shape[1]].copy_(table)\n",
        new="",
        tests=_TOKENS,
    ),
    _graphs(
        reason="a graph's table is another tensor than the captured one",
        old="        given.meta.block_table[:, : table.shape[1]].copy_(table)\n",
        new="        given.meta.block_table = table\n",
        tests=_TOKENS,
    ),
    _graphs(
        reason="a graph is not told lengths",
        old=_UPDATE,
        new="",
        tests=_TOKENS,
    ),
    _graphs(
        reason="a graph is told the lengths of the step before",
        old="step.meta.kv_lens}])",
        new="[max(1, n - 1) for n in step.meta.kv_lens]}])",
        tests=_TOKENS,
    ),
    _graphs(
        reason="lengths change while the graph still runs for the step before",
        old="        captured.updates.wait_stream(steps)\n",
        new="",
        tests=_AHEAD,
    ),
    _graphs(
        reason="a capture that fails leaves the thread on its stream",
        old="with torch_npu.npu.stream(stream), graph.graph_dispatch_mode:",
        new="torch_npu.npu.set_stream(stream)\n    with graph.graph_dispatch_mode:",
        tests=_REFUSED,
    ),
    Break(
        reason="the graph that is one row too small is taken",
        file=f"{DECODER}/devices/base/graphs.py",
        old="place = bisect_left(self.sizes, rows)",
        new="place = bisect_left(self.sizes, rows - 1)",
        tests=_TOKENS,
    ),
    Break(
        reason="rows that fill a graph up all write to one place",
        file=f"{DECODER}/devices/base/graphs.py",
        old="places = torch.arange(rows, dtype=torch.int64, device=device)",
        new="places = torch.zeros(rows, dtype=torch.int64, device=device)",
        tests=_TOKENS,
    ),
    Break(
        reason="rows share places that are more than a block has",
        file=f"{DECODER}/devices/base/graphs.py",
        old="if rows > 2 * ops.block_size:",
        new="if rows > ops.block_size:",
        tests=("decoder/test_graphs.py::test_the_memory_of_graphs_is_counted",),
    ),
    Break(
        reason="steps with a part of a prompt are replayed",
        file=f"{DECODER}/worker/preparing.py",
        old="generates = (rows.count == 1) & (rows.start >= self._slots.prompt_len[rows.slot])",
        new="generates = rows.count >= 1",
        tests=_TOKENS,
    ),
    Break(
        reason="rows that fill a graph up have no length",
        file=f"{DECODER}/worker/inputs/step_inputs.py",
        old="ones = [1] * blank",
        new="ones = [0] * blank",
        tests=_TOKENS,
    ),
    _trials(
        reason="graphs are tried within a block alone",
        old="""        yield [min(most, block + 2 + row) for row in range(size)]
        yield [most] * size
""",
        new="",
        tests=_REFUSED,
    ),
    _trials(
        reason="graphs are not tried with the longest sequence",
        old="        yield [most] * size\n",
        new="",
        tests=_REFUSED,
    ),
    _trials(
        reason="graphs are tried over a cache of zeros",
        old="        self._fill({_FIRST: -1.0, self._last: float(width)})\n",
        new="",
        tests=_REFUSED,
    ),
    _trials(
        reason="what the trials of graphs wrote stays in the cache",
        old="                    self.device.ops.scrub(kv, self._slots(block))\n",
        new="                    pass\n",
        tests=_REFUSED,
    ),
    _loading(
        reason="graphs that compute something else are used",
        old="                if not difference <= _TOLERANCE:\n",
        new="                if False:\n",
        tests=_REFUSED,
    ),
    _loading(
        reason="graphs that are slower are used",
        old="    return replayed < called\n",
        new="    return True\n",
        tests=(
            "decoder/test_graphs.py::test_unless_told_otherwise_graphs_are_used_where_they_are_faster",
        ),
    ),
    _loading(
        reason="layers with windows over codes are captured",
        old="    if not device.graphs_take_coded_windows and any",
        new="    if False and any",
        tests=(
            "decoder/test_served_cache.py::test_layers_with_windows_over_codes_have_no_graphs[on-warning]",
        ),
    ),
    _loading(
        reason="the memory of graphs does not count",
        old="    return most + sum(sizes) * each_row\n",
        new="    return 0\n",
        tests=("decoder/test_graphs.py::test_the_memory_of_graphs_is_counted",),
    ),
]
