"""What a plan means, in sentences."""

from collections.abc import Mapping

from .plan import Plan
from .plan_quantities import format_bytes

MEMORY_COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "state": "#009e73",
    "masters": "#cc79a7",
    "activations": "#56b4e9",
    "on top": "#8c8c8c",
}
"""Of parts, everywhere the same. They differ also for the colour-blind."""
PHASE_LABELS = {"making the optimizer": "making", "backward": "backward", "step": "step"}


def display_unit(plan: Plan) -> tuple[str, float]:
    """One for everything that is shown, so that numbers can be compared."""
    return ("GB", 1e9) if max(it.memory.peak for it in plan) >= 2e9 else ("MB", 1e6)


def format_headline(plan: Plan) -> str:
    """Without the name of the model, which comes from others."""
    buffers = f", {format_bytes(plan.model.buffer_bytes)} of buffers" if plan.model.buffer_bytes else ""
    frozen = sum(it.numel for it in plan.model.params if not it.trainable)
    still = f", {frozen:,} of them frozen" if frozen else ""
    rows = "" if plan.shard_group_size is None else f"; zeroshard in rows of {plan.shard_group_size} ranks"
    return f"{plan.model.numel:,} parameters{still}{buffers}, {plan.optimizer}, {plan.precision}{rows}"


def format_min_ranks(plan: Plan) -> str | None:
    """With 80 GB a rank, on the planned ranks: DDP never, torch ZeRO from 64 ranks, ..."""
    if plan.memory is None:
        return None
    numbers = sorted({it.ranks for it in plan})
    words = ", ".join(
        f"{method} {_format_min_ranks_of_method(least, numbers)}" for method, least in plan.min_ranks().items()
    )
    before = "" if any(it.memory.activations for it in plan) else ", before activations"
    where = f", on {' and '.join(f'{it:,}' for it in numbers)} ranks" if len(numbers) < 4 else ", of the planned ranks"
    return f"With {format_bytes(plan.memory)} a rank{where}{before}: {words}."


def _format_min_ranks_of_method(min_ranks: int | None, planned_ranks: list[int]) -> str:
    if min_ranks is None:
        return "never" if len(planned_ranks) > 1 else "does not fit"
    if min_ranks == planned_ranks[0]:
        return "always" if len(planned_ranks) > 1 else "fits"
    return f"from {min_ranks:,} ranks"


def format_peer_checkpoint_traffic(plan: Plan) -> str | None:
    """Second copies: for each a rank sends 1.5 GB on 8 ranks, 188 MB on 64 ranks."""
    sent = {it.ranks: it.peer_checkpoint_bytes for it in plan if it.peer_checkpoint_bytes}
    if not sent:
        return None
    words = ", ".join(f"{format_bytes(count)} on {ranks:,} ranks" for ranks, count in sent.items())
    return f"Second copies: for each a rank sends {words}. Host memory is that while the next is under way."


def format_exclusions(plan: Plan) -> str:
    said = max(it.memory.activations for it in plan)
    counted = f"Counted are {format_bytes(said)} of activations, in backward. " if said else ""
    activations = "" if said else "activations (--activations says how much they take), "
    return (
        f"{counted}Not counted: {activations}memory that the allocator loses to fragmentation, and the CUDA context "
        "(around half a GB)."
    )


def format_network_assumptions(plan: Plan) -> str:
    network = plan.network
    row = "" if network.within is None else f" ({format_bytes(network.within)}/s inside a row)"
    return (
        f"Network time: what a step sends, at {format_bytes(network.bandwidth)}/s{row} and {network.latency * 1e6:g} "
        "us a message, if nothing overlaps; at best, with log2 N messages one after the other in a collective."
    )


def breakdown_at_peak(row: Mapping[str, int], phase: str) -> dict[str, int]:
    """Parts that add up to the peak: what is kept, and what is on top of it in that phase."""
    parts = {part: row[part] for part in ("parameters", "gradients", "state", "masters")}
    parts["activations"] = row["activations"] if phase == "backward" else 0
    return {**parts, "on top": row["peak"] - sum(parts.values())}
