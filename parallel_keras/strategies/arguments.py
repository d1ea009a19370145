"""The arguments that strategies share: their defaults, and what they may be."""

DEFAULT_TIMEOUT = 60.0
BALANCES = ("time", "flops", "memory")


def check_balance(balance):
    if isinstance(balance, str) and balance.lower() in BALANCES:
        return balance.lower()
    if isinstance(balance, (list, tuple)) and balance:
        counts = tuple(balance)
        if all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in counts):
            return counts
    raise ValueError(
        "`balance` is 'time', 'flops', 'memory', or a list with the number of layers on each "
        f"device, such as [3, 2]. Received: balance={balance!r}"
    )


def check_count(name, count):
    if count is None or (isinstance(count, int) and not isinstance(count, bool) and count > 0):
        return count
    raise ValueError(f"`{name}` is an integer of one or more, or None. Received: {name}={count!r}")


def check_bool(name, value):
    if isinstance(value, bool):
        return value
    raise ValueError(f"`{name}` is True or False. Received: {name}={value!r}")


def check_split_points(points):
    if points is None:
        return None
    if isinstance(points, (list, tuple)) and points and all(isinstance(p, str) for p in points):
        return tuple(points)
    raise ValueError(
        "`split_points` is a list of the names of the layers that begin a new stage. "
        f"Received: split_points={points!r}"
    )


def check_timeout(timeout):
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"`timeout` is a number of seconds above 0. Received: timeout={timeout!r}")
    return float(timeout)
