"""How the inputs of a recommendation model reach the ranks that read them: copies to the device and
exchanges of indices, ahead of the step or inside of it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from perfkit.ground.units import show
from perfkit.models.offload import COPY_INPUTS
from perfkit.workloads.columns import OperationSizes
from perfkit.workloads.operations import Tensor
from perfkit.workloads.sizes import round_size
from perfkit.workloads.tables import INDEX_BYTES, SAMPLE_WEIGHT_BYTES, EmbeddingTable
from perfkit.workloads.tape import Tape

#: Bytes of a dense feature or of a label, which are fp32 in TorchRec [B].
_FEATURE_BYTES = 4
#: Fewest sizes that an exchange of them counts for: 512 B, where latency is all that it takes and fits
#: of messages begin [-].
_FEWEST_SIZES = 64


@dataclass(frozen=True)
class InputPipeline:
    """A loop of training steps, by what of its inputs is ready when a step begins.

    Parameters
    ----------
    name : str
        How people ask for it.
    torchrec_name : str
        TorchRec's class; empty if it has none.
    has_inputs : bool
        Whether copies and exchanges of inputs are part of the step.
    copies_ahead : int
        Batches that are copied to the device before the step that reads them [-].
    exchanges_ahead : bool
        Whether indices of the next batch are exchanged during the step.
    """

    name: str
    torchrec_name: str = ""
    has_inputs: bool = True
    copies_ahead: int = 0
    exchanges_ahead: bool = False


#: All that are known, by name.
INPUT_PIPELINES = {
    pipeline.name: pipeline
    for pipeline in (
        InputPipeline("local", has_inputs=False),
        InputPipeline("serial"),
        InputPipeline("base", "TrainPipelineBase", copies_ahead=1),
        InputPipeline(
            "sparse_dist", "TrainPipelineSparseDist", copies_ahead=2, exchanges_ahead=True
        ),
    )
}


class RefusedPipeline(NamedTuple):
    """A pipeline of TorchRec that is known and not modelled.

    Parameters
    ----------
    name, torchrec_name : str
        How people ask for it, and TorchRec's class.
    behaviour, advice : str
        What it does, and what to take in its place.
    """

    name: str
    torchrec_name: str
    behaviour: str
    advice: str


#: All of them, by name.
REFUSED = {
    pipeline.name: pipeline
    for pipeline in (
        RefusedPipeline(
            "sparse_dist_lite",
            "TrainPipelineSparseDistLite",
            "exchanges the indices of a batch at the begin of its own step",
            "take 'base', which does so, too",
        ),
        RefusedPipeline(
            "fused_sparse_dist",
            "TrainPipelineFusedSparseDist",
            "looks tables up on a stream of its own",
            "take 'sparse_dist', which looks them up in the step",
        ),
        RefusedPipeline(
            "semi_sync",
            "TrainPipelineSemiSync",
            "looks up rows before the updates of the batch ahead",
            "take 'sparse_dist', whose lookups wait for these",
        ),
        RefusedPipeline(
            "prefetch_sparse_dist",
            "PrefetchTrainPipelineSparseDist",
            "fetches rows of uvm_caching tables one batch ahead",
            "take 'sparse_dist', which fetches them in the step",
        ),
        RefusedPipeline(
            "staged",
            "StagedTrainPipeline",
            "runs stages that its user writes",
            "take 'sparse_dist' or 'base'",
        ),
    )
}


def find_pipeline(name: str) -> InputPipeline:
    """Find an input pipeline by its name.

    Parameters
    ----------
    name : str
        One of `INPUT_PIPELINES`, or the name of its class in TorchRec.

    Returns
    -------
    pipeline : InputPipeline
        Its record.

    Raises
    ------
    ValueError
        For an unknown name, and for one of `REFUSED`, which says what to take.

    Examples
    --------
    >>> find_pipeline("TrainPipelineSparseDist").name
    'sparse_dist'
    """
    if isinstance(name, str) and name:
        for pipeline in INPUT_PIPELINES.values():
            if name in (pipeline.name, pipeline.torchrec_name):
                return pipeline
        for refused in REFUSED.values():
            if name in (refused.name, refused.torchrec_name):
                raise ValueError(
                    f"pipeline is {name!r}; {refused.torchrec_name} {refused.behaviour}, which is not "
                    f"modelled; {refused.advice}"
                )
    raise ValueError(
        f"pipeline is {show(name)}; it must be one of {', '.join(map(repr, INPUT_PIPELINES))}"
    )


class SparseBytes(NamedTuple):
    """Bytes for one sample that say which rows are looked up, by tensor [B].

    Parameters
    ----------
    lengths : float
        How many lookups there are, a number for each feature of each table.
    values : float
        Their indices.
    weights : float
        Their weights, where tables have weighted lookups.
    """

    lengths: float = 0.0
    values: float = 0.0
    weights: float = 0.0

    @classmethod
    def of_tables(cls, tables: Sequence[EmbeddingTable]) -> "SparseBytes":
        """Those of tables, or of parts of tables."""
        lookups = [float(table.pooling) for table in tables]
        weighted = [float(table.pooling) for table in tables if table.weighted]
        return cls(
            float(INDEX_BYTES * sum(table.num_features for table in tables)),
            INDEX_BYTES * sum(lookups),
            SAMPLE_WEIGHT_BYTES * sum(weighted),
        )

    @property
    def total(self) -> float:
        """All of them [B]."""
        return sum(self)


class ExchangedInputs(NamedTuple):
    """What ranks read of a batch, and exchange, for one sample.

    Parameters
    ----------
    read : SparseBytes
        What the data loader of a rank reads of one of its own samples.
    sent : SparseBytes
        What it sends of that sample to all ranks: parts by columns each need all of it.
    received : SparseBytes
        What the rank with the most receives of one sample of the whole batch.
    """

    read: SparseBytes
    sent: SparseBytes
    received: SparseBytes


def size_inputs(
    tables: Sequence[EmbeddingTable], tables_of_ranks: Sequence[Sequence[EmbeddingTable]]
) -> ExchangedInputs:
    """Size the inputs of a model.

    Parameters
    ----------
    tables : sequence of EmbeddingTable
        Its tables.
    tables_of_ranks : sequence of sequence of EmbeddingTable
        What each rank looks up for the whole batch.

    Returns
    -------
    inputs : ExchangedInputs
        Bytes for one sample.

    Raises
    ------
    ValueError
        For lookups that are arrays.
    """
    for table in tables:
        if not isinstance(table.pooling, int | float):
            raise ValueError(
                f"pooling of {table.name!r} is {show(table.pooling)}; inputs of a pipeline take one "
                "number; take pipeline='local', or predict configurations one by one"
            )
    of_ranks = [SparseBytes.of_tables(of_rank) for of_rank in tables_of_ranks]
    return ExchangedInputs(
        SparseBytes.of_tables(tables),
        SparseBytes(*(sum(column) for column in zip(*of_ranks, strict=True))),
        SparseBytes(*(max(column) for column in zip(*of_ranks, strict=True))),
    )


class InputRecorder:
    """Records how the inputs of one rank arrive.

    Parameters
    ----------
    tape : Tape
        The tape.
    pipeline : InputPipeline
        How they do.
    inputs : ExchangedInputs
        Bytes for one sample.
    batch, ranks : int
        Samples of all ranks, which may be symbolic, and ranks [-].
    features : int
        Dense features of a sample [-].
    on_device : bool
        Whether ranks are devices, to which inputs are copied.
    copy_group, exchange_group : int
        Numbers of the groups of all ranks that copies and exchanges are launched in: each has a stream
        of its own [-].

    Notes
    -----
    A step of TorchRec's ``TrainPipelineSparseDist`` waits for the exchanges of its own batch, starts
    those of the next one and the copy of the batch after that, and runs forward and backward passes
    [1]_. Sizes are exchanged before the pooled rows of this step and the tensors behind these, as all
    of them share a communicator. ``TrainPipelineBase`` copies the next batch alone; indices are
    exchanged in the forward pass, whose host waits for their sizes. Its host starts the copy once it
    has launched the backward pass, ahead of the device: here that is behind the lookups.

    What is exchanged is permuted into the order of ranks ahead of that, and of tables behind it:
    copies of the compute stream here, of a stream beside it there. The host of ``sparse_dist`` waits for
    sizes that have long arrived, which is left out.

    References
    ----------
    .. [1] pytorch/torchrec, torchrec/distributed/train_pipeline/train_pipelines.py, ``progress``, and
       torchrec/distributed/dist_data.py, ``KJTAllToAll``
    """

    def __init__(
        self,
        tape: Tape,
        pipeline: InputPipeline,
        inputs: ExchangedInputs,
        *,
        batch: Any,
        ranks: int,
        features: Any,
        on_device: bool,
        copy_group: int,
        exchange_group: int,
    ) -> None:
        self.tape, self.pipeline, self.inputs = tape, pipeline, inputs
        self.batch, self.ranks, self.features = batch, ranks, features
        self.own_samples = batch // ranks
        self.on_device = on_device
        self.copy_group, self.exchange_group = copy_group, exchange_group
        # batches that are held: each is read where it stays for the next step
        self.raw: list[Tensor] = []
        self.exchanges = ranks > 1 and inputs.sent.total > 0

    def begin(self) -> None:
        """Record what is done before tables are looked up."""
        if not self.pipeline.has_inputs:
            return
        tape = self.tape
        before, tape.module = tape.module, "inputs"
        self._make_batches()
        if self.on_device and not self.pipeline.copies_ahead:
            tape.wait_for(self._copy())
        self.first = len(tape.operations)
        if self.on_device and self.pipeline.exchanges_ahead:
            self._copy_ahead()
        if self.exchanges and self.pipeline.exchanges_ahead:
            self._unpack()
            self._pack()
            self._exchange_sizes()
        elif self.exchanges:
            self._pack()
            tape.wait_for(self._exchange_sizes())
            if self.on_device:  # which the host reads
                sizes = OperationSizes(elements=self.ranks)
                tape.emit("to", "transfer", [self.sizes], [], sizes, variant="to_host")
            for launched in self._exchange_tensors():
                tape.wait_for(launched)
            self._unpack()
        tape.module = before

    def continue_beside(self) -> None:
        """Record what is launched once tables are looked up and their pooled rows are on their way."""
        if not self.pipeline.copies_ahead:
            return
        tape = self.tape
        before, tape.module = tape.module, "inputs"
        if self.on_device and not self.pipeline.exchanges_ahead:
            self._copy_ahead()
        if self.exchanges and self.pipeline.exchanges_ahead:
            for launched in self._exchange_tensors():
                tape.wait_for_previous(self.first, launched)
        tape.module = before

    def _copy_ahead(self) -> None:
        """Copy a batch to the device for which the next step waits."""
        self.tape.wait_for_previous(self.first, self._copy())

    def _make_batches(self) -> None:
        """Make the tensors of all batches that are on the device at once."""
        for _ in range(1 + self.pipeline.copies_ahead):
            self.raw.append(self._make_tensor(self.own_samples, self.inputs.read.total))

    def _make_tensor(self, samples: Any, nbytes: float) -> Tensor:
        """Make a tensor of so many bytes for each sample [B]."""
        return self.tape.tensor(round_size(samples * (nbytes / INDEX_BYTES)), itemsize=INDEX_BYTES)

    def _copy(self) -> int:
        """Copy a batch to the device; its dense features and labels, too."""
        dense = _FEATURE_BYTES * (self.features + 1)
        nbytes = self.own_samples * (self.inputs.read.total + dense)
        return self.tape.collective(
            COPY_INPUTS, self.raw, [self.raw[-1]], nbytes=nbytes, group=self.copy_group
        )

    def _pack(self) -> None:
        """Permute the indices of a batch into the order of the ranks that get them."""
        raw = self.raw[min(1, len(self.raw) - 1)]
        self.packed = self._make_tensor(self.own_samples, self.inputs.sent.total)
        self._permute(raw, self.packed)

    def _unpack(self) -> None:
        """Permute received indices into the order of tables."""
        received = self._make_tensor(self.batch, self.inputs.received.total)
        self._permute(received, self.tape.like(received))

    def _permute(self, source: Tensor, result: Tensor) -> None:
        """Copy tensors of a jagged tensor in another order."""
        self.tape.copy("permute_2D_sparse_data", [source], [result], "clone")

    def _list_exchanged(self) -> list[float]:
        """Bytes of each tensor that is exchanged, of the rank with the most, for a sample of the batch:
        what it receives, or what all send on average."""
        exchanged = []
        for sent, received in zip(self.inputs.sent, self.inputs.received, strict=True):
            if sent > 0:
                exchanged.append(max(sent / self.ranks, received))
        return exchanged

    def _exchange_sizes(self) -> int:
        """Tell all ranks how many numbers they get of each tensor."""
        numbers = self.ranks * len(self._list_exchanged())
        self.sizes = self.tape.tensor(max(numbers, _FEWEST_SIZES), itemsize=INDEX_BYTES)
        return self.tape.collective(
            "all_to_all", [], [self.sizes], nbytes=self.sizes.nbytes, group=self.exchange_group
        )

    def _exchange_tensors(self) -> list[int]:
        """Exchange each tensor."""
        launched = []
        for of_sample in self._list_exchanged():
            received = self._make_tensor(self.batch, of_sample)
            # what is there for the next step is read, so that it is held
            held = [self.packed]
            if self.pipeline.exchanges_ahead:
                held.append(received)
            launched.append(
                self.tape.collective(
                    "all_to_all",
                    held,
                    [received],
                    nbytes=received.nbytes,
                    group=self.exchange_group,
                )
            )
        return launched
