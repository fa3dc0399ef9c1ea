"""Train vision-language models on packs: the vision tower, its projector and the language model.

families           which models are supported, and what differs between them
features           run the tower over the distinct images of a pack, and the language model over the pack
sample_positions   the positions of a sample with images, from the model's own function
"""

from padfree.model.vision.sample_positions import prepare_sample

__all__ = ["prepare_sample"]
