"""Which devices compute: the server's own devices, and the devices of machines that have joined.

Number types, limits, refusals and engine arguments are derived from these devices. The server's own machine may compute nothing, so
no fact about a device is read from that machine.
"""

from collections.abc import Set
from dataclasses import dataclass
from typing import Protocol

from art_server.errors import InvalidInput
from art_server.settings import Device, NumberType, ServerConfig
from art_server.shared.same_policy import coarsest, mismatch_limits
from art_server.shared.trainer_messages import MismatchLimits
from art_server.store.base_models import BaseModel, check_on_cpu


class Offer(Protocol):
    """Engines and ranks on the devices of one machine."""

    @property
    def device(self) -> Device: ...

    @property
    def engines(self) -> int: ...

    @property
    def ranks(self) -> int: ...


@dataclass(frozen=True, slots=True)
class OwnOffer:
    """Engines and ranks on the server's own devices."""

    device: Device
    engines: int
    ranks: int


class ComputingDevices:
    """The devices of all engines and ranks that are there."""

    def __init__(self, config: ServerConfig, own: Device):
        """`own` is the kind of the server's devices, on which `--engines` and `--ranks` compute."""
        self._config = config
        self._own = OwnOffer(own, config.engines, config.num_ranks(own))
        self._joined: list[Offer] = []
        self._have_sampled: set[Device] = set(self.engines)
        """Devices of all engines since the start: tokens of a job may come from an engine that has left."""

    def join(self, offer: Offer) -> None:
        """Adds the devices of a machine."""
        self._joined.append(offer)
        self._have_sampled |= self.engines

    def leave(self, offer: Offer) -> None:
        """Removes the devices of a machine that is lost."""
        self._joined.remove(offer)

    @property
    def engines(self) -> Set[Device]:
        """The kinds of devices on which engines compute; empty while no machine with an engine has joined."""
        return {offer.device for offer in (self._own, *self._joined) if offer.engines}

    @property
    def ranks(self) -> Set[Device]:
        """The kinds of devices on which ranks compute; empty while no machine with a rank has joined."""
        return {offer.device for offer in (self._own, *self._joined) if offer.ranks}

    def mismatch_limits(self, base: BaseModel) -> MismatchLimits | None:
        """The limits for a base model, from the coarsest number types of all engines whose tokens may be trained, and of all ranks
        that are there. None while no machine with an engine has joined: then nothing samples or trains."""
        has_delta_rule = base.facts.has_delta_rule

        def types(device: Device) -> tuple[NumberType, NumberType]:
            return self._config.number_types(device, has_delta_rule=has_delta_rule)

        engines = {types(device)[0] for device in self._have_sampled}
        if not engines:
            return None
        ranks = {types(device)[1] for device in self.ranks} or engines
        return mismatch_limits((coarsest(engines), coarsest(ranks)), self._config.exact, self._config.gap_limit)

    def check(self, base: BaseModel) -> None:
        """Checks that the devices can compute a base model: the server's own devices, and the devices of one machine that has joined. A
        machine that joins later is checked then.

        Raises:
            InvalidInput: the devices cannot.
        """
        self.check_offer(self._own, base)
        refusals: list[InvalidInput] = []
        for offer in self._joined:
            try:
                self.check_offer(offer, base)
            except InvalidInput as error:
                refusals.append(error)
        has_own = self._own.engines or self._own.ranks
        if refusals and not has_own and len(refusals) == len(self._joined):
            raise refusals[0]

    def check_offer(self, offer: Offer, base: BaseModel) -> None:
        """Checks that the engines and ranks of one machine can compute a base model.

        Raises:
            InvalidInput: the weights are quantised, or vLLM computes the family's layers differently there, or not in the
                number type of the command line.
        """
        if offer.device == "cuda" or not (offer.engines or offer.ranks):
            return
        check_on_cpu(base, serves=offer.engines > 0)
        if offer.engines:
            check_number_types(self._config, base)


def check_number_types(config: ServerConfig, base: BaseModel) -> None:
    """Checks that an engine on a CPU can compute the model in the number type that the command line sets.

    Raises:
        InvalidInput: the engine cannot.
    """
    is_free = config.dtype in ("auto", "bfloat16") and not config.exact
    if base.facts.has_delta_rule and not is_free:
        flag = "--exact" if config.exact else f"--dtype {config.dtype}"
        raise InvalidInput(
            f"base_model '{base.name}' has gated delta layers, which vLLM computes on a CPU in bfloat16 only: start the server "
            f"without {flag}, or on a GPU",
            code="not_trainable",
            param="base_model",
        )
