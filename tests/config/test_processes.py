"""Environment variables of the processes of a run; invalid ones are refused by name."""

from __future__ import annotations

import pytest

from padfree.config.processes import Processes, processes_of
from tests.refused import refused

WHOLE = {
    "RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
}


def test_what_torchrun_sets() -> None:
    found = processes_of(WHOLE)
    assert found == Processes(rank=1, world=4, local_rank=1, local_world=2, address="localhost:29500")
    assert processes_of({}) == Processes()
    assert processes_of({"WORLD_SIZE": "8"}, meet=False).world == 8
    assert processes_of({"WORLD_SIZE": "8"}, meet=False).local_world == 8


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("value", ["abc", "", " ", "1.0", "-1", "99999999999999999999", "１x", "0x1", "inf", "1e3"])
def test_numbers_that_cannot_be(name: str, value: str) -> None:
    with refused(name):
        processes_of({**WHOLE, name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE: 0; give 1 or more processes"),
        ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: 0; give 1 or more"),
        ({"LOCAL_WORLD_SIZE": "5"}, "LOCAL_WORLD_SIZE: 5 is more than WORLD_SIZE 4"),
        ({"RANK": "4"}, "RANK: 4 is out of range for WORLD_SIZE 4; give 0 to 3"),
        ({"LOCAL_RANK": "2"}, "LOCAL_RANK: 2 is out of range for LOCAL_WORLD_SIZE 2"),
        ({"MASTER_PORT": "0"}, "MASTER_PORT: 0; give a port"),
        ({"MASTER_PORT": "65536"}, "MASTER_PORT: 65536; give a port"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR: missing, although WORLD_SIZE is 4"),
    ],
)
def test_numbers_that_do_not_go_together(changes: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        processes_of({**WHOLE, **changes})


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_what_is_missing(name: str) -> None:
    with refused(name):
        processes_of({key: value for key, value in WHOLE.items() if key != name})
