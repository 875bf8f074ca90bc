"""One host name under which decode dials prefill, with a connection of its own: where scenes are set."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator
from typing import TYPE_CHECKING

import numpy as np

from tests.transfer.harness import NUM_LAYERS
from tests.transfer.storm.engines import MAX_TOKENS, TOKEN_BYTES, Transfer
from tests.transfer.storm.network import Direction, Link, Spoiled, Traffic
from tests.transfer.storm.scenes import FRAME_FAULTS, HARMLESS, LINK_FAULTS, Scene
from tollbridge.transfer.frames import HANDSHAKE_KINDS, HEADER_BYTES, NO_TRANSFER, Header, Kind

if TYPE_CHECKING:
    from tests.transfer.storm.simulation import Simulation

_PATIENCE = 30  # turns that a scene may take to come about, or an armed fault to strike
_END_TURNS = 2_000  # by then everything has ended: many times the longest deadline


class Lane(Traffic):
    """Plays one scene after the other."""

    def __init__(self, world: Simulation, number: int) -> None:
        self._world = world
        self._rng = random.Random(world.rng.getrandbits(64))
        self._number = number
        self._renamed = 0
        self.transfers: list[Transfer] = []
        self._handshake_limit: int | None = None  # frames that may pass; None: all
        self._data_limit: int | None = None
        self._open_held = False
        self._passed_handshake = self._passed_data = 0
        self._armed: Scene | None = None
        self.tainted = False  # the connection may be dying: the next scene needs another
        self._victim: Transfer | None = None
        self.script = self._play()

    @property
    def host(self) -> str:
        return f"127.0.{self._number}.{1 + self._renamed % 250}"

    @property
    def links(self) -> list[Link]:
        return self._world.network.links.get(self.host, [])

    # ── Traffic ──

    def holds(self, direction: Direction, header: Header) -> bool:
        if header.kind in HANDSHAKE_KINDS:
            return self._handshake_limit is not None and self._passed_handshake >= self._handshake_limit
        if header.kind == Kind.OPEN:
            return self._open_held
        if header.kind != Kind.DATA or self._data_limit is None or self._victim is None:
            return False
        return header.transfer == self._victim.key and self._passed_data >= self._data_limit

    def spoil(self, direction: Direction, header: Header, frame: bytes) -> Spoiled:
        self._passed_handshake += header.kind in HANDSHAKE_KINDS
        scene, victim = self._armed, self._victim
        self._passed_data += header.kind == Kind.DATA and victim is not None and header.transfer == victim.key
        if scene is None or victim is None or header.transfer not in (victim.key, NO_TRANSFER):
            return Spoiled(frame)
        if (victim.prefill_state, victim.decode_state) != (scene.prefill, scene.decode):
            return Spoiled(frame)
        if scene.decode == "receiving" and header.kind != Kind.DATA and self._rng.random() < 0.9:
            return Spoiled(frame)
        return self._strike(scene, direction, header, frame)

    def delivered(self, direction: Direction, header: Header) -> None:
        for transfer in self.transfers:
            if header.transfer == transfer.key and header.kind == Kind.DATA:
                transfer.receiving = True

    def left(self, direction: Direction, header: Header) -> None:
        for transfer in self.transfers:
            if header.transfer == transfer.key and header.kind == Kind.OPEN:
                transfer.asked = True

    # ── inside: the faults of frames ──

    def _strike(self, scene: Scene, direction: Direction, header: Header, frame: bytes) -> Spoiled:
        """Spoil this frame."""
        rng, fault, size = self._rng, scene.fault, len(frame)
        if fault == "payload flip" and size == HEADER_BYTES:
            return Spoiled(frame)
        self._armed = None
        shaking = header.kind in HANDSHAKE_KINDS
        fatal = (
            shaking
            or fault not in (*HARMLESS, "payload flip")
            or (fault == "payload flip" and header.kind != Kind.DATA)
        )
        self._hit(scene, everyone=fatal, hurt=fatal or fault == "payload flip")
        if fatal:
            self.hurt()
        if fault == "duplicated":
            return Spoiled(frame + frame)
        if fault == "reordered":
            return Spoiled(b"", late=frame)
        if fault == "cut in frame":
            return Spoiled(frame[: rng.randrange(size)], then_cut=True)
        if fault == "truncated":
            return Spoiled(frame[: size - rng.randint(1, min(size, 40))])
        first, last = (0, HEADER_BYTES) if fault == "header flip" else (HEADER_BYTES, size)
        spoiled = bytearray(frame)
        spoiled[rng.randrange(first, last)] ^= 1 << rng.randrange(8)
        return Spoiled(bytes(spoiled))

    def hurt(self) -> None:
        """The connection is about to go, with all that use it or come to use it."""
        self.tainted = True
        for transfer in self.transfers:
            transfer.hurt = True

    def _hit(self, scene: Scene, *, everyone: bool, hurt: bool) -> None:
        """Count the fault for the victim, or for everyone on the connection."""
        victim = self._victim
        assert victim is not None
        for transfer in self.transfers if everyone else [victim]:
            if transfer is victim or transfer.decode_state is not None:
                self._world.counts.hit(scene.fault, transfer.prefill_state, transfer.decode_state)
                transfer.hurt |= hurt

    # ── inside: scenes ──

    def _play(self) -> Iterator[None]:
        while True:
            yield from self._scene(self._world.counts.choose(self._rng))

    def _scene(self, scene: Scene) -> Iterator[None]:
        if self.tainted or scene.decode == "connecting" or self._rng.random() < 0.05:
            self._rename()
        victim = self._victim = self._transfer(for_scene=True)
        victim.wrong_digest = scene.fault == "wrong digest"
        victim.hurt |= victim.wrong_digest
        self.transfers = [victim, *(self._transfer() for _ in range(self._rng.choice((0, 0, 1, 2))))]
        self._hold(scene)
        lives = [self._life(transfer) for transfer in self.transfers[1:]]
        for _ in self._set(scene, victim):
            self._advance(lives)
            yield
        if self._is_set(scene, victim):
            yield from self._fire(scene, victim)
        self._let_go()
        lives.append(self._life(victim))
        for _ in range(_END_TURNS):
            self._advance(lives)
            if not lives and all(transfer.send_over and transfer.receive_over for transfer in self.transfers):
                break
            yield
        else:
            left = [t for t in self.transfers if not (t.send_over and t.receive_over)]
            raise AssertionError(f"left without an end after {scene}: {left}")
        self._world.over(self.transfers, scene)
        self.transfers = []

    def _transfer(self, *, for_scene: bool = False) -> Transfer:
        rng = self._rng
        num_tokens = rng.randint(12 if for_scene else 1, MAX_TOKENS)
        first_token = rng.randrange(num_tokens - 9 if for_scene else num_tokens)
        end_token = num_tokens - 1 if for_scene or rng.random() < 0.9 else num_tokens
        truth = np.frombuffer(rng.randbytes(NUM_LAYERS * num_tokens * TOKEN_BYTES), dtype=np.uint8)
        return Transfer(
            transfer_id=f"{rng.getrandbits(128):032x}",
            host=self.host,
            num_tokens=num_tokens,
            first_token=min(first_token, end_token),
            end_token=end_token,
            truth=truth.reshape(NUM_LAYERS, num_tokens, TOKEN_BYTES),
        )

    def _rename(self) -> None:
        """Use another name for the host, so that decode dials anew; the idle connection goes."""
        for link in self.links:
            link.reset()
        self._renamed += 1
        self._passed_handshake = 0
        self.tainted = False

    def _hold(self, scene: Scene) -> None:
        """Let the wire pass as much as the scene allows."""
        self._passed_data = 0
        if scene.decode == "connecting":
            self._handshake_limit = self._rng.randrange(4)
        if scene.decode == "asked":
            self._data_limit = 0
            self._open_held = scene.fault == "wrong digest"
        if scene.decode == "receiving":
            self._data_limit = self._rng.randint(1, 3)

    def _let_go(self) -> None:
        self._handshake_limit = self._data_limit = self._armed = None
        self._open_held = False

    def _set(self, scene: Scene, victim: Transfer) -> Iterator[None]:
        """Bring the victim into the states of the scene."""
        rng = self._rng
        steps: list[Callable[[], None]] = []
        if scene.prefill != "unknown":
            steps.append(lambda: self._world.register(victim))
        if scene.prefill == "computing" or (scene.prefill == "sending" and rng.random() < 0.5):
            some = rng.randint(victim.first_token + 4, victim.num_tokens - 1)
            layer = rng.choice([None, None, 0, 1])
            steps.append(lambda: self._world.prefill.compute(victim, some, layer))
        if scene.prefill == "sending":
            steps.append(lambda: self._world.prefill.compute(victim, victim.num_tokens))
        if scene.decode is not None:
            steps.insert(rng.randint(0, len(steps)), lambda: self._world.open(victim))
        for step in steps:
            step()
            for _ in range(rng.randrange(3)):
                yield
        for _ in range(_PATIENCE):
            if self._is_set(scene, victim) or victim.receive_end is not None:
                return
            yield

    def _is_set(self, scene: Scene, victim: Transfer) -> bool:
        return (victim.prefill_state, victim.decode_state) == (scene.prefill, scene.decode)

    def _fire(self, scene: Scene, victim: Transfer) -> Iterator[None]:
        world, rng = self._world, self._rng
        if scene.fault in FRAME_FAULTS:
            self._armed = scene
            self._handshake_limit = self._data_limit = None
            for _ in range(_PATIENCE):
                if self._armed is None or not self._is_set(scene, victim):
                    return
                yield
        elif scene.fault in LINK_FAULTS:
            yield from self._spoil_links(scene)
        elif scene.fault == "prefill killed":
            world.kill_prefill(silently=rng.random() < 0.3)
        elif scene.fault == "decode killed":
            world.kill_decode(silently=rng.random() < 0.3)
        else:
            self._hit(scene, everyone=False, hurt=scene.fault not in HARMLESS)
            if scene.fault == "rewind":
                world.prefill.preempt(victim)
            elif scene.fault == "cancel on prefill":
                world.prefill.cancel(victim)
            elif scene.fault == "cancel on decode":
                world.decode.cancel(victim)

    def _spoil_links(self, scene: Scene) -> Iterator[None]:
        """Cut, stall or slow down the connection, for so long that the peer gives up or for less."""
        rng, links = self._rng, self.links
        short = rng.random() < 0.3
        self._hit(scene, everyone=True, hurt=False)
        if scene.fault == "cut" or not short:
            self.hurt()
        if scene.fault == "cut":
            for link in links:
                link.reset()
            return
        for link in links:
            link.stalled = scene.fault == "stalled"
            link.bytes_per_turn = rng.randint(1, 20)
        self._let_go()
        for _ in range(10 if short else rng.choice([40, 200])):
            yield
        for link in links:
            link.stalled, link.bytes_per_turn = False, 4096

    def _life(self, transfer: Transfer) -> Iterator[None]:
        """Do what engines do with a transfer until both have said everything; the order is random."""
        rng = self._rng
        steps = [self._prefill_life(transfer), self._decode_life(transfer)]
        while steps:
            step = rng.choice(steps)
            if next(step, step) is step:
                steps.remove(step)
                continue
            for _ in range(rng.randrange(4)):
                yield

    def _prefill_life(self, transfer: Transfer) -> Generator[None, None, None]:
        rng, world = self._rng, self._world
        if not transfer.registered:
            if rng.random() < 0.03:
                return  # the router's request never came
            yield
            world.register(transfer)
        yield
        while not transfer.send_over and min(transfer.published) < transfer.num_tokens:
            if rng.random() < 0.02:
                world.prefill.preempt(transfer)
            elif rng.random() < 0.3:
                world.prefill.compute(transfer, transfer.num_tokens)
            else:
                some = rng.randint(min(transfer.published), transfer.num_tokens)
                world.prefill.compute(transfer, some, rng.choice([None, *range(NUM_LAYERS)]))
            yield

    def _decode_life(self, transfer: Transfer) -> Generator[None, None, None]:
        if not transfer.opened:
            if self._rng.random() < 0.03:
                return
            yield
            self._world.open(transfer)

    def _advance(self, lives: list[Iterator[None]]) -> None:
        for life in list(lives):
            if next(life, self) is self:
                lives.remove(life)
