"""Run stock Hugging Face models on packs of samples.

adapter            attach: use padfree's attention in a stock model, or raise an error if the model is not supported
interface          the attention function that a model calls after `attach`
probe              test on a small copy whether an architecture can be packed
shrink             make a config of the same architecture with small sizes, for the small copy
mixers             layers that mix tokens without attention: recurrences, convolutions
sharing            whether samples of a pack can share prefixes in a model
outputs            hidden states, and the head that scores them
vision             vision-language models: towers, positions, image features at the placeholder tokens
scalar_head        heads that give one number: reward models, critics
routers            find the routers of a mixture of experts, and record which experts they choose
roles              what each parameter is: hidden matrix, expert, embedding, head or vector
structure          a model without weights: shapes, buffers, and the list of its layers
model_files        find the file of each tensor
named_tensors      the tensors of a model by their names in files, and the part that each rank holds
broadcast_weights  weights that rank 0 takes from transformers and broadcasts
load               load weights; each rank reads only its part
lora               low-rank adapters (LoRA)
expert_adapters    low-rank adapters on experts and routers
block_matmuls      on a CPU: experts whose result for a token is bitwise the same whatever the other tokens are
grouped_matmuls    on a GPU: experts whose result for a token is bitwise the same whatever the other tokens are
wrapper            extract the language model of a multimodal checkpoint, and put it back for an export
nonfinite_tensors  find NaN and infinity in weights
export             write a Hugging Face folder
"""

from padfree.batch import LmHead
from padfree.model.adapter import TESTED, attach, lm_head_of
from padfree.model.outputs import hidden_states

__all__ = ["TESTED", "LmHead", "attach", "hidden_states", "lm_head_of"]
