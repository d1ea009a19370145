"""What TensorFlow runs on its devices, read off its partition graphs."""

# What carries a value from device to device, or none.
MOVES = ("_Send", "_Recv", "_HostSend", "_HostRecv", "Const", "NoOp", "_Arg", "_Retval", "Identity")


def executed(run):
    """Name, operation and device number of what TensorFlow runs on its devices."""
    import tensorflow as tf
    from tensorflow.python.eager import context

    context.context().enable_run_metadata()
    try:
        # Once it has been on, TensorFlow gathers graphs while it is off as well, and hands
        # them over when the next function has run.
        tf.function(lambda: tf.zeros([]))()
        context.context().export_run_metadata()
        run()
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    for function in metadata.function_graphs:
        for graph in function.partition_graphs:
            for node in graph.node:
                yield node.name, node.op, int(node.device.rsplit(":", 1)[1])
