"""A model's calls cut into the stages of a pipeline, and what passes between them.

Pure: a call is anything with `inputs` and `outputs`, tuples of the numbers of values.
The calls are in an order in which each comes after those that it needs. A stage may
take what any earlier one has made: a skip connection passes stages by.
"""

import dataclasses
import difflib

BATCH = -1  # where a model's inputs come from


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        number: Int, from 0 up.
        calls: Tuple of the calls that it computes, in order.
        takes: Dict from the number of a value that it needs from outside to the
            number of the stage that makes it, `BATCH` for the model's inputs.
        gives: Dict from the number of a value that it makes to a tuple of the numbers
            of the stages that take it.
        adds: Tuple of the numbers of the values that it adds to the loss.
    """

    number: int
    calls: tuple
    takes: dict
    gives: dict
    adds: tuple


def cut(calls, numbers, inputs, outputs, losses=(), count=None, changed=lambda call: ()):
    """The stages of a model.

    Args:
        calls: List of calls.
        numbers: List of ints: the stage of each call.
        inputs, outputs, losses: Tuples of the numbers of values: what the model is
            given, what it returns, what it adds to the loss.
        count: Int, the number of stages, some of which may then have nothing to compute.
            Defaults to as many as `numbers` says, each with some call.
        changed: Function of a call: the numbers of those values that it takes and changes, so
            that later calls have to take them from its stage.

    Returns:
        A list of `Stage`. The last one takes all outputs of the model, wherever they
        are made: the loss is there.

    Raises:
        ValueError: If a stage has no call, or a call needs what a later stage makes or changes.

    Example:

    >>> import collections
    >>> Call = collections.namedtuple("Call", "inputs outputs")
    >>> calls = [Call((0,), (1,)), Call((1,), (2,)), Call((1, 2), (3,))]
    >>> first, last = cut(calls, [0, 0, 1], inputs=(0,), outputs=(3,))
    >>> first.gives, last.takes
    ({1: (1,), 2: (1,)}, {1: 0, 2: 0})
    """
    may_be_empty = count is not None
    if count is None:
        count = max(numbers, default=0) + 1
    empty = sorted(set(range(count)) - set(numbers))
    if empty and not may_be_empty:
        raise ValueError(
            f"Stage {empty[0]} of {count} has nothing to compute: place a layer on it, or leave "
            f"the number out. Received: stages {sorted(set(numbers))}"
        )
    source = dict.fromkeys(inputs, BATCH)
    changes: set = set()
    takes: list = [{} for _ in range(count)]
    for call, number in zip(calls, numbers, strict=True):
        for value in call.inputs:
            if source[value] > number:
                does = "changes before (it takes a mask away)" if value in changes else "makes"
                raise ValueError(
                    f"A pipeline goes forward only: place it on stage {source[value]} or later. "
                    f"Received: a call on stage {number} that needs what stage {source[value]} "
                    f"{does}"
                )
            if source[value] < number:
                takes[number][value] = source[value]
        source.update(dict.fromkeys(call.outputs, number))
        held = {value for value in changed(call) if value in takes[number]}
        source.update(dict.fromkeys(held, number))
        changes |= held
    for value in outputs:
        if source[value] < count - 1:
            takes[-1][value] = source[value]
    gives: list = [{} for _ in range(count)]
    for number, wanted in enumerate(takes):
        for value, maker in wanted.items():
            if maker != BATCH:
                gives[maker][value] = (*gives[maker].get(value, ()), number)
    return [
        Stage(
            number,
            tuple(c for c, n in zip(calls, numbers, strict=True) if n == number),
            takes[number],
            gives[number],
            tuple(value for value in losses if source[value] == number),
        )
        for number in range(count)
    ]


def by_places(calls, targets, is_shared, name):
    """The stage of each call of a model with places.

    A call without a place is where what it takes is made; one of a layer that is called
    several times moves on where what it takes is made later.

    Args:
        calls: List of calls.
        targets: List of ints or `None`: the place of each call.
        is_shared: Function of a call: whether its layer is called several times.
        name: Function of a call: its layer's name, for messages.

    Returns:
        A list of ints.

    Raises:
        ValueError: If a place would make the pipeline go back.
    """
    source: dict = {}
    numbers = []
    for call, target in zip(calls, targets, strict=True):
        made = max((source.get(value, 0) for value in call.inputs), default=0)
        number = made if target is None else target
        if number < made:
            if not is_shared(call):
                raise ValueError(
                    f"A pipeline goes forward only: {name(call)} is placed on stage {number} and "
                    f"takes what stage {made} makes. Place it on stage {made} or later, or use "
                    f"strategy='model'. Received: place {number}"
                )
            number = made
        source.update(dict.fromkeys(call.outputs, number))
        numbers.append(number)
    return numbers


def check_counts(counts, names, where):
    """Raise where a `balance` that is a list is not one of this model.

    Args:
        counts: Tuple of ints: how many layers and operations each stage or device has.
        names: List of their names, in the order in which they run.
        where: String, what each count is of.

    Raises:
        ValueError: If the counts are not as many as there are names.
    """
    if sum(counts) != len(names):
        raise ValueError(
            f"`balance` lists the number of layers and operations on {where}: these are "
            f"{sum(counts)} together, and the model has {len(names)}. In the order in which they "
            f"run: {shortened(names)}. Received: balance={list(counts)}"
        )


def by_counts(counts):
    """The stage of each call, from the number of calls of each stage.

    >>> by_counts([2, 1])
    [0, 0, 1]
    """
    return [number for number, count in enumerate(counts) for _ in range(count)]


def by_split_points(names, points):
    """The stage of each call, from the names of the layers that begin a stage.

    Args:
        names: List of tuples: the names by which each call may be meant.
        points: Tuple of names, in order: each begins a new stage.

    Returns:
        A list of ints.

    Raises:
        ValueError: If a name is not there, is the first call's, or comes out of order.

    >>> by_split_points([("a",), ("b",), ("c",)], ("b", "c"))
    [0, 1, 2]
    """
    order = shortened(dict.fromkeys(known[0] for known in names))
    starts: list = []
    for point in points:
        found = next((i for i, known in enumerate(names) if point in known), None)
        if found is None:
            every = list(dict.fromkeys(name for known in names for name in known))
            near = difflib.get_close_matches(str(point), every, n=3, cutoff=0.4)
            hint = f"Near are: {', '.join(near)}. " if near else ""
            raise ValueError(
                f"`split_points` names the layers that begin a stage, and {point!r} is none of the "
                f"model's. {hint}In the order in which they run, they are: {order}. "
                f"Received: split_points={list(points)}"
            )
        if not found:
            raise ValueError(
                f"The layer {point!r} is the first that runs and begins the first stage without "
                "being named: `split_points` has the layers that begin the stages after it. "
                f"Received: split_points={list(points)}"
            )
        if starts and found <= starts[-1]:
            raise ValueError(
                "`split_points` are in the order in which the layers run, each once. "
                f"That is: {order}. Received: split_points={list(points)}"
            )
        starts.append(found)
    return [sum(index >= start for start in starts) for index in range(len(names))]


_MOST_NAMES = 20


def shortened(names):
    """Names for a message, without those in the middle where there are many.

    >>> shortened(["a", "b"])
    'a, b'
    """
    names = list(names)
    if len(names) > _MOST_NAMES:
        half = _MOST_NAMES // 2
        names = [*names[:half], f"... ({len(names) - 2 * half} more)", *names[-half:]]
    return ", ".join(names)
