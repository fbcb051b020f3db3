"""Clicks and reloaded pages that reach a kernel while a cell waits: what ipykernel leaves for after the cell."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextvars import copy_context

GREETINGS = ("kernel_info_request", "comm_info_request")  # of a page: before these are answered it asks for no widget


def is_old(kernel) -> bool:
    """Whether widgets' messages wait for the running cell; newer kernels handle them while it awaits."""
    return hasattr(kernel, "msg_queue") and not getattr(kernel, "_supports_kernel_subshells", False)


@contextlib.contextmanager
def greeting(kernel) -> Iterator[None]:
    """Within it, a newer kernel whose cell awaits something answers pages that connect to it; for the main thread."""
    thread = getattr(kernel, "shell_channel_thread", None)
    if thread is None:
        yield
        return

    async def take(subshell_id, frames):
        _, rest = kernel.session.feed_identities(frames, copy=False)
        header = kernel.session.unpack(rest[1].bytes)  # only looked at: a message may be checked once
        if subshell_id is not None or header["msg_type"] not in GREETINGS:
            return await kernel.shell_main(subshell_id, frames)
        cell, ident = kernel.get_parent("shell"), kernel._get_shell_context_var(kernel._shell_parent_ident)
        try:
            kernel._publish_status("busy", "shell", {"header": header})
            await asyncio.create_task(kernel.dispatch_shell(frames, concurrent=True), context=copy_context())
            kernel._publish_status("idle", "shell", {"header": header})
        finally:
            kernel.set_parent(ident, cell, channel="shell")

    thread.manager.set_on_recv_callback(take)
    try:
        yield
    finally:
        thread.manager.set_on_recv_callback(kernel.shell_main)


def serve_clicks(kernel) -> None:
    """Handle the widgets' messages that wait at an old kernel; cells and the rest keep their order for afterwards.

    Call from the main thread.
    """
    socket, session = kernel.shell_stream.socket, kernel.session
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
        kernel.set_parent(ident, parent, channel="shell")  # what the cell prints goes below the cell again
