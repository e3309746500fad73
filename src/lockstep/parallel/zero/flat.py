"""Parameters as views of one flat buffer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lockstep.errors import ConfigurationError
from lockstep.parallel.views import view_like
from lockstep.parallel.zero.spans import Span, cut_spans, even_end, slice_bounds, with_offsets


class FlatBuffer:
    """Parameters that lie back to back in ``flat``, and each owner's slice of it.

    Args:
        parameters: By place in the buffer; of one device and dtype. Their ``data`` become views of ``flat``; what
            they held is copied there.
        spans: By place: each whole parameter, as ``Span(parameter, group, 0, numel)``.
        flat: One-dimensional, with as many elements as the parameters have together.
        num_owners: Among how many it is divided.
        bounds: By owner, where its slice begins and ends. Default: equal slices, see `slice_bounds`.

    Attributes:
        is_even: Whether slices are equal, but for the remainder.
        even_end: Where the remainder begins then.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        spans: Sequence[Span],
        flat: Tensor,
        *,
        num_owners: int,
        bounds: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        self.parameters, self.spans, self.flat = list(parameters), list(spans), flat
        self.is_even, self.even_end = bounds is None, even_end(flat.numel(), num_owners)
        self.bounds = slice_bounds(flat.numel(), num_owners) if bounds is None else list(bounds)
        self.take_back()

    def take_back(self) -> None:
        """Copy what the parameters hold to the buffer, and make them views of it.

        Raises:
            ConfigurationError: They are of another device or dtype by now.
        """
        first = self.parameters[0]
        if first.device != self.flat.device or first.dtype != self.flat.dtype:
            raise ConfigurationError(
                f"Parameters were {self.flat.dtype} on {self.flat.device} when the optimizer was made, and are now "
                f"{first.dtype} on {first.device}.\nMove or convert the model before the optimizer is made."
            )
        with torch.no_grad():
            views = self.views_of(self.flat)
            torch._foreach_copy_(views, [parameter.detach() for parameter in self.parameters])
        for parameter, view in zip(self.parameters, views, strict=True):
            parameter.data = view
        self._pointers = [parameter.data_ptr() for parameter in self.parameters]

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Return views of ``flat``, laid out like this buffer, in the shapes of the parameters."""
        pieces = flat.split([span.numel for span in self.spans])
        return [view_like(piece, parameter) for piece, parameter in zip(pieces, self.parameters, strict=True)]

    @property
    def is_whole(self) -> bool:
        """Whether the parameters still lie in the buffer, and nobody gave them other memory."""
        return [parameter.data_ptr() for parameter in self.parameters] == self._pointers

    def spans_of(self, owner: int) -> list[Span]:
        """Return what lies in the slice of ``owner``."""
        return cut_spans(self.spans, *self.bounds[owner])

    def slice_of(self, owner: int, flat: Tensor | None = None) -> Tensor:
        """Return the slice of ``owner``, of this buffer or of another ``flat`` one with this layout."""
        start, stop = self.bounds[owner]
        return (self.flat if flat is None else flat)[start:stop]

    def gather_gradients(self, owner: int, out: Tensor) -> None:
        """Copy the gradients of what lies in the slice of ``owner`` to ``out``; those that are None leave it as it is.

        Raises:
            RuntimeError: One is sparse.
        """
        start, stop = self.bounds[owner]
        targets, sources = [], []
        for parameter, (offset, span) in zip(self.parameters, with_offsets(self.spans), strict=True):
            first, last = max(start, offset), min(stop, offset + span.numel)
            gradient = parameter.grad
            if first >= last or gradient is None:
                continue
            if last - first == span.numel:
                targets.append(view_like(out[first - start : last - start], parameter))
                sources.append(gradient)
                continue
            if gradient.stride() == parameter.stride():
                flat = gradient.as_strided((span.numel,), (1,))
            else:
                flat = torch.empty_like(out[:0]).resize_(span.numel)
                view_like(flat, parameter).copy_(gradient)
            targets.append(out[first - start : last - start])
            sources.append(flat[first - offset : last - offset])
        if targets:
            torch._foreach_copy_(targets, sources)
