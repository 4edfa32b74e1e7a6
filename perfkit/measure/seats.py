"""Where the ranks of a launcher sit: on which node, with which GPU, and whether that can be measured."""

from dataclasses import dataclass

from perfkit.measure.launchers import LaunchedRanks, write_start


@dataclass(frozen=True, kw_only=True)
class Seat:
    """Where a rank of a launcher really is, as it says itself.

    Parameters
    ----------
    rank : int
        The rank [-].
    node, host : str
        Its node, see `LaunchedRanks`.
    gpus : int or None
        GPUs that it sees; None where it measures no GPU [-].
    device, device_id : str or None
        Name of its GPU, and what no other GPU of the node has.
    """

    rank: int
    node: str
    host: str
    gpus: int | None = None
    device: str | None = None
    device_id: str | None = None


def check_seats(seats: list[Seat], launched: LaunchedRanks) -> None:
    """Check that all nodes are alike, and that every rank has a GPU of its own where GPUs are
    measured.

    Parameters
    ----------
    seats : list of Seat
        Of all ranks, in their order.
    launched : LaunchedRanks
        What the launcher said to rank 0.

    Raises
    ------
    ValueError
        For nodes with unequal ranks, ranks of a node that do not follow each other, ranks that share
        a GPU or have none, and GPUs of several kinds.
    """
    ranks_of_node: dict[str, list[Seat]] = {}
    for seat in seats:
        ranks_of_node.setdefault(seat.node, []).append(seat)
    most_gpus = max((seat.gpus or 0 for seat in seats), default=0)
    counts = [len(members) for members in ranks_of_node.values()]
    if len(set(counts)) > 1:
        told = ", ".join(f"{len(rows)} on {rows[0].host}" for rows in ranks_of_node.values())
        wanted = most_gpus or min(counts)
        raise ValueError(
            f"nodes have unequal ranks: {told}; start equally many, one for each GPU: "
            f"{write_start(launched.launcher, wanted)}"
        )
    for members in ranks_of_node.values():
        first, last = members[0], members[-1]
        if last.rank - first.rank + 1 > len(members):
            between = next(seat for seat in seats[first.rank :] if seat.node != first.node)
            raise ValueError(
                f"rank {between.rank} is on {between.host}, between ranks {first.rank} and "
                f"{last.rank} of {first.host}; ranks of a node have to follow each other: "
                "srun --distribution=block, or mpirun --rank-by slot"
            )
    if counts and counts[0] != launched.ranks_per_node:
        raise ValueError(
            f"{launched.launcher} says {launched.ranks_per_node} ranks a node, {seats[0].host} has "
            f"{counts[0]}; start {write_start(launched.launcher, counts[0])}"
        )
    if any(seat.gpus is not None for seat in seats):
        _check_gpus(seats, launched, most_gpus)


def _check_gpus(seats: list[Seat], launched: LaunchedRanks, most_gpus: int) -> None:
    """The part of `check_seats` about GPUs."""
    for seat in seats:
        if not seat.gpus:
            raise ValueError(
                f"rank {seat.rank} on {seat.host} sees no GPU; ask Slurm for them "
                "(#SBATCH --gpus-per-node=8), or look at CUDA_VISIBLE_DEVICES and nvidia-smi there"
            )
    owners: dict[tuple[str, str | None], Seat] = {}
    for seat in seats:
        owner = owners.setdefault((seat.host, seat.device_id), seat)
        if owner is not seat:
            raise ValueError(
                f"ranks {owner.rank} and {seat.rank} on {seat.host} have the same GPU, "
                f"{seat.device}, of {seat.gpus} that each sees; start as many ranks as GPUs: "
                f"{write_start(launched.launcher, most_gpus)}"
            )
    other = next((seat for seat in seats if seat.device != seats[0].device), None)
    if other is not None:
        raise ValueError(
            f"rank 0 on {seats[0].host} has {seats[0].device}, rank {other.rank} on {other.host} "
            f"{other.device}; one kind of GPU is calibrated at a time; take nodes of one kind "
            "(#SBATCH --constraint, or --nodelist)"
        )
    if launched.ranks_per_node == 1 and most_gpus > 1:
        raise ValueError(
            f"one rank is on {seats[0].host}, which has {most_gpus} GPUs; start one for each GPU: "
            f"{write_start(launched.launcher, most_gpus)}; or set CUDA_VISIBLE_DEVICES=0 to measure "
            "one GPU of every node"
        )


def take_seat(launched: LaunchedRanks, device: str) -> Seat:
    """Take the GPU of this rank, and say where it is.

    Parameters
    ----------
    launched : LaunchedRanks
        Of this rank.
    device : str
        ``cuda``, or another device, which needs no seat.

    Returns
    -------
    seat : Seat
        Where this rank is.
    """
    if device != "cuda":
        return Seat(rank=launched.rank, node=launched.node, host=launched.host)
    import torch

    gpus = torch.cuda.device_count()
    if not gpus:
        return Seat(rank=launched.rank, node=launched.node, host=launched.host, gpus=0)
    number = number_gpu(launched.local_rank, gpus)
    properties = torch.cuda.get_device_properties(number)
    return Seat(
        rank=launched.rank,
        node=launched.node,
        host=launched.host,
        gpus=gpus,
        device=properties.name,
        device_id=str(getattr(properties, "uuid", number)),
    )


def number_gpu(local_rank: int, gpus: int) -> int:
    """The GPU of a rank among those that it sees: its own where it sees one alone, as with
    ``--gpus-per-task=1``.

    Parameters
    ----------
    local_rank : int
        The rank among those of its node [-].
    gpus : int
        GPUs that it sees [-].

    Examples
    --------
    >>> number_gpu(3, 8), number_gpu(3, 1)
    (3, 0)
    """
    return local_rank % gpus
