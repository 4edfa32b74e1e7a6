"""An error about too many ranks names a platform that has them, and that can be asked for."""

import re

import pytest

import perfkit as pk
from perfkit.platform.datasheets import list_datasheets
from perfkit.platform.nodes import advise_nodes

NAMES = [*pk.platforms()["name"], *list_datasheets(), "mi300x-8", "h100-sxm-8x4"]


@pytest.mark.parametrize("name", NAMES)
def test_the_advice_can_be_followed(name: str) -> None:
    platform = pk.load_platform(name)
    for ranks in (platform.network.ranks + 1, 5 * platform.network.ranks + 3):
        advice = advise_nodes(platform, ranks)
        assert advice.startswith(f"take at most {platform.network.ranks}")
        for named in re.findall(r"platform (\S+)", advice):
            assert pk.load_platform(named).network.ranks >= ranks
        for nodes in re.findall(r"with_nodes\((\d+)\)", advice):
            assert platform.with_nodes(int(nodes)).network.ranks >= ranks
            assert platform.with_nodes(int(nodes) - 1).network.ranks < ranks


def test_predictions_and_collectives_give_the_same_advice() -> None:
    said = r"or 2 nodes: with_nodes\(2\), --platform h100-sxm-8x2$"
    with pytest.raises(ValueError, match=said):
        pk.predict(pk.Transformer.bert(batch=12), "h100-sxm-8", ranks=12)
    with pytest.raises(ValueError, match=said):
        pk.load_platform("h100-sxm-8").collective("all_reduce", 1e6, ranks=12)
    with pytest.raises(ValueError, match=r"or a node of 4: the platform rtx-4090-4$"):
        pk.predict(pk.Transformer.bert(batch=4), "rtx-4090", ranks=4)
