"""sglang on a CPU: what must stand in for its GPU-only packages before it is imported, and the functions under test."""

from __future__ import annotations

import os
import sys
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"

import torch

# torchvision's operators cannot load beside a CPU-only torch; sgl_kernel is CUDA only.
_library = torch.library.Library("torchvision", "DEF")
_library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
sys.modules.setdefault("sgl_kernel", mock.MagicMock())
