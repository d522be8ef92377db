"""Write a program as the source text of a script. The pool runs exactly the script that a failure report shows."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache

from tests.programs import blocks, harness
from tests.programs.program import (
    MUON_AMPLIFIES,
    AddGroup,
    Backward,
    Clip,
    Consolidate,
    EditOptions,
    EditState,
    Evaluate,
    Freeze,
    Op,
    Program,
    RejectedCall,
    Restart,
    ScaleGrads,
    Step,
    UnevenInputs,
    ZeroGrad,
)

LOOSE_TOLERANCES = {
    "torch.float32": (2e-4, 2e-5),
    "torch.float64": (1e-4, 1e-6),
    "torch.bfloat16": (2e-2, 1e-2),
    "torch.complex64": (2e-4, 2e-5),
}
"""Tolerances for a different summation order: float32 sums differ by 1e-7, and steps amplify the difference."""

TIGHT_TOLERANCES = {**LOOSE_TOLERANCES, "torch.float64": (1e-7, 1e-10), "torch.float32": (1e-6, 1e-7)}
"""The same for float64 models, whose losses are float32."""

MUON_TOLERANCES = dict.fromkeys(LOOSE_TOLERANCES, (2e-2, 2e-2))
"""Muon's Newton-Schulz iterations in bfloat16 turn a relative difference of 3e-7 into up to a quarter of a step."""

OVERLAP_WARMUP = 2


def write_script(program: Program) -> str:
    """Return a script for torchrun with exit code 1 if zeroshard differs from DDP with the plain optimizer."""
    body = "\n".join([*_write_model(program), *_write_build(program), *_write_train(program), *_write_main(program)])
    helpers = _find_helpers(body)
    text = "\n\n\n".join([helpers, body.strip()]) if helpers else body
    return f"{_write_docstring(program)}\n{_find_imports(text)}\n\n{text}\n"


# ---- The parts of the script


def _write_docstring(program: Program) -> str:
    reasons = "".join(f"\nLast bits may differ: {reason}." for reason in program.tolerances())
    return (
        f'"""{", ".join(program.parts())}.{reasons}\n\n'
        "OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo torchrun --standalone --nproc-per-node "
        f"{program.ranks} program.py\n"
        'Exit code 1: zeroshard and DDP with the plain optimizer differ.\n"""\n'
    )


def _write_model(program: Program) -> Iterator[str]:
    yield "class Model(nn.Module):"
    yield "    def __init__(self) -> None:"
    yield "        super().__init__()"
    for number, block in enumerate(program.blocks):
        yield f"        self.b{number} = {block.kind}({block.variant})"
    yield ""
    yield "    def forward(self, x: Tensor) -> Tensor:"
    yield "        inputs = x.detach()"
    for number, block in enumerate(program.blocks):
        call = f"self.b{number}(x, inputs)"
        if block.checkpointed:
            reentrant = block.checkpointed == "reentrant"
            call = f"checkpoint_activations(self.b{number}, x, inputs, use_reentrant={reentrant})"
        yield f"        x = x + {call}"
    yield "        return x"
    yield "\n"


def _write_build(program: Program) -> Iterator[str]:
    mode = program.mode
    yield f"SIZE = {program.batch}"
    yield "\n"
    yield "def build(sharded: bool, seed: int = 0, group: Any = None, old: Any = None) -> Run:"
    yield f"    torch.manual_seed({program.seed} + seed + dist.get_rank())  # rank 0's values are broadcast"
    if program.dtype != "float32":
        yield f"    torch.set_default_dtype(torch.{program.dtype})"
    yield "    model = Model()"
    if program.dtype != "float32":
        yield "    torch.set_default_dtype(torch.float32)"
    yield "    run = Run(model, sharded, group)"
    if not mode.is_under_ddp and program.has_buffers:
        yield "    run.keeps_buffers = False"
    frozen = {f"b{number}" for number, block in enumerate(program.blocks) if block.frozen or block.late}
    if frozen or any(isinstance(op, Freeze) for op in program.loop):
        yield f"    run.frozen = set({sorted(frozen)!r}) if old is None else old.frozen"
        yield "    for name in run.frozen:"
        yield "        model.get_submodule(name).requires_grad_(False)"
    yield from _write_groups(program)
    yield ""
    yield "    if sharded:"
    yield from _indent(_write_sharded(program))
    yield "    else:"
    yield from _indent(_write_plain(program))
    yield from _indent(_write_common(program), 1)
    yield "    return run"
    yield "\n"


def _write_groups(program: Program) -> Iterator[str]:
    late = [f"b{number}." for number, block in enumerate(program.blocks) if block.late]
    params = "model.named_parameters()"
    if late:
        params = f"[(name, param) for name, param in {params} if not name.startswith({tuple(late)!r})]"
    if program.optimizer.kind == RULES:
        return
    yield f"    named = list({params})"
    if program.optimizer.groups == "one":
        yield '    groups: list[dict[str, Any]] = [{"params": named}]'
    elif program.optimizer.groups == "by dimensions":
        yield "    matrices = [(name, param) for name, param in named if param.dim() > 1]"
        yield "    others = [(name, param) for name, param in named if param.dim() <= 1]"
        yield '    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "lr": 0.02}]'
    else:
        yield '    groups = [{"params": named[1::2], "lr": 0.03}, {"params": named[::2]}]'


RULES = "Muon + AdamW"


def _write_sharded(program: Program) -> Iterator[str]:
    mode, optimizer = program.mode, program.optimizer
    config = _write_config(program)
    options = "".join(f", {name}={value!r}" for name, value in optimizer.options)
    if mode.kind == "shard":
        group_option = ""
        if mode.shard_group_size:
            yield "world_size = dist.get_world_size(group)"
            yield f"group_size = {mode.shard_group_size} if group is None else world_size"
            group_option = ", shard_group_size=group_size"
            if mode.mesh:
                yield "mesh_shape = (world_size // group_size, group_size)"
                yield "names = ('replicate', 'shard')"
                yield "mesh = init_device_mesh('cpu', mesh_shape, mesh_dim_names=names) if group is None else None"
                group_option = ", mesh=mesh"
        if optimizer.kind == RULES:
            yield "rules = ["
            yield "    zeroshard.ParamRule(is_matrix, torch.optim.Muon, lr=0.02, weight_decay=0.1),"
            yield f"    zeroshard.ParamRule(zeroshard.remaining_params, torch.optim.AdamW{options}),"
            yield "]"
            arguments, options = "rules", ""
        else:
            arguments = f"torch.optim.{optimizer.kind}, params=groups"
        call = f"zeroshard.shard(model, {arguments}, process_group=group{group_option}{config}{options})"
        yield f"optimizer = {call}"
        yield "run.no_sync = optimizer.no_sync"
        yield "run.optimizers = [optimizer]"
        return
    flags = ", parameters_as_bucket_view=True" if mode.kind == "bucket_view" else ""
    flags += ", overlap_with_ddp=True" if mode.is_overlapped else ""
    if mode.kind == "ddp_hook":
        yield "run.net = DistributedDataParallel(model, process_group=group)  # broadcasts rank 0's values"
    else:
        yield from _write_ddp_wrapper(program, "")
        yield "wrap(group, init_sync=True)"
    if mode.is_overlapped:
        hook = "hook_with_zero_step" + ("_interleaved" if mode.kind == "overlap_interleaved" else "")
        shards = ", shard_buckets=True" if mode.small_buckets else ""
        yield "optimizer = zeroshard.ZeroRedundancyOptimizer("
        yield f"    groups, torch.optim.{optimizer.kind}{flags}{config}{options}"
        yield ")"
        yield f"hook = zeroshard.ddp_hooks.{hook}(allreduce_hook, run.net, optimizer{shards})"
        yield "run.net.register_comm_hook(None, hook)"
    else:
        yield "optimizer = zeroshard.ZeroRedundancyOptimizer("
        yield f"    groups, torch.optim.{optimizer.kind}, process_group=group{flags}{config}{options}"
        yield ")"
    if mode.kind == "ddp_hook":
        yield from _write_ddp_wrapper(program, "optimizer.ddp_hook()")
        yield "wrap(group)"
    yield "run.wrap = wrap"
    yield "run.optimizers = [optimizer]"


def _write_plain(program: Program) -> Iterator[str]:
    mode, optimizer = program.mode, program.optimizer
    dtype_option = f", reduce_dtype=torch.{mode.reduce_dtype}" if mode.reduce_dtype else ""
    size_option = f", shard_group_size={mode.shard_group_size} if group is None else 0" if mode.shard_group_size else ""
    options = "".join(f", {name}={value!r}" for name, value in optimizer.options)
    averages_here = mode.master_weights and mode.shards_grads
    if averages_here:
        yield "broadcast_params(model, group)"
    elif mode.shards_grads:
        yield from _write_ddp_wrapper(program, f"averaging_hook(group{size_option}{dtype_option})")
    else:
        yield from _write_ddp_wrapper(program, "allreduce_hook" if mode.is_overlapped else "")
    if not averages_here:
        yield "wrap(group, init_sync=True)"
        yield "run.wrap = wrap"
    if optimizer.kind == RULES:
        yield "named = list(model.named_parameters())"
        yield "matrices = [(name, param) for name, param in named if is_matrix(name, param)]"
        yield "others = [(name, param) for name, param in named if not is_matrix(name, param)]"
        yield "muon = torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1)"
        yield f"run.optimizers = [muon, torch.optim.AdamW(others{options})]"
    elif mode.master_weights:
        yield "def make(groups: Any) -> torch.optim.Optimizer:"
        yield f"    return torch.optim.{optimizer.kind}(groups{options})"
        yield ""
        if averages_here:
            dtype = f"torch.{mode.reduce_dtype}" if mode.reduce_dtype else "None"
            yield "def average_grad(grad: Tensor) -> Tensor:"
            yield "    grads = all_gather(grad, run.group)"
            yield f"    return average(grads, {mode.shard_group_size or 'len(grads)'}, {dtype})"
            yield ""
        yield f"run.optimizers = [MasterOptimizer(run, make, groups, {'average_grad' if averages_here else 'None'})]"
    else:
        yield f"run.optimizers = [torch.optim.{optimizer.kind}(groups{options})]"


def _write_ddp_wrapper(program: Program, hook: str) -> Iterator[str]:
    """Write `wrap`, which wraps the model in DDP, also later if the trainable parameters or the ranks change."""
    unused = ", find_unused_parameters=True" if program.finds_unused else ""
    small = ", bucket_cap_mb=0.0005" if program.mode.small_buckets else ""
    yield "def wrap(group: Any, init_sync: bool = False) -> None:"
    yield "    run.net = run.no_sync = None  # the old DDP removes its hooks"
    yield f"    run.net = DistributedDataParallel(model, process_group=group{unused}{small}, init_sync=init_sync)"
    if hook:
        yield f"    run.net.register_comm_hook(None, {hook})"
    yield "    run.no_sync = run.net.no_sync"
    yield ""


def _write_common(program: Program) -> Iterator[str]:
    """Write the part of `build` that is the same for both sides."""
    scheduler = program.optimizer.scheduler
    yield "if old is not None:"
    yield "    run.log, run.passes, run.scaler = old.log, old.passes, old.scaler"
    if any(block.late for block in program.blocks):
        yield "    for name in old.added:"
        yield "        add_group(run, name)"
    if program.scaler:
        module = "zeroshard" if program.mode.shards_grads else "torch.amp"
        options = "(device='cpu', init_scale=1024.0, growth_interval=2)"
        yield "else:"
        if module == "zeroshard":
            yield f"    run.scaler = zeroshard.GradScaler{options} if sharded else torch.amp.GradScaler{options}"
        else:
            yield f"    run.scaler = torch.amp.GradScaler{options}"
    if scheduler:
        calls = {
            "StepLR": "lr_scheduler.StepLR(OPTIMIZER, 2)",
            "ExponentialLR": "lr_scheduler.ExponentialLR(OPTIMIZER, 0.8)",
            "CosineAnnealingLR": "lr_scheduler.CosineAnnealingLR(OPTIMIZER, 3)",
            "OneCycleLR": "lr_scheduler.OneCycleLR(OPTIMIZER, 0.05, total_steps=40, cycle_momentum=False)",
            "ReduceLROnPlateau": "lr_scheduler.ReduceLROnPlateau(OPTIMIZER, patience=0)",
        }
        optimizer = "getattr(optimizer, 'inner', optimizer)" if program.mode.master_weights else "optimizer"
        yield f"run.schedulers = [{calls[scheduler].replace('OPTIMIZER', optimizer)} for optimizer in run.optimizers]"


def _write_config(program: Program) -> str:
    mode, options = program.mode, []
    bucket_option = "bucket_bytes=400" if mode.small_buckets else ""
    if mode.kind in ("flat", "ddp_hook") or (mode.kind == "shard" and bucket_option and not mode.whole_params):
        options.append(f"partition=zeroshard.FlatShards({bucket_option})")
    if mode.whole_params:
        options.append("partition=zeroshard.WholeParams()")
    if mode.kind == "shard" and mode.stage == 1:
        options.append("stage=1")
    if mode.reduce_dtype:
        options.append(f"reduce_dtype=torch.{mode.reduce_dtype}")
    if mode.master_weights:
        options.append("master_dtype=torch.float32")
    if mode.offload:
        options.append("offload=zeroshard.CPUOffload()")
    if mode.skip_nonfinite:
        options.append('nonfinite=zeroshard.NonFiniteGrads("skip")')
    if mode.overlap_param_gather:
        options.append("overlap_param_gather=True")
    if mode.is_under_ddp and program.is_mixed:
        options.append("allow_mixed_dtypes=True")
    return f", config=zeroshard.ZeroConfig({', '.join(options)})" if options else ""


def _write_train(program: Program) -> Iterator[str]:
    if program.mode.offload:
        yield "@offload_without_gpu()"
    yield "def train(sharded: bool) -> list[tuple[str, Any]]:"
    yield "    run = build(sharded)"
    has_restart = any(isinstance(op, Restart) for op in program.loop)
    if has_restart:
        yield "    directory = make_directory()"
    for op in program.loop:
        yield from _indent(_write_op(program, op), 1)
    yield "    record_model(run, stepped=False)"
    yield "    record_state(run)"
    if has_restart:
        yield "    remove_directory(directory)"
    yield "    return run.log"
    yield "\n"


def _write_op(program: Program, op: Op) -> Iterator[str]:  # noqa: C901
    mode = program.mode
    match op:
        case Backward(local, synced, nonfinite_rank):
            options = f", local={local}" if any(local) else ""
            options += "" if synced else ", synced=False"
            options += f", nonfinite_rank={nonfinite_rank}" if nonfinite_rank >= 0 else ""
            yield f"backward(run, SIZE{options})"
            if not synced and not mode.master_weights:
                dtype = f"torch.{mode.reduce_dtype}" if mode.reduce_dtype else "None"
                yield f"average_manually(run, {mode.shard_group_size}, {dtype})"
        case Clip(kind, limit, by_torch):
            yield f"clip(run, {kind!r}, {limit}{', by_torch=True' if by_torch else ''})"
        case ScaleGrads():
            yield "scale_grads(run)"
        case Step(closure, record):
            options = "" if record else ", record=False"
            if mode.is_overlapped:
                yield f"step_after_overlap(run, {OVERLAP_WARMUP}{options})"
                return
            options += ", closure=True" if closure else ""
            options += ", skip_nonfinite=True" if mode.skip_nonfinite else ""
            yield f"step(run, SIZE{options})"
        case ZeroGrad(by, to_none):
            options = "" if by == "optimizer" else f", by={by!r}"
            options += "" if to_none else ", to_none=False"
            yield f"zero_grad(run{options})"
        case EditState(edit):
            yield f"edit_state(run, {edit!r})"
        case EditOptions(factor):
            yield f"edit_options(run, {factor})"
        case Freeze(block, frozen):
            yield f"freeze(run, 'b{block}', {frozen})"
        case AddGroup(block):
            yield f"add_group(run, 'b{block}')"
        case Evaluate(rank):
            yield f"evaluate(run, {rank}, SIZE)"
        case Consolidate():
            yield "record_state(run)"
        case UnevenInputs(counts):
            yield f"train_unevenly(run, {counts}, SIZE)"
        case Restart(via, ranks):
            if ranks:
                yield f"group = dist.new_group({list(range(ranks))})  # the job continues on these ranks"
                yield f"run = restart(build, run, directory, {via!r}, group)"
                yield "if run.is_member:"
                yield "    backward(run, SIZE)"
                options = ", skip_nonfinite=True" if mode.skip_nonfinite else ""
                yield f"    step(run, SIZE{options})"
                yield "else:"
                yield "    run.passes += 1"
                yield f"run = restart(build, run, directory, {via!r})"
            else:
                yield f"run = restart(build, run, directory, {via!r})"
        case RejectedCall(call):
            yield from _write_rejected_call(call)


REJECTED_CALLS = {
    "load": "run.optimizers[0].load_state_dict({'state': {}, 'param_groups': []})",
    "state_dict": "run.optimizers[0].state_dict()",
    "known parameter": "run.optimizers[0].add_param_group({'params': [run.params()[0]]})",
    "LBFGS": "zeroshard.shard(MLP(0), torch.optim.LBFGS)",
    "flat Muon": (
        "zeroshard.shard(nn.Linear(3, 3, bias=False), torch.optim.Muon, "
        "config=zeroshard.ZeroConfig(partition=zeroshard.FlatShards()))"
    ),
    "shard of DDP": "zeroshard.shard(DistributedDataParallel(MLP(0)), torch.optim.SGD)",
    "mixed dtypes": (
        "zeroshard.ZeroRedundancyOptimizer([torch.zeros(2), torch.zeros(2, dtype=torch.float64)], torch.optim.SGD)"
    ),
    "option that differs": "zeroshard.shard(MLP(0), torch.optim.SGD, lr=0.1 + dist.get_rank())",
    "torch clip": "torch.nn.utils.clip_grad_norm_(run.params(), 1.0)",
    "read grad": "[param.grad + 1 for param in run.params() if param.grad is not None][0]",
    "step after torch clip": "clip_by_torch_and_step(run)",
    "step in which lr differs": "step_with_different_lr(run)",
    "ddp_hook": "run.optimizers[0].ddp_hook()",
    "add_param_group": "run.optimizers[0].add_param_group({'params': [nn.Parameter(torch.zeros(3))]})",
}


def _write_rejected_call(call: str) -> Iterator[str]:
    yield f"assert_rejected(run, {call!r}, lambda: {REJECTED_CALLS[call]})"


def _indent(lines: Iterator[str], levels: int = 2) -> Iterator[str]:
    for line in lines:
        yield f"{'    ' * levels}{line}" if line else ""


def _write_main(program: Program) -> Iterator[str]:
    is_float64 = program.dtype == "float64" and not program.is_mixed
    reasons = program.tolerances()
    tolerances = MUON_TOLERANCES if MUON_AMPLIFIES in reasons else TIGHT_TOLERANCES if is_float64 else LOOSE_TOLERANCES
    tolerances = tolerances if reasons else {}
    text = ", ".join(f"{dtype}: {values}" for dtype, values in tolerances.items())
    yield f"TOLERANCES: dict[torch.dtype, tuple[float, float]] = {{{text}}}"
    yield "\n"
    yield 'if __name__ == "__main__":'
    yield '    warnings.simplefilter("ignore")'
    yield '    dist.init_process_group("gloo")'
    yield "    try:"
    yield "        verdict = judge(train, TOLERANCES)"
    yield "    except AssertionError as error:"
    yield "        sys.exit(str(error))"
    yield '    print(f"rank {dist.get_rank()}: {verdict}")'
    yield "    dist.destroy_process_group()"


# ---- Helpers and imports that the script needs


@cache
def _sources() -> dict[str, str]:
    """Return the source of functions and classes that scripts may contain, in the order of definition."""
    found: list[tuple[str, int, str]] = []
    for module in (harness, blocks):
        for name, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and callable(value):
                lines, start = inspect.getsourcelines(value)
                found.append((name, start + (10_000 if module is blocks else 0), "".join(lines).rstrip()))
    return {name: source for name, _, source in sorted(found, key=lambda item: item[1])}


def _find_helpers(text: str) -> str:
    sources, queue = _sources(), [_find_names(text)]
    needed: set[str] = set()
    while queue:
        for name in queue.pop() & set(sources) - needed:
            needed.add(name)
            queue.append(_find_names(sources[name]))
    return "\n\n\n".join(re.sub(r"  # type: ignore\S*", "", sources[name]) for name in sources if name in needed)


@cache
def _find_names(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


def _find_imports(text: str) -> str:
    used = _find_names(text)
    lines: list[str] = []
    for line in harness.HEADER.splitlines():
        if not line:
            lines.append(line)
            continue
        (node,) = ast.parse(line).body
        assert isinstance(node, (ast.Import, ast.ImportFrom))
        node.names = [name for name in node.names if (name.asname or name.name).split(".")[0] in used]
        if node.names:
            lines.append(ast.unparse(node))
    return "\n".join(lines)
