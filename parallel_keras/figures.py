"""Figures of matplotlib, which is loaded when one is drawn, without its global state."""


def figure(size, title, thing):
    """An empty figure.

    Args:
        size: Pair of floats, in inches: width and height.
        title: String.
        thing: String, what is drawn, for the message where matplotlib is not installed.

    Returns:
        A `matplotlib.figure.Figure`.

    Raises:
        ImportError: If matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            f"A {thing} is drawn with matplotlib, which is not installed: `pip install "
            f"matplotlib`. `print({thing})` shows the same numbers."
        ) from error
    empty = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(empty)
    empty.suptitle(title, fontsize=12, fontweight="bold")
    return empty
