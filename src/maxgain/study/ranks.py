"""Several processes that train one network together: ``torchrun --nproc-per-node 4 -m maxgain train ...``.

Every rank takes its share of every batch, and what is random is drawn for the whole batch on all of them. So each rank
has the weights, the random numbers and the scores that one process alone would have, but for the order in which sums
are rounded. Rank 0 alone evaluates, writes and speaks.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.rendezvous import rendezvous
from torch.overrides import TorchFunctionMode

from maxgain.errors import MaxGainError, RecipeError, RunError

from .wording import clause

if TYPE_CHECKING:
    from .training import Training

Value = TypeVar("Value")

PATIENCE = timedelta(hours=1)
"""How long a rank waits for the others, of which rank 0 evaluates in between. A rank that dies is noticed at once."""


@dataclass(frozen=True)
class Ranks:
    """Which of how many processes this is: the only one, unless torchrun started several.

    A process alone has a count of 1, and there is nothing that it has to ask or tell here.
    """

    rank: int = 0
    count: int = 1
    is_restarted: bool = False
    """Whether torchrun has started the ranks again, after one of them had died."""

    @classmethod
    def started(cls) -> Ranks:
        """As torchrun started this process."""
        if not dist.is_available() or not dist.is_torchelastic_launched():
            return cls()
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return cls(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), restarts > 0)

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that evaluates, writes and speaks."""
        return self.rank == 0

    def own(self, device: torch.device) -> torch.device:
        """The device of this rank: of several GPUs in a machine each rank there has one."""
        if device.type != "cuda":
            return device
        here, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if here >= there:
            raise RunError(f"there are {there} GPUs here, one per rank: use --nproc-per-node {there}, or --device cpu.")
        return torch.device("cuda", here)

    @contextmanager
    def joined(self, device: Callable[[], torch.device]) -> Iterator[None]:
        """Within this context the ranks can exchange what lies on their devices; one that is lost ends them all."""
        own = self.own(device())
        if own.type == "cuda":
            torch.cuda.set_device(own)
        try:
            backend = "cuda:nccl,cpu:gloo" if own.type == "cuda" else "gloo"
            dist.init_process_group(
                backend, store=self._meeting(), rank=self.rank, world_size=self.count, timeout=PATIENCE
            )
            yield
        except RuntimeError as error:
            if not _is_loss(error):
                raise
            raise RunError(
                f"rank {self.rank} lost the others, so all end here; what was saved is kept, and --resume goes on."
            ) from error
        dist.destroy_process_group()

    def ready(self, prepare: Callable[[], Value]) -> Value:
        """What ``prepare`` returns. Where it fails on one rank it fails on all of them, in that rank's words."""
        made: list[Value] = []
        error: MaxGainError | None = None
        try:
            made.append(prepare())
        except MaxGainError as caught:
            error = caught
        told = self._gathered(None if error is None else str(error))
        if not any(told):
            return made[0]
        self._let_the_first_speak()
        if error is not None and len(set(told)) == 1:  # the same everywhere, so where it happened says nothing
            raise error
        rank = next(rank for rank, sentence in enumerate(told) if sentence is not None)
        raise RunError(f"rank {rank} cannot begin: {clause(told[rank])}.")

    def first_says(self, say: Callable[[], Value]) -> Value:
        """What rank 0 says, on every rank; what it refuses is refused by all."""
        said = [self.ready(say if self.is_first else lambda: None)]
        dist.broadcast_object_list(said, src=0)
        return cast("Value", said[0])

    def share_state(self, training: Training) -> None:
        """Puts every rank where rank 0 is."""
        state = {name: tensor.cpu() for name, tensor in training.state().items()} if self.is_first else {}
        threads, state = self.first_says(lambda: (torch.get_num_threads(), state))
        torch.set_num_threads(threads)
        training.load_state(state)

    def expect_same(self, what: str, value: str) -> None:
        """Refuses ranks that differ in something."""
        for rank, other in enumerate(values := self._gathered(value)):
            if other != values[0]:
                self._let_the_first_speak()
                raise RunError(f"rank {rank} has other {what} than rank 0: give all of them the same.")

    def _meeting(self) -> Any:
        """A store in which nothing lies that ranks of an earlier start have left, such as addresses of dead processes.

        torchrun keeps one store for all starts. Rank 0 names a new part of it, and answers each rank's own question
        with that name, so that no rank can take an old name for the new one.
        """
        store, _, _ = next(iter(rendezvous("env://", timeout=PATIENCE)))
        own = secrets.token_hex(8)
        if not self.is_first:
            store.set(f"maxgain/{self.rank}", own)
            name = store.get(f"maxgain/answer/{own}").decode()
            store.set(f"maxgain/{name}/{self.rank}", "")
            return dist.PrefixStore(name, store)  # type: ignore[attr-defined]
        others = range(1, self.count)
        while missing := [rank for rank in others if not store.check([f"maxgain/{own}/{rank}"])]:
            for rank in missing:
                if store.check([f"maxgain/{rank}"]):
                    store.set(f"maxgain/answer/{store.get(f'maxgain/{rank}').decode()}", own)
            time.sleep(0.02)
        return dist.PrefixStore(own, store)  # type: ignore[attr-defined]

    def _let_the_first_speak(self) -> None:
        """Keeps the other ranks until rank 0 has ended: torchrun ends all of them as soon as one has failed."""
        if not self.is_first:
            with suppress(RuntimeError):
                dist.all_reduce(torch.zeros(1))

    def _gathered(self, value: Value) -> list[Value]:
        """What every rank has."""
        values: list[Any] = [None] * self.count
        dist.all_gather_object(values, value)
        return values

    def share_of(self, batch_size: int) -> slice:
        """The images of a batch that are this rank's."""
        if batch_size < self.count:
            raise RecipeError(
                f"{self.count} ranks cannot share a batch of {batch_size}: start fewer, or use a larger --batch-size."
            )
        return slice(batch_size * self.rank // self.count, batch_size * (self.rank + 1) // self.count)

    def as_whole(self, batch_size: int) -> AbstractContextManager[Any]:
        """Within this context a forward pass of the rank's share gives what it would give within the whole batch."""
        return _AsWhole(batch_size, self.share_of(batch_size))

    def part_of(self, mean: Tensor, batch_size: int) -> Tensor:
        """What a mean over this rank's share, or a number that all ranks have, adds to that of the whole batch."""
        images = range(batch_size)[self.share_of(batch_size)]
        return mean * (len(images) / batch_size)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Puts the sum over all ranks into each of the tensors, in one exchange, of the first one's type."""
        packed = torch.cat([tensor.reshape(-1).to(tensors[0].dtype) for tensor in tensors])
        dist.all_reduce(packed)
        parts = torch.split(packed, [tensor.numel() for tensor in tensors])
        torch._foreach_copy_(list(tensors), [part.view_as(one) for part, one in zip(parts, tensors, strict=True)])


ALONE = Ranks()
HERE = Ranks.started()
"""This process, as one of those that torchrun started; alone without it."""


def _is_loss(error: RuntimeError) -> bool:
    """Whether an exchange failed because somebody is no longer there."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class _AsWhole(TorchFunctionMode):
    """Does for a share of a batch what cannot be done image by image: noise, and the statistics of batch norm.

    Noise is drawn for the whole batch, as a process alone would, of which this rank keeps its share. The mean and the
    variance of batch norm are those of all ranks' images; torch's ``SyncBatchNorm`` is for GPUs alone, and another type
    of layer.
    """

    def __init__(self, batch_size: int, share: slice) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.share = share

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is F.batch_norm:
            return self._batch_norm(*args, **kwargs)
        if function is F.dropout:
            return self._dropout(*args, **kwargs)
        if function in (torch.rand_like, torch.randn_like):
            return function(self._whole(args[0]), *args[1:], **kwargs)[self.share]
        return function(*args, **kwargs)

    def _whole(self, x: Tensor) -> Tensor:
        """A tensor like x, laid out in memory as x is, with a row for every image of the batch."""
        return torch.empty_strided((self.batch_size, *x.shape[1:]), x.stride(), dtype=x.dtype, device=x.device)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002
        if not training:
            return input
        return input * F.dropout(torch.ones_like(self._whole(input)), p)[self.share]

    def _batch_norm(
        self,
        input: Tensor,  # noqa: A002 - torch calls it so, and names it
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        if not training:
            return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
        x = input.to(torch.promote_types(input.dtype, torch.float32))
        instances = self.batch_size * x[0, 0].numel()
        mean, variance = self._moments(x, instances)
        with torch.no_grad():
            if running_mean is not None and running_var is not None:
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_((variance * (instances / (instances - 1))).to(running_var.dtype), momentum)
        by_channel = (1, -1, *(1 for _ in x.shape[2:]))
        scale = weight * (variance + eps).rsqrt().to(x.dtype)
        return ((x - mean.to(x.dtype).view(by_channel)) * scale.view(by_channel) + bias.view(by_channel)).to(
            input.dtype
        )

    def _moments(self, x: Tensor, instances: int) -> tuple[Tensor, Tensor]:
        """Mean and variance of every channel over all ranks, added up in double precision as squares cancel."""
        over = [dim for dim in range(x.dim()) if dim != 1]
        variance, mean = (moment.double() for moment in torch.var_mean(x, over, correction=0))
        of_share = x.numel() // x.shape[1] / instances
        moments = torch.stack([mean, variance + mean.square()]) * of_share
        mean, square = _SumOverRanks.apply(moments)  # type: ignore[no-untyped-call]
        return mean, square - mean.square()


class _SumOverRanks(torch.autograd.Function):
    """The sum of all ranks' tensors. So is its gradient, as every rank's loss depends on every rank's tensor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        total = tensor.contiguous().clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _SumOverRanks.apply(gradient)  # type: ignore[no-untyped-call]
