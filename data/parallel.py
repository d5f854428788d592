"""One training run on many processes, as torchrun starts them: one for each GPU, or on CPUs over gloo.

- `processes`: joins the group that torchrun describes, and `report_error`, by which one error is said once;
- `agree`, `averaged`, `largest`, `first`: sums, means and maxima over processes, and what rank 0 does before others;
- `shard`, `Engine`: FSDP2 or DDP around a model whose loss is more than one forward; `AdamW`, its optimiser;
- `gathered`, `placed`: whole tensors for a checkpoint, and back to where their shards lie;
- `catch_stop_signals`: SIGTERM, and Ctrl-C where there are many processes, stop them all after the same step.
Without torchrun there is one process, and none of these communicates.
"""
import contextlib
import os
import signal
import sys
import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

STOP = []  # signals that ask for an end; looked at between steps
FAILED = []  # what report_error was told
STORE = CONTROL = None  # of the group: a key-value store, and gloo for numbers that the CPU needs


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def world_size():
    return dist.get_world_size() if dist.is_initialized() else 1


@contextlib.contextmanager
def processes():
    """Be one of torchrun's processes while it lasts; rank 0 alone has a stdout. Nothing without torchrun."""
    global STORE, CONTROL
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            yield
            return
        STORE, number, count = next(dist.rendezvous("env://"))
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=STORE, rank=number, world_size=count)
        CONTROL = dist.new_group(backend="gloo", timeout=timedelta(hours=2))  # rank 0 may write for long
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if number == 0 else nowhere):
            yield
        if not FAILED:  # taking leave of a process that is lost can hang; the end of this one does it too
            dist.destroy_process_group()
    finally:
        STORE = CONTROL = None
        STOP.clear()
        FAILED.clear()
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                signal.signal(number, handler)


def use_gpu():
    """Make the GPU of this process the current one. ValueError when the machine has none for it."""
    local = int(os.environ.get("LOCAL_RANK", 0)) if dist.is_initialized() else 0
    if local >= torch.cuda.device_count():
        raise ValueError(f"--nproc-per-node starts {os.environ.get('LOCAL_WORLD_SIZE', local + 1)} processes, and this "
                         f"machine shows {torch.cuda.device_count()} GPUs: start as many processes as GPUs")
    torch.cuda.set_device(local)


def report_error(message):
    """One line on stderr from the first process that has an error; those that it takes along are silent."""
    FAILED.append(message)
    if claim("reported"):
        print(message, file=sys.stderr, flush=True)


def claim(name):
    """Whether this process is the first one to ask for `name`; none waits for another."""
    with contextlib.suppress(RuntimeError):  # the store itself is gone
        return STORE is None or STORE.add(name, 1) == 1
    return True


def lost_process(error):
    """Whether an exception, or the one that it interrupted, says that another process is gone. torchrun then ends
    those that are left and what they started, so that a missing loader of batches may be the last thing they see."""
    while dist.is_initialized() and error is not None:
        if isinstance(error, dist.DistError) or "gloo" in str(error):
            return True
        error = error.__context__
    return False


def catch_stop_signals():
    """From now to the end of `processes`: SIGTERM is a KeyboardInterrupt in a process alone. Many processes must stop
    after the same step, so there SIGTERM and Ctrl-C only ask for it, and `agree` raises in all of them."""
    if threading.current_thread() is not threading.main_thread():
        return  # signals are not a thread's to handle

    def interrupt(number, frame):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second one would spoil the save
        raise KeyboardInterrupt
    if dist.is_initialized():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: STOP.append(number))
    else:
        signal.signal(signal.SIGTERM, interrupt)


# ----------------------------------------------------------------------------- numbers

def summed(values):
    """A list of numbers, each summed over processes. On the CPU: nothing waits for a GPU."""
    if not dist.is_initialized():
        return list(values)
    total = torch.tensor([float(value) for value in values], dtype=torch.float64)
    dist.all_reduce(total, group=CONTROL)
    return total.tolist()


def largest(value):
    """The largest of the processes' numbers; all must call it."""
    if not dist.is_initialized():
        return value
    most = torch.tensor(float(value), dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX, group=CONTROL)
    return most.item()


def agree(values):
    """Numbers of a step, each summed over processes. KeyboardInterrupt in all processes if one was told to stop."""
    *total, stop = summed([*values, len(STOP)])
    if stop:
        raise KeyboardInterrupt
    return total


def averaged(values):
    """name -> tensor: the same, each the mean over processes, on the CPU."""
    if not dist.is_initialized():
        return {name: value.cpu() for name, value in values.items()}
    flat = summed([x for value in values.values() for x in value.flatten().tolist()])
    parts = torch.tensor(flat, dtype=torch.float64).div(world_size()).split([v.numel() for v in values.values()])
    return {name: part.view(value.shape) for (name, value), part in zip(values.items(), parts)}


def first(function, name="first"):
    """function() in rank 0, and then in the others, which find the files that it wrote. Once in a run for a name."""
    if STORE is None:
        return function()
    if rank():
        STORE.wait([name], timedelta(days=7))
    result = function()
    if rank() == 0:
        STORE.set(name, "done")
    return result


# ----------------------------------------------------------------------------- gradients

def shard(model, device):
    """FSDP2 on a Transformer, in place: a group for each block, one for each scorer, and one for the embedding, the
    final norm and the head. On a GPU the base computes in bf16; gradients are summed, and weights kept, in fp32."""
    mesh = init_device_mesh(device, (world_size(),))
    # inputs are not cast: cosines of RoPE in bf16 would misplace far tokens; autocast narrows the products
    policy = MixedPrecisionPolicy() if device == "cpu" else MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for scorer in getattr(model, "scorers", ()):
        if next(scorer.parameters(), None) is not None:
            # fp32, and whole until their backward: log_gamma() is asked after the forward
            fully_shard(scorer, mesh=mesh, reshard_after_forward=False)
            if hasattr(scorer, "logits"):
                register_fsdp_forward_method(scorer, "logits")
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)  # unembed comes after the forward


class AsForward(nn.Module):
    """A function of the model as a forward: DDP must see all that touches the weights, also where the base runs under
    no_grad and where logits are made chunk by chunk."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, function, *args, **flags):
        return function(*args, **flags)


class Engine:
    """Backward passes of a model whose gradients are averaged over processes, once a step. A model that `shard` has
    seen averages its own; any other is wrapped in DDP."""

    def __init__(self, model):
        self.sharded = hasattr(model, "set_requires_gradient_sync")
        self.model, self.call = model, AsForward(model)
        if world_size() > 1 and not self.sharded:
            # DDP would cut compiled graphs at its buckets, and cannot cut FlexAttention or checkpoints
            torch._dynamo.config.optimize_ddp = False
            self.call = DistributedDataParallel(self.call)

    def backward(self, last, function, *args, **flags):
        """Backward of the loss that function(*args) -> (loss, rest) returns -> rest. Gradients stay with the process
        until `last`, the last micro-batch of a step."""
        silent = contextlib.nullcontext()
        if self.sharded:
            self.model.set_requires_gradient_sync(last)
        elif world_size() > 1 and not last:
            silent = self.call.no_sync()
        with silent:
            loss, rest = self.call(function, *args, **flags)
            loss.backward()
        return rest


class AdamW(torch.optim.AdamW):
    """torch's, which for a sharded parameter works on this process's own shard as a plain tensor; its moments stay
    sharded tensors. Given a sharded one, the fused kernel with a rate in a tensor is tried out on zeros of the whole
    parameter, its gradient and moments, on the CPU of every process: 16 bytes a parameter, 131 GB for 8B
    (pytorch/pytorch#140874). And each step leaks a little (#188174)."""

    def _init_group(self, group, params_with_grad, grads, exp_avgs, exp_avg_sqs, *rest):
        found = super()._init_group(group, params_with_grad, grads, exp_avgs, exp_avg_sqs, *rest)
        for tensors in (params_with_grad, grads, exp_avgs, exp_avg_sqs):
            tensors[:] = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
        return found


# ----------------------------------------------------------------------------- checkpoints

def gathered(tree):
    """A tree of dicts and lists with its sharded tensors whole, on the CPU of rank 0 and None elsewhere, one tensor at
    a time. All processes must call it."""
    if isinstance(tree, DTensor):
        whole = tree.full_tensor()
        return whole.cpu() if rank() == 0 else None
    if isinstance(tree, dict):
        return {key: gathered(value) for key, value in tree.items()}
    return [gathered(value) for value in tree] if isinstance(tree, list) else tree


def placed(value, like):
    """A whole tensor as `like` is: cut into its shards, each process taking its own, or itself. Tensors of another
    shape, as a step count beside moments, stay."""
    if not isinstance(like, DTensor) or not isinstance(value, torch.Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
