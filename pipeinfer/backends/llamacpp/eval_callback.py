"""llama.cpp's eval callback (`cb_eval`), by which all is done that is done inside of a graph.

It copies the shard's hidden rows out, stops a decode at a layer boundary, passes the partial
results of a wide stage to the all-reduce, computes the routers of mixtures row by row, and puts
hidden rows in where a graph takes tokens only.

llama.cpp calls it for every node of a graph, thousands of times per token on a deep model. Where
`layer_filter.c` was compiled, it handles the calls for tensors that are not a layer's output;
otherwise Python does, at 1 to 2 us each. Identifies tensors by their names in llama.cpp's graphs
(`l_out-<layer>`); independent of rows and caches.

Routers: a mixture's router is a product of float32 matrices. For one row llama.cpp uses another
kernel than for several, which sums in another order. So where few rows are decoded together, each
row's product is computed once more, by the function for single rows, and a row's experts do not
depend on other rows of the batch.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from enum import IntEnum
from functools import cache
from typing import Any, Protocol

import numpy as np

from pipeinfer.core.types import FloatArray
from pipeinfer.errors import BackendError, ModelError
from pipeinfer.llama import binding
from pipeinfer.llama.short_runs import KERNELS
from pipeinfer.loading import c_part
from pipeinfer.models import slice_parts
from pipeinfer.models.architectures import declared
from pipeinfer.models.gguf import ModelFile

_NOTHING, _LAST, _SOME, _ENDED = range(4)
#: how often a decode is cut to check whether to stop: after each cut the threads have to start
#: again, which takes about a tenth of a millisecond
_CUTS = 8


_FEED_FORWARD = b".ffn_down.weight"
_SUMMED = (b".attn_output.weight", b".ssm_out.weight", _FEED_FORWARD)
#: before the layer's number, of the node that adds up its experts; a head's has "mtp_" before
_EXPERTS = b"ffn_moe_out-"


class ExpertSum(IntEnum):
    """Which node of a mixture's graph is a slice's partial result of the feed forward."""

    NONE = 0  #: the model has no experts
    ALONE = 1  #: the sum over the experts
    SHARED = 2  #: what is made of that first: the sum with the shared expert


class PartSum(Protocol):
    """The all-reduce of one slice's partial results with those of the other slices of its stage."""

    @property
    def address(self) -> int | None:
        """The address of struct sums, where sums.c computes the sums; None: `add` does."""

    def add(self, part: FloatArray, place: int) -> bool:
        """Replace `part`, float32[n], by the sum; return False where the decode has to be left.

        place: number of the sum in the model (`place_of`)
        """


class Filter(ctypes.Structure):
    """The state of `layer_filter.c`: struct filter."""

    _fields_ = (("name_of", ctypes.c_void_p), ("reached", ctypes.c_void_p),
                ("last", ctypes.c_char_p), ("wants", ctypes.c_int),
                ("stride", ctypes.c_int), ("sliced", ctypes.c_int), ("first", ctypes.c_int),
                ("source", ctypes.c_size_t), ("data_of", ctypes.c_void_p),
                ("bytes_of", ctypes.c_void_p), ("sums", ctypes.c_void_p),
                ("entry", ctypes.c_char_p), ("enters", ctypes.c_int),
                ("row_by_row", ctypes.c_int), ("elements_of", ctypes.c_void_p),
                ("rows_of", ctypes.c_void_p), ("dot", ctypes.c_void_p),
                ("experts", ctypes.c_int), ("routers", ctypes.c_void_p),
                ("weights", ctypes.c_char_p), ("n_experts", ctypes.c_int),
                ("n_drawn", ctypes.c_int), ("first_expert", ctypes.c_int),
                ("n_own", ctypes.c_int), ("input", ctypes.c_void_p), ("drawn", ctypes.c_void_p),
                ("again", ctypes.c_char_p))


class EvalCallback:
    """One context's callback; `arm` it before a decode and read the outcome afterwards.

    last_layer: number of the file's last layer, from 0
    first_layer: number of the file's first layer in the model
    entry: name of the tensor that the first layer reads, for rows that are put in there
    output: name of the last layer's output, with "%d" for its number
    function, data: for llama.cpp
    hidden_done: whether the rows were copied
    entered: whether the given rows were put in
    stopped: whether `should_stop` returned True, or a sum returned False
    error: the exception raised meanwhile

    llama.cpp calls it twice per tensor: with `ask`, whether the tensor is wanted (the graph is cut
    there), and, when wanted, once it is computed; the result False then ends the graph.
    """

    def __init__(self, last_layer: int, first_layer: int = 0, entry: str = "",
                 output: str = "l_out-%d") -> None:
        self.last_name = output.replace("%d", str(last_layer)).encode()
        self.should_stop: Callable[[], bool] | None = None
        self.hidden: FloatArray | None = None
        self.hidden_done = self.stopped = self.entered = False
        self.error: BaseException | None = None
        kind = binding.ggml_backend_sched_eval_callback
        self._own = kind(self._call)
        self._filter = Filter(_address(binding.ggml_get_name), _address(self._own),
                              self.last_name, _NOTHING, max(1, (last_layer + 1) // _CUTS))
        self._filter.first, self._filter.entry = first_layer, entry.encode()
        self._given: FloatArray | None = None
        self._embedding: FloatArray | None = None
        self._entry_tensor = 0
        self._sums: PartSum | None = None
        self._on_device = False
        self.routers: Routers | None = None  #: of a slice with some of the experts
        self.chooses_experts = False  #: whether it computes the routers of mixtures
        function = compiled_filter()
        if function is None:
            self.function, self.data = self._own, None
        else:
            self.function, self.data = kind(_address(function)), ctypes.addressof(self._filter)

    def sum_with(self, sums: PartSum | None, *, on_device: bool = False) -> None:
        """Sum the partial results of a slice from now on; None: use each partial result as the sum.

        on_device: whether some are in a device's memory, which only ggml's functions read
        Raises BackendError where tensors' sources cannot be found.
        """
        self._sums, self._on_device, own = sums, on_device, self._filter
        own.sliced = sums is not None
        if sums is not None:
            self._look_inside()
            own.sums = None if on_device or compiled_filter() is None else sums.address

    def enter_again(self, behind: str) -> None:
        """Put the embeddings of tokens in, too, once the node `behind` is done: later nodes read
        them where the first layer has read its rows."""
        self._filter.again = behind.encode()

    @contextlib.contextmanager
    def at_norm(self) -> Iterator[None]:
        """Copy the output of the norm before the head, of rows whose results are wanted, in place
        of the last layer's."""
        before = self.last_name
        self.last_name = self._filter.last = b"result_norm"
        try:
            yield
        finally:
            self.last_name = self._filter.last = before

    def sum_experts_at(self, node: ExpertSum) -> None:
        """Take this node for a slice's partial result, where layers have experts."""
        self._filter.experts = node

    def choose_experts_row_by_row(self) -> None:
        """Compute the routers' products of few rows as those of single rows from now on: see
        `by_rows`.

        Raises BackendError where tensors' sources cannot be found.
        """
        self._look_inside()
        own = self._filter
        own.elements_of = _address(binding.ggml_nelements)
        own.rows_of = _address(binding.ggml_nrows)
        own.dot = _address(single_row_dot())
        self.chooses_experts = True

    def select_among(self, routers: Routers) -> None:
        """Select the experts of each row among those of all slices from now on, and compute those
        of this slice, which has whole ones.

        Raises BackendError without the C part.
        """
        if compiled_filter() is None:
            raise BackendError("slices with whole experts need the C part, which was not compiled "
                               "here: install a C compiler, then pipeinfer again, or use fewer "
                               "slices")
        self.choose_experts_row_by_row()
        own, self.routers = self._filter, routers
        own.routers, own.weights = routers.address, routers.weights
        own.n_experts, own.n_drawn = routers.count, routers.drawn
        own.first_expert, own.n_own = routers.own

    def _look_inside(self) -> None:
        own = self._filter
        own.source = source_offset()
        own.data_of, own.bytes_of = _address(binding.ggml_get_data), _address(binding.ggml_nbytes)

    @property
    def ended(self) -> bool:
        """Whether the decode ended early."""
        return bool(self._filter.wants == _ENDED)

    def arm(self, should_stop: Callable[[], bool] | None, hidden: FloatArray | None,
            given: FloatArray | None = None, rows: int = 0,
            embedding: FloatArray | None = None) -> None:
        """Prepare for one decode of `rows` rows.

        should_stop: is called at some layer boundaries; None: no stop
        hidden: float32[n, n_embd] to fill; None: norm and head run
        given: float32[n, n_embd] to put in at the entry
        embedding: float32[n, n_embd], the embeddings of tokens: to put in behind the node of
            `enter_again`, or without given rows to fill
        """
        self.should_stop, self.hidden, self._given = should_stop, hidden, given
        self._embedding = embedding
        self._filter.enters = given is not None or embedding is not None
        self._filter.row_by_row = self.routers is None and self.chooses_experts \
            and 1 < rows <= MOST_ROWS
        self.hidden_done = self.stopped = self.entered = False
        self.error = None
        self._filter.wants = _SOME if should_stop is not None else \
            _NOTHING if hidden is None else _LAST

    def _call(self, tensor: int, ask: bool, _data: int | None) -> bool:
        """The callback. With the compiled filter it is called only for computed tensors that are
        wanted.
        """
        try:
            if self._filter.wants == _ENDED:
                # With offloaded layers the graph has several splits, and False ends only one:
                # ask for the first tensor of the next, and end that one, too.
                return ask
            if self._sums is not None and (place := self._place_of(tensor)) >= 0:
                return ask or self._sum(self._sums, tensor, place)
            if self._filter.row_by_row and is_router(tensor, self._filter.source):
                if not ask:
                    by_rows(tensor, self._filter.source)
                return True
            if self.routers is not None and not ask and binding.ggml_get_name(tensor).startswith(
                    self.routers.weights):
                raise BackendError(UNKNOWN)  # the C part could not do it
            if self._filter.enters and (found := binding.ggml_get_name(tensor)) in (
                    self._filter.entry, self._filter.again):
                return ask or self._enter(tensor, again=found != self._filter.entry)
            if self._filter.wants == _NOTHING:
                return False
            name = binding.ggml_get_name(tensor)
            if ask:
                return name == self.last_name or (
                    self.should_stop is not None and name.startswith(b"l_out-")
                    and (int(name[6:].split()[0]) + 1) % self._filter.stride == 0)
            if name == self.last_name and self.hidden is not None:
                n_bytes = binding.ggml_nbytes(tensor)
                if n_bytes != self.hidden.nbytes:
                    raise BackendError(
                        f"{name.decode()} has {n_bytes} bytes, {self.hidden.nbytes} expected"
                    )
                binding.ggml_backend_tensor_get(tensor, self.hidden.ctypes.data, 0, n_bytes)
                self.hidden_done = True
                return self._end()  # norm and head of a shard that is not the last never run
            if self.should_stop is not None and self.should_stop():
                self.stopped = True
                return self._end()
        except BaseException as error:  # an exception cannot cross C: re-raised after the decode
            self.error = error
            return self._end()
        return True

    def _enter(self, tensor: int, *, again: bool) -> bool:
        """Put rows in at the entry, or take the embeddings from there."""
        if again:
            return self._given is None or self._embedding is None or self._put_in(
                self._entry_tensor, self._embedding)
        self._entry_tensor = tensor
        if self._given is not None:
            return self._put_in(tensor, self._given)
        assert self._embedding is not None
        binding.ggml_backend_tensor_get(
            tensor, self._embedding.ctypes.data, 0, self._embedding.nbytes)
        return True

    def _put_in(self, tensor: int, given: FloatArray) -> bool:
        """Overwrite the graph's embedding of placeholder tokens with these rows."""
        if binding.ggml_nbytes(tensor) != given.nbytes:
            raise BackendError(f"the graph's input has {binding.ggml_nbytes(tensor)} bytes, "
                               f"{given.nbytes} expected")
        binding.ggml_backend_tensor_set(tensor, given.ctypes.data, 0, given.nbytes)
        self.entered = True
        return True

    def _place_of(self, tensor: int) -> int:
        """The number of the sum that a tensor is a partial result of; -1 for none."""
        own = self._filter
        name = weight_of(tensor, own.source)
        if name.endswith(_SUMMED):
            layer = own.first + int(name.split(b".", 2)[1])
            return place_of(layer, feed_forward=name.endswith(_FEED_FORWARD))
        if own.experts == ExpertSum.NONE:
            return -1
        named = source_of(tensor, own.source, 0) if own.experts == ExpertSum.SHARED else tensor
        name = binding.ggml_get_name(named).removeprefix(b"mtp_") if named else b""
        if not name.startswith(_EXPERTS):
            return -1
        return place_of(own.first + int(name[len(_EXPERTS):].split()[0]), feed_forward=True)

    def _sum(self, sums: PartSum, tensor: int, place: int) -> bool:
        count = binding.ggml_nbytes(tensor) // 4
        if self._on_device:
            part = np.empty(count, np.float32)
            binding.ggml_backend_tensor_get(tensor, part.ctypes.data, 0, part.nbytes)
        else:
            data = (ctypes.c_float * count).from_address(binding.ggml_get_data(tensor))
            part = np.frombuffer(data, np.float32)
        if sums.add(part, place):
            if self._on_device:
                binding.ggml_backend_tensor_set(tensor, part.ctypes.data, 0, part.nbytes)
            return True
        self.stopped = True
        return self._end()

    def _end(self) -> bool:
        self._filter.wants = _ENDED
        return False


def place_of(layer: int, *, feed_forward: bool) -> int:
    """Return the number of a sum in the model: attention's and the feed forward's of each layer."""
    return 2 * layer + feed_forward


def compiled_filter() -> Any | None:
    """Return the function of `layer_filter.c`; None where it is not compiled or not loadable."""
    library = compiled()
    return None if library is None else library.pipeinfer_layer_filter


@cache
def compiled() -> Any | None:
    """Return the library of the C part; None where it was not compiled or cannot be loaded."""
    path = c_part("_layer_filter", KERNELS)
    if path is None:
        return None
    try:
        library = ctypes.CDLL(path)
        library.pipeinfer_sums_bytes.restype = ctypes.c_size_t
        _ = library.pipeinfer_sums_widen  # the newest of its functions
        library.pipeinfer_filter_bytes.restype = ctypes.c_size_t
        if library.pipeinfer_filter_bytes() != ctypes.sizeof(Filter):
            return None
    except (OSError, AttributeError):
        return None
    return library


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def source_offset() -> int:
    """Return the offset of the first source's address in a tensor, in bytes.

    Found by searching the memory of a product of two tensors, as no function returns it. Raises
    BackendError for an unknown layout.
    """
    room = 4 * binding.ggml_tensor_overhead() + 4096
    # zeroed: the search reads a little beyond the tensor, where old memory may have the addresses
    memory = ctypes.create_string_buffer(room)
    context = binding.ggml_init(binding.ggml_init_params(room, ctypes.addressof(memory), True))
    try:
        first, second = (binding.ggml_new_tensor_2d(context, 0, 8, 8) for _ in range(2))
        product = binding.ggml_mul_mat(context, first, second)
        words = binding.ggml_tensor_overhead() // 8
        values = list((ctypes.c_uint64 * words).from_address(product))
    finally:
        binding.ggml_free(context)
    found = [8 * i for i, value in enumerate(values) if value == first]
    if len(found) != 1 or values.count(second) != 1 or values.index(second) != found[0] // 8 + 1:
        raise BackendError("tensors of this llama.cpp are laid out in an unknown way, so it cannot "
                           "hold slices: install the version that constraints.txt names")
    return found[0]


def source_of(tensor: int, source: int, which: int) -> int:
    """Return a tensor's source number `which` (0 or 1), 0 for none; source: as from
    `source_offset`.
    """
    return ctypes.c_void_p.from_address(tensor + source + 8 * which).value or 0


def weight_of(tensor: int, source: int) -> bytes:
    """Return the name of the layer's weight that is a tensor's first source; empty for none."""
    first = source_of(tensor, source, 0)
    name: bytes = binding.ggml_get_name(first) if first else b""
    return name if name.startswith(b"blk.") else b""


#: decodes of at most so many rows have their routers' products row by row; longer ones are chunks
#: of prompts, whose cuts do not depend on other requests
MOST_ROWS = 16
MOST_EXPERTS = 512  #: of a layer; llama.cpp's own limit
UNKNOWN = ("this llama.cpp hands rows to routers in an unknown way: install the version that "
           "constraints.txt names")
_FLOAT32 = 0  #: ggml's number of the type
_NAMES = (b".ffn_gate_inp.weight", b".ffn_gate_inp_shexp.weight")


class _Router(ctypes.Structure):
    """The router of a layer: struct router of `layer_filter.c`."""

    _fields_ = (("weights", ctypes.c_void_p), ("biases", ctypes.c_void_p))


class Routers:
    """The routers of a slice that has whole experts: with the rows of all slices' experts.

    count: experts of a layer
    drawn: experts of a row
    own: the first expert of the slice, and how many it has
    weights: beginning of the name of the tensor with the weights of the drawn experts
    Raises ModelError for a damaged file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        model = ModelFile(path)
        self.count, first, own, self.drawn = (
            value if isinstance(value, int) else -1 for value in (
                model.get("pipeinfer.experts"), model.get("pipeinfer.first_expert"),
                model.arch_get("expert_count"), model.arch_get("expert_used_count")))
        if first < 0 or not (
                0 < self.drawn <= own <= self.count - first <= self.count <= MOST_EXPERTS):
            raise ModelError(f"{path}: has {own} of {self.count} experts from {first} on, of which "
                             f"a row draws {self.drawn}; remove the file, it is then made again")
        self.own = first, own
        self._arrays = slice_parts.read_routers(model)
        self.weights = f"ffn_moe_weights_{declared(model.architecture).drawn}-".encode()
        self._table = (_Router * model.n_layers)(*(
            _Router(weights.ctypes.data, None if biases is None else biases.ctypes.data)
            for weights, biases in self._arrays))
        self.address = ctypes.addressof(self._table)


@cache
def single_row_dot() -> Any | None:
    """Return ggml's product of float32 vectors for single rows: (n, to, 0, x, 0, y, 0, 1).

    None where the library's kernels are plug-ins, which do not export it.
    """
    binding.loaded()
    traits = getattr(binding, "ggml_get_type_traits_cpu", None)
    return None if traits is None else traits(_FLOAT32).contents.vec_dot


def is_router(tensor: int, source: int) -> bool:
    """Return whether a tensor is a router's product; source: as from `source_offset`."""
    return weight_of(tensor, source).endswith(_NAMES)


def by_rows(tensor: int, source: int) -> None:
    """Overwrite a router's product with the products of single rows.

    tensor, source: as for `is_router`
    Raises BackendError for rows that are not contiguous.
    """
    weights, inputs = (source_of(tensor, source, which) for which in (0, 1))
    if binding.ggml_nbytes(inputs) != 4 * binding.ggml_nelements(inputs):
        raise BackendError(UNKNOWN)
    dot = single_row_dot()
    assert dot is not None
    count = binding.ggml_nrows(weights)
    length = binding.ggml_nelements(weights) // count
    to, weight, row = map(binding.ggml_get_data, (tensor, weights, inputs))
    for k in range(binding.ggml_nrows(inputs)):
        for i in range(count):
            dot(length, to + 4 * (k * count + i), 0, weight + 4 * i * length, 0,
                row + 4 * k * length, 0, 1)


def of_floats(file: ModelFile) -> bool:
    """Return whether all routers of the file are float32."""
    return all(tensor.type == _FLOAT32 for name, tensor in file.tensors.items()
               if name.encode().endswith(_NAMES))
