"""Where trained weights may differ from torch's: parameters whose gradient is zero but for rounding."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import psfleet.torch as pst
from tests.torch import models  # noqa: F401  # sets torch's threads

_NONE = 1e-14  # a float64 gradient below it is the rounding of zero; the others are above 1e-6


class Attention(nn.Module):
    """A transformer encoder layer. Softmax does not see what the key bias adds to all its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.as_tensor(self.head(self.layer(x).mean(1)))


def normed(bias: bool = True) -> nn.Module:
    """A convolution and a line before BatchNorm, which takes away what a bias adds."""
    one = [nn.Conv1d(6, 4, 3, bias=bias), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*one, nn.Linear(24, 8, bias=bias), nn.BatchNorm1d(8), nn.Linear(8, 1))


def parts(model: nn.Module, grads: bool = False) -> dict[str, Tensor]:
    """Parameters, or their gradients, by name; the query, key and value parts of a bias apart."""
    arrays: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        value = (parameter.grad if grads else parameter.data).detach().clone()  # type: ignore[union-attr]
        if name.endswith("in_proj_bias"):
            own = zip(("query", "key", "value"), value.chunk(3), strict=True)
            arrays |= {f"{name}.{part}": its for part, its in own}
        else:
            arrays[name] = value
    return arrays


def train(model: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """Losses of 60 steps on samples [16, 6, 8], and the largest gradient of each parameter."""
    dice = torch.Generator().manual_seed(1)
    losses: list[float] = []
    largest: dict[str, float] = {}
    for _ in range(60):
        x = torch.randn(16, 6, 8, generator=dice).to(dtype)
        optimizer.zero_grad()
        loss = (model(x)[:, 0] - x.sum((1, 2)).sin()).square().mean()
        loss.backward()
        losses.append(loss.item())
        for name, grad in parts(model, grads=True).items():
            largest[name] = max(largest.get(name, 0.0), float(grad.abs().max()))
        optimizer.step()
    return np.array(losses), largest


KINDS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, 0.003),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
}
ZERO = {Attention: {"layer.self_attn.in_proj_bias.key"}, normed: {"0.bias", "4.bias"}}


@pytest.mark.parametrize(
    ("make", "name"), [(Attention, "adam"), (Attention, "sgd"), (normed, "adagrad")]
)
def test_only_parameters_of_zero_gradient_differ(make: Callable[[], Any], name: str) -> None:
    """Losses agree to 1e-5 and weights to 1e-5, but for those whose float64 gradient is zero.

    Adam, Adagrad and RMSprop divide the rounding of such a gradient by its own size, so the parameter
    walks at the learning rate in a direction that rounding decides, in torch too: its float32 differs
    from its float64 there and nowhere else. With SGD these parameters agree as well.
    """
    torch.manual_seed(0)
    plain = make()
    twin, exact = copy.deepcopy(plain), copy.deepcopy(plain).double()
    expected, _ = train(plain, KINDS[name](plain.parameters()))
    truth, largest = train(exact, KINDS[name](exact.parameters()), torch.float64)
    moved, opt = pst.convert(twin, KINDS[name](twin.parameters()))
    actual, _ = train(moved, opt)
    np.testing.assert_allclose(actual, expected, rtol=1e-5)
    np.testing.assert_allclose(expected, truth, rtol=1e-5)
    assert {part for part, size in largest.items() if size < _NONE} == ZERO[make]
    assert min(size for part, size in largest.items() if part not in ZERO[make]) > 1e-6
    ours, torchs, doubles = (parts(model) for model in (moved, plain, exact))
    for part in ours:
        if part not in ZERO[make] or name == "sgd":
            torch.testing.assert_close(ours[part], torchs[part], rtol=1e-4, atol=1e-5)
        else:
            between = float((torchs[part] - doubles[part]).abs().max())
            assert between > 1e-5, f"torch agrees with itself on {part}"


def test_without_them_everything_agrees() -> None:
    """With bias=False before BatchNorm all weights, statistics and predictions are torch's."""
    torch.manual_seed(0)
    plain, x = normed(bias=False), torch.randn(16, 6, 8)
    moved, opt = pst.convert(twin := copy.deepcopy(plain), KINDS["adam"](twin.parameters()))
    expected, _ = train(plain, KINDS["adam"](plain.parameters()))
    np.testing.assert_allclose(train(moved, opt)[0], expected, rtol=1e-5)
    for value, its in zip(moved.state_dict().values(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(value, its, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moved.eval()(x), plain.eval()(x), rtol=1e-4, atol=1e-5)
