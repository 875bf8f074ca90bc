"""KV over TCP: `TcpSender` listens on the prefill side, `TcpReceiver` dials from the decode side.

Threads. Each side has one I/O thread per stream, which serves that lane of every pair of workers (lanes.py). The work
of a thread is system calls that copy between the kernel and the cache, and xxh3 over what was copied; both release the
GIL, so the engine's Python runs meanwhile, and what needs the GIL is a few dozen microseconds per frame. One thread
copies 3-5 GB/s while it has a core, but its stream stands still while it waits for one, and several fill the gap; from
GPU to GPU within a host several are needed to go as fast as TCP can. Where the cache lies in shared memory, all of this
runs in an I/O process, which does not need the engine's GIL at all (outboard.py). asyncio was rejected: its transports
copy every payload once more.

One book, one lock. What the threads share, the books, is behind a monitor (monitor.py, with the lock order). It is held
for the decisions about a frame, and not while bytes move.

Who touches the blocks. A transfer ends in the book first, so nothing new of it begins; then every lane lets go of its
blocks, in the middle of a frame if need be; then the engine hears of the end. So "nothing writes into a block after
its transfer ended" holds by construction. The same goes for reading on the send side, and `rewind` returns only then.

No copies. `sendmsg` gathers from the cache, `recvmsg_into` scatters into it. The exceptions: after a cancel or rewind
in the middle of a frame, the rest of that one frame is copied so that the blocks are free at once and the framing stays
intact; payloads that nobody wants are drained into a small scratch; and GPU memory goes through a pinned ring, which is
then the only host memory of a side, whatever the concurrency (stage.py, staging.py).

Stopping. A cancel reaches the wire after what the kernel holds (TCP_NOTSENT_LOWAT) and the rest of one frame, each at
most about 30 ms of the lane's goodput (pacing.py).

Striping. Frames name their transfer, layer and tokens, and the receiver takes them in any order. A lane that has room
takes the next frame of the pair, so each carries as much as it can move. A lane that finds nothing to send is hungry;
whatever makes a frame available wakes two hungry lanes, and a lane that leaves more behind wakes two more. Towards the
end of a transfer frames get smaller, so that the lanes finish together.
"""

from __future__ import annotations

from tollbridge.transfer.tcp_receive import TcpReceiver
from tollbridge.transfer.tcp_send import TcpSender

__all__ = ["TcpReceiver", "TcpSender"]
