"""Every classification network of torchvision and timm."""
