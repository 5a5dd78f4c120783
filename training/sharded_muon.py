"""Muon where each process holds some rows of every matrix.

Shapes: n matrices of one shape, P processes, R rows of a matrix and r of them here, C columns.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from tercet.training.optimizers import Muon, orthogonalize


class ShardedMuon(Muon):
    """Muon on `DTensor`s sharded by rows: the same numbers as on whole matrices, to floating-point noise.

    An orthogonal update needs the whole matrix. The matrices of one shape are dealt out among the processes: each
    gathers its own n / P whole ones, orthogonalises them, and sends everyone their rows back. Nobody holds more than
    its share of whole matrices, and no work is done twice. Momentum stays sharded.
    """

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        return cast(DTensor, tensor).to_local()

    def _orthogonalized(self, directions: list[torch.Tensor], parameters: list[torch.Tensor]) -> list[torch.Tensor]:
        shards = [cast(DTensor, parameter) for parameter in parameters]
        assert all(shard.placements == (Shard(0),) for shard in shards), "ShardedMuon takes matrices sharded by rows"
        return orthogonalize_shards(directions, shards[0].shape[0], shards[0].device_mesh.get_group())


def orthogonalize_shards(parts: Sequence[torch.Tensor], num_rows: int, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """As `orthogonalize`, of matrices whose rows are spread over processes, which all call this.

    Args:
        parts: This process's rows of each matrix, n times (r, C).
        num_rows: R.
        group: The processes that share the matrices.

    Returns:
        This process's rows of each orthogonalised matrix, n times (r, C).
    """
    rank, num_processes = dist.get_rank(group), dist.get_world_size(group)
    num_columns = parts[0].shape[1]
    rows = rows_by_process(num_rows, num_processes)
    assert parts[0].shape[0] == rows[rank], f"{parts[0].shape[0]} rows here and {rows[rank]} expected"
    least, more = divmod(len(parts), num_processes)
    matrices = [least + (process < more) for process in range(num_processes)]
    mine = matrices[rank]
    sent = [count * rows[rank] * num_columns for count in matrices]
    received = [mine * count * num_columns for count in rows]

    # One behind the other, the matrices of process 0 first.
    outgoing = torch.cat([part.reshape(-1) for part in parts])
    incoming = outgoing.new_empty(sum(received))
    dist.all_to_all_single(incoming, outgoing, received, sent, group=group)
    if mine:
        blocks = [
            block.view(mine, count, num_columns) for block, count in zip(incoming.split(received), rows, strict=True)
        ]
        updates = orthogonalize(torch.cat(blocks, dim=1))  # (mine, R, C)
        incoming = torch.cat([block.reshape(-1) for block in updates.split(rows, dim=1)])
    dist.all_to_all_single(outgoing, incoming, sent, received, group=group)
    return list(outgoing.view(len(parts), rows[rank], num_columns).unbind(0))


def rows_by_process(num_rows: int, num_processes: int) -> list[int]:
    """How many rows each process holds: equal parts rounded up, so that the last ones may hold fewer, or none."""
    most = -(-num_rows // num_processes)
    return [max(0, min(most, num_rows - process * most)) for process in range(num_processes)]
