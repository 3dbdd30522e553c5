"""ArkVale: summarizes the keys of each page by a volume around them (a cuboid or a ball). The score
of a page is the largest inner product of the query with a point in this volume.

Chen et al., ArkVale: Efficient Generative LLM Inference with Recallable Key-Value Eviction
(NeurIPS 2024). The paper calls the center and the radius of the volume the page's digest.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvindex.bases.pages import PagedIndex, box_scores, extremes, layout_of_boxes
from kvindex.core import check
from kvindex.core.protocol import Codes
from kvindex.ops import group
from kvindex.storage.layout import Layout, TensorSpec

VOLUMES = ("cuboid", "ball", "center")

RADII = ("mean", "max")


@dataclass(frozen=True)
class ArkValeConfig:
    """Options of ArkVale.

    Args:
        page: Tokens per page (published: 32).
        volume: Shape of the volume around the keys of a page: a "cuboid" with a radius for each
            coordinate (as in the authors' code), a "ball" with one radius, or the "center" alone.
            The center is halfway between the minimum and the maximum of each coordinate.
        radius: "mean": the mean distance of the keys from the center (as in the authors' code), so
            that some keys are outside the volume. "max": the maximum distance, so that the score of
            a page is an upper bound of the inner products with its keys.
        group: How the scores of the query heads that share a KV head are combined
            (`kvindex.ops.group`).
    """

    page: int = 32
    volume: str = "cuboid"
    radius: str = "mean"
    group: str = "mean_share"

    def __post_init__(self) -> None:
        check.at_least("page", self.page, 1)
        check.one_of("volume", self.volume, VOLUMES)
        check.one_of("radius", self.radius, RADII)
        check.one_of("group", self.group, group.POLICIES)


class ArkVale(PagedIndex):
    """Selects whole pages by the query's largest inner product with a point of a page's volume.

    The volume of a page is a region around its keys (option `volume`). In `Hits.scores`, each row
    has the score of its page.

    Source: Chen et al., ArkVale (NeurIPS 2024).
    """

    Config = ArkValeConfig

    def _summaries_of(self, keys: Tensor, present: Tensor, marks: Tensor | None) -> Codes:
        low, high = extremes(keys, present)
        cuboid = self.config.volume == "cuboid"
        if cuboid and self.config.radius == "max":
            return {"low": low, "high": high}
        center = (low.float() + high.float()) / 2
        if not cuboid:
            center = center.to(keys.dtype)  # radii are measured from the stored center
        if self.config.volume == "center":
            return {"center": center}
        distances = keys.float() - center.float()[:, :, :, None]
        distances = distances.abs() if cuboid else distances.norm(dim=-1, keepdim=True)
        distances = distances.masked_fill(~present, 0)
        radius = distances.amax(3)
        if self.config.radius == "mean":
            radius = distances.sum(3) / present.sum(3).clamp_min(1)
        if cuboid:
            box = {"low": center - radius, "high": center + radius}
            return {name: corner.to(keys.dtype) for name, corner in box.items()}
        return {"center": center, "radius": radius}

    def _page_layout(self, pages: str) -> Layout:
        axes, config = f"B G {pages} D", self.config
        if config.volume == "cuboid":
            return layout_of_boxes(axes, self.geometry)
        layout = {"codes.center": TensorSpec(axes, self.geometry.dtype)}
        if config.volume == "ball":
            layout["codes.radius"] = TensorSpec(f"B G {pages} 1", torch.float32, least=0)
        return layout

    def _page_scores(self, queries: Tensor) -> Tensor:
        codes = self._codes
        if self.config.volume == "cuboid":
            return box_scores(queries, codes["low"], codes["high"])
        scores = queries @ codes["center"].float().mT
        if self.config.volume == "ball":
            scores = scores + queries.norm(dim=-1, keepdim=True) * codes["radius"].mT
        return scores
