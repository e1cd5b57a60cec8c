# SPDX-License-Identifier: Apache-2.0
"""A CPU's counterpart of a CUDA graph: the operations of a pass, recorded and repeated.

A pass of a small model takes longer in Python than in kernels. PyTorch's dispatcher
sees every operation of it; those that compute are kept with their arguments, and a
replay calls them one after the other. What only allocates memory or makes a view of it
has been done by then. As in a CUDA graph, tensors that a pass makes stay where they
are, and share one block of memory if they do not live at the same time.

What the dispatcher does not see cannot be recorded: see `verify`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_ALLOCATIONS = {_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty}
_DEPENDS_ON_DATA = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
}
# The same without a tag, since other operations make them up. Tensors are resolved
# before Python or NumPy reads them.
_UNTAGGED = {
    _aten.repeat_interleave.self_Tensor,
    _aten.resolve_conj.default,
    _aten.resolve_neg.default,
    _aten.tensor_split.tensor_indices_or_sections,
    _aten.where.default,
}
_NUMBERS = {"bool", "int", "float", "number", "SymInt", "Scalar"}
_ALIGNMENT = 64  # bytes of a cache line, and of the widest vectors

Inputs = Sequence[Tensor | None]


class NotRecordableError(Exception):
    """A pass does something that a replay would not repeat; says what."""


class Memory:
    """A block that the recordings of a model share: they run one after the other."""

    def __init__(self) -> None:
        self.block = torch.empty(0, dtype=torch.uint8)

    def reserve(self, size: int) -> Tensor:
        """[at least size] uint8. Earlier recordings keep the block they have."""
        if self.block.numel() < size:
            # A power of two, so that few recordings have a block of their own.
            self.block = torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8)
        return self.block


class Call(NamedTuple):
    """An operation that computes."""

    function: Callable[..., Any]
    args: list[Any]
    kwargs: dict[str, Any]


@dataclass
class CPUGraph:
    """A recorded pass.

    Attributes:
        output: what the pass returned; each replay overwrites its tensors.
        returned: places of `output` that are an input, and which one.
        inputs: the tensors that the calls read, in the order of `record`.
        places: of each input, arguments that are this input.
        pinned: by index, where inputs are of which views were recorded.
        calls: functions and arguments.
        block: memory of the tensors that the pass makes.
    """

    output: Any
    returned: dict[int, int]
    inputs: Inputs
    places: list[list[tuple[list[Any], int]]]
    pinned: dict[int, tuple[Any, ...]]
    calls: list[tuple[Callable[..., Any], list[Any]]]
    block: Tensor

    def fits(self, inputs: Inputs) -> bool:
        """Whether the pass can be run on these inputs.

        Args:
            inputs: have the types and sizes of those recorded, except for inputs that
                the pass only hands on, such as a block table.
        """
        return all(_where(inputs[at]) == place for at, place in self.pinned.items())

    def replay(self, inputs: Inputs) -> Any:
        """Runs the pass on inputs that fit, and returns what it does."""
        known = self.inputs
        for index, tensor in enumerate(inputs):
            if tensor is not known[index]:
                known[index] = tensor
                for args, position in self.places[index]:
                    args[position] = tensor
        for function, args in self.calls:
            function(*args)
        if not self.returned:
            return self.output
        if not isinstance(self.output, tuple):
            return inputs[self.returned[0]]
        output = list(self.output)
        for place, index in self.returned.items():
            output[place] = inputs[index]
        return tuple(output)

    def verify(
        self, run: Callable[[], Any], inputs: Inputs, num_rows: int | None = None
    ) -> Any:
        """Runs the pass both ways, on other inputs than those recorded, and returns
        what it returns.

        Args:
            num_rows: rows of the outputs that are no padding, whose contents may
                differ; None: all.

        A replay gives something else if a part of the pass was computed behind the
        dispatcher, by a Triton kernel for example, whose result is missing in a block
        that holds NaN; or from a tensor that was another one when the pass was
        recorded. The replay comes first, so that it cannot read what the pass leaves
        in the KV cache.

        Raises:
            NotRecordableError: a replay does not return the same bits. After any error
                inputs are as before.
        """
        with _restored_if_fails(inputs) as before:
            self.block.fill_(255)
            found = copies(_rows(self.replay(inputs), num_rows))
            _restore(inputs, before)
            output = run()
            if not are_same(_rows(output, num_rows), found):
                raise NotRecordableError("a replay of it gives something else")
        return output


def copies(tensors: Inputs) -> list[Tensor | None]:
    return [None if one is None else one.clone() for one in tensors]


def are_same(some: Inputs, others: Inputs) -> bool:
    """Whether tensors have the same bits."""
    return all(map(_same_bits, some, others))


def record(run: Callable[[], Any], inputs: Inputs, memory: Memory) -> CPUGraph:
    """Runs a pass once, and records it.

    Args:
        run: the pass. Only `inputs` and the contents of other tensors may differ from
            one replay to the next, not what it computes in Python.
        inputs: tensors that later replays replace; None: an input that is not there.
        memory: for what the pass makes.

    Raises:
        NotRecordableError: it computes something in Python that depends on tensors.
            After any error inputs are as before.
    """
    with _restored_if_fails(inputs):
        return _record(run, inputs, memory)


def _record(run: Callable[[], Any], inputs: Inputs, memory: Memory) -> CPUGraph:
    with _Recorder() as recorder:
        output = run()
    calls, made = _computing(recorder.operations)
    offsets, size = _lay_out(calls, made, kept=_storages(output))
    block = memory.reserve(size)
    move = partial(_move, offsets, block)
    names = {id(one): i for i, one in enumerate(inputs) if one is not None}
    outputs = dict(enumerate(output if isinstance(output, tuple) else (output,)))
    returned = {i: names[id(one)] for i, one in outputs.items() if id(one) in names}
    viewed = _storages([one for i, one in outputs.items() if i not in returned])
    places: list[list[tuple[list[Any], int]]] = [[] for _ in inputs]
    recorded = []
    for call in calls:
        args = [_replaced(arg, move) for arg in call.args]
        kwargs = {name: _replaced(arg, move) for name, arg in call.kwargs.items()}
        for position, arg in enumerate(call.args):
            if isinstance(arg, Tensor) and id(arg) in names:
                places[names[id(arg)]].append((args, position))
            else:
                viewed |= _storages(arg)
        viewed |= _storages(call.kwargs)
        # Without the Python between an operation and its C++ function.
        function = getattr(call.function, "_op", call.function)
        recorded.append((partial(function, **kwargs) if kwargs else function, args))
    given = {i: one for i, one in enumerate(inputs) if one is not None}
    pinned = {i: _where(one) for i, one in given.items() if _storage(one) in viewed}
    return CPUGraph(output, returned, [*inputs], places, pinned, recorded, block)


class _Recorder(TorchDispatchMode):
    """Collects all operations: function, arguments, named ones, result.

    Since all results are kept, no two of them have the same memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Sequence[Any], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _depends_on_data(func, args):
            raise NotRecordableError(f"{func} depends on the contents of tensors")
        result = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, result))
        return result


def _depends_on_data(function: Any, args: Sequence[Any]) -> bool:
    """Whether what an operation returns to Python depends on more than shapes."""
    if function.overloadpacket is _aten.index:
        # A mask is tagged, and so are indices.
        return any(one.dtype in (torch.bool, torch.uint8) for one in _tensors(args[1]))
    results = function._schema.returns
    returns_numbers = results and all(str(one.type) in _NUMBERS for one in results)
    is_tagged = _DEPENDS_ON_DATA.intersection(function.tags)
    return bool(is_tagged or returns_numbers or function in _UNTAGGED)


def _computing(
    operations: Iterable[tuple[Any, Sequence[Any], dict[str, Any], Any]],
) -> tuple[list[Call], dict[int, Tensor]]:
    """Operations that a replay repeats, and the tensors made, by their storage."""
    calls, made = [], {}
    for function, args, kwargs, result in operations:
        results, given = _tensors(result), _storages((args, kwargs))
        new = {_storage(one): one for one in results}
        is_written = any(map(_is_written, function._schema.arguments))
        if new.keys() - given and (is_written or new.keys() & given):
            raise NotRecordableError(f"{function} also makes tensors of its own")
        if is_written or not results:
            calls.append(Call(function, list(args), kwargs))
        elif function.overloadpacket in _ALLOCATIONS:
            made |= new
        elif not given & new.keys():
            made |= new
            calls.append(_writing(function, list(args), kwargs, results))
    return calls, made


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _writing(
    function: Any, args: list[Any], kwargs: dict[str, Any], results: list[Tensor]
) -> Call:
    """A call that writes its results to where they were."""
    if found := _out_variant(function, len(results)):
        overload, names = found
        return Call(overload, args, kwargs | dict(zip(names, results, strict=True)))
    copying = partial(_copy_results, function)
    return Call(copying, args, kwargs | {"results": results})


@cache
def _out_variant(function: Any, num_results: int) -> tuple[Any, list[str]] | None:
    """The same operation with arguments for its results, and their names."""
    takes = [(one.name, str(one.type)) for one in function._schema.arguments]
    packet = function.overloadpacket
    for overload in map(partial(getattr, packet), packet.overloads()):
        arguments = overload._schema.arguments
        outputs = [one.name for one in arguments if one.is_out]
        others = [(one.name, str(one.type)) for one in arguments if not one.is_out]
        if len(outputs) == num_results and others == takes:
            return overload, outputs
    return None


def _copy_results(
    function: Any, *args: Any, results: list[Tensor], **kwargs: Any
) -> None:
    for to, one in zip(results, _tensors(function(*args, **kwargs)), strict=True):
        to.copy_(one)


def _lay_out(
    calls: Sequence[Call], made: dict[int, Tensor], kept: set[int]
) -> tuple[dict[int, int], int]:
    """Offsets in one block of what is made and not `kept`, by storage, and its size.

    Each one gets the first gap among those that live at the same time.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for time, call in enumerate(calls):
        for storage in map(_storage, _tensors((call.args, call.kwargs))):
            if storage in made and storage not in kept:
                first.setdefault(storage, time)
                last[storage] = time
    offsets: dict[int, int] = {}
    alive: list[tuple[int, int, int]] = []  # start, end, storage
    total = 0
    for storage, time in first.items():
        size = made[storage].untyped_storage().nbytes()
        size = -(-size // _ALIGNMENT) * _ALIGNMENT
        alive = sorted(one for one in alive if last[one[2]] >= time)
        at = 0
        for start, end, _ in alive:
            if start - at >= size:
                break
            at = end
        offsets[storage] = at
        alive.append((at, at + size, storage))
        total = max(total, at + size)
    return offsets, total


def _move(offsets: dict[int, int], block: Tensor, tensor: Tensor) -> Tensor:
    """The same view of the block as of the memory that `tensor` has."""
    offset = offsets.get(_storage(tensor))
    if offset is None:
        return tensor
    start = offset // tensor.itemsize + tensor.storage_offset()
    moved = torch.empty(0, dtype=tensor.dtype)
    return moved.set_(block.untyped_storage(), start, tensor.shape, tensor.stride())


def _where(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


@contextmanager
def _restored_if_fails(tensors: Inputs) -> Iterator[Inputs]:
    """Gives copies of the tensors, which get these contents again after an error."""
    before = copies(tensors)
    try:
        yield before
    except Exception:
        _restore(tensors, before)
        raise


def _restore(tensors: Inputs, contents: Inputs) -> None:
    for to, content in zip(tensors, contents, strict=True):
        if to is not None:
            to.copy_(content)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _storages(tree: Any) -> set[int]:
    return set(map(_storage, _tensors(tree)))


def _tensors(tree: Any) -> list[Tensor]:
    # A tenth of the time that PyTree takes, which is most of that of a recording.
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return []
    return [tensor for one in tree for tensor in _tensors(one)]


def _replaced(argument: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """An argument of an operation with other tensors."""
    if isinstance(argument, Tensor):
        return replace(argument)
    if isinstance(argument, (list, tuple)):
        return [_replaced(one, replace) for one in argument]
    return argument


def _rows(output: Any, num_rows: int | None) -> list[Tensor]:
    found = _tensors(output)
    return found if num_rows is None else [one[:num_rows] for one in found]


def _same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    if one.shape != other.shape:
        return False
    views = (each.flatten().contiguous().view(torch.uint8) for each in (one, other))
    return torch.equal(*views)
