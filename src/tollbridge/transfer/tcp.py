"""KV over TCP: `TcpSender` listens on the prefill side, `TcpReceiver` dials from the decode side.

Threads. Each side has one I/O thread for all of its connections (switchboard.py). The work of that thread is system
calls that copy between the kernel and the cache, and xxh3 over what was copied; both release the GIL, so the engine's
Python runs meanwhile, and what needs the GIL is a few dozen microseconds per frame. One thread per connection would
buy parallel copies (one core moves 3-5 GB/s, more than the links this is for) and cost locks around every session. A
separate I/O process would not need the GIL at all, but the cache would have to live in shared memory, which an engine
that allocates its own cache cannot promise. asyncio was rejected: its transports copy every payload once more.

One writer, one reporter. The thread that receives into blocks is the one that reports the end, and it lets go of the
blocks first; so "nothing writes into a block after its transfer ended" holds by construction. The same goes for reading
on the send side, and `rewind` runs in that thread too.

No copies. `sendmsg` gathers from the cache, `recvmsg_into` scatters into it. The exceptions: after a cancel or rewind
in the middle of a frame, the rest of that one frame is copied so that the blocks are free at once and the framing stays
intact; and payloads that nobody wants are drained into a small scratch.

Stopping. A cancel reaches the wire after what the kernel holds (TCP_NOTSENT_LOWAT) and the rest of one frame, each at
most about 50 ms of the link's goodput (pacing.py).

Streams. A pair of workers shares one connection. Frames name their transfer, layer and tokens, and the receiver takes
them in any order, so several streams per pair need a choice of connection in `SendBook.take`, and nothing else.
"""

from __future__ import annotations

from tollbridge.transfer.tcp_receive import TcpReceiver
from tollbridge.transfer.tcp_send import TcpSender

__all__ = ["TcpReceiver", "TcpSender"]
