"""Float32 master weights, and loss scaling where gradients pass through float16.

In bfloat16 the next number after 1 is 1.0078: adding 0.001 to a weight of 1 gives 1, a thousand
times over. So the optimizer changes a float32 copy, and the model gets it rounded. In float16
gradients below 6e-8 become 0. A loss that is multiplied by 65,536 has gradients 65,536 times as
large; they are divided again in float32. If one was infinite, the step is skipped and the scale
halved. (Micikevicius et al., Mixed Precision Training, ICLR 2018, sections 3.1 and 3.2.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from labsupport.precision.dtypes import short
from labsupport.precision.policy import FlashAttentionConfig


class MixedPrecisionOptimizer:
    """Any PyTorch optimizer, on master weights.

    Args:
        model: under its policy, on its device, and with its weights loaded: masters are copied from
            it, and overwrite what is loaded into it later.
        config: the policy; it decides the masters' dtype and whether losses are scaled.
        optimizer: an optimizer's class.
        groups: parameters of the model in groups, as for the optimizer itself:
            [{"params": [...], "weight_decay": 0.0}, ...]. Default: all that require gradients.
        init_scale: the scaler's; used with float16 only.
        options: the optimizer's own: lr, betas, weight_decay, ...

    A parameter that is already in the masters' dtype, or a wider one, is its own master. So under a
    float32 policy this is the plain optimizer, bit for bit. A parameter's gradient is its master's,
    in the same dtype: gradients of several backward passes add up there. To clip gradients call
    `optimizer.clip_grad_norm_`, which knows the loss scale. `torch.nn.utils.clip_grad_norm_` does
    the same where there is none; where there is one, the next step refuses what it has changed.

    Attributes:
        optimizer: the optimizer, for learning-rate schedulers.
        scaler: a `torch.amp.GradScaler`, or None if nothing is in float16.

    Raises:
        ValueError: no parameter to train, one that is not the model's or comes twice, float16
            parameters without wider masters, an init_scale that is not above 0 and finite.
        TypeError: groups that are no mappings with "params".

    >>> model = torch.nn.Linear(8, 10).bfloat16()  # or under a policy
    >>> optimizer = MixedPrecisionOptimizer(model, FlashAttentionConfig(), lr=1e-3)
    >>> logits = model(torch.randn(4, 8, dtype=torch.bfloat16))
    >>> optimizer.backward(compute_loss(logits, torch.arange(4)))
    >>> norm = optimizer.clip_grad_norm_(1.0)
    >>> optimizer.step()
    True
    >>> optimizer.zero_grad()
    """

    def __init__(
        self,
        model: nn.Module,
        config: FlashAttentionConfig,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
        *,
        groups: Iterable[Mapping[str, Any]] | None = None,
        init_scale: float = 2.0**16,
        **options: Any,
    ) -> None:
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._pairs: dict[str, tuple[nn.Parameter, Tensor]] = {}
        self._bits = torch.finfo(config.optimizer).bits
        # The gradients after backward(), which scales the loss, as `_identity` tells them.
        self._scaled: dict[str, tuple[int, int]] = {}
        if not 0 < init_scale < math.inf:
            raise ValueError(f"init_scale is {init_scale}, and must be above 0 and finite.")
        if groups is None:
            groups = [{"params": [p for p in model.parameters() if p.requires_grad]}]
        wide = []
        for group in groups:
            if not isinstance(group, Mapping) or "params" not in group:
                raise TypeError(
                    f'a group is a mapping, {{"params": [...], ...}}, not {type(group).__name__}'
                )
            given: Any = group["params"]
            own: list[Any] = [given] if isinstance(given, Tensor) else list(given)
            wide.append(
                {**group, "params": [self._master(p, names, config.optimizer) for p in own]}
            )
        if not self._pairs:
            raise ValueError("there is no parameter to train.")
        self.optimizer = optimizer(wide, **options)
        self.scaler: torch.amp.GradScaler | None = None
        parameters = [parameter for parameter, _ in self._pairs.values()]
        if config.needs_loss_scaling or any(p.dtype == torch.float16 for p in parameters):
            self.scaler = torch.amp.GradScaler(parameters[0].device.type, init_scale=init_scale)

    def _master(self, parameter: nn.Parameter, names: dict[int, str], dtype: torch.dtype) -> Tensor:
        name = names.get(id(parameter))
        if name is None or name in self._pairs:
            raise ValueError(
                f"a parameter {tuple(parameter.shape)} ({name or 'without a name'}) is not one of "
                "the model's, or in two groups. Was it replaced after it was put into a group?"
            )
        master: Tensor = parameter
        if torch.finfo(dtype).bits > torch.finfo(parameter.dtype).bits:
            master = parameter.detach().to(dtype).requires_grad_()
            parameter.grad_dtype = dtype
        elif parameter.dtype == torch.float16:
            raise ValueError(
                f"{name} is float16 and needs masters in float32, not {short(dtype)}: gradients "
                "cannot be unscaled in float16."
            )
        self._pairs[name] = (parameter, master)
        return master

    @property
    def scale(self) -> float:
        """Factor on losses; 1 if nothing is in float16."""
        return 1.0 if self.scaler is None else self.scaler.get_scale()

    @property
    def masters(self) -> dict[str, Tensor]:
        """The tensors that the optimizer changes, by the names of their parameters."""
        return {name: master for name, (_, master) in self._pairs.items()}

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a scalar loss, scaled if needed.

        The same as `scale_loss(loss).backward()` and `collect_gradients()`.

        Raises:
            RuntimeError: as in `step`, except that no gradient is needed.
        """
        self.scale_loss(loss).backward()
        self.collect_gradients()

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return a loss to call backward() on: scaled if something is in float16, else the same.

        Raises: as `backward`.
        """
        self._check()
        return loss if self.scaler is None else self.scaler.scale(loss)

    def collect_gradients(self) -> None:
        """Accept the parameters' gradients as their masters', after each backward()."""
        for name, (parameter, master) in self._pairs.items():
            master.grad = parameter.grad
            if master.grad is not None:
                self._scaled[name] = _identity(master.grad)

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients down, by one factor, so that their total norm is at most `max_norm`.

        Call it after all of a step's backward passes. The norm is that of the gradients without the
        loss scale, in float32 or wider. If a gradient is not finite, neither is the norm; `step`
        leaves it out where there is a scaler.

        Args:
            max_norm: above 0; infinity only measures.

        Returns:
            The total norm before, a scalar.

        Raises:
            ValueError: max_norm is not above 0.
            RuntimeError: as `step`.
        """
        if not max_norm > 0:
            raise ValueError(f"max_norm is {max_norm}, and must be above 0.")
        masters = self._ready()
        wide = [
            gradient.to(torch.promote_types(gradient.dtype, torch.float32))
            for master in masters
            if (gradient := master.grad) is not None
        ]
        norm = nn.utils.get_total_norm(wide)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()  # each rank has the norm of its shards
        norm = norm / self.scale
        if max_norm < math.inf:
            nn.utils.clip_grads_with_norm_(masters, max_norm, norm)
            self.collect_gradients()
        return norm

    @torch.no_grad()
    def step(self) -> bool:
        """Unscale, update the masters, and round them into the model.

        Returns:
            False if the step was skipped because a scaled gradient was infinite or NaN. Without a
            scaler every step is taken.

        Raises:
            RuntimeError: there is no gradient; under loss scaling, one that is not from `backward`,
                or an old one; a policy was applied after this was built.
        """
        self._ready()
        self._scaled.clear()
        if self.scaler is None:
            self.optimizer.step()
        else:
            before = self.scale
            self.scaler.step(self.optimizer)
            self.scaler.update()
            # The scaler does not report a skipped step; only then does it lower the scale.
            if self.scale < before:
                return False
        self._write_weights()
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients.

        With set_to_none=False set them to zero instead.
        """
        for parameter, master in self._pairs.values():
            if set_to_none:
                parameter.grad = master.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        self._scaled.clear()
        self.collect_gradients()  # zero is right at any scale

    def _masters(self) -> dict[str, Tensor]:
        return {n: m.detach() for n, (p, m) in self._pairs.items() if m is not p}

    def state_dict(self) -> dict[str, Any]:
        """Return masters by parameter name, the optimizer's state, and the scaler's.

        Masters that are the parameter itself are in the model's state dict instead.
        """
        return {
            "masters": self._masters(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`; the model's weights follow from the masters.

        Raises:
            ValueError: it is of other parameters, of a policy with other dtypes, or of another
                class of optimizer.
        """
        here = self._masters()
        theirs = state["masters"]
        different = sorted(theirs.keys() ^ here.keys()) or [
            f"{name} {tuple(theirs[name].shape)}"
            for name in here
            if theirs[name].shape != here[name].shape
        ]
        if different:
            raise ValueError(
                "this state has other master weights than this optimizer: "
                f"{', '.join(different[:5])}. Was it saved under the same policy?"
            )
        if (state["scaler"] is None) != (self.scaler is None):
            raise ValueError(
                "only one of this state and this optimizer scales losses. Was it saved under the "
                "same policy?"
            )
        saved, own = (
            groups[0].keys()
            for groups in (state["optimizer"]["param_groups"], self.optimizer.param_groups)
        )
        if missing := sorted(own - saved):
            raise ValueError(
                f"this state is of another optimizer than {type(self.optimizer).__name__}: it has "
                f"no {', '.join(missing)}."
            )
        self.optimizer.load_state_dict(state["optimizer"])
        for name, master in theirs.items():
            here[name].copy_(master)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
        self._write_weights()

    def _write_weights(self) -> None:
        """Round the masters into the model."""
        for parameter, master in self._pairs.values():
            if master is not parameter:
                parameter.copy_(master)

    def _ready(self) -> list[Tensor]:
        """Return the masters that have gradients to step with; raise if there are none."""
        self._check(changed=True)
        self.collect_gradients()
        masters = [master for _, master in self._pairs.values() if master.grad is not None]
        if not masters:
            raise RuntimeError(
                "no parameter has a gradient: call backward(loss) before step(). (If you did: were "
                "the model's parameters replaced by new ones after this optimizer was built?)"
            )
        return masters

    def _check(self, *, changed: bool = False) -> None:
        """Raise if a parameter lost its master, or a gradient is not scaled, or was changed.

        Between two backward passes DDP may put gradients elsewhere: that is no change.
        """
        for name, (parameter, master) in self._pairs.items():
            if master is parameter and torch.finfo(parameter.dtype).bits < self._bits:
                raise RuntimeError(
                    f"{name} is {short(parameter.dtype)} now and has no master: build the "
                    "optimizer after the policy is applied."
                )
            gradient = parameter.grad
            if self.scaler is None or gradient is None:
                continue
            known = self._scaled.get(name)
            if known is None or (changed and known != _identity(gradient)):
                raise RuntimeError(
                    f"{name} has a gradient that is not from optimizer.backward(loss), that was "
                    "changed after it, or used by a step before: it is not scaled, but a step "
                    "would divide it by the scale. Call optimizer.backward(loss) in place of "
                    "loss.backward(), optimizer.clip_grad_norm_(max_norm) in place of "
                    "torch.nn.utils.clip_grad_norm_, and optimizer.zero_grad() after each step."
                )


def _identity(gradient: Tensor) -> tuple[int, int]:
    """Return what changes when a gradient is replaced, or changed in place."""
    return id(gradient), gradient._version
