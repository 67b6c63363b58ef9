"""A rank of two or four: optimizers on DTensors. Started by torchrun with the name of a check, and a folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint import state_dict as states_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Optimizer

from ds_plugin_sdk import torch_threads
from ds_plugin_sdk.errors import InvalidTensorError
from ds_plugin_sdk.optim import FusedAdagrad, FusedAdam, FusedLamb, FusedLion

Make = Callable[[Any], Optimizer]
ADAM: Make = lambda params: FusedAdam(params, lr=1e-2, weight_decay=0.1)  # noqa: E731  # beside the others
OURS: dict[str, Make] = {
    "adam": ADAM,
    "adagrad": lambda params: FusedAdagrad(params, lr=1e-2, weight_decay=0.1),
    "lion": lambda params: FusedLion(params, lr=1e-3, weight_decay=0.1),
}
TORCH: dict[str, Make] = {
    "adam": lambda params: torch.optim.AdamW(params, lr=1e-2, weight_decay=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2, weight_decay=0.1),
}
LAMB: Make = lambda params: FusedLamb(params, lr=1e-2, weight_decay=0.1, max_grad_norm=0.05)  # noqa: E731  # as ADAM


def plain(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), nn.GELU(), nn.Linear(8, 5), nn.LayerNorm(5), nn.Linear(5, 1)).to(dtype)


def sharded(dtype: torch.dtype = torch.float32) -> nn.Module:
    """FSDP2: of 5 rows ranks have 3 and 2, of one row the second has none."""
    model = plain(dtype)
    fully_shard(model, mesh=init_device_mesh("cpu", (distributed.get_world_size(),)))
    return model


def divided(dtype: torch.dtype = torch.float32, mesh: DeviceMesh | None = None) -> nn.Module:
    """Tensor parallelism of two linear layers; the others have plain parameters."""
    mesh = mesh or init_device_mesh("cpu", (distributed.get_world_size(),))
    return parallelize_module(plain(dtype), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})


def in_two_dimensions(dtype: torch.dtype = torch.float32) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = divided(dtype, mesh["tensor"])
    fully_shard(model, mesh=mesh["data"])
    return model


def train(
    model: nn.Module, optimizer: Optimizer, steps: int = 4, seed: int = 1, *, clip: bool = True
) -> Iterator[None]:
    """Stops before each step of the optimizer, when there are gradients."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        optimizer.zero_grad()
        inputs = torch.randn(6, 5, generator=generator).to(next(model.parameters()).dtype)
        model(inputs).float().square().mean().backward()
        params = [param for param in model.parameters() if isinstance(param, DTensor) and clip]
        for mesh in dict.fromkeys(param.device_mesh for param in params):  # torch adds up the norms of one
            nn.utils.clip_grad_norm_([param for param in params if param.device_mesh == mesh], 0.02)
        yield
        optimizer.step()


def run(model: nn.Module, optimizer: Optimizer, steps: int = 4, seed: int = 1, *, clip: bool = True) -> list[Tensor]:
    for _ in train(model, optimizer, steps, seed, clip=clip):
        pass
    return full(model.parameters())


def full(tensors: Any) -> list[Tensor]:
    return [(x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for x in tensors]


def assert_close(left: list[Tensor], right: list[Tensor], rtol: float = 1e-5, atol: float = 1e-6) -> None:
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=rtol, atol=atol)


def assert_error(call: Callable[[], Any], *texts: str) -> None:
    try:
        call()
    except InvalidTensorError as error:
        for text in texts:
            assert text in str(error), error
    else:
        raise AssertionError(texts)


def follows_torch(make_model: Callable[..., nn.Module]) -> None:
    """Torch's optimizer on a model of the same kind, and ours on whole parameters with the same gradients."""
    for name, make in OURS.items():
        for dtype in (torch.float32, torch.bfloat16):
            model, twin = make_model(dtype), plain(dtype)
            optimizer, other = make(model.parameters()), make(twin.parameters())
            for _ in train(model, optimizer):
                for param, grad in zip(twin.parameters(), full(p.grad for p in model.parameters()), strict=True):
                    param.grad = grad
                other.step()
            assert_close(full(model.parameters()), full(twin.parameters()), atol=1e-7)
            if dtype == torch.float32 and name in TORCH:
                theirs = make_model()
                assert_close(full(model.parameters()), run(theirs, TORCH[name](theirs.parameters())))
            for param in model.parameters():
                for key, state in optimizer.state[param].items():
                    assert key == "step" or type(state) is type(param.data), (key, type(state))
                    assert key == "step" or getattr(state, "placements", 0) == getattr(param, "placements", 0)


def optimizers() -> None:
    follows_torch(sharded)
    follows_torch(divided)


def two_dimensions() -> None:
    follows_torch(in_two_dimensions)


def checkpoints(folder: str) -> None:
    """Saved from FSDP2; loaded into FSDP2, tensor parallelism and a whole model, which go on as the first does."""
    for name, make in OURS.items():
        model = sharded()
        optimizer = make(model.parameters())
        run(model, optimizer, 3)
        weights, states = states_of.get_state_dict(model, optimizer)
        checkpoint.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/{name}")
        expected = run(model, optimizer, 3, seed=2, clip=False)
        for make_model in (sharded, divided, plain):
            other = make_model()
            loaded = make(other.parameters())
            weights, states = states_of.get_state_dict(other, loaded)
            saved = {"model": weights, "optimizer": states}
            checkpoint.load(saved, checkpoint_id=f"{folder}/{name}")
            states_of.set_state_dict(
                other, loaded, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
            )
            assert {state["step"] for state in loaded.state.values()} == {3}
            assert_close(run(other, loaded, 3, seed=2, clip=False), expected)


def whole_checkpoints() -> None:
    """State dicts of whole tensors, to and from models that are divided."""
    options = states_of.StateDictOptions(full_state_dict=True)
    for make in OURS.values():
        model, other = sharded(), sharded()
        optimizer, loaded = make(model.parameters()), make(other.parameters())
        run(model, optimizer, 3)
        parts = list(states_of.get_state_dict(model, optimizer, options=options))
        distributed.broadcast_object_list(parts, src=0)
        states_of.set_state_dict(other, loaded, model_state_dict=parts[0], optim_state_dict=parts[1], options=options)
        assert_close(run(model, optimizer, 3, seed=2), run(other, loaded, 3, seed=2), 0, 0)


def gradients() -> None:
    """Gradients that are laid out in other ways than their parameters, or that a collective is still writing."""
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    values, grad = torch.randn(5, 3), torch.randn(5, 3)
    for make in (*OURS.values(), LAMB):
        twin = nn.Parameter(values.clone())
        twin.grad = grad.clone()
        other = make([twin])
        other.step()
        for placement in (Replicate(), Shard(0), Shard(1)):
            if make is LAMB and placement != Replicate():
                continue
            for laid_out in (Replicate(), Shard(0), Shard(1), Partial(), "asynchronous"):
                param = nn.Parameter(distribute_tensor(values.clone(), mesh, [placement]))
                if isinstance(laid_out, str):
                    half = DTensor.from_local(grad / 2, mesh, [Partial()])
                    param.grad = half.redistribute(placements=[placement], async_op=True)
                elif laid_out == Partial():
                    param.grad = DTensor.from_local(grad / 2, mesh, [Partial()])
                else:
                    param.grad = distribute_tensor(grad, mesh, [laid_out])
                optimizer = make([param])
                optimizer.step()
                assert_close(full([param]), full([twin]))


def later() -> None:
    """An optimizer that has stepped before its parameters were replaced by DTensors, as accelerate does."""
    model, twin = plain(torch.bfloat16), plain(torch.bfloat16)
    optimizer, other = (FusedAdam(each.parameters(), lr=1e-2, state_dtype=torch.float32) for each in (model, twin))
    run(twin, other)
    run(model, optimizer)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer.param_groups[0]["params"] = list(model.parameters())
    optimizer.state.clear()
    other.state.clear()
    for _ in train(model, optimizer):
        for param, grad in zip(twin.parameters(), full(p.grad for p in model.parameters()), strict=True):
            param.grad = grad
        other.step()
    assert_close(full(model.parameters()), full(twin.parameters()), 0, 0)
    assert {state["exp_avg"].dtype for state in optimizer.state.values()} == {torch.float32}


def lamb() -> None:
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    shapes = [(5, 3), (4,), (3, 3)]
    values = [torch.randn(shape) for shape in shapes]
    alone = [nn.Parameter(value.clone()) for value in values]
    mixed = [nn.Parameter(values[0].clone())]
    mixed += [nn.Parameter(distribute_tensor(value.clone(), mesh, [Replicate()])) for value in values[1:]]
    theirs, ours = LAMB(alone), LAMB(mixed)
    for step in range(3):
        for left, right in zip(alone, mixed, strict=True):
            left.grad = torch.randn(left.shape)
            right.grad = distribute_tensor(left.grad, mesh, [Shard(0)]) if isinstance(right, DTensor) else left.grad
        norm = torch.nn.utils.get_total_norm(p.grad for p in alone)
        options = {"grad_norm": distribute_tensor(norm, mesh, [Replicate()])} if step == 1 else {}
        theirs.step()
        ours.step(**options)
    assert_close(full(mixed), full(alone))
    torch.testing.assert_close(torch.tensor(ours.get_lamb_coeffs()), torch.tensor(theirs.get_lamb_coeffs()))
    model = sharded()
    before = full(model.parameters())
    text = "a parameter of shape [8, 5] is divided among ranks (op 'lamb'): the update needs norms of the whole of it"
    assert_error(lambda: run(model, LAMB(model.parameters()), 1), text, "FusedAdam")
    assert_close(full(model.parameters()), before, 0, 0)


def errors() -> None:
    mesh, other_mesh = init_device_mesh("cpu", (2,)), init_device_mesh("cpu", (2, 1))
    values = torch.ones(5, 3)

    def made(placement: Any = None, grad: Tensor | None = None) -> tuple[nn.Parameter, Optimizer]:
        param = nn.Parameter(distribute_tensor(values.clone(), mesh, [placement or Shard(0)]))
        param.grad = torch.ones_like(param) if grad is None else grad
        return param, ADAM([param])

    param, optimizer = made(grad=values)
    assert_error(
        optimizer.step, "a gradient is not on the mesh of its parameter (op 'adam')", "the gradient no DTensor"
    )
    param, optimizer = made(grad=distribute_tensor(values, other_mesh, [Shard(0), Replicate()]))
    assert_error(optimizer.step, "a gradient is not on the mesh of its parameter")
    param, optimizer = made()
    optimizer.step()
    before = full([param])
    for wrong in (values, distribute_tensor(values, mesh, [Replicate()])):
        optimizer.state[param]["exp_avg"] = wrong
        assert_error(optimizer.step, "a state is not divided as its parameter", "set_optimizer_state_dict")
    assert_close(full([param]), before, 0, 0)
    param = nn.Parameter(DTensor.from_local(values, mesh, [Partial()]))
    param.grad = torch.ones_like(param)
    assert_error(ADAM([param]).step, "a parameter cannot be updated (op 'adam')")
    # What autograd has saved is noticed.
    param, optimizer = made()
    for saved in ((param * param).sum(), param.to_local().square().sum()):
        optimizer.step()
        try:
            saved.backward()
        except RuntimeError as error:
            assert "inplace" in str(error), error
        else:
            raise AssertionError("autograd did not see the step")


def replicas() -> None:
    """DDP with ZeroRedundancyOptimizer, whose parameters are plain."""
    model, twin = (nn.parallel.DistributedDataParallel(plain()) for _ in range(2))
    ours = ZeroRedundancyOptimizer(model.parameters(), FusedAdam, lr=1e-2, weight_decay=0.1)
    assert_close(run(model, ours), run(twin, TORCH["adam"](twin.parameters())))


def main() -> None:
    name, folder = sys.argv[1:]
    torch_threads.wait_at_exit()
    distributed.init_process_group("gloo")
    check = globals()[name]
    check(*([folder] if name == "checkpoints" else []))
    distributed.barrier()
    distributed.destroy_process_group()
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
