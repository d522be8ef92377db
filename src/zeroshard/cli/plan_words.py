"""What a plan means, in sentences."""

from collections.abc import Mapping

from ..planning.plan import Plan
from .plan_quantities import in_bytes

COLOURS = {
    "parameters": "#0072b2",
    "gradients": "#e69f00",
    "state": "#009e73",
    "masters": "#cc79a7",
    "activations": "#56b4e9",
    "on top": "#8c8c8c",
}
"""Of parts, everywhere the same. They differ also for the colour-blind."""
PHASES = {"making the optimizer": "making", "backward": "backward", "step": "step"}


def unit_of(plan: Plan) -> tuple[str, float]:
    """One for everything that is shown, so that numbers can be compared."""
    return ("GB", 1e9) if max(it.usage.peak for it in plan) >= 2e9 else ("MB", 1e6)


def headline(plan: Plan) -> str:
    """Without the name of the model, which comes from others."""
    buffers = f", {in_bytes(plan.model.buffers)} of buffers" if plan.model.buffers else ""
    frozen = sum(it.numel for it in plan.model.params if not it.trainable)
    still = f", {frozen:,} of them frozen" if frozen else ""
    rows = "" if plan.shard_within is None else f"; zeroshard in rows of {plan.shard_within} ranks"
    return f"{plan.model.elements:,} parameters{still}{buffers}, {plan.optimizer}, {plan.precision}{rows}"


def what_fits(plan: Plan) -> str | None:
    """With 80 GB a rank, on the planned ranks: DDP never, torch ZeRO from 64 ranks, ..."""
    if plan.memory is None:
        return None
    numbers = sorted({it.ranks for it in plan})
    words = ", ".join(f"{method} {_from(least, numbers)}" for method, least in plan.least_ranks().items())
    before = "" if any(it.usage.activations for it in plan) else ", before activations"
    where = f", on {' and '.join(f'{it:,}' for it in numbers)} ranks" if len(numbers) < 4 else ", of the planned ranks"
    return f"With {in_bytes(plan.memory)} a rank{where}{before}: {words}."


def _from(least: int | None, numbers: list[int]) -> str:
    if least is None:
        return "never" if len(numbers) > 1 else "does not fit"
    if least == numbers[0]:
        return "always" if len(numbers) > 1 else "fits"
    return f"from {least:,} ranks"


def copies(plan: Plan) -> str | None:
    """Second copies: for each a rank sends 1.5 GB on 8 ranks, 188 MB on 64 ranks."""
    sent = {it.ranks: it.copies for it in plan if it.copies}
    if not sent:
        return None
    words = ", ".join(f"{in_bytes(count)} on {ranks:,} ranks" for ranks, count in sent.items())
    return f"Second copies: for each a rank sends {words}. Host memory is that while the next is under way."


def not_counted(plan: Plan) -> str:
    said = max(it.usage.activations for it in plan)
    counted = f"Counted are {in_bytes(said)} of activations, in backward. " if said else ""
    activations = "" if said else "activations (--activations says how much they take), "
    return (
        f"{counted}Not counted: {activations}memory that the allocator loses to fragmentation, and the CUDA context "
        "(around half a GB)."
    )


def assumed(plan: Plan) -> str:
    network = plan.network
    row = "" if network.within is None else f" ({in_bytes(network.within)}/s inside a row)"
    return (
        f"Network time: what a step sends, at {in_bytes(network.bandwidth)}/s{row} and {network.latency * 1e6:g} us a "
        "message, if nothing overlaps; at best, with log2 N messages one after the other in a collective."
    )


def at_the_peak(row: Mapping[str, int], phase: str) -> dict[str, int]:
    """Parts that add up to the peak: what is kept, and what is on top of it in that phase."""
    parts = {part: row[part] for part in ("parameters", "gradients", "state", "masters")}
    parts["activations"] = row["activations"] if phase == "backward" else 0
    return {**parts, "on top": row["peak"] - sum(parts.values())}
