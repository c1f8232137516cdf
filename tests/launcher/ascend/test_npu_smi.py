"""What the driver's tool prints, for each kind of chip."""

from services.launcher.ascend import npu_smi
from services.launcher.ascend.npu_smi import Chip, Holder
from tests.support.processes.ascend_machine import HELD_910B, INFO_310P, INFO_910B

# A3: two chips on a card, each with a number on the machine.
INFO_A3 = """\
| npu-smi 24.1.rc3.7               Version: 24.1.rc3.7                                           |
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
| 0     Ascend910           | OK            | 178.7       37                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3419 / 65536         |
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3420 / 65536         |
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
| 0       1                 | 3328327       |                          | 50119                   |
"""


def test_chips_of_an_800i_a2() -> None:
    report = npu_smi.read(INFO_910B)
    assert report is not None
    assert report.driver == "25.2.0"
    assert report.chips == (
        Chip(0, 0, "910B3", "OK", 3408, 65536),
        Chip(1, 0, "910B3", "OK", 3400, 65536),
    )


def test_processes_and_what_they_hold() -> None:
    report = npu_smi.read(HELD_910B)
    assert report is not None
    assert report.chips[0].used_mb == 41052
    assert report.chips[0].holders == (Holder(1333928, "python3", 37709), Holder(1333930, "", 132))
    assert report.chips[1].holders == ()


def test_310p_has_memory_in_place_of_hbm_and_two_chips_on_a_card() -> None:
    report = npu_smi.read(INFO_310P)
    assert report is not None
    assert report.chips == (
        Chip(32768, 0, "310P3", "OK", 19435, 21527, (Holder(4711, "mindie", 17500),)),
        Chip(32768, 1, "310P3", "Warning", 1511, 43693),
    )


def test_a3_names_a_chip_by_card_and_number() -> None:
    report = npu_smi.read(INFO_A3)
    assert report is not None
    assert [(chip.npu, chip.number, len(chip.holders)) for chip in report.chips] == [
        (0, 0, 0),
        (0, 1, 1),
    ]


def test_what_is_no_report_is_none() -> None:
    assert npu_smi.read("dcmi module initialize failed. ret is -8005") is None
    assert npu_smi.firmware("") == ""
