"""SSD300 with a ResNet-50, as NVIDIA's examples train it (DeepLearningExamples, PyTorch/Detection/SSD):
Liu et al. 2015, arXiv:1512.02325."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

#: Pixels of an edge of an image, classes with the background, and numbers of a box.
EDGE, CLASSES, BOX = 300, 81, 4
#: Boxes at each place of the six maps of features, the channels of these maps, and the channels
#: between a map and the next one.
BOXES = (4, 6, 6, 6, 4, 4)
CHANNELS = (1024, 512, 512, 256, 256, 256)
BETWEEN = (256, 256, 128, 128, 128)
#: Maps that are half as large as the one before; the last two have no margin instead.
HALVED = 3
#: Boxes of an image.
ALL_BOXES = 8732


def _make_unit(
    inputs: int, outputs: int, kernel: int, stride: int = 1, pad: int = 0
) -> nn.Sequential:
    """A convolution, a norm and a cut at zero."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride, pad, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class _Bottleneck(nn.Module):
    """Three convolutions of a ResNet and a way around them."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.narrow = _make_unit(inputs, width, 1)
        self.middle = _make_unit(width, width, 3, stride, 1)
        self.widen = _make_unit(width, outputs, 1)[:2]
        self.shortcut: nn.Module = nn.Identity()
        if inputs != outputs:
            self.shortcut = _make_unit(inputs, outputs, 1, stride)[:2]

    def forward(self, x: Tensor) -> Tensor:
        y = self.widen(self.middle(self.narrow(x)))
        return F.relu_(y + self.shortcut(x))


def _make_backbone() -> nn.Sequential:
    """A ResNet-50 without its last stage; the third one does not shrink its maps."""
    layers: list[nn.Module] = [_make_unit(3, 64, 7, 2, 3), nn.MaxPool2d(3, 2, 1)]
    inputs = 64
    for blocks, width, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 1)):
        for block in range(blocks):
            layers.append(_Bottleneck(inputs, width, 1 if block else stride))
            inputs = 4 * width
    return nn.Sequential(*layers)


class SSD300(nn.Module):
    """Boxes and classes from six maps of features."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = _make_backbone()
        self.further = nn.ModuleList()
        for place, between in enumerate(BETWEEN):
            inputs, outputs = CHANNELS[place : place + 2]
            stride, pad = (2, 1) if place < HALVED else (1, 0)
            self.further.append(
                nn.Sequential(
                    _make_unit(inputs, between, 1), _make_unit(between, outputs, 3, stride, pad)
                )
            )
        sizes = list(zip(CHANNELS, BOXES, strict=True))
        self.boxes = nn.ModuleList(nn.Conv2d(c, BOX * n, 3, padding=1) for c, n in sizes)
        self.classes = nn.ModuleList(nn.Conv2d(c, CLASSES * n, 3, padding=1) for c, n in sizes)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        maps = [self.backbone(images)]
        for layers in self.further:
            maps.append(layers(maps[-1]))
        boxes, classes = [], []
        for x, find_boxes, find_classes in zip(maps, self.boxes, self.classes, strict=True):
            boxes.append(find_boxes(x).reshape(len(images), BOX, -1))
            classes.append(find_classes(x).reshape(len(images), CLASSES, -1))
        return torch.cat(boxes, dim=2), torch.cat(classes, dim=2)


def find_loss(boxes: Tensor, classes: Tensor) -> Tensor:
    """Loss of boxes, and of classes whose worst errors are found by sorting; where the true boxes
    are takes the same operations, whatever they are."""
    loss_of_boxes = F.smooth_l1_loss(boxes, torch.zeros_like(boxes))
    labels = torch.zeros(len(classes), ALL_BOXES, dtype=torch.long, device=classes.device)
    errors = F.cross_entropy(classes, labels, reduction="none")
    ranks = errors.detach().sort(dim=1).indices.sort(dim=1).indices
    return loss_of_boxes + (errors * (ranks < ALL_BOXES // 4)).mean()
