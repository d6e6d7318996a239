"""The model for a data set when the user names none: the papers' own where one is small enough, else by the samples."""

from __future__ import annotations

from ..errors import ConfigError

_BY_NAME = {
    "digits": "digits_cnn", "mnist": "mnist_cnn", "fashion_mnist": "fedavg_cnn",
    "femnist": "lenet5",
    "cifar10": "fedavg_cnn", "cifar100": "fedavg_cnn", "cinic10": "fedavg_cnn", "tiny_imagenet": "fedavg_cnn",
    "pacs": "vgg11", "office_caltech10": "alexnet_bn", "domainnet": "alexnet_bn", "prostate_mri": "unet",
    "uci_har": "har_cnn", "ag_news": "fasttext", "bindingdb": "drug_target", "davis": "drug_target",
}
_IMAGES = ("digits_cnn", "mnist_cnn", "fedavg_cnn", "lenet5", "vgg11", "alexnet_bn", "unet", "har_cnn")


def default_for(dataset: str, sample: tuple[int, ...], *, vocabulary: int | None = None,
                task: str = "classification") -> str:
    """The name of a model that fits the data set."""
    if task == "segmentation":
        return "unet"
    named = _BY_NAME.get(dataset)
    if named is not None and (len(sample) == 3 or named not in _IMAGES):
        return named
    if vocabulary is not None:
        return "fasttext"
    if len(sample) == 3:
        side = min(sample[1:])
        if side < 8:                        # a table or a signal in the shape of an image; too small for convolutions
            return "mlp"
        return "digits_cnn" if side <= 16 else "fedavg_cnn" if side <= 64 else "resnet18"
    if len(sample) in (1, 2):
        return "mlp"
    raise ConfigError(f"No model is known for samples of shape {sample} (data set {dataset!r}); name one with --model.")
