"""Clicks that reach a kernel while a cell runs, where the kernel has no thread for them (ipykernel 6, as on Colab)."""

from __future__ import annotations


def is_old(kernel) -> bool:
    """Whether widgets' messages wait for the running cell; newer kernels handle them while it awaits."""
    return hasattr(kernel, "msg_queue") and not getattr(kernel, "_supports_kernel_subshells", False)


def serve_clicks(kernel) -> int:
    """Handle the widgets' messages that wait at an old kernel; cells and the rest keep their order for afterwards.

    Call from the main thread.

    Returns:
        Messages that were handled.
    """
    socket, session, handled = kernel.shell_stream.socket, kernel.session, 0
    parent, ident = kernel.get_parent("shell"), kernel._parent_ident["shell"]
    while socket.poll(0):
        frames = socket.recv_multipart(copy=False)
        idents, rest = session.feed_identities(frames, copy=False)
        kind = session.unpack(rest[1].bytes)["msg_type"]  # only looked at: a message may be checked once
        if not kind.startswith("comm_"):
            kernel.schedule_dispatch(kernel.dispatch_shell, frames)
            continue
        message = session.deserialize(rest, content=True, copy=False)
        # The browser sends a widget's next message only after it was told that the last one is done with.
        kernel.set_parent(idents, message, channel="shell")
        kernel._publish_status("busy", "shell")
        kernel.shell_handlers[kind](kernel.shell_stream, idents, message)
        kernel._publish_status("idle", "shell")
        handled += 1
    if handled:
        kernel.set_parent(ident, parent, channel="shell")  # what the cell prints goes below the cell again
    return handled
