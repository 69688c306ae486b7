"""Float32 master weights, and loss scaling where gradients pass through float16.

Why a master copy: bfloat16 has 8 significant bits. The next number after 1 is 1.0078; adding 0.001
to a weight of 1 gives 1, a thousand times over. So the optimizer changes a float32 copy, and the
model gets it rounded. Why loss scaling: float16 ends at 6e-8 below; smaller gradients become 0. A
loss that is multiplied by 65,536 has gradients 65,536 times as large; they are divided again in
float32. When the scale was too large, gradients are infinite: the step is skipped and the scale
halved. (Micikevicius et al., Mixed Precision Training, ICLR 2018, sections 3.1 and 3.2.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from labsupport.precision.dtypes import short
from labsupport.precision.policy.config import FlashAttentionConfig


class MixedPrecisionOptimizer:
    """Any optimizer of PyTorch, on master weights.

    Args:
        model: under its policy, on its device, and with its weights loaded: masters are copied from
            it. (They begin as the rounded weights; what the rounding took away is gone.) Weights
            that you change later reach the masters by `copy_weights()`.
        config: the policy; it says the masters' dtype and whether losses are scaled.
        optimizer: an optimizer's class.
        params: parameters of the model, or groups of them, as for the optimizer itself:
            [{"params": [...], "weight_decay": 0.0}, ...]. Default: all that require gradients.
        max_norm: clip the gradients to this total norm, after unscaling.
        init_scale, growth_interval: the scaler's; used with float16 only.
        options: the optimizer's own: lr, betas, weight_decay, ...

    A parameter that is already in the masters' dtype, or a wider one, is its own master. So under a
    float32 policy this is the plain optimizer, bit for bit.

    Attributes:
        optimizer: the optimizer; give it to learning-rate schedulers.
        scaler: a `torch.amp.GradScaler`, or None where nothing is in float16.
        grad_norm: the last total norm before clipping, a scalar tensor; None without `max_norm`.

    Raises:
        ValueError: no parameter to train, one that is not the model's, one that comes twice or
            shares its memory with another one, or float16 parameters without wider masters.

    >>> optimizer = MixedPrecisionOptimizer(model, config, lr=1e-3)
    >>> optimizer.backward(compute_loss(model(x), labels))
    >>> optimizer.step(), optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        config: FlashAttentionConfig,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        params: Iterable[Any] | None = None,
        max_norm: float | None = None,
        init_scale: float = 2.0**16,
        growth_interval: int = 2000,
        **options: Any,
    ) -> None:
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._pairs: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self._memory: dict[tuple[torch.device, int], str] = {}
        self._kinds: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._marks: dict[str, tuple[int, int]] = {}
        self._scaled = False  # the gradients at hand are scaled ones, of backward()
        chosen = [p for p in model.parameters() if p.requires_grad] if params is None else params
        groups = self._groups(chosen, config.optimizer)
        self.optimizer = optimizer(groups, **options)
        self.max_norm = max_norm
        self.grad_norm: Tensor | None = None
        self.scaler: torch.amp.GradScaler | None = None
        half = any(p.dtype == torch.float16 for p, _ in self._pairs.values())
        if half or config.needs_loss_scaling:
            device = next(iter(self._pairs.values()))[0].device.type
            self.scaler = torch.amp.GradScaler(
                device, init_scale=init_scale, growth_interval=growth_interval
            )

    @property
    def scale(self) -> float:
        """What losses are multiplied by; 1 where nothing is in float16."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a scalar loss, scaled if need be.

        Gradients of low-precision parameters move to their masters at once: several calls before a
        step add up in the masters' dtype, and the low-precision copies are freed.

        Raises:
            RuntimeError: as in `step`, except that no gradient is needed.
        """
        self._check_model()
        self._check_gradients()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self._scaled = True
        self._move_gradients()

    @torch.no_grad()
    def step(self) -> bool:
        """Unscale, clip, update the masters, and round them into the model.

        Returns:
            Whether the step was taken: False if a scaled gradient was infinite or NaN. Without a
            scaler every step is taken.

        Raises:
            RuntimeError: there is no gradient; under loss scaling, one that is not of `backward`,
                or an old one; parameters have another dtype, shape or device than when this was
                built; weights were changed, and the masters were not. (Changes by way of `.data`,
                such as `parameter.data.mul_(2)`, cannot be seen.)
        """
        self._check_model()
        self._check_gradients()
        self._move_gradients()
        masters = [master for _, master in self._pairs.values() if master.grad is not None]
        if not masters:
            raise RuntimeError(
                "no parameter has a gradient: call backward(loss) before step(). (If you did: were "
                "the model's parameters replaced by new ones after this optimizer was built?)"
            )
        self._scaled = False
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.max_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(masters, self.max_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            before = self.scale
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # The scaler does not say whether it skipped; only then does it lower the scale.
            if self.scale < before:
                return False
        self._round_masters()
        return True

    def zero_grad(self) -> None:
        """Drop all gradients, the model's and the masters' (which model.zero_grad() does not)."""
        for parameter, master in self._pairs.values():
            parameter.grad = master.grad = None
        self._scaled = False

    @torch.no_grad()
    def copy_weights(self) -> None:
        """Make the masters anew from the model: after you loaded or changed its weights.

        The optimizer's state (momentum, ...) stays. Masters lose what is finer than the weights.

        Raises:
            RuntimeError: parameters have another dtype, shape or device than when this was built.
        """
        self._check_kinds()
        for name, (parameter, master) in self._pairs.items():
            if master is not parameter:
                master.copy_(parameter)
                self._marks[name] = _mark(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Masters by parameter name, the optimizer's state, and the scaler's.

        Masters that are the parameter itself are in the model's state dict, and not in here.
        """
        return {
            "masters": {
                name: master.detach()
                for name, (parameter, master) in self._pairs.items()
                if master is not parameter
            },
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; the model's weights follow from the masters.

        Raises:
            ValueError: it is of other parameters, or of a policy with other dtypes.
            RuntimeError: parameters have another dtype, shape or device than when this was built.
        """
        self._check_kinds()
        own = self.state_dict()
        if state["masters"].keys() != own["masters"].keys():
            different = sorted(state["masters"].keys() ^ own["masters"].keys())
            raise ValueError(
                "this state has other master weights than this optimizer: "
                f"{', '.join(different[:5])}. Was it saved under the same policy?"
            )
        if (state["scaler"] is None) != (self.scaler is None):
            raise ValueError("this state and this optimizer differ in whether losses are scaled.")
        for name, master in own["masters"].items():
            master.copy_(state["masters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._round_masters()

    def _groups(self, chosen: Iterable[Any], dtype: torch.dtype) -> list[dict[str, Any]]:
        """The caller's parameters or groups, with masters in place of parameters."""
        entries = list(chosen)
        groups = entries if entries and isinstance(entries[0], Mapping) else [{"params": entries}]
        made = []
        for group in groups:
            members = group["params"]
            members = [members] if isinstance(members, Tensor) else list(members)
            made.append({**group, "params": [self._master(member, dtype) for member in members]})
        if not self._pairs:
            raise ValueError("there is no parameter to train.")
        return made

    def _master(self, member: Any, dtype: torch.dtype) -> Tensor:
        # model.named_parameters() is as good as model.parameters(), as for PyTorch's optimizers.
        parameter = member[1] if isinstance(member, tuple) else member
        name = self._names.get(id(parameter))
        if name is None:
            raise ValueError(
                f"a parameter {tuple(parameter.shape)} is not one of the model's. (Was it replaced "
                "after it was put into a group?)"
            )
        if name in self._pairs:
            raise ValueError(f"{name} is in more than one group.")
        wider = torch.finfo(dtype).bits > torch.finfo(parameter.dtype).bits
        if parameter.dtype == torch.float16 and not wider:
            raise ValueError(
                f"{name} is float16 and needs masters in float32, not {short(dtype)}: gradients "
                "cannot be unscaled in float16."
            )
        if wider and parameter.numel():
            memory = (parameter.device, parameter.data_ptr())
            if memory in self._memory and parameter.device.type != "meta":
                raise ValueError(
                    f"{name} and {self._memory[memory]} are two parameters on one memory: their "
                    "masters would overwrite each other. Make them one: a.weight = b.weight."
                )
            self._memory[memory] = name
        master = parameter.detach().to(dtype).requires_grad_() if wider else parameter
        self._pairs[name] = (parameter, master)
        self._kinds[name] = (parameter.dtype, parameter.shape)
        if wider:
            self._marks[name] = _mark(parameter)
        return master

    def _move_gradients(self) -> None:
        for parameter, master in self._pairs.values():
            if master is parameter or parameter.grad is None:
                continue
            # GradScaler refuses to unscale float16 gradients; and sums belong into float32.
            gradient = parameter.grad.to(master.dtype)
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None

    def _round_masters(self) -> None:
        for name, (parameter, master) in self._pairs.items():
            if master is not parameter:
                parameter.copy_(master)
                self._marks[name] = _mark(parameter)

    def _check_kinds(self) -> None:
        for name, (parameter, master) in self._pairs.items():
            dtype, shape = self._kinds[name]
            now = parameter.dtype, parameter.shape, parameter.device
            if now != (dtype, shape, master.device):
                raise RuntimeError(
                    f"{name} was {short(dtype)} {tuple(shape)} on {master.device} when this "
                    f"optimizer was built, and is {short(now[0])} {tuple(now[1])} on {now[2]} now: "
                    "its master does not fit. Build the optimizer after the policy is applied and "
                    "the model moved."
                )

    def _check_model(self) -> None:
        self._check_kinds()
        for name, (parameter, master) in self._pairs.items():
            if master is parameter or self._marks[name] == _mark(parameter):
                continue
            # Written to; which is no harm if it is the same again, as after loading a checkpoint.
            if not torch.equal(parameter.detach(), master.detach().to(parameter.dtype)):
                raise RuntimeError(
                    f"{name} was changed after this optimizer last wrote or read it (by "
                    "model.load_state_dict, or in place); a step would overwrite that with the "
                    "old master weights. Call optimizer.copy_weights() after such a change."
                )
            self._marks[name] = _mark(parameter)

    def _check_gradients(self) -> None:
        """Under loss scaling, all gradients at hand must be scaled ones."""
        if self.scaler is None:
            return
        for name, (parameter, master) in self._pairs.items():
            by_hand = master is not parameter and parameter.grad is not None
            if by_hand or (master.grad is not None and not self._scaled):
                raise RuntimeError(
                    f"{name} has a gradient that is not of optimizer.backward(loss), or that was "
                    "used by a step before: it is not scaled, and a step would divide it by "
                    "the scale all the same. Call optimizer.backward(loss) in place of "
                    "loss.backward(), and optimizer.zero_grad() after each step."
                )


def _mark(parameter: nn.Parameter) -> tuple[int, int]:
    """Changes with each change in place, and with other memory."""
    return parameter._version, parameter.data_ptr()
