"""The embedded engine, which computes linked prompts, and the contract that each engine fulfils.

A step of the embedded engine is ours: ``embedded/scheduling/composition.py`` puts runs of all
requests together, ``embedded/execution/`` computes them in one forward pass, which attends to
chunks' KV in place, while their last layers may still be arriving, and in which tokens may be
dropped between layers.

Engines of other packages join by ``contract/joining.py``. A step of vLLM, in the package
``kvlinker_vllm``, is vLLM's: ``scheduler/transfer_scheduler.py`` adds slices of linked prompts to
it, and ``worker/passes.py`` carries them out in passes of their own before vLLM's. Chunks' KV is
copied into the request's blocks, once all layers are there, and no token is dropped.
"""
